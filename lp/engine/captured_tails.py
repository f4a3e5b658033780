"""Captures and chooses the sampling parts of captured steps, their "tails": CUDA graphs replayed after a forward pass.

A step's first graph is the forward pass; its tail (`lp.engine.captured_tail`) samples the nodes of the draft trees and
writes messages to other ranks. Each sequence has a place: the index at which a tail finds its noise and token counts
in device memory.
Q: places that a tail has, P: int64s of a message, B: tokens of the step, padding included, V: vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from lp.engine.captured_tail import CapturedTail, SamplerMemory, TailShape
from lp.engine.step_sampler import StepSampler, StepSequence
from lp.models import captured_steps
from lp.models.captured_step import CapturedStep
from lp.models.graph_recorder import CaptureFailed
from lp.models.runner import ModelRunner
from lp.sampling.node_sampling import CallRules, ScoreRules
from lp.sampling.sampler import Sampler

logger = logging.getLogger(__name__)
MOST_TAILS = 16  # kept for a step size, for different operations on scores; the least recently used one is dropped


class _TailKey(NamedTuple):
    """Key of a captured tail: the operations on scores that it has, its sizes, and the memory that it reads."""

    rules: CallRules
    shape: TailShape
    memory: Hashable


class CapturedTails:
    """Samples the sequences of captured steps by CUDA graphs ("tails"), which it captures when they are needed.

    Args:
        runner: has the captured forward passes.
        compared: whether messages have the largest logits of each sequence's newest token, for ranks to compare; True
            if several ranks share steps.
        most_texts: most sequences that a step may have.
        alone: True if every step computes one sequence. Then a graph is captured as soon as it is needed, and keeps
            noise and token counts in the memory of the model's captured steps. False if steps compute several
            sequences. Then this object has memory of its own, and captures a graph for a new combination of sampling
            settings only when it has come often enough. Until then a graph with more operations does the work, or none.
    """

    def __init__(self, runner: ModelRunner, compared: bool, most_texts: int = 1, alone: bool = True) -> None:
        self.runner = runner
        self.compared = compared
        self.most_texts = most_texts
        self.alone = alone
        self._own_memory: dict[Hashable, torch.Tensor] = {}
        self._places: WeakKeyDictionary[Sampler, int] = WeakKeyDictionary()
        self._room = 1  # Q
        self._steps: WeakValueDictionary[int, CapturedStep] = WeakValueDictionary()  # steps that have tails
        self._seen: Counter[Hashable] = Counter()  # how often each key had no tail of its own

    def messages(
        self,
        step: CapturedStep,
        logits_BV: torch.Tensor,
        texts: Sequence[StepSequence],
        num_logits: int,
        running: Collection[Sampler],
        on_host: bool,
    ) -> list[torch.Tensor] | None:
        """Sample sequences by a captured graph, right after a step's forward pass; returns the graph's messages.

        Args:
            step: the captured step, whose forward pass has been launched.
            logits_BV: tensor in which the forward pass leaves its logits.
            texts: sequences that one graph can sample together, as `go_together` has found.
            num_logits: how many top-k logits of each draft-tree node the messages have.
            running: samplers of all running sequences, at most `most_texts`: their noise and token counts keep their
                places in device memory.
            on_host: whether the caller can use messages in pinned host memory.

        Returns:
            One message for each sequence, int64 (P,). The messages are on the host if `on_host` is True and the graph
            copies them there, else on the device; they are valid once the device is done. None: no graph fits these
            sequences.
        """
        step_samplers = [own.step_sampler for own in texts]
        places = self._take_places(step_samplers, running)
        tail = self.tail(step, logits_BV, step_samplers, num_logits)
        if tail is None:
            return None
        self._use_memory(step_samplers)
        tail.run(texts, places)
        sharded = step_samplers[0].sharded
        if sharded and tail.heads is not None:
            sharded.heads = tail.heads
        messages = tail.on_host if on_host and tail.on_host is not None else tail.messages
        return [messages[place] for place in places]

    def go_together(self, step_samplers: Sequence[StepSampler]) -> list[StepSampler]:
        """Select the sequences of a step that one captured graph can sample together.

        They are the first sequence that a graph can sample, and all others whose sampling settings fit the first.

        Args:
            step_samplers: samplers of the sequences in the step.
        """
        able = [own for own in step_samplers if own.sampler.rules is not None and (self.alone or not own.sharded)]
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
        self, step: CapturedStep, logits_BV: torch.Tensor, step_samplers: Sequence[StepSampler], num_logits: int
    ) -> CapturedTail | None:
        """Find or capture the CUDA graph that samples some sequences after the forward pass of a step.

        Args:
            step: the captured step.
            logits_BV: tensor in which the forward pass leaves its logits.
            step_samplers: samplers of the sequences.
            num_logits: how many top-k logits of each node the messages have.

        Returns:
            The graph; None if there is none yet, or if it can't be captured.

        Raises:
            torch.OutOfMemoryError: the device is full, and every step computes one sequence.
        """
        key = self._key(step_samplers, num_logits)
        if key not in step.tails:
            if not self.alone:
                self._seen[key] += 1
                if self._seen[key] <= captured_steps.UNCAPTURED:
                    return _serving(step, key)
            self._steps[id(step)] = step
            step.tails[key] = self._captured(step, logits_BV, step_samplers, key)
            while len(step.tails) > MOST_TAILS:
                del step.tails[next(iter(step.tails))]
        tail: CapturedTail | None = step.tails.pop(key)
        step.tails[key] = tail  # the newest is last: those before it go first
        return tail

    def lacks(self, step: CapturedStep, step_samplers: Sequence[StepSampler], num_logits: int) -> bool:
        """Whether the graph that samples these sequences after the step is not captured yet.

        Args:
            step: the captured step.
            step_samplers: samplers of the sequences.
            num_logits: how many top-k logits of each node the messages have.
        """
        return self._key(step_samplers, num_logits) not in step.tails

    def _key(self, step_samplers: Sequence[StepSampler], num_logits: int) -> _TailKey:
        call = CallRules.of([_rules(own) for own in step_samplers], any(own.sampler.noise for own in step_samplers))
        shape = TailShape(self._room, step_samplers[0].shape, num_logits, self.compared)
        return _TailKey(call, shape, _memory_key(step_samplers))

    def _captured(
        self, step: CapturedStep, logits_BV: torch.Tensor, step_samplers: Sequence[StepSampler], key: _TailKey
    ) -> CapturedTail | None:
        assert self.runner.captured
        recorder, functions = self.runner.captured.recorder, _rules(step_samplers[0])
        try:
            memory = self._memory(step_samplers)
            return CapturedTail(
                recorder, step.tensors, logits_BV, key.rules, functions, memory, key.shape, step_samplers[0].sharded
            )
        except (CaptureFailed, torch.OutOfMemoryError) as error:
            if self.alone and isinstance(error, torch.OutOfMemoryError):
                raise
            logger.info("sampling is not captured: %s", error)
            return None

    def _memory(self, step_samplers: Sequence[StepSampler]) -> SamplerMemory:
        """The device memory in which tails find noise and token counts; it is allocated when first needed."""
        assert self.runner.captured
        memory = self.runner.captured.shared if self.alone else self._own_memory
        found: list[torch.Tensor | None] = []
        for kind in KINDS:
            owner = next((getattr(own.sampler, kind) for own in step_samplers if getattr(own.sampler, kind)), None)
            if owner is not None and (kind, owner.shape) not in memory:
                memory[kind, owner.shape] = owner.buffer(self._room)
            found.append(None if owner is None else memory[kind, owner.shape])
        return SamplerMemory(*found)

    def _take_places(self, step_samplers: Sequence[StepSampler], running: Collection[Sampler]) -> list[int]:
        """The places of texts in memory. A text keeps its place as long as it takes steps, with a tail or without."""
        for sampler in [*self._places]:
            if sampler not in running:
                del self._places[sampler]
        samplers = [own.sampler for own in step_samplers]
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

    def _use_memory(self, step_samplers: Sequence[StepSampler]) -> None:
        """Point the samplers' noise and token counts to the memory that their tail reads."""
        memory = self._memory(step_samplers)
        for own in step_samplers:
            place = self._places[own.sampler]
            if own.sampler.noise is not None and memory.noise_SV is not None:
                own.sampler.noise.use(memory.noise_SV, place)
            if own.sampler.counts is not None and memory.counts_QV is not None:
                own.sampler.counts.use(memory.counts_QV, place)


KINDS = ("noise", "counts")  # attributes of a sampler that have device memory


def _memory_key(step_samplers: Sequence[StepSampler]) -> Hashable:
    """Key of the samplers' device memory: the shapes of their noise and of their token counts."""
    owners = [[getattr(own.sampler, kind) for own in step_samplers] for kind in KINDS]
    return tuple(frozenset(owner.shape for owner in kind if owner) for kind in owners)


def _serving(step: CapturedStep, key: _TailKey) -> CapturedTail | None:
    """A captured tail that can stand in for one of this key, though it does more work; None if there is none."""
    for other, tail in step.tails.items():
        assert isinstance(other, _TailKey)
        if tail is not None and other[1:] == key[1:] and other.rules.serves(key.rules):
            found: CapturedTail = tail
            return found
    return None


def _rules(own: StepSampler) -> ScoreRules:
    assert own.sampler.rules is not None
    return own.sampler.rules
