"""What may go wrong at every step and every collective of a short run, one after the other: none of it drawn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.engine.interrupts import DeferredSignals
from lp.engine.journal import Journal
from lp.errors import RanksParted
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import Lockstep, run_lockstep
from tests.conftest import LONG
from tests.support.tiny_models import plain_greedy, tiny_model

ALONE = ParallelContext()
CONFIG = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=2, pool_mib=1)
IDS, NEW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 8
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def before_pass(number: int, act: Callable[[], Any]) -> Iterator[list[int]]:
    """Do something before so many-th forward pass, prefill among them; yields their count."""
    count = [0]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prefill", "forward", "forward_trees"):
            original = getattr(ModelRunner, name)

            def acting(self: ModelRunner, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                count[0] += 1
                if count[0] == number:
                    act()
                return original(self, *args, **kwargs)

            patch.setattr(ModelRunner, name, acting)
        yield count


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_every_pass(number: signal.Signals, tmp_path: Path) -> None:
    """In prefill, in any step: the text so far, then the same decoder and the journal give the undisturbed text."""
    model = tiny_model()
    expected = plain_greedy(model, IDS, NEW)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    with before_pass(0, list) as passes:
        decoder.generate(IDS, NEW, prefill_chunk=4)
    assert passes[0] > 4
    for at in range(1, passes[0] + 1):
        path = tmp_path / f"{at}.jsonl"
        with pytest.raises(lp.Interrupted) as caught, before_pass(at, lambda: signal.raise_signal(number)):
            Journal(path, ALONE).generate(decoder, IDS, NEW, prefill_chunk=4)
        assert caught.value.signal == number
        assert caught.value.output.tokens == expected[: len(caught.value.output.tokens)]
        assert decoder.generate(IDS, NEW, prefill_chunk=4).tokens == expected
        output = Journal(path, ALONE).generate(decoder, IDS, NEW, prefill_chunk=4)
        assert output.tokens == expected and output.resumed <= len(caught.value.output.tokens)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_kill_before_every_pass(tmp_path: Path) -> None:
    """What the journal has then is what a restart goes on from, on as many ranks as it likes."""
    model = tiny_model()
    sampling = lp.SamplingParams(temperature=0.8, seed=3)
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, sampling).tokens
    decoder = lp.LookaheadDecoder(model, CONFIG)
    with before_pass(0, list) as passes:
        decoder.generate(IDS, NEW, sampling)
    for at in range(1, passes[0] + 1):
        path = tmp_path / f"{at}.jsonl"

        def kill() -> None:
            raise Killed

        with pytest.raises(Killed), before_pass(at, kill):
            Journal(path, ALONE).generate(lp.LookaheadDecoder(model, CONFIG), IDS, NEW, sampling)

        def again(context: ParallelContext, path: Path = path) -> list[int]:
            return (
                Journal(path, context).generate(lp.LookaheadDecoder(model, CONFIG, context), IDS, NEW, sampling).tokens
            )

        assert run_lockstep(1 + at % 2, again) == [expected] * (1 + at % 2)


BATCH = [IDS, IDS[:6], IDS[2:]]  # two at a time: the third begins when one has ended


def test_a_batch_killed_before_every_pass(tmp_path: Path) -> None:
    """Three texts, their lines in the order of the steps: the journal gives each one its own tokens and no other's."""
    model = tiny_model()
    sampling = [None, lp.SamplingParams(temperature=0.8, seed=3), lp.SamplingParams(temperature=1.1, seed=3)]
    asked: dict[str, Any] = {"max_new_tokens": [NEW, 3, NEW], "sampling": sampling, "max_sequences": 2}
    outputs = lp.PlainDecoder(model).generate_batch(BATCH, **asked)
    expected = [(output.tokens, output.finish_reason) for output in outputs]
    with before_pass(0, list) as passes:
        lp.LookaheadDecoder(model, CONFIG).generate_batch(BATCH, **asked)
    resumed = 0
    for at in range(1, passes[0] + 1):
        path = tmp_path / f"{at}.jsonl"

        def kill() -> None:
            raise Killed

        with pytest.raises(Killed), before_pass(at, kill):
            Journal(path, ALONE).generate_batch(lp.LookaheadDecoder(model, CONFIG), BATCH, **asked)

        def again(context: ParallelContext, path: Path = path) -> list[lp.GenerationOutput]:
            streamed: list[list[int]] = [[] for _ in BATCH]
            outputs = Journal(path, context).generate_batch(
                lp.LookaheadDecoder(model, CONFIG, context),
                BATCH,
                **asked,
                on_tokens=lambda index, tokens, step: streamed[index].extend(tokens),
            )
            assert streamed == [output.tokens for output in outputs]
            return outputs

        for outputs in run_lockstep(1 + at % 2, again):
            assert [(output.tokens, output.finish_reason) for output in outputs] == expected, at
            resumed += sum(output.resumed for output in outputs)
    assert resumed > passes[0]


