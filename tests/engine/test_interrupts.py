"""SIGINT and SIGTERM while a text is generated: an exception that has the text so far, never a shorter answer."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import lp
from launch.bench.baselines import BaselineOptions
from launch.bench.baselines.hf_generate import HFGenerateDecoder, missing_release
from lp.engine.interrupts import DeferredSignals, Terminated, asked_to_end
from lp.engine.journal import Journal
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import plain_greedy

CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
DECODERS = {
    "oracle": lp.AutoregressiveDecoder,
    "plain": lp.PlainDecoder,
    "lookahead": lambda model: lp.LookaheadDecoder(model, CONFIG),
    "prompt_lookup": lambda model: lp.LookaheadDecoder(model, lp.PromptLookupConfig()),
    "hf_generate": HFGenerateDecoder,
    "hf_prompt_lookup": lambda model: HFGenerateDecoder(model, prompt_lookup=4),
}
if missing_release(BaselineOptions()):
    del DECODERS["hf_prompt_lookup"]
every_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@every_decoder
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_with_the_text_so_far(make: Any, number: signal.Signals, model: PreTrainedModel) -> None:
    """A loop that does not look at finish_reason would store half a text; what was generated must not be lost."""
    before, streamed = signal.getsignal(number), list[int]()

    def on_tokens(tokens: list[int], step: int) -> None:
        streamed.extend(tokens)
        if step == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt) as caught:
        make(model).generate(PROMPT, 60, on_tokens=on_tokens)
    assert isinstance(caught.value, lp.Interrupted) and caught.value.signal == number
    output = caught.value.output
    assert output.finish_reason == "interrupted" and 4 <= len(output.tokens) < 60
    assert output.tokens == streamed == plain_greedy(model, PROMPT, 60)[: len(output.tokens)]
    assert str(caught.value).startswith(f"{number.name} after {len(output.tokens)} new tokens")
    assert signal.getsignal(number) is before


@every_decoder
def test_a_signal_in_the_last_step_is_not_lost(make: Any, model: PreTrainedModel) -> None:
    """The text is complete, but Ctrl-C is meant for the loop around it."""
    streamed = list[int]()

    def on_tokens(tokens: list[int], step: int) -> None:
        streamed.extend(tokens)
        if len(streamed) == 20:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(lp.Interrupted) as caught:
        make(model).generate(PROMPT, 20, on_tokens=on_tokens)
    assert caught.value.output.finish_reason == "length"
    assert caught.value.output.tokens == streamed == plain_greedy(model, PROMPT, 20)


def test_the_rows_of_the_tokens_are_kept_too(model: PreTrainedModel) -> None:
    """`output_scores` was asked for: they belong to what was generated."""
    with pytest.raises(lp.Interrupted) as caught:
        lp.LookaheadDecoder(model, CONFIG).generate(
            PROMPT, 60, on_tokens=lambda *_: signal.raise_signal(signal.SIGINT), output_scores=True
        )
    output = caught.value.output
    assert output.scores is not None and output.scores.argmax(-1).tolist() == output.tokens != []


@pytest.mark.parametrize("during", ["installing", "restoring"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_handlers_change(
    number: signal.Signals, during: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python calls the handlers of signals that have come before it installs another one: a KeyError, and no text."""
    before, honest = {each: signal.getsignal(each) for each in SIGNALS}, signal.signal
    fired = []

    def change(changed: int, handler: Any) -> Any:
        restoring = handler in before.values()
        if changed == number and not fired and restoring == (during == "restoring"):
            fired.append(changed)
            if not restoring:
                honest(changed, handler)
            signal.raise_signal(changed)
            if not restoring:
                return before[number]
        return honest(changed, handler)

    monkeypatch.setattr(signal, "signal", change)
    with pytest.raises(lp.Interrupted) as caught:
        lp.LookaheadDecoder(model, CONFIG).generate(PROMPT, 20)
    assert fired and caught.value.signal == number
    assert caught.value.output.tokens == plain_greedy(model, PROMPT, 20)[: len(caught.value.output.tokens)]
    assert {each: signal.getsignal(each) for each in SIGNALS} == before


