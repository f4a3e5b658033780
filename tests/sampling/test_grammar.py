"""Texts that follow a grammar: always, with the tokens of plain decoding, and by fewer steps."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

import lp
from launch.serve.grammars import Grammars
from lp.draft.grammar_drafts import GrammarDrafts, GrownTree
from lp.draft.source import DraftSource
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.grammar import Cursor, Grammar
from lp.sampling.grammar_compiler import MOST_DRAFTED
from scripts.studies.parts.json_tasks import drawn_schema
from tests.support.serving import STEP_TIMES, Running
from tests.support.toy_grammar import ToyGrammar

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

CASES = 200 if os.environ.get("LP_TEST_LONG") else 8


@pytest.mark.parametrize("merge", [True, False])
def test_forced_tokens_stay_within_the_room(merge: bool) -> None:
    """Nodes side by side, as the paper's n-grams are: what is behind a node already needs no second node."""
    step: Any = SimpleNamespace(rooms=[5], rank=0, price=None)
    grown = GrownTree(DraftTree([5, 6], [-1, -1], [0.5, 0.4], merge), [0, 1], step)
    grown.add_path(0, [7, 8], 0.9)
    grown.add_path(0, [7, 8], 0.9)
    assert grown.tree().tokens == [5, 6, 7, 8]
    grown.add_path(0, [7, 8, 9, 10], 0.9)
    grown.add_path(1, [7], 0.9)
    tree = grown.tree()
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, -1, 0, 2, 3])


def test_a_cursor_goes_to_any_text() -> None:
    """Forwards, back, aside: a place left where it was would allow what may follow another text."""
    rng = random.Random(4)
    grammar = ToyGrammar(6, 5)
    cursor = Cursor(grammar.matcher([0]))
    ways = Counter[str]()
    for _ in range(300):
        before = list(cursor.text)
        text = [*before[: rng.randint(0, len(before))], *(rng.randrange(5) for _ in range(rng.randint(0, 3)))]
        fresh = grammar.matcher([0])
        allowed = [fresh.accept(token) for token in text]
        assert cursor.go_to(text) == all(allowed)
        taken = text[: [*allowed, False].index(False)]
        assert cursor.text == taken == cursor.matcher._text  # type: ignore[attr-defined]
        ways["on" if taken[: len(before)] == before else "back" if before[: len(taken)] == taken else "aside"] += 1
    assert min(ways[way] for way in ("on", "back", "aside")) > 10