def test_a_signal_before_every_pass_of_a_batch(tmp_path: Path) -> None:
    """The texts as far as they are, whole ones among them; the journal gives the undisturbed ones."""
    model = tiny_model()
    asked: dict[str, Any] = {"max_new_tokens": [NEW, 3, NEW], "max_sequences": 2}
    expected = [plain_greedy(model, ids, new) for ids, new in zip(BATCH, asked["max_new_tokens"], strict=True)]
    decoder = lp.LookaheadDecoder(model, CONFIG)
    with before_pass(0, list) as passes:
        decoder.generate_batch(BATCH, **asked)
    finished = set[int]()
    for at in range(1, passes[0] + 1):
        path = tmp_path / f"{at}.jsonl"
        for goes_on in (False, True):  # the second signal comes within what the first one left, or behind its end
            journal = Journal(path, ALONE)
            try:
                with before_pass(1 if goes_on else at, lambda: signal.raise_signal(signal.SIGTERM)):
                    outputs = journal.generate_batch(decoder, BATCH, **asked)
            except lp.Interrupted as error:
                outputs, ended = error.outputs, [error.outputs.index(output) for output in error.finished]
                assert [outputs[index].tokens for index in ended] == [expected[index] for index in ended]
                finished.add(len(ended))
            for output, tokens in zip(outputs, expected, strict=True):
                assert output.tokens == tokens[: len(output.tokens)]
        outputs = Journal(path, ALONE).generate_batch(decoder, BATCH, **asked)
        assert [output.tokens for output in outputs] == expected, at
    assert {0, 1} <= finished


def test_a_signal_on_any_rank_behind_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops a step before or after the others leaves them in a collective."""
    here: dict[int, DeferredSignals] = {}  # by thread, which no real signal reaches

    class Noted(DeferredSignals):
        def __enter__(self) -> DeferredSignals:
            here[threading.get_ident()] = self
            return super().__enter__()

    monkeypatch.setattr("lp.engine.decoder.DeferredSignals", Noted)
    model = tiny_model()
    expected = plain_greedy(model, IDS, NEW)

    def stopped(got: int, at: int) -> list[lp.GenerationOutput]:
        def body(context: ParallelContext) -> lp.GenerationOutput:
            def on_tokens(tokens: list[int], step: int) -> None:
                if context.rank == got and step == at:
                    here[threading.get_ident()].received = signal.SIGTERM

            try:
                return lp.LookaheadDecoder(model, CONFIG, context).generate(IDS, NEW, on_tokens=on_tokens)
            except lp.Interrupted as error:
                assert error.signal == (signal.SIGTERM if context.rank == got else 0)
                return error.output

        return run_lockstep(3, body)

    steps = stopped(0, -1)[0].steps
    assert steps > 3
    for got in range(3) if LONG else (0, 2):
        for at in range(steps):
            outputs = stopped(got, at)
            (tokens,) = {tuple(output.tokens) for output in outputs}
            assert list(tokens) == expected[: len(tokens)]


FAULTS: dict[str, Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]] = {
    "another size": lambda call, mine: (call, torch.cat([mine.flatten(), mine.flatten()[:1]])),
    "nothing": lambda call, mine: (call, mine.flatten()[:0]),
}


def run_with(fault: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None, at: int, bad: int) -> int:
    """A short run of 2 ranks, one of whose collectives sends something else; how many there are."""
    trade = Lockstep.trade
    count = [0, 0]
    models = [tiny_model(), tiny_model()]

    def faulty(self: Lockstep, rank: int, call: str, mine: torch.Tensor, timeout_s: float | None) -> Any:
        count[rank] += 1
        if fault and rank == bad and count[rank] == at:
            call, mine = fault(call, mine)
        return trade(self, rank, call, mine, timeout_s)

    def body(context: ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(models[context.rank], CONFIG, context).generate(IDS, NEW).tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lockstep, "trade", faulty)
        patch.setattr("lp.parallel.thread_ranks.DEFAULT_TIMEOUT_S", 30)
        run_lockstep(2, body)
    return count[bad]


@pytest.mark.parametrize("name", FAULTS)
def test_a_message_of_another_kind_in_every_collective(name: str) -> None:
    """Read as if it were the right one, it would be another text, or memory beyond an array."""
    total = run_with(None, 0, 1)
    for at in range(1, total):  # the last one says that the rank has ended
        for bad in (0, 1) if LONG else (at % 2,):
            with pytest.raises(RanksParted, match=r"rank 0, 1 is .*; give every rank the same calls"):
                run_with(FAULTS[name], at, bad)


def test_another_digest_in_every_step() -> None:
    """Ranks whose texts have parted go on together with a text that neither computed."""
    found = []

    def flipped(call: str, mine: torch.Tensor) -> tuple[str, torch.Tensor]:
        if call == "in a step of generate":
            found.append(call)
            mine = mine.clone()
            mine.view(-1)[0] ^= 1 << 40
        return call, mine

    for at in range(1, run_with(None, 0, 1)):
        del found[:]
        try:
            run_with(flipped, at, 1)
        except RuntimeError as error:
            assert (found and "rank 1 differs from rank 0" in str(error)) or "differ" in str(error), error
        else:
            assert not found, "the step was taken"