@pytest.mark.parametrize("first", SIGNALS)
def test_a_signal_just_before_its_handler_is_installed(first: signal.Signals) -> None:
    """It acts as before; a later signal was not deferred any more, for as long as the engine lived."""
    signals = DeferredSignals()

    def acts(number: int, frame: Any) -> None:
        raise InterruptedError

    before = {each: signal.signal(each, acts) for each in SIGNALS}
    try:
        with pytest.MonkeyPatch.context() as patch:
            honest = signal.signal

            def change(number: int, handler: Any) -> Any:
                if handler is not acts and number == first:
                    signal.raise_signal(number)
                return honest(number, handler)

            patch.setattr(signal, "signal", change)
            with pytest.raises(InterruptedError), signals:
                pytest.fail("it had come before")
        assert [signal.getsignal(each) for each in SIGNALS] == [acts, acts]
        with signals:
            signal.raise_signal(signal.SIGINT)
        assert signals.take() == signal.SIGINT
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_all_handlers_are_put_back_where_one_is_called_at_once() -> None:
    """SIGTERM would have stayed deferred for ever."""

    def acts(number: int, frame: Any) -> None:
        raise InterruptedError

    before = {each: signal.signal(each, acts) for each in SIGNALS}
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError), DeferredSignals():
            honest = signal.signal

            def change(number: int, handler: Any) -> Any:
                replaced = honest(number, handler)
                if handler is acts and number == signal.SIGTERM:
                    signal.raise_signal(number)
                return replaced

            patch.setattr(signal, "signal", change)
        assert [signal.getsignal(each) for each in SIGNALS] == [acts, acts]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_the_first_signal_is_the_one_that_counts() -> None:
    """Ctrl-C at a launcher comes as SIGINT from the terminal, then as SIGTERM from the launcher."""
    with DeferredSignals() as held:
        for number in SIGNALS:
            signal.raise_signal(number)
    assert held.received == signal.SIGINT


def test_a_second_interrupt_is_immediate(model: PreTrainedModel) -> None:
    """A step that hangs must still yield to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored

    def on_tokens(tokens: list[int], step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was deferred too")

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            lp.LookaheadDecoder(model, CONFIG).generate(PROMPT, 60, on_tokens=on_tokens)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.type is KeyboardInterrupt


@pytest.mark.parametrize("got", range(3))
def test_ranks_raise_together(got: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that returned would go on with its loop, and wait for the one that has left."""
    signals = dict[int, DeferredSignals]()  # by thread, which no real signal reaches

    class Noted(DeferredSignals):
        def __enter__(self) -> DeferredSignals:
            signals[threading.get_ident()] = self
            return super().__enter__()

    monkeypatch.setattr("lp.engine.decoder.DeferredSignals", Noted)

    def body(context: ParallelContext) -> lp.Interrupted:
        def on_tokens(tokens: list[int], step: int) -> None:
            if step == 2 and context.rank == got:
                signals[threading.get_ident()].received = signal.SIGINT

        with pytest.raises(lp.Interrupted) as caught:
            lp.LookaheadDecoder(model, CONFIG, context).generate(PROMPT, 60, on_tokens=on_tokens)
        return caught.value

    plain = plain_greedy(model, PROMPT, 60)
    for rank, error in enumerate(run_lockstep(3, body)):
        assert error.signal == (signal.SIGINT if rank == got else 0)
        assert 3 <= len(error.output.tokens) < 60 and error.output.steps == 3
        assert error.output.tokens == plain[: len(error.output.tokens)]


def test_on_another_thread_after_the_main_one() -> None:
    """As a server's engine, which warms up before its thread starts."""
    signals = DeferredSignals()
    failed: list[Exception] = []

    def enter() -> None:
        try:
            with signals:
                pass
        except ValueError as error:  # of Python, which sets handlers on the main thread alone
            failed.append(error)

    with signals:
        pass
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert failed == []