def follows(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    """Whether a value is of a schema, as far as `drawn_schema` draws them."""
    if "$ref" in schema:
        return follows(value, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return any(follows(value, part, defs) for part in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return type(value) in (int, float)
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return type(value) is str and len(value) <= schema["maxLength"]
        case "array":
            items = type(value) is list and len(value) <= schema["maxItems"]
            return items and all(follows(each, schema["items"], defs) for each in value)
    properties = schema["properties"]
    return (
        type(value) is dict
        and {*schema["required"]} <= {*value} <= {*properties}
        and all(follows(each, properties[name], defs) for name, each in value.items())
    )


@dataclass
class Ranks:
    """What each rank of a lockstep run calls: decoding this prompt under a grammar."""

    model: Any
    ids: list[int]
    most: int
    sampling: lp.SamplingParams | None
    grammar: Grammar
    prediction: Sequence[int] = ()

    def __call__(self, context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(self.model, context=context, step_times=STEP_TIMES)
        return decoder.generate(self.ids, self.most, self.sampling, grammar=self.grammar, prediction=self.prediction)


@pytest.fixture(scope="module")
def demo() -> Any:
    model, tokenizer = lp.load("demo")
    return model, tokenizer, lp.GrammarCompiler(tokenizer, vocabulary_size(model))


def test_drawn_schemas(demo: Any) -> None:
    """Greedy and sampled, some on two ranks: the tokens of plain decoding; every text that ends follows its schema."""
    model, tokenizer, compiler = demo
    lookahead, plain = lp.LookaheadDecoder(model, step_times=STEP_TIMES), lp.AutoregressiveDecoder(model)
    ended = 0
    for case in range(CASES):
        draws = random.Random(f"grammar-{case}")
        schema = drawn_schema(draws)
        grammar = compiler.json_schema(schema)
        ids = tokenizer("# the settings as JSON\n")["input_ids"]
        sampling = lp.SamplingParams(temperature=0.8, seed=case) if case % 2 else None
        expected = plain.generate(ids, 160, sampling, grammar=grammar)
        outputs = [lookahead.generate(ids, 160, sampling, grammar=grammar)]
        if case % 4 > 1:
            outputs += run_lockstep(2, Ranks(model, ids, 160, sampling, grammar))
        for output in outputs:
            assert output.tokens == expected.tokens, case
        if expected.finish_reason == "eos":
            text = tokenizer.decode(expected.tokens, skip_special_tokens=True)
            assert follows(json.loads(text), schema, schema["$defs"]), (case, text)
            ended += 1
    assert ended > 0.8 * CASES  # the others are cut within a number or a list


def test_ranks_and_predictions(demo: Any) -> None:
    """A prediction is drafted as far as the grammar takes it."""
    model, tokenizer, compiler = demo
    grammar = compiler.json_schema(drawn_schema(random.Random(1), 3))
    ids = tokenizer("x = ")["input_ids"]
    expected = lp.PlainDecoder(model).generate(ids, 60, grammar=grammar).tokens
    for output in run_lockstep(2, Ranks(model, ids, 60, None, grammar, expected)):
        assert output.tokens == expected and output.compression > 3


class Toy(DraftSource):
    """Proposes the same tree again and again, as far as there is room."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, text: Any, budget: int, *_: Any) -> DraftTree:
        tree = self.tree
        return DraftTree(tree.tokens[:budget], tree.parents[:budget], tree.accept_probs[:budget])


def drafts_of(compiler: Any, pattern: str, tree: DraftTree) -> GrammarDrafts:
    """A draft source behind a prompt of one token, which proposes `tree` as the grammar of `pattern` cuts it."""
    return GrammarDrafts(Toy(tree), Cursor(compiler.regex(pattern).matcher([0])), prompt_tokens=1)


def test_what_is_drafted(demo: Any) -> None:
    """No node that the grammar forbids, each path once, and what must follow behind nodes, within the room."""
    _, tokenizer, compiler = demo
    a, x, y, z = (tokenizer(text)["input_ids"][0] for text in "axyz")
    end = tokenizer("-end")["input_ids"]
    inner = DraftTree([a, z, x, z, y], [-1, -1, 0, 2, 0], [0.9, 0.8, 0.7, 0.6, 0.5])
    drafts = drafts_of(compiler, "a(x|yy)-end", inner)
    tree = drafts.propose([5], 99, WindowDrafts(), None)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert {(a, x, *end), (a, y, y, *end)} <= {*paths} and len({*paths}) == len(paths)
    assert not any(z in path for path in paths)
    assert len(drafts.propose([5], 4, WindowDrafts(), None)) == 4


def test_forced_tokens_are_as_likely_as_they_were(demo: Any) -> None:
    """Where a model spells by other tokens what must follow, they should cost less."""
    _, tokenizer, compiler = demo
    probs = []
    for spelt in ("return", *"return"), ("return", "return", "return"):
        drafts = drafts_of(compiler, "(return){9}", DraftTree())
        text = [5, *(token for part in spelt for token in tokenizer(part)["input_ids"])]
        drafts.propose([5], 9, WindowDrafts(), None)
        drafts.propose(text, 9, WindowDrafts(), None)
        probs.append(drafts.added_prob)
    assert probs[0] < 0.9 < probs[1]


def test_forced_tokens_of_a_long_text(demo: Any) -> None:
    """No step has room for more; what might never end is not looked for, or a step would not, either."""
    *_, compiler = demo
    assert len(compiler.regex("(x = 1; ){400}").matcher([0]).forced()) == MOST_DRAFTED
    assert compiler.regex("(x = 1; ){4000}").matcher([0]).forced() == []


def test_compiled_grammars_are_forgotten(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always sends another schema must not fill the memory; one that sends one again waits once."""
    model, tokenizer, _ = demo
    monkeypatch.setattr("lp.sampling.grammar_compiler.MOST_COMPILED", 3)
    compiler = lp.GrammarCompiler(tokenizer, vocabulary_size(model))
    made = [compiler.regex(f"a{{{count}}}") for count in (1, 2, 3, 1, 4)]
    assert made[0] is made[3]
    assert len(compiler._compiled) == 3
    assert compiler.regex("a{1}") is made[0]
    assert compiler.regex("a{2}") is not made[1]


class SlowCompiler:
    """Compiles schemas for ever, until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def json_schema(self, text: str) -> str:
        self.begun.set()
        assert self.let_go.wait(30)
        return text

    def regex(self, text: str) -> str:
        return text


def test_a_grammar_that_takes_long_keeps_nobody_waiting(demo: Any) -> None:
    """The engine's thread looks up the grammars of texts that begin, and would stop all others."""
    model, tokenizer, _ = demo
    grammars = Grammars(tokenizer, vocabulary_size(model))
    slow = SlowCompiler()
    grammars._compiler = slow  # type: ignore[assignment]
    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(grammars.grammar, "json_schema", "{}")
            assert slow.begun.wait(10)
            assert pool.submit(grammars.grammar, "regex", "a").result(10) == "a"
            assert not first.done()
        finally:
            slow.let_go.set()


def test_a_grammar_that_is_hard_to_follow_ends_its_text_alone(
    demo_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All texts would wait for it in every step. What is too hard is counted: every rank ends it at one step."""
    monkeypatch.setattr("lp.sampling.grammar_compiler.LIMITS", {"max_lexer_states": 40, "verbose_errors": False})
    http = demo_server.http()
    asked = {"prompt": "x = ", "max_tokens": 40, "temperature": 0}
    expected = http.post("/v1/completions", json=asked).json()["choices"]
    slow = asked | {"response_format": {"type": "regex", "regex": "([a-z]{1,5} ){1,60}"}}
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(http.post, "/v1/completions", json=slow)
        beside = pool.submit(http.post, "/v1/completions", json=asked)
        assert beside.result().json()["choices"] == expected
    assert refused.result().status_code == 400
    error = refused.result().json()["error"]
    assert error["message"].startswith("response_format.regex is too large or too hard to follow ("), error
    assert error["param"] == "response_format"
    assert http.post("/v1/completions", json=asked).json()["choices"] == expected


def bounded_object(names: int, most: int) -> str:
    """A schema of objects with some of many names, which are counted by states of their own."""
    return json.dumps({"type": "object", "properties": {f"a{n}": {} for n in range(names)}, "maxProperties": most})


DOUBLED = "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)), 'r60 ::= "x"'])


@pytest.mark.parametrize(
    "kind, text, message",
    [
        ("json_schema", '{"enum": ["' + "x" * 40_000 + '"]}', "json_schema has 40014 characters, of at most 32768"),
        ("json_schema", '{"items": ' * 100 + "true" + "}" * 100, "schemas within more than 64 others"),
        ("json_schema", '{"a": ' + "[" * 900 + "]" * 900 + "}", "nested more than 256 levels deep"),
        ("json_schema", json.dumps({"dependentRequired": {f"a{n}": [f"b{n}"] for n in range(30)}}), "alternatives"),
        ("json_schema", bounded_object(600, 20), "maxProperties at # of 600 names has 12411 states, of at most 5000"),
        ("json_schema", bounded_object(600, 7), None),
        (
            "json_schema",
            json.dumps({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}),
            "no text",
        ),
        ("regex", "(?:" * 60 + "a" + "){0,9}" * 60, None),
        ("regex", "(" * 100 + ")" * 100, "groups within more than 64 groups"),
        ("regex", "((((a{50}){50}){50}){50}){50}", None),
        ("regex", "[" * 32_000, r"a \[ that is not closed"),
        ("ebnf", DOUBLED, "too large"),
        ("ebnf", 'root ::= "x" root', "no text follows it"),
        ("ebnf", 'root ::= root root root | [a-z] | ""', None),
    ],
)
def test_grammars_are_bounded(demo: Any, kind: str, text: str, message: str | None) -> None:
    """Compiling or a mask took minutes; now each takes less than some seconds of a processor, or is refused by name."""
    model, tokenizer, _ = demo
    grammars = Grammars(tokenizer, vocabulary_size(model))
    began = time.thread_time()
    if message:
        with pytest.raises(UserError, match=message):
            grammars.grammar(kind, text)
    else:
        matcher = grammars.grammar(kind, text).matcher([0])
        mask = torch.zeros(vocabulary_size(model) // 32, dtype=torch.int32)
        try:
            for _ in range(5):
                matcher.allowed(mask)
                matcher.forced()
                matcher.accept(min(token for token in range(1, 4096) if int(mask[token // 32]) >> token % 32 & 1))
        except UserError as error:
            assert "too hard to follow" in str(error)
    assert time.thread_time() - began < 6


def test_other_grammars(demo: Any) -> None:
    model, tokenizer, compiler = demo
    decoder = lp.LookaheadDecoder(model, step_times=STEP_TIMES)
    ids = tokenizer("x = ")["input_ids"]
    for grammar, expected in [
        (compiler.regex("(yes|no), sir"), ("yes, sir", "no, sir")),
        (compiler.ebnf('root ::= "a" "b"'), ("ab",)),
    ]:
        output = decoder.generate(ids, 20, grammar=grammar)
        assert tokenizer.decode(output.tokens, skip_special_tokens=True) in expected and output.finish_reason == "eos"


def test_bad_grammars(demo: Any) -> None:
    model, _, compiler = demo
    with pytest.raises(UserError, match="json_schema is not taken: it is no JSON"):
        compiler.json_schema("{")
    for pattern in ("[]", "$a", "(?!a)a", "(?=a)"):
        with pytest.raises(UserError, match="regex is not taken: no text follows it that the model can write"):
            compiler.regex(pattern)
    with pytest.raises(UserError, match="no EOS that can end its text; give eos_token_id"):
        lp.PlainDecoder(model).generate([1], 4, grammar=compiler.json(), eos_token_id=())


def test_a_processor_that_forbids_what_the_grammar_allows(demo: Any) -> None:
    """Some token would be sampled all the same, and the text would follow no grammar."""
    model, tokenizer, compiler = demo
    banned = [SuppressTokensLogitsProcessor([token for token, text in enumerate(tokens_of(tokenizer)) if "y" in text])]
    for decoder in (lp.LookaheadDecoder(model, step_times=STEP_TIMES), lp.AutoregressiveDecoder(model)):
        with pytest.raises(UserError, match=r"GrammarProcessor.*together forbid every token"):
            decoder.generate([1], 9, grammar=compiler.regex("xy"), logits_processor=banned)


def tokens_of(tokenizer: Any) -> list[str]:
    """The characters of every token."""
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


def test_response_format(demo: Any, demo_server: Running) -> None:
    """The tokens of the decoder under the same grammar; a bad schema is a 400."""
    model, tokenizer, compiler = demo
    schema = drawn_schema(random.Random(3))
    prompt = "# as JSON\n"
    expected = lp.PlainDecoder(model).generate(tokenizer(prompt)["input_ids"], 80, grammar=compiler.json_schema(schema))
    http = demo_server.http()
    asked = {"prompt": prompt, "max_tokens": 80, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "settings", "schema": schema}}
    answer = http.post("/v1/completions", json=asked | {"response_format": form}).json()
    assert answer["choices"][0]["text"] == demo_server.decode(expected.tokens)
    llama = http.post("/completion", json={"prompt": prompt, "n_predict": 80, "temperature": 0, "json_schema": schema})
    assert llama.json()["content"] == demo_server.decode(expected.tokens)
    likewise = {"type": "json_object", "schema": schema}  # as llama.cpp's clients send it
    assert (
        http.post("/v1/completions", json=asked | {"response_format": likewise}).json()["choices"] == answer["choices"]
    )
    any_object = http.post("/v1/completions", json=asked | {"response_format": {"type": "json_object"}}).json()
    assert any_object["choices"][0]["text"][:2] in ('{"', "{}")  # not white space for ever
    bad = http.post("/v1/completions", json=asked | {"response_format": {"type": "regex", "regex": "("}})
    assert bad.status_code == 400 and "regex is not taken: a ( that is not closed" in bad.json()["error"]["message"]
