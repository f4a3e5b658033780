"""Replicas that span ranks, over gloo processes: the tokens of one process in float64, and what a step costs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import lp
from tests.conftest import LONG
from tests.support.forked import Forked
from tests.support.tiny_models import plain_greedy
from tests.support.workers import replicas
from tests.support.workers.replicas import CASES, IDS, NEW, model_of

ALL = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "qwen3_moe"]
FEW = ["llama", "phi3", "qwen3_moe"]
LAUNCHES = [(2, 2, ALL), (4, 2, ALL), (4, 4, ALL), (6, 2, ALL)] if LONG else [(4, 2, FEW)]


@pytest.mark.parametrize(("world", "tp", "archs"), LAUNCHES)
def test_tokens_and_collectives(forked: Forked, tmp_path: Path, world: int, tp: int, archs: list[str]) -> None:
    """Two sums a layer and one of embeddings within a replica, the vocabulary's gather, and one among replicas."""
    forked.start(world, replicas.main, tmp_path, tp, archs).check(400)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    for arch in archs:
        model = model_of(arch)
        whole = sum(each.numel() for each in model.parameters())
        greedy = plain_greedy(model, IDS, NEW)
        for case, (_, sampling) in CASES.items():
            expected = (
                greedy if sampling is None else lp.AutoregressiveDecoder(model).generate(IDS, NEW, sampling).tokens
            )
            for rank, found in enumerate(by_rank):
                assert found[arch][case]["tokens"] == expected, (arch, case, rank)
        for rank, found in enumerate(by_rank):
            assert found[arch]["plain"] == [greedy, greedy], (arch, rank)
            assert found[arch]["held"] < 0.75 * whole
            replica = "|".join(str(rank // tp * tp + index) for index in range(tp))
            others = "|".join(str(each) for each in range(rank % tp, world, tp))
            due = {f"all_reduce {replica}": 5, f"all_gather {replica}": 1}  # of two layers
            due |= {f"all_gather {others}": 1} if world > tp else {}
            for case in ("greedy", "T=0.8"):
                assert [calls for calls in found[arch][case]["calls"] if calls != due] == [], (arch, rank)


def test_logits_are_plain_decodings_bit_for_bit(forked: Forked, tmp_path: Path) -> None:
    """Gloo adds up four ranks in an order that goes by the place in a tensor, as the usual mode shows."""
    forked.start(4, replicas.main, tmp_path, 4, ["bitwise"]).check(400)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert by_rank == [by_rank[0]] * 4
    for arch, found in by_rank[0].items():
        assert all(found["bitwise"]) and not all(found["tokens"]), arch


@pytest.mark.parametrize("victim", [1, 2] if LONG else [2])
def test_a_killed_rank_ends_all_and_is_named(forked: Forked, tmp_path: Path, victim: int) -> None:
    """Ranks of its replica wait in the model, others for its replica; what was journaled stays."""
    launch = forked.start(4, replicas.main, tmp_path, 2, ["endless"])
    end = time.monotonic() + 120
    while not all((tmp_path / f"{rank}.pid").exists() for rank in range(4)):
        assert launch.goes_on() and time.monotonic() < end, launch.output()
        time.sleep(0.05)
    time.sleep(0.5)
    journal = tmp_path / "journal.jsonl"
    before = journal.read_text()
    started = time.monotonic()
    os.kill(int((tmp_path / f"{victim}.pid").read_text()), signal.SIGKILL)
    codes = launch.wait(60)
    assert time.monotonic() - started < 45
    assert codes[victim] == -signal.SIGKILL and 0 not in codes, launch.output()
    assert f"rank {victim} does not answer" in launch.output(), launch.output()
    after = journal.read_text()
    assert after.startswith(before) and len(before.splitlines()) > 5
