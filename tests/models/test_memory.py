"""Free memory, and a KV cache that does not fit: the error's figures are right, and what it proposes fits."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.budget.step_times import StepTimes
from lp.draft.share import step_tokens
from lp.models.memory import format_bytes, free_bytes
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import tiny_model

CONFIG = lp.LookaheadConfig(window_size=16, ngram_size=3, guess_set_size=40)
IDS = [1, 2, 3, 4, 5]
SLOT_BYTES = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, dimensions, float64


@dataclass
class Room:
    """A device: its free bytes, those used by tensors of four dimensions, and the rank that has it, None for all."""

    free: int = 1 << 40
    used: int = 0
    rank: str | None = None


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    device, empty = Room(), torch.empty

    def limited(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if tensor.ndim == 4 and device.rank in (None, threading.current_thread().name):
            device.used += tensor.nbytes
            if device.used > device.free:
                raise torch.OutOfMemoryError("simulated")
        return tensor

    monkeypatch.setattr(torch, "empty", limited)
    monkeypatch.setattr("lp.engine.memory.free_bytes", lambda at: device.free)
    monkeypatch.setattr("lp.models.runner.check_tree_mask", lambda runner: None)  # it has a cache of its own
    yield device
    assert device.used


def _error(room: Room, free: int, new: int) -> str:
    room.free = free
    room.used = 0
    with pytest.raises(ValueError) as error:
        lp.LookaheadDecoder(tiny_model(max_position_embeddings=1 << 20), CONFIG).generate(IDS, new)
    return str(error.value)


def _rank_0(room: Room, config: lp.LookaheadConfig, new: int) -> BaseException | lp.GenerationOutput:
    """What rank 0 of 4 ends with, where it alone has a limit."""
    room.used, room.rank = 0, "rank 0"
    model = tiny_model(max_position_embeddings=1 << 20)
    step_times = StepTimes.constant(0.01, step_tokens(config)) if config.adaptive else None

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        threading.current_thread().name = f"rank {context.rank}"
        try:
            return lp.LookaheadDecoder(model, config, context, step_times=step_times).generate(IDS, new)
        except (ValueError, lp.Interrupted) as error:
            return error

    return run_lockstep(4, body)[0]


def test_the_error_states_memory_and_what_fits(room: Room) -> None:
    """A bare "out of memory" leaves the user to guess which of four numbers to lower, and by how much."""
    free, new = 400 * SLOT_BYTES, 300
    message = _error(room, free, new)
    size = 16 * 2 + 40 * 2
    needed = format_bytes(SLOT_BYTES * (len(IDS) + new + size))
    assert f"5 prompt and 300 new tokens and a step of {size} tokens needs {needed} on cpu" in message
    assert f"where {format_bytes(free)} are free; W=" in message
    found = re.search(r"W=(\d+) G=(\d+) would fit or max_new_tokens=(\d+) would fit", message)
    assert found
    w, g, fewer = map(int, found.groups())
    smaller = lp.LookaheadConfig(window_size=w, ngram_size=3, guess_set_size=g)
    model = tiny_model(max_position_embeddings=1 << 20)
    for config, length in ((smaller, new), (CONFIG, fewer)):
        room.used = 0
        assert len(lp.LookaheadDecoder(model, config).generate(IDS, length).tokens) == length
        assert 0 < room.used <= free


@pytest.mark.parametrize(
    ("adaptive", "size", "whose", "fewer"), [(False, 49, " of all 4 ranks", 6), (True, 192, " a rank", None)]
)
def test_several_ranks_hear_what_their_parts_need(
    room: Room, adaptive: bool, size: int, whose: str, fewer: int | None
) -> None:
    """A rank of four holds its own part of a fixed step; W and G of an adaptive one are its own."""
    config = lp.LookaheadConfig(window_size=16, ngram_size=3, guess_set_size=80, adaptive=adaptive)
    new = 20
    room.free = int((60 if fewer else 120) * SLOT_BYTES / 0.9) + SLOT_BYTES
    message = str(_rank_0(room, config, new))
    needed = format_bytes(SLOT_BYTES * (len(IDS) + new + size))
    assert f"new tokens and a step of {size} tokens a rank needs {needed} on cpu" in message
    found = re.search(rf"W=(\d+) G=(\d+){whose} would fit( or max_new_tokens={fewer} would fit)?", message)
    assert found and bool(found[3]) == bool(fewer)
    smaller = replace(config, window_size=int(found[1]), guess_set_size=int(found[2]))
    assert isinstance(_rank_0(room, smaller, new), lp.GenerationOutput)


def test_remedies_that_do_not_exist_are_not_proposed(room: Room) -> None:
    """Where no step is small enough, only the length is named; where none is short enough, neither."""
    message = _error(room, 320 * SLOT_BYTES, 300)
    assert "W=" not in message and "max_new_tokens=171 would fit" in message
    assert _error(room, 50 * SLOT_BYTES, 300).endswith("use a shorter prompt, or a device with more memory")


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


def test_free_memory_on_a_gpu_has_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first generation torch holds most of a GPU: by the driver's figure alone nothing would fit again."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda:0")) == 1300
    assert free_bytes(torch.device("meta")) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_free_memory_has_the_page_cache() -> None:
    """Pages that cache files are given back: after a large checkpoint was read, MemFree alone is almost nothing."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    free = free_bytes(torch.device("cpu"))
    assert free is not None and abs(free - available) < 1 << 30


def test_bytes_are_shown_in_units_that_people_read() -> None:
    """13477093376 bytes are hard to tell from 1347709337."""
    shown = {1000: "1.0 KiB", 10**9: "953.7 MiB", 1 << 30: "1.0 GiB", 13477093376: "12.6 GiB"}
    assert {count: format_bytes(count) for count in shown} == shown
