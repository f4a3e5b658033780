"""Watches torch.distributed from outside: which collectives a generation calls, step by step."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lp.engine.generation import Generation
from lp.parallel.rank_group import ProcessRankGroup

WORDS = ("gather", "reduce", "broadcast", "scatter", "all_to_all", "barrier", "send", "recv", "object")
NOT_CALLS = {"is_", "get_", "supports", "Reduce"}  # prefixes of names that hold such a word and move nothing


@dataclass
class Step:
    """One decode step: collectives as (name, bytes this rank sends), and what ranks lacked after it."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    lacking: bool = False  # some rank had not computed the whole accepted path


class Watch:
    """Records every outermost call into torch.distributed; `on_tokens` ends a step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.before, self.steps, self._depth = Step(), Step(), list[Step](), 0
        self._begun = False
        for name in dir(dist):
            function = getattr(dist, name)
            moves = any(word in name for word in WORDS) and not name.startswith(tuple(NOT_CALLS))
            if moves and not name.startswith("_") and callable(function) and not isinstance(function, type):
                patch.setattr(dist, name, self._watched(name, function))
        message = ProcessRankGroup.gather_message  # which calls no function of torch.distributed
        patch.setattr(ProcessRankGroup, "gather_message", self._watched("gather_message", message))
        self._mark(patch, Generation, "begin_step", self._started)
        self._mark(patch, Generation, "_commit", self._committed)

    def on_tokens(self, tokens: list[int], step: int) -> None:
        """The end of a step."""
        self.steps.append(self.now)
        self.now = Step()

    def _watched(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                tensors = [value for value in args if isinstance(value, torch.Tensor)]
                self.now.calls.append((name, tensors[-1].nbytes if tensors else -1))
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return watched

    @staticmethod
    def _mark(patch: pytest.MonkeyPatch, owner: type, name: str, see: Any) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
            see(self, *args)
            return method(self, *args, **kwargs)

        patch.setattr(owner, name, marked)

    def _started(self, *args: Any) -> None:
        if not self._begun:  # what start-up and prefill called is none of the steps'
            self._begun, self.before, self.now = True, self.now, Step()

    def _committed(self, generation: Generation, layout: Any, outcome: Any) -> None:
        self.now.lacking = min(outcome.held) < len(outcome.path)
