"""launch.serve with the official client of OpenAI's interface: what it takes, what it streams, and the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lp
from tests.support.serving import Running

openai = pytest.importorskip("openai", reason="the package openai is not installed")

PROMPT = "def fibonacci(n):\n"
OTHERS = ["import os\n", "class Stack:\n", "def read(path):\n    with", "for i in range(", "x = [", "# sort\n", "if a:"]


@pytest.fixture
def client(demo_server: Running) -> Any:
    return demo_server.openai()


def expected(server: Running, prompt: str | list[int], tokens: int, sequence: int = 0, **sampling: Any) -> list[int]:
    """What the decoder gives by itself."""
    ids = server.encode(prompt) if isinstance(prompt, str) else prompt
    params = lp.SamplingParams(**sampling) if sampling else None
    return server.decoder.generate(ids, tokens, params, sequence=sequence).tokens


def joined(chunks: Any, index: int = 0) -> str:
    """The text of a stream's choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.2, "top_p": 0.9, "seed": 11}],
    ids=["greedy", "sampled", "top_p"],
)
def test_completion_has_the_decoders_tokens(
    demo_server: Running, client: Any, asked: dict[str, Any], stream: bool
) -> None:
    """A request's temperature, top_p and seed reach the decoder, and a stream has the text of a whole answer."""
    sampling = {} if asked["temperature"] == 0 else asked
    text = demo_server.decode(expected(demo_server, PROMPT, 40, **sampling))
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, stream=stream, **asked)
    if stream:
        chunks = list(answer)
        assert joined(chunks) == text and len(chunks) > 2
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert sum(chunk.step_tokens for chunk in chunks) == 40
    else:
        assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 40 and answer.usage.prompt_tokens == len(demo_server.encode(PROMPT))
        assert answer.usage.tokens_per_step == pytest.approx(40 / answer.usage.steps)
        assert answer.usage.steps < 40


def test_eight_streams_at_once_have_the_same_tokens(demo_server: Running, client: Any) -> None:
    """A seed gives the same text whatever else runs."""
    prompts = [PROMPT, *OTHERS]

    def text(index: int) -> str:
        chunks = client.completions.create(
            model="demo", prompt=prompts[index], max_tokens=32, temperature=0.9, seed=index, stream=True
        )
        return joined(chunks)

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(text, range(len(prompts))))
    for index, prompt in enumerate(prompts):
        alone = expected(demo_server, prompt, 32, temperature=0.9, seed=index)
        assert texts[index] == demo_server.decode(alone), prompt


def test_n_choices_of_several_prompts(demo_server: Running, client: Any) -> None:
    """Choices of a prompt are the sequences of a batch; those of the second prompt come behind the first one's."""
    ids = [demo_server.encode(PROMPT), demo_server.encode(OTHERS[0])]
    asked = {"temperature": 0.9, "seed": 3}
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=12, n=2, **asked)
    texts = [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    each = [(prompt, sequence) for prompt in ids for sequence in range(2)]
    assert texts == [demo_server.decode(expected(demo_server, one, 12, at, **asked)) for one, at in each]
    assert texts[0] != texts[1]
    assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1]) and answer.usage.completion_tokens == 48
    chunks = list(client.completions.create(model="demo", prompt=ids, max_tokens=12, n=2, stream=True, **asked))
    assert [joined(chunks, index) for index in range(4)] == texts


def test_a_drawn_seed_repeats_the_text(client: Any) -> None:
    """Without a seed texts differ, and each says the one that gives it again."""
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 1.0}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert first.choices[0].text != second.choices[0].text and first.seed != second.seed
    again = client.completions.create(**asked, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(demo_server: Running, client: Any, stream: bool) -> None:
    """The text ends before the first of them, wherever tokens begin and end; a stream never shows a part of it."""
    text = demo_server.decode(expected(demo_server, PROMPT, 40))
    stop = [text[20:25], text[31:34]]
    cut = min(text.find(one) for one in stop)
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=stream
    )
    if stream:
        chunks = list(answer)
        assert joined(chunks) == text[:cut] and chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].text == text[:cut] and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "stream": True}
    chunks = list(client.completions.create(**asked, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 9
    assert all(getattr(chunk, "usage", None) is None for chunk in client.completions.create(**asked))


def test_cached_tokens_of_a_prompt_that_comes_again(client: Any) -> None:
    """An editor sends the same file after every keystroke."""
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 4, "temperature": 0}
    text = "def cached(one, other):\n    return one + other\n\n"
    client.completions.create(prompt=text, **asked)
    again = client.completions.create(prompt=text + "print(", **asked)
    details = again.usage.prompt_tokens_details
    assert 8 < details.cached_tokens < again.usage.prompt_tokens
    several = client.completions.create(prompt=text + "print(other, ", n=3, **asked)  # of one prompt
    assert 8 < several.usage.prompt_tokens_details.cached_tokens < several.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own(demo_server: Running, client: Any, stream: bool) -> None:
    """Without temperature, of every token, with the likeliest beside it; the same in a stream."""
    ids = demo_server.encode(PROMPT)
    sampling = lp.SamplingParams(temperature=0.8, seed=5)
    output = demo_server.decoder.generate(ids, 16, sampling, output_logits=True)
    assert output.logits is not None
    expected = output.logits.log_softmax(-1)
    own = [float(row[token]) for row, token in zip(expected, output.tokens, strict=True)]
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": 3}
    answer = client.completions.create(model="demo", stream=stream, **asked)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    values = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert values == pytest.approx(own, abs=1e-4)
    assert "".join(tokens) == demo_server.decode(output.tokens)
    assert offsets == [len("".join(tokens[:index])) for index in range(16)]
    best = [max(top.values()) for top in tops]
    assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
    assert all(3 <= len(top) <= 4 for top in tops)


def test_echo_scores_the_prompt(demo_server: Running, client: Any) -> None:
    """As lm_eval's local-completions asks: the log probability of every prompt token but the first."""
    import torch

    ids = demo_server.encode("import os\nimport sys\n")
    model = demo_server.served.model
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
    for extra in ({"max_tokens": 0}, {"max_tokens": 1, "temperature": 0}):
        answer = client.completions.create(model="demo", prompt=[ids], logprobs=1, echo=True, **extra)
        found = answer.choices[0].logprobs
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-4)
        assert len(found.tokens) == len(ids) + extra["max_tokens"]
        assert answer.choices[0].text.startswith("import os\nimport sys\n")


