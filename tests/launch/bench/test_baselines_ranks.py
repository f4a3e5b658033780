"""The tensor-parallel baselines on two gloo processes: the tokens of one process, from a part of its weights each."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

import lp
from tests.support.forked import Forked
from tests.support.workers import shards
from tests.support.workers.shards import ARCHITECTURES, IDS, NEW, SAMPLING, split_model

pytestmark = [pytest.mark.xdist_group("baselines"), pytest.mark.slow]  # the split model of lp: test_tensor_parallel

RANKS = 2
BASELINES = ["transformers_tp", "deepspeed_tp"]
THERE = [name for name in BASELINES if name != "deepspeed_tp" or importlib.util.find_spec("deepspeed")]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of one launch wrote down."""
    folder, forked = tmp_path_factory.mktemp("shards"), Forked()
    try:
        forked.start(RANKS, shards.main, folder, THERE).check(240)
    finally:
        forked.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_split_model_says_what_the_whole_one_says(by_rank: list[dict[str, Any]], baseline: str, arch: str) -> None:
    """A baseline that falls back to a replica, or splits wrongly, would be compared all the same."""
    if baseline not in THERE:
        pytest.skip(f"{baseline} needs a package that is not installed")
    plain = lp.AutoregressiveDecoder(split_model(arch))
    expected = [plain.generate(IDS, NEW, sampling).tokens for sampling in SAMPLING]
    for found in by_rank:
        assert found[baseline][arch]["tokens"] == expected
        assert found[baseline][arch]["held"] < 0.85 * found[baseline][arch]["whole"]
