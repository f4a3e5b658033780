"""SIGINT and SIGTERM in `model.generate(custom_generate=lp.generate)`: raised, as by transformers' own loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, StoppingCriteria, pipeline
from transformers.generation.streamers import BaseStreamer

import lp
from lp.engine.generation import Generation
from tests.support.tiny_models import plain_greedy

LOOKAHEAD: dict[str, Any] = {"custom_generate": lp.generate, "window_size": 5, "ngram_size": 4, "guess_set_size": 5}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
BATCH = [PROMPT, PROMPT[::-1], PROMPT[:10] * 2]
SIGNALS = [signal.SIGINT, signal.SIGTERM]


class _Sends(StoppingCriteria):
    """Ends nothing, and sends a signal to this process on its n-th call."""

    def __init__(self, call: int, number: signal.Signals) -> None:
        self.call, self.number, self.calls = call, number, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call:
            os.kill(os.getpid(), self.number)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("call", [1, 20, 60])
def test_a_batch_raises_with_the_rows_so_far(call: int, number: signal.Signals, model: PreTrainedModel) -> None:
    """It returned: rows cut and padded, as if they were answers."""
    ids, new = torch.tensor(BATCH), 24
    plain = [plain_greedy(model, prompt, new) for prompt in BATCH]
    criteria = [_Sends(call, number)]
    with pytest.raises(KeyboardInterrupt) as caught:
        model.generate(ids, max_new_tokens=new, do_sample=False, stopping_criteria=criteria, **LOOKAHEAD)
    error = caught.value
    assert isinstance(error, lp.Interrupted) and error.signal == number
    assert [output.tokens for output in error.outputs] == [
        row[: len(output.tokens)] for row, output in zip(plain, error.outputs, strict=True)
    ]
    assert call <= sum(len(output.tokens) for output in error.outputs) < 3 * new
    assert all(len(output.tokens) == new for output in error.finished)
    assert error.output.finish_reason == "interrupted" and error.output in error.outputs


def test_a_row_that_goes_on_with_its_batch_raises_too(model: PreTrainedModel) -> None:
    """Without EOS, rows that met a criterion are made longer in a second pass."""

    class Short(_Sends):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            ends = super().__call__(input_ids, scores)
            return ends | (input_ids[:, 0] == PROMPT[0]) & (input_ids.shape[1] >= len(PROMPT) + 5)

    ids = torch.tensor(BATCH[:2])
    honest, calls = lp.LookaheadDecoder.generate, list[int]()

    def interrupted(self: Any, *args: Any, **options: Any) -> lp.GenerationOutput:
        calls.append(1)
        options["on_tokens"] = lambda *_: signal.raise_signal(signal.SIGINT)
        return honest(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(lp.Interrupted) as caught:
        patch.setattr(lp.LookaheadDecoder, "generate", interrupted)
        model.generate(ids, max_new_tokens=24, stopping_criteria=[Short(-1, signal.SIGINT)], **LOOKAHEAD)
    assert len(calls) == 1, "the row that ended early alone"
    assert [len(output.tokens) for output in caught.value.finished] == [24]
    short, whole = caught.value.outputs
    assert 5 <= len(short.tokens) < 24 and len(whole.tokens) == 24


def test_scores_of_a_prompt_that_is_being_cached(model: PreTrainedModel) -> None:
    """A text that has no scores yet raised in the place of Interrupted, and the tokens of all others were lost."""
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ablation=lp.Ablation(prompt_logits=False)))

    def interrupt(index: int, tokens: list[int], step: int) -> None:
        if not index and step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(lp.Interrupted) as caught:
        decoder.generate_batch([PROMPT, PROMPT * 20], 40, on_tokens=interrupt, output_scores=True, prefill_chunk=9)
    first, second = caught.value.outputs
    assert first.tokens and first.scores is not None and len(first.scores) == len(first.tokens)
    assert not second.tokens and second.scores is not None and len(second.scores) == 0


@pytest.mark.parametrize("scores", [True, False])
def test_prompts_that_wait_for_a_place(model: PreTrainedModel, scores: bool) -> None:
    """Outputs were told apart by their values, and tensors have no truth: an error in the place of Interrupted."""
    decoder = lp.LookaheadDecoder(model)

    def interrupt(index: int, tokens: list[int], step: int) -> None:
        if index == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(lp.Interrupted) as caught:
        decoder.generate_batch([PROMPT] * 5, 10, on_tokens=interrupt, output_scores=scores, max_sequences=1)
    first, second, *waiting = caught.value.outputs
    assert first.tokens == plain_greedy(model, PROMPT, 10) and second.tokens and second.attention
    assert [output is first for output in caught.value.finished] == [True]
    for output in waiting:
        assert (output.tokens, output.finish_reason, output.attention) == ([], "cancelled", "")
        assert (output.scores is not None and len(output.scores) == 0) if scores else output.scores is None


def test_a_signal_between_the_texts_of_a_step(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended those alone that had not begun the step; the others had no end behind `run`."""
    honest, begun = Generation.begin_step, list[Generation]()

    def begin_step(text: Generation) -> Any:
        begun.append(text)
        if len(begun) == 6:
            signal.raise_signal(signal.SIGINT)
        return honest(text)

    monkeypatch.setattr(Generation, "begin_step", begin_step)
    engine = lp.Engine(lp.LookaheadDecoder(model))
    texts = [engine.submit(prompt, 40, eos_token_id=()) for prompt in BATCH]
    engine.run()
    assert engine.signal == signal.SIGINT and len(begun) == 9 and not engine.running
    for prompt, text in zip(BATCH, texts, strict=True):
        assert text.result().finish_reason == "interrupted" and text.tokens
        assert text.tokens == plain_greedy(model, prompt, 40)[: len(text.tokens)]