def test_a_handler_that_is_not_pythons_stays(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that embeds Python and has handlers of its own, the text was lost behind its last step."""
    getsignal, setsignal = signal.getsignal, signal.signal
    replaced: list[int] = []

    def noted(number: int, handler: Any) -> Any:
        replaced.append(number)
        before = setsignal(number, handler)
        return None if number == signal.SIGTERM else before

    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else getsignal(number))
    monkeypatch.setattr(signal, "signal", noted)
    before = getsignal(signal.SIGTERM)
    try:
        output = lp.LookaheadDecoder(model, CONFIG).generate(PROMPT, 10)
    finally:
        setsignal(signal.SIGTERM, before)
    assert output.tokens == plain_greedy(model, PROMPT, 10)
    assert replaced == [signal.SIGINT] * 2


def test_another_thread_leaves_signals_alone(model: PreTrainedModel) -> None:
    """Python has handlers in the main thread only, where a signal acts as usual: the text goes on to its end."""
    before, made = signal.getsignal(signal.SIGINT), list[list[int]]()
    thread = threading.Thread(
        target=lambda: made.append(lp.LookaheadDecoder(model, CONFIG).generate(PROMPT, 40).tokens)
    )
    thread.start()
    assert signal.getsignal(signal.SIGINT) is before
    thread.join()
    assert made == [plain_greedy(model, PROMPT, 40)]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_journal_goes_on_behind_an_interrupt(tmp_path: Path, number: signal.Signals, model: PreTrainedModel) -> None:
    """In this process or the next one; the exception has the whole text, what the file had included."""
    decoder, path, plain = lp.LookaheadDecoder(model, CONFIG), tmp_path / "j", plain_greedy(model, PROMPT, 60)
    had = 0
    for _ in range(2):
        streamed = list[int]()

        def on_tokens(tokens: list[int], step: int, streamed: list[int] = streamed) -> None:
            streamed.extend(tokens)
            if step == 3:
                signal.raise_signal(number)

        with pytest.raises(lp.Interrupted) as caught:
            Journal(path, ParallelContext()).generate(decoder, PROMPT, 60, on_tokens=on_tokens)
        output = caught.value.output
        assert output.tokens == streamed == plain[: len(output.tokens)] and had < len(output.tokens) < 60
        assert output.resumed == max(had - 1, 0)
        had = len(output.tokens)
    assert not [line for line in path.read_text().splitlines() if "end" in json.loads(line)]
    whole = Journal(path, ParallelContext()).generate(decoder, PROMPT, 60)
    assert whole.tokens == plain and whole.resumed == had - 1


def test_a_text_that_ended_is_not_asked_for_again(tmp_path: Path, model: PreTrainedModel) -> None:
    """The signal came in its last step: the journal must have the end."""
    decoder, ended = lp.LookaheadDecoder(model, CONFIG), list[int]()

    def on_tokens(tokens: list[int], step: int) -> None:
        ended.extend(tokens)
        if len(ended) == 12:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(lp.Interrupted):
        Journal(tmp_path / "j", ParallelContext()).generate(decoder, PROMPT, 12, on_tokens=on_tokens)
    again = Journal(tmp_path / "j", ParallelContext()).generate(decoder, PROMPT, 12)
    assert (again.tokens, again.resumed, again.finish_reason) == (ended, 12, "length")


def _interrupted(number: int) -> lp.Interrupted:
    return lp.Interrupted(lp.GenerationOutput([1, 2], "interrupted", []), number)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (KeyboardInterrupt(), False),
        (Terminated(), True),
        (_interrupted(signal.SIGINT), False),
        (_interrupted(signal.SIGTERM), True),
        (_interrupted(0), True),
    ],
    ids=repr,
)
def test_which_interrupt_is_ctrl_c(error: KeyboardInterrupt, asked: bool) -> None:
    """The apps end with 130 after Ctrl-C, and with 0 where they were asked to end."""
    assert asked_to_end(error) is asked


def test_it_travels_between_processes() -> None:
    """A pool of workers pickles what a task raises."""
    error = pickle.loads(pickle.dumps(_interrupted(0)))
    assert (error.output.tokens, error.signal, error.finished) == ([1, 2], 0, [])
    assert str(error) == "another rank stopped after 2 new tokens, which are in the attribute `output`"


def test_entered_within_itself() -> None:
    """As when a callback steps its engine, which is refused: afterwards the next SIGTERM met a handler of no use."""
    before = [signal.getsignal(number) for number in DeferredSignals.SIGNALS]
    held = DeferredSignals()
    with held:
        with held:
            pass
        signal.raise_signal(signal.SIGTERM)
        assert held.received == signal.SIGTERM
    assert [signal.getsignal(number) for number in DeferredSignals.SIGNALS] == before
