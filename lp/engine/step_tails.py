"""The tails of captured steps: which one a step needs, and where in its memory each text's noise and counts are.

Q: texts that a tail has room for, P: int64s of a message.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from lp.draft.layout import StepLayout
from lp.engine.captured_tail import CapturedTail, SamplerMemory, TailShape, TextInTail
from lp.engine.step_sampler import StepSampler
from lp.models import captured_steps
from lp.models.captured_step import CapturedStep
from lp.models.graph_recorder import CaptureFailed
from lp.models.runner import ModelRunner
from lp.parallel.message import Header
from lp.sampling.node_sampling import CallRules, ScoreRules
from lp.sampling.sampler import Sampler

logger = logging.getLogger(__name__)
MOST_TAILS = 16  # of one bucket, for calls that differ in what they do; the one that was used longest ago goes


class TailText(NamedTuple):
    """A text of a captured step.

    Attributes:
        step_sampler: has the text's sampler.
        layout: the nodes of its step.
        header: what its message begins with.
        text: prompt and generated tokens.
        first_row: where the logits have `c`.
        first_token: where the pass has its first token.
    """

    step_sampler: StepSampler
    layout: StepLayout
    header: Header
    text: Sequence[int]
    first_row: int
    first_token: int


class _TailKey(NamedTuple):
    """What a tail is captured for: calls that its rules serve, over the same memory."""

    rules: CallRules
    shape: TailShape
    memory: Hashable


class StepTails:
    """Samples the texts of captured steps by captured tails.

    Args:
        runner: has the captured steps.
        compared: ranks compare the best logits of each `c`.
        most_texts: most texts that a step may have.
        alone: texts take steps by themselves, one text after another: their samplers' memory is that of the model's
            captured steps, and a tail is captured as soon as it is needed. Else this object's texts have memory of
            their own, and what they ask for together is sampled uncaptured, or by a tail that does more, until it has
            come often.
    """

    def __init__(self, runner: ModelRunner, compared: bool, most_texts: int = 1, alone: bool = True) -> None:
        self.runner = runner
        self.compared = compared
        self.most_texts = most_texts
        self.alone = alone
        self._own_memory: dict[Hashable, torch.Tensor] = {}
        self._places: WeakKeyDictionary[Sampler, int] = WeakKeyDictionary()
        self._room = 1  # Q
        self._steps: WeakValueDictionary[int, CapturedStep] = WeakValueDictionary()  # which have tails
        self._seen: Counter[Hashable] = Counter()  # calls for which there was no tail of their own

    def messages(
        self,
        step: CapturedStep,
        logits_BV: torch.Tensor,
        texts: Sequence[TailText],
        num_logits: int,
        running: Collection[Sampler],
        on_host: bool,
    ) -> list[torch.Tensor] | None:
        """The messages (P,) of these texts; None if there is no tail for them.

        They lie on the device, which may still be at them, or on the host, if the tail copies them there.

        Args:
            step: has run, and has left the logits.
            logits_BV: what it left.
            texts: texts that `go_together`.
            num_logits: top-k logits that are taken of every node.
            running: the samplers of all texts that take steps, at most `most_texts`; each keeps its place.
            on_host: the caller can read them there.
        """
        passes = [own.step_sampler for own in texts]
        places = self._take_places(passes, running)
        tail = self.tail(step, logits_BV, passes, num_logits)
        if tail is None:
            return None
        self._use_memory(passes)
        tail.run(
            [TextInTail(place, own.step_sampler.sampler, *own[1:]) for place, own in zip(places, texts, strict=True)]
        )
        sharded = passes[0].sharded
        if sharded and tail.heads is not None:
            sharded.heads = tail.heads
        messages = tail.on_host if on_host and tail.on_host is not None else tail.messages
        return [messages[place] for place in places]

    def go_together(self, passes: Sequence[StepSampler]) -> list[StepSampler]:
        """The passes that one tail can sample together: those that sample as the first of them does."""
        able = [own for own in passes if own.sampler.rules is not None and (self.alone or not own.sharded)]
        noise = {own.sampler.noise.shape for own in able[:1] if own.sampler.noise}
        together = []
        for own in able:
            shapes = {own.sampler.noise.shape} if own.sampler.noise else set()
            alike = own.shape == able[0].shape and _rules(own).functions_key == _rules(able[0]).functions_key
            if alike and len(noise | shapes) <= 1:
                noise |= shapes
                together.append(own)
        return together

    def tail(
        self, step: CapturedStep, logits_BV: torch.Tensor, passes: Sequence[StepSampler], num_logits: int
    ) -> CapturedTail | None:
        """The tail of a step for these texts; None if there is none yet, or it can't be captured.

        Arguments are those of `messages`.

        Raises:
            torch.OutOfMemoryError: the device is full, and there is one text.
        """
        key = self._key(passes, num_logits)
        if key not in step.tails:
            if not self.alone:
                self._seen[key] += 1
                if self._seen[key] <= captured_steps.UNCAPTURED:
                    return _serving(step, key)
            self._steps[id(step)] = step
            step.tails[key] = self._captured(step, logits_BV, passes, key)
            while len(step.tails) > MOST_TAILS:
                del step.tails[next(iter(step.tails))]
        tail: CapturedTail | None = step.tails.pop(key)
        step.tails[key] = tail  # behind the others, which go before it
        return tail

    def lacks(self, step: CapturedStep, passes: Sequence[StepSampler], num_logits: int) -> bool:
        """Whether the tail of a step for these texts is still to be captured."""
        return self._key(passes, num_logits) not in step.tails

    def _key(self, passes: Sequence[StepSampler], num_logits: int) -> _TailKey:
        call = CallRules.of([_rules(own) for own in passes], any(own.sampler.noise for own in passes))
        shape = TailShape(self._room, passes[0].shape, num_logits, self.compared)
        return _TailKey(call, shape, _memory_key(passes))

    def _captured(
        self, step: CapturedStep, logits_BV: torch.Tensor, passes: Sequence[StepSampler], key: _TailKey
    ) -> CapturedTail | None:
        assert self.runner.captured
        recorder, functions = self.runner.captured.recorder, _rules(passes[0])
        try:
            memory = self._memory(passes)
            return CapturedTail(
                recorder, step.tensors, logits_BV, key.rules, functions, memory, key.shape, passes[0].sharded
            )
        except (CaptureFailed, torch.OutOfMemoryError) as error:
            if self.alone and isinstance(error, torch.OutOfMemoryError):
                raise
            logger.info("sampling is not captured: %s", error)
            return None

    def _memory(self, passes: Sequence[StepSampler]) -> SamplerMemory:
        """Where captured work computes noise and counts, made where it is first needed."""
        assert self.runner.captured
        memory = self.runner.captured.shared if self.alone else self._own_memory
        found: list[torch.Tensor | None] = []
        for kind in KINDS:
            owner = next((getattr(own.sampler, kind) for own in passes if getattr(own.sampler, kind)), None)
            if owner is not None and (kind, owner.shape) not in memory:
                memory[kind, owner.shape] = owner.buffer(self._room)
            found.append(None if owner is None else memory[kind, owner.shape])
        return SamplerMemory(*found)

    def _take_places(self, passes: Sequence[StepSampler], running: Collection[Sampler]) -> list[int]:
        """The places of texts: each keeps its own as long as it takes steps, sampled by a tail or not."""
        for sampler in [*self._places]:
            if sampler not in running:
                del self._places[sampler]
        samplers = [own.sampler for own in passes]
        taken = {*self._places.values()}
        free = (place for place in range(self.most_texts) if place not in taken)
        for sampler in samplers:
            if sampler not in self._places:
                self._places[sampler] = next(free)
        needed = max(self._places.values()) + 1
        if needed > self._room:  # twice as much, or all that there can be: memory is made for texts that there are
            self._room = min(1 << (needed - 1).bit_length(), self.most_texts)
            self._own_memory.clear()
            for step in self._steps.values():
                step.tails.clear()
        return [self._places[sampler] for sampler in samplers]

    def _use_memory(self, passes: Sequence[StepSampler]) -> None:
        """Let the samplers compute noise and counts where their tail looks for them."""
        memory = self._memory(passes)
        for own in passes:
            place = self._places[own.sampler]
            if own.sampler.noise is not None and memory.noise_SV is not None:
                own.sampler.noise.use(memory.noise_SV, place)
            if own.sampler.counts is not None and memory.counts_QV is not None:
                own.sampler.counts.use(memory.counts_QV, place)


KINDS = ("noise", "counts")  # attributes of a sampler that have memory on the device


def _memory_key(passes: Sequence[StepSampler]) -> Hashable:
    """What of the samplers' memory depends on the samplers."""
    owners = [[getattr(own.sampler, kind) for own in passes] for kind in KINDS]
    return tuple(frozenset(owner.shape for owner in kind if owner) for kind in owners)


def _serving(step: CapturedStep, key: _TailKey) -> CapturedTail | None:
    """A tail that gives what a tail of this key would give, with more work; None if there is none."""
    for other, tail in step.tails.items():
        assert isinstance(other, _TailKey)
        if tail is not None and other[1:] == key[1:] and other.rules.serves(key.rules):
            found: CapturedTail = tail
            return found
    return None


def _rules(own: StepSampler) -> ScoreRules:
    assert own.sampler.rules is not None
    return own.sampler.rules
