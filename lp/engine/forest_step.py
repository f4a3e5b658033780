"""One step of several texts: a forward pass over the trees of all, and one all-gather.

P: int64s of a text's message, R: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch

from lp.engine.decode_loop import Generation, StepPart
from lp.engine.output import StepTimer
from lp.models.captured_forests import CapturedForests
from lp.models.runner import TreePass
from lp.parallel.context import ParallelContext
from lp.parallel.message import Sampled, Stop, best_logits
from lp.sampling.sampler import NotFinite, sample_together
from lp.sampling.top_logits import pack_top_logits

T = TypeVar("T")
NO_LOGITS = torch.empty(0)


class ForestStep:
    """Runs the steps of texts that come and go. A text that fails where there is one rank, or on all, fails alone.

    Args:
        passes: runs them.
        context: the ranks that share steps.

    Attributes:
        timer: of all texts.
        errors: of the last step, what texts failed with; they are not to be used again.
    """

    def __init__(self, passes: CapturedForests, context: ParallelContext) -> None:
        self.passes = passes
        self.context = context
        self.timer = StepTimer()
        self.errors: dict[Generation, Exception] = {}

    def run(self, texts: Sequence[Generation], prompts: Sequence[tuple[Generation, int]]) -> dict[Generation, Stop]:
        """Compute a step of every text, and a chunk of every prompt.

        Args:
            texts: whose prompts are cached; the same, in the same order, on every rank, like the next ones.
            prompts: others, and how many tokens of theirs to cache.

        Returns:
            By text, the reason to stop, or NONE.
        """
        self.timer.restart()
        self.errors = {}
        parts = self._each(texts, Generation.begin_step)
        chunks = {text: text.next_chunk(most) for text, most in prompts}
        passes = {text: text.tree_pass(part) for text, part in parts.items()} | chunks
        with self.timer.forward:
            logits, sampled, failure = self._computed(passes, parts)
            messages = self._each(
                parts, lambda text: text.own_message(parts[text], logits[text], failure, sampled.get(text))
            )
        self._each(parts, Generation.finish_learning)
        self._each(chunks, lambda text: text.take_chunk(len(chunks[text].tokens), logits[text], failure))
        failure = None  # raised above, it has this frame, which would keep it and all caches until gc finds the cycle
        gathered = self._exchanged({text: own for text, own in messages.items() if text not in self.errors})
        return self._each(gathered, lambda text: text.end_step(parts[text], gathered[text]))

    def _each(self, texts: Iterable[Generation], work: Callable[[Generation], T]) -> dict[Generation, T]:
        """What it returns, by text, of those that did not fail."""
        results = {}
        for text in texts:
            try:
                results[text] = work(text)
            except Exception as error:
                self.note_error(text, error)
        return results

    def note_error(self, text: Generation, error: Exception) -> None:
        """A text has failed: alone, if no other rank waits for this one.

        Raises:
            Exception: the error itself, where others would wait.
        """
        if not (self.context.alone or isinstance(error, NotFinite)):
            raise error
        self.errors[text] = error

    def _computed(
        self, passes: dict[Generation, TreePass], parts: dict[Generation, StepPart]
    ) -> tuple[dict[Generation, torch.Tensor], dict[Generation, Sampled], Exception | None]:
        """Logits by text, what nodes of most texts sampled, and what the model failed with: it fails for all texts."""
        try:
            logits = dict(zip(passes, self.passes.forward([*passes.values()]), strict=True)) if passes else {}
        except Exception as error:
            return dict.fromkeys(passes, NO_LOGITS), {}, error
        return logits, self._sampled_together(parts, logits), None

    def _sampled_together(
        self, parts: dict[Generation, StepPart], logits: dict[Generation, torch.Tensor]
    ) -> dict[Generation, Sampled]:
        """What nodes sampled, of texts whose samplers are alike: many small operations take longer than one."""
        groups: dict[Hashable, list[Generation]] = {}
        for text in parts:
            groups.setdefault(text.step_pass.joint_key, []).append(text)
        groups.pop(None, None)
        sampled: dict[Generation, Sampled] = {}
        for texts in groups.values():
            if len(texts) > 1:
                with suppress(Exception):  # such as a warper's: these are sampled one by one, and fail where it is
                    sampled |= self._sampled_of(texts, parts, logits)
        return sampled

    def _sampled_of(
        self,
        texts: Sequence[Generation],
        parts: dict[Generation, StepPart],
        logits: dict[Generation, torch.Tensor],
    ) -> dict[Generation, Sampled]:
        """The same of one group."""
        samplers = [text.request.sampler for text in texts]
        positions, branches = zip(*(text.step_pass.sampling_of(parts[text].layout) for text in texts), strict=True)
        scores, tokens = sample_together(samplers, torch.cat([logits[text] for text in texts]), positions, branches)
        num_logits = max(parts[text].num_logits for text in texts)
        packed = pack_top_logits(scores, num_logits) if num_logits else tokens.new_zeros(len(tokens), 0)
        counts = [len(own) for own in positions]
        compared = not self.context.alone
        return {
            text: Sampled(own, top[:, : parts[text].num_logits], best_logits(logits[text]) if compared else None)
            for text, own, top in zip(texts, tokens.split(counts), packed.split(counts), strict=True)
        }

    def _exchanged(self, messages: dict[Generation, torch.Tensor]) -> dict[Generation, np.ndarray]:
        """The messages of all ranks, (R, P) of each text, by one all-gather."""
        if not messages:
            return {}
        with self.timer.exchange:
            gathered = self.context.all_gather(torch.cat([*messages.values()])).numpy()
        ends = np.cumsum([len(message) for message in messages.values()])[:-1]
        return dict(zip(messages, map(np.ascontiguousarray, np.split(gathered, ends, axis=1)), strict=True))
