"""Ranks in different calls: each learns what the others are doing, whatever either waits in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lp
from lp.errors import CallsDiffer
from lp.parallel import agreement, lost_ranks
from lp.parallel.context import ParallelContext
from lp.parallel.rank_group import RankGroup
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import Processes
from tests.support.tiny_models import plain_greedy, tiny_model
from tests.support.workers.calls import CALLS, CONFIG, ENDED, IDS, SEED, ends, error_of


@pytest.mark.parametrize("name", CALLS)
def test_both_calls_are_named_on_every_rank(name: str) -> None:
    """Ranks in different calls must both be told, or one waits for ever; test_faults.py has processes."""
    model = tiny_model()
    assert run_lockstep(2, lambda context: ends(context, name, model)) == [error_of(name)] * 2


def test_a_rank_that_has_ended_is_named() -> None:
    """What is asked for behind the last common call has nobody to answer it."""

    model = tiny_model()

    def body(context: ParallelContext) -> None:
        decoder = lp.LookaheadDecoder(model, CONFIG, context)
        for _ in range(1 + context.rank):
            decoder.generate(IDS, 8)

    with pytest.raises(CallsDiffer, match=f"rank 0 is {ENDED}, rank 1 is {SEED}"):
        run_lockstep(2, body)


def test_the_same_calls_within_a_text() -> None:
    """Every rank makes a decoder and a text between two steps: messages in pieces of a step's row."""
    model = tiny_model()
    plain, inner = plain_greedy(model, IDS, 30), plain_greedy(model, IDS[:5], 9)

    def body(context: ParallelContext) -> list[Any]:
        found: list[Any] = []

        def on_tokens(tokens: list[int], step: int) -> None:
            if step == 2:
                found.append(lp.LookaheadDecoder(model, CONFIG, context).generate(IDS[:5], 9).tokens)
                found.append(context.share_text("naïve" if context.is_main else None))

        return [lp.LookaheadDecoder(model, CONFIG, context).generate(IDS, 30, on_tokens=on_tokens).tokens, *found]

    assert run_lockstep(2, body) == [[plain, inner, "naïve"]] * 2


def test_long_names_and_many_words() -> None:
    """A name is cut, not sent in a larger message; too many words are refused before any rank waits."""

    def body(context: ParallelContext) -> list[list[int]]:
        assert context.rank < 2
        with pytest.raises(AssertionError, match="57 int64s; a message has room for 56"):
            agreement.exchange(context.ranks, "counting", range(57))
        return agreement.exchange(context.ranks, "x" * 100, [context.rank - 1] * 56).tolist()

    assert run_lockstep(2, body) == [[[-1] * 56, [0] * 56]] * 2

    def differ(context: ParallelContext) -> None:
        agreement.exchange(context.ranks, "é" * 100 + "ab"[context.rank])
        agreement.exchange(context.ranks, "ab"[context.rank] + "é" * 100)

    with pytest.raises(CallsDiffer, match=r"rank 0 is aé+\ufffd, rank 1 is bé+\ufffd;"):
        run_lockstep(2, differ)


STORE = """
import torch.distributed as dist, sys, time
store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
for rank in map(int, sys.argv[1:]):
    store.set(f"lp/here/{rank}", "")
    store.set(f"lp/call/{rank}", "making a cake")
print(store.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def store(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[str]]:
    """A process that holds the store, in which these ranks answer."""
    monkeypatch.setattr(lost_ranks, "ROLL_CALL_S", 0.5)

    def start(*ranks: int) -> subprocess.Popen[str]:
        holder = processes.start([sys.executable, "-c", STORE, *map(str, ranks)], {"CUDA_VISIBLE_DEVICES": ""})
        assert holder.stdout
        port = int(holder.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        monkeypatch.setattr(lost_ranks, "_store", lambda: client)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        return holder

    return start


def test_the_roll_call_names_who_is_silent(store: Callable[..., subprocess.Popen[str]]) -> None:
    store(1)
    lost_ranks.announce(0, "making a decoder")
    assert lost_ranks.roll_call(0, 3) == "rank 2 does not answer"
    late = "a rank came too late, or an exchange failed"
    assert lost_ranks.roll_call(0, 1) == late
    assert lost_ranks.roll_call(0, 2).startswith(f"{late} (rank 0 is making a decoder, rank 1 is making a cake; give")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("agent", "holder"), [("False", "rank 0"), ("True", "torchrun's agent")])
def test_a_store_that_is_gone_is_no_fault_of_ranks(
    number: int,
    agent: str,
    holder: str,
    store: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first write to a dead store succeeds, then every wait fails, for the rank that asks as for the others."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    process = store(0, 1)
    os.kill(process.pid, number)
    # Until then its store still answers.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    said = lost_ranks.roll_call(1, 2)
    assert said.startswith(f"the store at 127.0.0.1:{os.environ['MASTER_PORT']}, which {holder} holds, is gone")
    assert "rank 1" not in said


def test_a_single_rank_exchanges_nothing() -> None:
    torch.manual_seed(3)
    seed = agreement.shared_seed(RankGroup(), "drawing")
    torch.manual_seed(3)
    assert seed == int(torch.randint(2**63 - 1, (1,)))
    before = torch.get_rng_state()
    assert agreement.shared_seed(RankGroup(), "drawing", wanted=False) == 0
    assert torch.equal(before, torch.get_rng_state()), "a seed that nobody wants was drawn"
