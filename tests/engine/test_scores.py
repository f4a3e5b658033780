"""`output_scores` and `output_logits`: a row for every token that came out, as transformers' `generate` returns them.

B: prompts of a batch, T: tokens of its longest text, V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import lp
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import VOCABULARY, tiny_model

IDS = torch.tensor([[0, 0, 0, 5, 6, 7, 1, 2], [1, 2, 3, 4, 1, 2, 3, 4]])
MASK = (torch.arange(8)[None] >= torch.tensor([[3], [0]])).long()  # the first prompt is padded on the left
BOTH: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LOOKAHEAD: dict[str, Any] = {"custom_generate": lp.generate, "window_size": 7, "ngram_size": 5, "guess_set_size": 7}
# transformers rounds float64 logits to float32 and processes those; here float64 is processed, then rounded. A handful
# of roundings of 2 ** -24 each; the float64 kernels' own difference is a million times smaller.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def _assert_rows_equal(ours: Any, theirs: Any, length: int) -> None:
    """Sequences, and rows as far as a text goes; zeros behind."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    new = ours.sequences[:, length:]
    for name in ("scores", "logits"):
        assert isinstance(ours[name], tuple) and len(ours[name]) == len(theirs[name]) == new.shape[1]
        ours_TBV, theirs_TBV = torch.stack(ours[name]), torch.stack(theirs[name])
        assert ours_TBV.dtype == theirs_TBV.dtype == torch.float32
        for row, tokens in enumerate(new):
            end = len(tokens) - int((tokens.flip(0) != 0).int().argmax())  # 0 is the padding, and no text's last token
            torch.testing.assert_close(ours_TBV[:end, row], theirs_TBV[:end, row], **CLOSE)
            assert not ours_TBV[end:, row].any()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "eos_token_id": [26, 29]},  # one row ends before the other
        {"no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": 9},
        {"sequence_bias": {(3,): 2.0, (4, 5): 5.0}, "suppress_tokens": [47]},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_greedy_rows_equal_generate(model: PreTrainedModel, asked: dict[str, Any]) -> None:
    """A row of another slot, of another branch's prefix or from behind the end looks as good as the right one."""
    asked = {"max_new_tokens": 40, "attention_mask": MASK, **BOTH} | asked
    ours = model.generate(IDS, **asked, **LOOKAHEAD)
    _assert_rows_equal(ours, model.generate(IDS, **asked), IDS.shape[1])
    if asked.get("eos_token_id") == [26, 29]:
        assert (ours.sequences[:, -1] == 0).any() and ours.sequences.shape[1] < 48
    if "eos_token_id" not in asked:
        transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
        assert transitions.shape == (2, asked["max_new_tokens"]) and (transitions <= 0).all()


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_only_what_was_asked_for(model: PreTrainedModel, name: str) -> None:
    """Both together are twice the memory; without the dict transformers gives neither."""
    asked: dict[str, Any] = {"max_new_tokens": 5, "attention_mask": MASK, f"output_{name}": True}
    output = model.generate(IDS, **asked, **LOOKAHEAD, return_dict_in_generate=True)
    other = {"scores": "logits", "logits": "scores"}[name]
    assert len(output[name]) == 5 and output.get(other) is None
    assert torch.equal(model.generate(IDS, **asked, **LOOKAHEAD), output.sequences)
    plain = lp.LookaheadDecoder(model).generate(IDS[1], 5)
    assert plain.scores is None and plain.logits is None


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_sampled_rows_equal_the_oracles(model: PreTrainedModel, verifier: str) -> None:
    """Scores are before the noise and after every warper, of the prefix that the text has."""
    processors = [tf.RepetitionPenaltyLogitsProcessor(1.3), tf.NoRepeatNGramLogitsProcessor(3)]
    prompt, accepted = [5, 6, 7, 1, 2], 0
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig())  # it guesses in every step
    for seed in range(6):
        sampling = lp.SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=seed, verifier=verifier)
        given = {"sampling": sampling, "logits_processor": processors, "output_scores": True, "output_logits": True}
        output = decoder.generate(prompt, 40, **given)
        accepted += sum(step.accepted for step in output.step_stats)
        assert output.scores is not None and output.logits is not None
        assert output.scores.shape == output.logits.shape == (40, VOCABULARY)
        if verifier == "coupled":
            plain = lp.AutoregressiveDecoder(model).generate(prompt, 40, **given)
            assert plain.tokens == output.tokens
            torch.testing.assert_close(output.scores, plain.scores)  # float64, whose kernels agree to 1e-13
            torch.testing.assert_close(output.logits, plain.logits)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.tokens])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(output.logits, logits)
        for at, (row, scores) in enumerate(zip(logits[:, None], output.scores, strict=True)):
            prefix = torch.tensor([prompt + output.tokens[:at]])
            for processor in [*processors, *sampling.processors()]:
                row = processor(prefix, row)
            torch.testing.assert_close(scores, row[0])
            assert scores[output.tokens[at]] > -torch.inf
    assert accepted > 50  # or every row were the root's