def test_a_part_of_a_character_has_its_bytes(client: Any) -> None:
    """Clients put texts together from the bytes."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        extra_body={"response_format": {"type": "regex", "regex": "a\u00ed"}},
    )
    assert answer.choices[0].message.content == "a\u00ed"
    first, *parts = answer.choices[0].logprobs.content[:3]
    assert (first.token, first.bytes) == ("a", [ord("a")])
    assert [(part.token, part.bytes) for part in parts] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xad", [0xAD])]


def test_penalties_and_biases_change_the_text(demo_server: Running, client: Any) -> None:
    """They are transformers' own scores less what OpenAI's formula says, in the decoder as by hand."""
    import torch

    ids = demo_server.encode(PROMPT)
    greedy = expected(demo_server, PROMPT, 24)
    banned = greedy[2]
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {str(banned): -100}}
    text: list[int] = []
    with torch.inference_mode():
        for _ in range(24):
            scores = demo_server.served.model(torch.tensor([[*ids, *text]])).logits[0, -1]
            for token in set(text):
                scores[token] -= 1.5 + 0.5 * text.count(token)
            scores[banned] -= 100
            text.append(int(scores.argmax()))
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, **asked)
    assert answer.choices[0].text == demo_server.decode(text) != demo_server.decode(greedy)


@pytest.mark.parametrize("stream", [False, True])
def test_chat(demo_server: Running, client: Any, stream: bool) -> None:
    """Without a chat template the messages are one text; parts of a content are joined."""
    messages = [
        {"role": "system", "content": "# Python"},
        {"role": "user", "content": [{"type": "text", "text": "def f("}, {"type": "text", "text": "x):"}]},
    ]
    tokens = expected(demo_server, "# Python\ndef f(x):", 20, temperature=0.7, seed=2)
    asked: dict[str, Any] = {"max_completion_tokens": 20, "temperature": 0.7, "seed": 2, "logprobs": True}
    answer = client.chat.completions.create(
        model="demo", messages=messages, top_logprobs=2, user="someone", stream=stream, **asked
    )
    if stream:
        chunks = list(answer)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == demo_server.decode(tokens)
        assert chunks[-1].choices[0].finish_reason == "length"
        logprobs = [chunk.choices[0].logprobs for chunk in chunks]
        assert sum(len(each.content) for each in logprobs if each) == 20
    else:
        choice = answer.choices[0]
        assert choice.message.content == demo_server.decode(tokens) and choice.message.role == "assistant"
        assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 20


def test_a_text_ends_at_eos_unless_told_otherwise(demo_server: Running, client: Any) -> None:
    eos = demo_server.served.tokenizer.eos_token_id
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logit_bias": {str(eos): 100}}
    ended = client.completions.create(model="demo", **asked)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].text == ""
    assert ended.usage.completion_tokens == 1
    on = client.completions.create(model="demo", extra_body={"ignore_eos": True}, **asked)
    assert on.usage.completion_tokens == 6 and on.choices[0].finish_reason == "length"


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"
    assert client.models.retrieve("models/demo").id == "models/demo"


def test_errors_are_the_clients_exceptions(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature is 3.0; .* 2") as bad:
        client.completions.create(model="demo", prompt="a", temperature=3.0)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'; this server has 'demo'") as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="2048") as long:
        client.completions.create(model="demo", prompt=[5] * 2048, stream=True)
    assert long.value.code == "context_length_exceeded"


def test_a_predicted_output_is_drafted(demo_server: Running, client: Any) -> None:
    """A predicted text is the same text by far fewer steps; the usage says how much of the prediction was accepted."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "import os\n"}],
        "max_completion_tokens": 80,
        "temperature": 0.8,
        "seed": 5,
    }
    without = client.chat.completions.create(**asked)
    content = without.choices[0].message.content
    answer = client.chat.completions.create(**asked, prediction={"type": "content", "content": content + "# no more"})
    assert answer.choices[0].message.content == content
    assert answer.usage.tokens_per_step >= 2 * without.usage.tokens_per_step
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 60 and details.rejected_prediction_tokens > 0
    assert without.usage.completion_tokens_details.accepted_prediction_tokens == 0
