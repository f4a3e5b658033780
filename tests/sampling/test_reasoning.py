"""Models that think first: free text up to the end of a reasoning block, then what a grammar says."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, LogitsProcessor

import lp
from lp.errors import UserError
from lp.sampling.reasoning import AfterReasoning, ReasoningBlock
from tests.support.serving import STEP_TIMES, Running, serving
from tests.support.tokenizers_of import llama_2, model_with
from tests.support.toy_grammar import ToyGrammar

VOCABULARY = 37  # more than one word of a mask, and no multiple of it
BEGIN, END, EOS = 31, 32, 3


def allowed_behind(grammar: ToyGrammar, text: list[int], is_open: bool) -> set[int]:
    """Tokens that may follow, from the whole text each time."""
    block = text if is_open else text[1:] if text[:1] == [BEGIN] else None
    if block is None:
        return {*grammar.allowed(text)} | ({BEGIN} if not text else set())
    if END not in block:
        return {*range(VOCABULARY)} - {EOS}
    return {*grammar.allowed(block[block.index(END) + 1 :])}


class ReferenceMask(LogitsProcessor):
    """`allowed_behind` as a processor of transformers."""

    per_branch = True

    def __init__(self, grammar: ToyGrammar, prompt_tokens: int, is_open: bool) -> None:
        self._grammar, self._prompt_tokens, self._is_open = grammar, prompt_tokens, is_open

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -math.inf)
        for row, ids in enumerate(input_ids.tolist()):
            tokens = [*allowed_behind(self._grammar, ids[self._prompt_tokens :], self._is_open)]
            masked[row, tokens] = scores[row, tokens]
        return masked


@pytest.mark.parametrize("is_open", [False, True])
def test_a_place_goes_on_and_back_over_the_border(is_open: bool) -> None:
    """What other runtimes had wrong: a mask within a draft in which the block ends."""
    places = Counter[str]()
    for seed in range(60):
        rng = random.Random(f"{seed} {is_open}")
        grammar = ToyGrammar(seed, VOCABULARY)
        matcher = AfterReasoning(grammar, ReasoningBlock(BEGIN, END), is_open).matcher([EOS])
        text: list[int] = []
        for _ in range(60):
            if text and (rng.random() < 0.35 or matcher.ended):
                count = rng.randint(1, len(text))
                crossed = END in text[len(text) - count :]
                matcher.rollback(count)
                del text[len(text) - count :]
                places["back over the end" if crossed else "back"] += 1
            token = rng.choice([BEGIN, END, END, EOS, rng.randrange(VOCABULARY)])
            expected = allowed_behind(grammar, text, is_open)
            mask = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32)
            matcher.allowed(mask)
            assert {each for each in range(VOCABULARY) if int(mask[each // 32]) >> each % 32 & 1} == expected
            assert matcher.accept(token) == (token in expected), (text, token)
            text += [token] if token in expected else []
            places["end of the block"] += token == END and token in expected
            assert matcher.ended == (EOS in text)
    assert min(places.values()) > 50, places


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_plain_decoding(is_open: bool, temperature: float) -> None:
    """Lookahead decoding's trees cross the border; steps accept tokens of both sides."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).double().eval()
    both = 0
    for seed in range(12):
        rng = random.Random(seed)
        prompt = [rng.randrange(4, 30) for _ in range(12)]
        grammar = ToyGrammar(seed, VOCABULARY)
        sampling = lp.SamplingParams(temperature=temperature, seed=seed) if temperature else None
        reference = ReferenceMask(grammar, len(prompt), is_open)
        thinks = [BEGIN, 7, 8, END] if not is_open else [7, 8, END]
        expected = lp.AutoregressiveDecoder(model).generate(
            prompt, 40, sampling, eos_token_id=EOS, logits_processor=[reference, _Towards(thinks, len(prompt))]
        )
        decoder = lp.LookaheadDecoder(model, step_times=STEP_TIMES)
        steps: list[list[int]] = []

        def on_tokens(tokens: list[int], step: Any, steps: list[list[int]] = steps) -> None:
            steps.append([*tokens])

        output = decoder.generate(
            prompt,
            40,
            sampling,
            eos_token_id=EOS,
            grammar=AfterReasoning(grammar, ReasoningBlock(BEGIN, END), is_open),
            logits_processor=[_Towards(thinks, len(prompt))],
            prediction=expected.tokens,
            on_tokens=on_tokens,
        )
        assert output.tokens == expected.tokens
        assert output.tokens[: len(thinks)] == thinks
        both += any(END in step[:-1] and step.index(END) > 0 for step in steps)
    assert both > 3


