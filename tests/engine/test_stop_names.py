"""stop_strings= that name tokens of a tokenizer, in every decoder."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers as tk
from transformers import PreTrainedTokenizerFast, SequenceBiasLogitsProcessor

import lp
from tests.support.serving import STEP_TIMES
from tests.support.tokenizers_of import gpt_2, llama_2, model_with

NAMES = ["<|im_end|>", "<\uff5cend\u2581of\u2581turn\uff5c>"]


def named(tokenizer: PreTrainedTokenizerFast, special: bool) -> PreTrainedTokenizerFast:
    added = [tk.AddedToken(f"{special}{name}", special=special, normalized=False) for name in NAMES]
    tokenizer.add_tokens(added, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["llama-2", "gpt-2"])
@pytest.mark.parametrize("decoder", ["lookahead", "plain", "autoregressive"])
def test_the_text_ends_at_the_token(decoder: str, kind: str, special: bool) -> None:
    """Whatever the name is decoded to: of a tokenizer that takes a character of it for a space, to another text."""
    tokenizer = named(llama_2() if kind == "llama-2" else gpt_2(), special)
    model = model_with(tokenizer)
    made: dict[str, Any] = {
        "lookahead": lambda: lp.LookaheadDecoder(model, step_times=STEP_TIMES),
        "plain": lambda: lp.PlainDecoder(model),
        "autoregressive": lambda: lp.AutoregressiveDecoder(model),
    }
    for name in NAMES:
        stop = f"{special}{name}"
        token = tokenizer.convert_tokens_to_ids(stop)
        forced = {"logits_processor": [SequenceBiasLogitsProcessor([[[token], 90.0]])], "eos_token_id": []}
        for strings in ([stop], ["zz", f"{stop}{stop}"]):
            output = made[decoder]().generate([5, 6], 6, stop_strings=strings, tokenizer=tokenizer, **forced)
            assert output.tokens == [token] * len(strings) and output.finish_reason == "stop_string"
