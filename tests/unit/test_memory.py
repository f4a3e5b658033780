"""A KV cache that does not fit: what the error says is so, and what it proposes fits."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lp
from lp.parallel.context import ParallelContext
from lp.parallel.lockstep import run_lockstep
from tests.tiny_models import tiny_model

CONFIG = lp.LookaheadConfig(window_size=16, ngram_size=3, guess_set_size=40)
IDS = [1, 2, 3, 4, 5]
ROW_BYTES = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, dimensions, float64


@dataclass
class Room:
    """A device: its free bytes, those taken by tensors of four dimensions, and the rank that it is, None for all."""

    free: int = 1 << 40
    taken: int = 0
    rank: str | None = None


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    device, new_empty = Room(), torch.Tensor.new_empty

    def limited(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = new_empty(self, *shape, **options)
        if made.ndim == 4 and device.rank in (None, threading.current_thread().name):
            device.taken += made.nbytes
            if device.taken > device.free:
                raise torch.OutOfMemoryError("simulated")
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", limited)
    monkeypatch.setattr("lp.engine.memory.free_bytes", lambda at: device.free)
    monkeypatch.setattr("lp.models.runner.check_tree_mask", lambda runner: None)  # it has a cache of its own
    yield device
    assert device.taken


def _said(room: Room, free: int, new: int) -> str:
    room.free, room.taken = free, 0
    with pytest.raises(ValueError) as error:
        lp.LookaheadDecoder(tiny_model(max_position_embeddings=1 << 20), CONFIG).generate(IDS, new)
    return str(error.value)


def test_the_error_states_bytes_and_what_fits(room: Room) -> None:
    """A bare "out of memory" leaves the user to guess which of four numbers to lower, and by how much."""
    free, new = 400 * ROW_BYTES, 300
    said = _said(room, free, new)
    rows = 16 * 2 + 40 * 2
    needed = ROW_BYTES * (len(IDS) + new + rows)
    assert f"5 prompt and 300 new tokens and a step of {rows} rows needs {needed:,} bytes on cpu" in said
    assert f"where {free:,} are free; W=" in said
    found = re.search(r"W=(\d+) G=(\d+) would fit or max_new_tokens=(\d+) would fit", said)
    assert found
    w, g, fewer = map(int, found.groups())
    smaller = lp.LookaheadConfig(window_size=w, ngram_size=3, guess_set_size=g)
    model = tiny_model(max_position_embeddings=1 << 20)
    for config, length in ((smaller, new), (CONFIG, fewer)):
        room.taken = 0
        assert len(lp.LookaheadDecoder(model, config).generate(IDS, length).tokens) == length
        assert 0 < room.taken <= free


def test_what_no_shape_can_mend(room: Room) -> None:
    """Where no step is small enough, only the length is named; where none is short enough, neither."""
    said = _said(room, 320 * ROW_BYTES, 300)
    assert "W=" not in said and "max_new_tokens=171 would fit" in said
    assert _said(room, 50 * ROW_BYTES, 300).endswith("use a shorter prompt, or a device with more memory")


def test_one_rank_without_room_tells_the_others(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait in the prefill's broadcast, or in the first step, until the time limit."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, room.free = tiny_model(), 0

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        threading.current_thread().name = f"rank {context.rank}"
        try:
            return lp.LookaheadDecoder(model, CONFIG, context).generate(IDS, 20)
        except (ValueError, lp.Interrupted) as error:
            return error

    for bad in range(3):
        room.rank = f"rank {bad}"
        for rank, output in enumerate(run_lockstep(3, body)):
            if rank == bad:
                assert isinstance(output, ValueError) and "KV cache" in str(output)
            else:
                assert isinstance(output, lp.Interrupted) and output.signal == 0
                assert (output.output.tokens, output.output.finish_reason) == ([], "interrupted")