class _Towards(LogitsProcessor):
    """Makes a text likely to begin with some tokens."""

    per_branch = True

    def __init__(self, begin: list[int], prompt_tokens: int) -> None:
        self._begin, self._prompt_tokens = begin, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            text = ids[self._prompt_tokens :]
            if len(text) < len(self._begin) and text == self._begin[: len(text)]:
                scores[row, self._begin[len(text)]] += 1e3
        return scores


TEMPLATES = {
    "begins": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "open": "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n",
    "closed": "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n\n</think>\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    tokenizer = llama_2()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])  # as of Qwen3
    with serving(model_with(tokenizer), tokenizer, reasoning="auto") as running:
        yield running


def answers(server: Running, kind: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message at once, and put together from a stream."""
    server.served.tokenizer.chat_template = TEMPLATES[kind]
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, **body}
    whole = server.http().post("/v1/chat/completions", json=asked)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    stream = server.http().post("/v1/chat/completions", json=asked | {"stream": True})
    joined: dict[str, Any] = {}
    for line in stream.text.splitlines():
        if line.startswith("data: {"):
            (part,) = json.loads(line[6:])["choices"]
            for name, text in part["delta"].items():
                joined[name] = joined.get(name, "") + text
    return choice, joined


def bias_towards(server: Running, token: str, bias: float = 5.0) -> dict[str, float]:
    return {str(server.served.tokenizer.convert_tokens_to_ids(token)): bias}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_response_format_begins_behind_the_reasoning(server: Running, kind: str, temperature: float) -> None:
    """Whether the model begins the block, or its template, or its template ends it: the content alone is the form's."""
    seen = Counter[str]()
    for seed in range(8):
        form = {"type": "regex", "regex": "(the|a){3}"}
        body = {"temperature": temperature, "seed": seed, "response_format": form}
        begins = bias_towards(server, "<think>", 2.0) if seed % 2 and kind == "begins" else {}
        body["logit_bias"] = bias_towards(server, "</think>") | begins
        choice, streamed = answers(server, kind, **body)
        message = choice["message"]
        assert message["content"] == streamed.get("content", "")
        assert message.get("reasoning_content", "") == streamed.get("reasoning_content", "")
        assert "</think>" not in message.get("reasoning_content", "")
        if choice["finish_reason"] == "stop":
            assert re.fullmatch("(the|a){3}", message["content"])
            seen["thought" if "reasoning_content" in message else "none"] += 1
        else:
            assert message["content"] == ""
    assert seen.total() > 3
    if temperature:
        assert seen["thought"] > 0 or kind == "closed", seen
        assert seen["none"] > 0 or kind == "open", seen


def test_stop_strings_are_of_the_answer(server: Running) -> None:
    """Thoughts may have what would end an answer."""
    form = {"type": "regex", "regex": "(the|a){8}"}
    body = {"temperature": 1.0, "response_format": form, "logit_bias": bias_towards(server, "</think>")}
    ended = 0
    for seed in range(8):
        choice, streamed = answers(server, "open", **body, seed=seed, stop=["the"])
        assert "the" not in choice["message"]["content"]
        assert streamed.get("content", "") == choice["message"]["content"]
        ended += choice["finish_reason"] == "stop"
    assert ended > 3


@pytest.mark.parametrize(
    "given, said",
    [
        ("deepseek", "reasoning is 'deepseek'; give auto, null, or the two tokens"),
        (["<a>"], "reasoning is ['<a>']; give auto"),
        (["<a>", "<b>"], "has no tokens <a> and <b>; name its own"),
        ("auto", "has no tokens <think> and </think>, or [THINK]"),
    ],
)
def test_what_names_no_block_is_refused(given: Any, said: str) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from launch.serve.reasoning import reasoning_block

    with pytest.raises(UserError) as refused:
        reasoning_block(llama_2(), given)
    assert said in str(refused.value)