def test_sampled_rows_through_generate(model: PreTrainedModel) -> None:
    """The batch's rows keep their own noise, warpers from the generation config included."""
    asked: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "top_k": 0, "seed": 4, "attention_mask": MASK[1:]}
    output = model.generate(IDS[1:], max_new_tokens=12, num_return_sequences=2, **asked, **BOTH, **LOOKAHEAD)
    for sequence in range(2):
        plain = lp.AutoregressiveDecoder(model).generate(
            IDS[1], 12, lp.SamplingParams(top_p=0.9, seed=4), sequence=sequence, output_scores=True
        )
        assert output.sequences[sequence, 8:].tolist() == plain.tokens
        assert plain.scores is not None and bool((plain.scores == -torch.inf).any())
        torch.testing.assert_close(torch.stack(output.scores)[:, sequence], plain.scores.float(), **CLOSE)


def test_rows_argmax_to_their_tokens_in_bfloat16() -> None:
    """Rows from another kernel than the one that chose would now and then favour another token than the text has."""
    model = tiny_model(dtype=torch.bfloat16)
    for seed in range(8):
        prompt = torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(seed))
        output = lp.LookaheadDecoder(model).generate(prompt, 60, output_scores=True)
        assert output.scores is not None and output.scores.dtype == torch.float32
        assert output.scores.argmax(-1).tolist() == output.tokens
        output.scores[0] = 0  # the caller's to change: not an inference tensor


def test_rows_of_a_text_that_was_stopped_at_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, no row; but of the right width, so that nothing downstream falls over."""
    monkeypatch.setattr(lp.engine.interrupts.DeferredSignals, "requested", True)
    with pytest.raises(lp.Interrupted) as caught:
        lp.LookaheadDecoder(model).generate([1, 2, 3], 9, output_logits=True)
    output = caught.value.output
    assert output.finish_reason == "interrupted" and output.tokens == []
    assert output.logits is not None and output.logits.shape == (0, VOCABULARY)


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_rows_of_a_text_that_is_cancelled_before_a_step(model: PreTrainedModel, name: str) -> None:
    """While its prompt is being cached there is nothing to take the width from: cancelling it gave a KeyError."""
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ablation=lp.Ablation(prompt_logits=False)))
    engine = lp.Engine(decoder, 1, prefill_chunk=4)
    asked = {f"output_{name}": True}
    caching, waiting = engine.submit([1, 2, 3] * 9, 9, **asked), engine.submit([1, 2], 9, **asked)
    other = engine.submit([1, 2], 9)
    engine.step()
    for handle in (caching, waiting):
        engine.cancel(handle)
        rows = getattr(handle.result(), name)
        assert rows.shape == (0, VOCABULARY) and rows.dtype == torch.promote_types(model.dtype, torch.float32)
    engine.run()
    assert len(other.result().tokens) == 9


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_several_ranks_refuse(model: PreTrainedModel, name: str) -> None:
    """A rank has the rows that it computed; the others' would be missing without a word."""
    with pytest.raises(ValueError, match=f"{name} is on among 2 ranks.*generate on one rank"):
        run_lockstep(2, lambda c: lp.LookaheadDecoder(model, context=c).generate([1, 2], 9, **{name: True}))
