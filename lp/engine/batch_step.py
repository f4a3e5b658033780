"""One decode step of a batch: a forward pass over the draft trees of all sequences, and one all-gather between ranks.

A sequence is a prompt and the tokens that are generated after it; the code calls it a text. A single sequence is a
batch of one. In the all-gather, each rank sends for each sequence a message with the tokens that its part of the draft
tree sampled (`lp.parallel.message`).
P: int64s in the message for one sequence, R: ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from lp.engine.captured_tails import CapturedTails
from lp.engine.generation import Generation, StepPart
from lp.engine.output import StepTimer
from lp.engine.step_sampler import StepSequence, node_sampling
from lp.errors import RanksParted
from lp.models.captured_forests import CapturedForests
from lp.models.runner import ModelRunner, PassLogits
from lp.models.tree_pass import TreePass
from lp.parallel.context import ParallelContext
from lp.parallel.message import Sampled, Stop, best_logits
from lp.sampling.sampler import NotFinite
from lp.sampling.top_logits import pack_top_logits

T = TypeVar("T")
NO_LOGITS = torch.empty(0)


class BatchStep:
    """Runs decode steps; each call says which sequences take part in the step.

    A sequence is a prompt and the tokens generated after it. If one sequence fails, the others continue, provided that
    there is one rank or that all ranks fail alike.

    Args:
        runner: computes the model's forward passes.
        context: who this rank is, and which ranks share its steps.
        pooled: replays forward passes over several sequences as CUDA graphs; None: such passes are launched one
            operation at a time.

    Attributes:
        timer: splits the time of a step into forward pass, exchange and host work, for all sequences together.
        errors: errors of the sequences that have failed, by sequence. The caller removes entries that it has handled; a
            failed sequence must not take part in another step.
    """

    def __init__(self, runner: ModelRunner, context: ParallelContext, pooled: CapturedForests | None = None) -> None:
        self.runner = runner
        self.context = context
        self.pooled = pooled
        self.timer = StepTimer()
        self.errors: dict[Generation, Exception] = {}
        compared = context.steps.size > 1
        self._tails = CapturedTails(runner, compared)
        self._pooled_tails = CapturedTails(runner, compared, pooled.most_sequences, alone=False) if pooled else None
        self._clock = _Clock() if runner.device.type == "cuda" else None

    def run(
        self, texts: Sequence[Generation], prompts: Sequence[tuple[Generation, int]] = ()
    ) -> dict[Generation, Stop]:
        """Run one forward pass: a decode step for each of `texts`, and a prefill chunk for each of `prompts`.

        Both lists must be the same, in the same order, on every rank.

        Args:
            texts: sequences whose prompts are in the KV cache already.
            prompts: sequences whose prompts are not completely cached, each with how many prompt tokens to prefill now.

        Returns:
            For each sequence of `texts` that did not fail, why it ends with this step; Stop.NONE: it continues.
        """
        self.timer.restart()
        by_itself = len(texts) == 1 and not prompts and not (self.pooled and self.pooled.replays(texts[0].cache))
        parts = self._each(texts, Generation.begin_step)
        counts = dict(prompts)
        with self.timer.forward:
            if self._clock:
                self._clock.start()
            logits, sampled, messages, failure = self._computed(parts, counts, by_itself)
            messages |= self._each(
                [text for text in parts if text not in messages],
                lambda text: text.own_message(parts[text], logits.get(text), failure, sampled.get(text)),
            )
            self._each(parts, Generation.finish_learning)  # while the device computes
        self._each(counts, lambda text: text.prompt.take_chunk(text.cache, counts[text], logits[text], failure))
        failure = None  # raised above, it has this frame, which would keep it and all caches until gc finds the cycle
        gathered = self._exchanged({text: messages[text] for text in parts if text not in self.errors})
        stops = self._each(gathered, lambda text: text.end_step(parts[text], gathered[text]))
        if by_itself:
            self._each(stops, lambda text: text.observe_step(parts[text]))
        return stops

    def read_images(self, text: Generation) -> None:
        """Compute and cache the KV of a prompt up to the end of its images, in a forward pass for this prompt alone.

        Args:
            text: the sequence whose prompt has images that are not in its cache yet.
        """
        self._each([text], lambda text: text.prompt.read_images(text.cache))

    def capture(self, text: Generation) -> None:
        """Before a sequence's first step, capture CUDA graphs for all step sizes that it may need while it runs alone.

        Args:
            text: the sequence that is about to begin.
        """
        text.capture_steps(partial(self._capture, text))

    def _capture(self, text: Generation, num_tokens: int, num_logits: Sequence[int]) -> None:
        """Capture the graphs of forward passes, and of the sampling after them, that are not captured yet.

        Where none is missing nothing runs: each would take as long as a step.

        Args:
            text: the text that is about to begin.
            num_tokens: tokens of the largest step.
            num_logits: numbers of top-k logits a node that steps may take; sampling is captured once for each.
        """
        together = self._tails.go_together([text.step_sampler])
        ran = False
        for step in self.runner.captured_steps(num_tokens, text.cache):
            lacking = [k for k in num_logits if together and self._tails.lacks(step, together, k)]
            if not lacking:
                continue
            ran = True
            logits_BV = step.run_empty()
            for k in lacking:
                self._tails.tail(step, logits_BV, together, k)
        if ran and self.runner.captured:
            self.runner.captured.settle()

    def _each(self, texts: Iterable[Generation], work: Callable[[Generation], T]) -> dict[Generation, T]:
        """Call `work` with each text; the results by text, without those that failed, whose errors are noted."""
        results = {}
        for text in texts:
            try:
                results[text] = work(text)
            except Exception as error:
                self.note_error(text, error)
        return results

    def note_error(self, text: Generation, error: Exception) -> None:
        """Note that a sequence has failed, so that the others continue; raise if other ranks may wait for this one.

        Args:
            text: the sequence that has failed.
            error: the exception that it failed with.

        Raises:
            Exception: `error`, if there are several ranks, unless all of them fail alike (logits that are not finite).
        """
        if not (self.context.alone or isinstance(error, NotFinite)):
            raise error
        self.errors[text] = error

    def _computed(
        self, parts: dict[Generation, StepPart], counts: dict[Generation, int], by_itself: bool
    ) -> tuple[
        dict[Generation, torch.Tensor],
        dict[Generation, Sampled],
        dict[Generation, torch.Tensor],
        Exception | None,
    ]:
        """Run the forward pass of the step, and sample what can be sampled for several texts at once.

        Args:
            parts: what each text computes in the step.
            counts: how many tokens of each prompt to cache.
            by_itself: there is one text, whose step is padded to the number of tokens that its budget names.

        Returns:
            Four things: the logits of each text's sampled nodes; the sampled tokens of the texts that were sampled
            together; the messages, int64 (P,), of the texts that a captured graph sampled; and the model's error, which
            is every text's.
        """
        computing = [text for text in parts if text.failures.computes]
        try:
            passes = {text: text.tree_pass(parts[text], by_itself) for text in computing}
            passes |= {text: text.prompt.next_chunk(text.cache, count) for text, count in counts.items()}
            if not passes:
                return {}, {}, {}, None
            computed = self._forward([*passes.values()], by_itself)
            logits = dict(zip(passes, computed.each(), strict=True))
            messages = self._tail_messages(computed, passes, parts, by_itself)
        except (
            Exception
        ) as error:  # kept in no variable: the frame, and all caches, would stay until gc finds the cycle
            return dict.fromkeys([*computing, *counts], NO_LOGITS), {}, {}, error
        others = [text for text in computing if text not in messages]
        return logits, self._sampled_together(others, parts, logits), messages, None

    def _forward(self, passes: Sequence[TreePass], by_itself: bool) -> PassLogits:
        if len(passes) == 1 and passes[0].chain and self.runner.captures(passes[0].cache):
            return self.runner.forward_prompt(passes[0])
        if self.pooled and not by_itself:
            return self.pooled.forward(passes)
        return self.runner.forward_trees(passes, capture=by_itself)

    def _tail_messages(
        self,
        computed: PassLogits,
        passes: dict[Generation, TreePass],
        parts: dict[Generation, StepPart],
        by_itself: bool,
    ) -> dict[Generation, torch.Tensor]:
        """The messages of the texts that a captured tail samples: its graph runs after that of the forward pass.

        Empty where there is no such graph for these texts; they are sampled one operation at a time then.
        """
        tails = self._tails if by_itself else self._pooled_tails
        if computed.step is None or tails is None:
            return {}
        together = tails.go_together([text.step_sampler for text in passes if text in parts])
        texts: dict[Generation, StepSequence] = {}
        row = token = 0
        for text, tree in passes.items():
            if text.step_sampler in together:
                part = parts[text]
                texts[text] = StepSequence(text.step_sampler, part.layout, part.header, text.text, row, token)
            row += len(tree.logits_indices)
            token += len(tree.tokens)
        if not texts:
            return {}
        num_logits = max(parts[text].num_logits for text in texts)
        running = {text.request.sampler for text in parts}
        try:
            messages = tails.messages(
                computed.step, computed.rows, [*texts.values()], num_logits, running, len(texts) == len(parts)
            )
        except RanksParted:
            raise
        except Exception:
            if by_itself:
                raise
            return {}  # they are sampled one by one, and the one that is at fault fails alone
        finally:
            if self.pooled and not by_itself:
                self.pooled.note_copy()
        return dict(zip(texts, messages, strict=True)) if messages else {}

    def _sampled_together(
        self, texts: Sequence[Generation], parts: dict[Generation, StepPart], logits: dict[Generation, torch.Tensor]
    ) -> dict[Generation, Sampled]:
        """Sample texts whose samplers do the same operations by one call: many small operations take longer.

        Returns:
            The sampled tokens of the texts that were sampled here; each of the others is sampled by itself.
        """
        groups: dict[Hashable, list[Generation]] = {}
        for text in texts:
            groups.setdefault(text.step_sampler.joint_key, []).append(text)
        groups.pop(None, None)
        sampled: dict[Generation, Sampled] = {}
        for group in groups.values():
            with suppress(Exception):  # such as a warper's: these are sampled one by one, and fail where it is
                sampled |= self._sampled_of(group, parts, logits)
        return sampled

    def _sampled_of(
        self,
        texts: Sequence[Generation],
        parts: dict[Generation, StepPart],
        logits: dict[Generation, torch.Tensor],
    ) -> dict[Generation, Sampled]:
        """Sample the nodes of texts with equal `StepSampler.joint_key` by one call, and pack their top-k logits."""
        nodes = [StepSequence(text.step_sampler, parts[text].layout, parts[text].header, text.text) for text in texts]
        joined = _joined([logits[text] for text in texts])
        scores, tokens = node_sampling(nodes, joined.device).sample(joined)
        num_logits = max(parts[text].num_logits for text in texts)
        packed = pack_top_logits(scores, num_logits) if num_logits else tokens.new_zeros(len(tokens), 0)
        counts = [len(logits[text]) for text in texts]
        compared = self.context.steps.size > 1
        return {
            text: Sampled(own, top[:, : parts[text].num_logits], best_logits(logits[text]) if compared else None)
            for text, own, top in zip(texts, tokens.split(counts), packed.split(counts), strict=True)
        }

    def _exchanged(self, messages: dict[Generation, torch.Tensor]) -> dict[Generation, np.ndarray]:
        """Exchange the messages of the step by one all-gather.

        Args:
            messages: this rank's message of each text, int64 (P,).

        Returns:
            For each text, the messages of all ranks, int64 (R, P), on the host.
        """
        if not messages:
            return {}
        own = [*messages.values()]
        gathered = self._gathered(own)
        if self.pooled:
            self.pooled.inputs_read()
        if len(own) == 1:
            return dict.fromkeys(messages, gathered)
        ends = np.cumsum([len(message) for message in own])[:-1]
        return dict(zip(messages, map(np.ascontiguousarray, np.split(gathered, ends, axis=1)), strict=True))

    def _gathered(self, own: Sequence[torch.Tensor]) -> np.ndarray:
        """The messages of all ranks, one after another, (R, sum of P), on the host, which waits for the device once."""
        if self._clock is None:
            with self.timer.exchange:
                return self.context.steps.all_gather(_joined(own)).numpy()
        with self.timer.forward:
            self._clock.computed.record()
            if own[0].device.type == "cpu":  # a graph copies them there
                self.context.replica.wait_for(self._clock.computed)
                message = torch.cat([*own])  # the next step overwrites them, while the host may still read
            else:
                message = _joined(own)
                if self.context.steps.size == 1:
                    message = self.context.on_host(message)
            gathered = self.context.steps.all_gather(message).numpy()
        self.timer.count_as_exchange(self._clock.since_computed_s())
        return gathered


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors concatenated; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


class _Clock:
    """Tells how long the exchange of a step took on a GPU, whose queue the host waits for only once."""

    def __init__(self) -> None:
        self.started = torch.cuda.Event(enable_timing=True)
        self.computed = torch.cuda.Event(enable_timing=True)
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        self.started.record()

    def since_computed_s(self) -> float:
        """Seconds from the end of the computation until now; the device must have passed both events."""
        computing_s: float = self.started.elapsed_time(self.computed) / 1000
        return max(time.perf_counter() - self._began - computing_s, 0.0)
