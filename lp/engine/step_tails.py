"""The tails of captured steps: which one a step needs, and where in its memory each text's noise and counts are.

Q: texts that a step may have, P: int64s of a message.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from lp.draft.layout import StepLayout
from lp.engine.captured_tail import CapturedTail, SamplerMemory, TailShape, TextInTail
from lp.engine.step_pass import StepPass
from lp.models.captured_steps import CapturedStep
from lp.models.graph_recorder import CaptureFailed
from lp.models.runner import ModelRunner
from lp.parallel.message import Header
from lp.sampling.node_sampling import CallRules
from lp.sampling.sampler import Sampler

logger = logging.getLogger(__name__)
MOST_TAILS = 8  # of one bucket, for calls that differ in what they do; the oldest goes


class TailText(NamedTuple):
    """A text of a captured step.

    Attributes:
        step_pass: of the text.
        layout, header: of its step and its message.
        text: prompt and generated tokens.
        first_row: of the logits, the one of `c`.
        first_token: of the pass.
    """

    step_pass: StepPass
    layout: StepLayout
    header: Header
    text: Sequence[int]
    first_row: int
    first_token: int


class StepTails:
    """Samples the texts of captured steps by captured tails.

    Args:
        runner: of the steps.
        compared: ranks compare the best logits of each `c`.
        most_texts: Q.
        alone: texts take steps by themselves, one text after another, so that they share the memory of their samplers
            with those of other engines; else this one's texts have memory of their own.
    """

    def __init__(self, runner: ModelRunner, compared: bool, most_texts: int = 1, alone: bool = True) -> None:
        self.runner = runner
        self.compared = compared
        self.most_texts = most_texts
        self._own_memory: dict[Hashable, torch.Tensor] | None = None if alone else {}
        self._places: dict[Sampler, int] = {}

    def messages(
        self,
        step: CapturedStep,
        logits_BV: torch.Tensor,
        texts: Sequence[TailText],
        num_logits: int,
        on_host: bool,
    ) -> list[torch.Tensor] | None:
        """The messages (P,) of these texts; None if their tail can't be captured.

        They lie on the device, which may still be at them, or on the host, if the tail copies them there.

        Args:
            step: that has run, and has left the logits.
            texts: which `go_together`; at most Q.
            num_logits: top-k logits that are taken of every node.
            on_host: the caller can read them there.
        """
        passes = [own.step_pass for own in texts]
        tail = self.tail(step, logits_BV, passes, num_logits)
        if tail is None:
            return None
        places = self._take_places(passes)
        tail.run([TextInTail(place, own.step_pass.sampler, *own[1:]) for place, own in zip(places, texts, strict=True)])
        sharded = passes[0].sharded
        if sharded and tail.heads is not None:
            sharded.heads = tail.heads
        messages = tail.on_host if on_host and tail.on_host is not None else tail.messages
        return [messages[place] for place in places]

    def go_together(self, passes: Sequence[StepPass]) -> list[StepPass]:
        """Those that one tail can sample, which are like the first of them."""
        able = [own for own in passes if own.sampler.rules is not None and not (own.sharded and self.most_texts > 1)]
        noise = {own.sampler.noise.shape for own in able[:1] if own.sampler.noise}
        together = []
        for own in able:
            shapes = {own.sampler.noise.shape} if own.sampler.noise else set()
            alike = own.shape == able[0].shape and _functions(own) == _functions(able[0])
            if alike and len(noise | shapes) <= 1:
                noise |= shapes
                together.append(own)
        return together

    def tail(
        self, step: CapturedStep, logits_BV: torch.Tensor, passes: Sequence[StepPass], num_logits: int
    ) -> CapturedTail | None:
        """The tail of a step for these texts; None if it can't be captured. Arguments are those of `messages`."""
        assert self.runner.captured
        samplers = [own.sampler for own in passes]
        rules = [own.rules for own in samplers if own.rules is not None]
        call = CallRules.of(rules, any(own.noise for own in samplers))
        shape = TailShape(self.most_texts, passes[0].shape, num_logits, self.compared)
        if (call, shape) not in step.tails:
            if len(step.tails) == MOST_TAILS:
                del step.tails[next(iter(step.tails))]
            recorder, memory = self.runner.captured.recorder, self._memory(samplers)
            try:
                step.tails[call, shape] = CapturedTail(
                    recorder, step.tensors, logits_BV, call, rules[0], memory, shape, passes[0].sharded
                )
            except (CaptureFailed, torch.OutOfMemoryError) as error:
                if isinstance(error, torch.OutOfMemoryError) and self._own_memory is None:
                    raise  # of a text by itself, which nothing else can go on for
                logger.info("sampling is not captured: %s", error)
                step.tails[call, shape] = None
        tail: CapturedTail | None = step.tails[call, shape]
        return tail

    def _memory(self, samplers: Sequence[Sampler]) -> SamplerMemory:
        """Where captured work computes noise and counts, made where it is first needed."""
        assert self.runner.captured
        memory = self.runner.captured.shared if self._own_memory is None else self._own_memory
        found: list[torch.Tensor | None] = []
        for kind in ("noise", "counts"):
            owner = next((getattr(own, kind) for own in samplers if getattr(own, kind) is not None), None)
            if owner is not None and (kind, owner.shape) not in memory:
                memory[kind, owner.shape] = owner.buffer(self.most_texts)
            found.append(None if owner is None else memory[kind, owner.shape])
        return SamplerMemory(*found)

    def _take_places(self, passes: Sequence[StepPass]) -> list[int]:
        """The places of texts, which they keep as long as they take steps; their samplers compute there."""
        samplers = [own.sampler for own in passes]
        self._places = {own: place for own, place in self._places.items() if own in samplers}
        free = sorted({*range(self.most_texts)} - {*self._places.values()})
        memory = self._memory(samplers)
        for sampler in samplers:
            place = self._places[sampler] = self._places[sampler] if sampler in self._places else free.pop(0)
            if sampler.noise is not None and memory.noise_SV is not None:
                sampler.noise.use(memory.noise_SV, place)
            if sampler.counts is not None and memory.counts_QV is not None:
                sampler.counts.use(memory.counts_QV, place)
        return [self._places[sampler] for sampler in samplers]


def _functions(own: StepPass) -> str:
    assert own.sampler.rules is not None
    return own.sampler.rules.functions_key