def test_a_signal_and_a_failure_in_one_step(model: PreTrainedModel) -> None:
    """The failure was raised, and what all texts had come to was lost; now it is the cause of Interrupted."""
    decoder, failure = lp.LookaheadDecoder(model), ValueError("no more")

    def fail(index: int, tokens: list[int], step: int) -> None:
        if index and step == 2:
            signal.raise_signal(signal.SIGINT)
            raise failure

    with pytest.raises(lp.Interrupted) as caught:
        decoder.generate_batch([PROMPT, PROMPT[::-1]], 40, on_tokens=fail)
    assert caught.value.__cause__ is failure and caught.value.signal == signal.SIGINT
    for prompt, output in zip([PROMPT, PROMPT[::-1]], caught.value.outputs, strict=True):
        assert output.tokens and output.tokens == plain_greedy(model, prompt, 40)[: len(output.tokens)]


class _Streamer(BaseStreamer):
    """Sends SIGINT after so many calls."""

    def __init__(self) -> None:
        self.tokens, self.ended = list[int](), False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > len(PROMPT) + 6:
            signal.raise_signal(signal.SIGINT)

    def end(self) -> None:
        self.ended = True


def test_a_streamer_has_all_of_it(model: PreTrainedModel) -> None:
    """It holds back the last word until it is ended."""
    streamer = _Streamer()
    with pytest.raises(lp.Interrupted) as caught:
        lp.generate(model, torch.tensor([PROMPT]), generation_config=_config(model, 60), streamer=streamer)
    assert streamer.tokens == PROMPT + caught.value.output.tokens and streamer.ended


def _config(model: PreTrainedModel, new: int) -> Any:
    config = model.generation_config
    config.max_length = len(PROMPT) + new
    return config


@pytest.mark.parametrize("number", SIGNALS)
def test_a_text_pipeline_raises(tiny_folder: Path, number: signal.Signals) -> None:
    """It would hand the cut text on as a record."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    pipe = pipeline("text-generation", model=str(tiny_folder), tokenizer=tokenizer)
    asked: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": [_Sends(35, number)]}
    with pytest.raises(KeyboardInterrupt) as caught:
        pipe(["def add(a, b):\n", "import os\n"], **asked, **LOOKAHEAD)
    assert isinstance(caught.value, lp.Interrupted) and caught.value.signal == number
