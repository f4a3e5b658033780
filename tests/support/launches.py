"""Launches of the workers, and what must hold of every one, whatever it runs on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lp
from lp.budget.policy import AdaptiveBudget
from lp.draft.share import step_tokens
from tests.conftest import Processes
from tests.support.rounded_kv import OwnCache
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model
from tests.support.workers.cases import Case
from tests.support.workers.faults import STEP

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def check_cases(
    processes: Processes, folder: Path, ranks: int, first: int, last: int, env: dict[str, str]
) -> tuple[set[str], set[str]]:
    """Launch these seeds, and `check_found`."""
    worker = "tests.support.workers.cases"
    command = processes.torchrun(ranks, worker, str(folder), str(first), str(last))
    ran = processes.run(command, env, timeout_s=240)
    assert ran.returncode == 0, ran.stderr
    assert processes.wait_for_end() == []
    return check_found(folder, ranks, first, last)


def check_found(folder: Path, ranks: int, first: int, last: int) -> tuple[set[str], set[str]]:
    """Hold every rank's tokens of these seeds against plain decoding, and count its collectives.

    Returns:
        The backends and the devices of the ranks.
    """
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    broadcasts = 0
    for i, seed in enumerate(range(first, last)):
        case = Case.drawn(seed)
        model = tiny_model(case.arch, seed=case.model_seed)
        given = {} if case.kv_dtype == "auto" else {"past_key_values": OwnCache(case.kv_dtype, model.config)}
        plain = plain_greedy(model, case.ids, case.new, **given)
        expected = plain[: plain.index(case.eos) + 1] if case.eos in plain else plain
        for rank, results in enumerate(by_rank):
            assert results[i]["tokens"] == expected, f"seed {seed}, rank {rank} of {ranks}"
            assert results[i]["accepted"] == by_rank[0][i]["accepted"], f"seed {seed}, rank {rank}"
            check_collectives(results[i], case, ranks)
            broadcasts += sum(len(step["calls"]) - 1 for step in results[i]["steps"])
    assert broadcasts, "no case of the launch had anything to broadcast"
    cases = [result for results in by_rank for result in results]
    return {case["backend"] for case in cases}, {case["device"] for case in cases}


def check_collectives(result: dict[str, Any], case: Case, ranks: int) -> None:
    """One all-gather a step; with kv_sync=broadcast one more, if some rank lacks what was accepted; nothing else.

    Before the first step, one broadcast of what the prompt's rows said, if the pool wants it.
    """
    names = {name for step in [result["before"], *result["steps"], result["after"]] for name, _ in step["calls"]}
    assert not [name for name in names if "object" in name], "pickles"
    assert len(result["steps"]) == len(result["accepted"])
    assert result["after"]["calls"] == []
    config, parts = case.config, case.config.ablation
    told = parts.prompt_ngrams and parts.prompt_logits and parts.num_logits > 0 and len(case.ids) > 1
    if config.adaptive:  # reads them where tokens are nearly free
        told = told and AdaptiveBudget(config, case.step_times, ranks).prompt_logits > 0
    assert [name for name, _ in result["before"]["calls"]].count("broadcast") == told  # what the prompt's rows said
    payloads = set()
    for step, accepted in zip(result["steps"], result["accepted"], strict=True):
        (name, payload), *more = step["calls"]
        assert name in ("all_gather_into_tensor", "all_gather_single")
        payloads.add(payload)
        due = parts.kv_sync is lp.KVSync.BROADCAST and step["lacking"]
        assert [name for name, _ in more] == ["broadcast"] * due
        assert accepted or not more
    assert len(payloads) == 1, "the size of the gathered tensor depends on the step"
    budget = step_tokens(config, ranks)
    if config.adaptive:
        budget = min(step_tokens(config), case.step_times.max_tokens)
    k = min(parts.num_logits, VOCABULARY)
    assert payloads.pop() == 8 * (8 + budget * (1 + k))


def pid_of(folder: Path, generation: int, rank: int, goes_on: Callable[[], bool]) -> int:
    """The process id of a rank of the faults worker, once it has taken a few steps of that generation."""
    file = folder / f"{generation}-{rank}.pid"
    end = time.monotonic() + 120
    while not file.exists():
        assert goes_on() and time.monotonic() < end, "the launch did not get so far"
        time.sleep(0.02)
    return int(file.read_text())


def check_kill(processes: Processes, folder: Path, ranks: int, victim: int, env: dict[str, str]) -> None:
    """SIGKILL one rank in the middle of a run: the launch ends soon, says so, and keeps what was printed."""
    worker = "tests.support.workers.faults"
    process = processes.start(processes.torchrun(ranks, worker, str(folder), "endless"), env)
    pids = [pid_of(folder, 0, rank, lambda: process.poll() is None) for rank in range(ranks)]
    started = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    out, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert process.returncode != 0
    assert f"step {STEP}" in out.splitlines(), "what rank 0 had printed is lost"
    assert f"{victim}: -9" in errors, errors
    assert processes.wait_for_end() == []
