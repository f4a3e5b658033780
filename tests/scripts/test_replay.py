"""Replays take the steps of the decoder they stand for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

import lp
from launch.data.prompts import load_builtin
from lp.draft.prompt_lookup import PromptLookup
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.models.loader import DEMO_MODEL, load
from scripts.studies.parts.replay import Text, load_texts, replay
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model


def test_replay_equals_the_decoder(cases: Callable[[int, int], range]) -> None:
    """Off by the bonus token, by the end of the text or by a step's learning, it measures another method."""
    for case in cases(8, 64):
        rng = random.Random(case)
        model, ids = tiny_model(seed=case), [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))]
        eos = rng.choice(plain_greedy(model, ids, 60)) if case % 2 else None
        lookup = lp.PromptLookupConfig(max_matching_ngram=rng.randint(1, 3), num_tokens=rng.randint(1, 12))
        output = lp.LookaheadDecoder(model, lookup).generate(ids, 60, eos_token_id=() if eos is None else eos)
        source = PromptLookup(lookup, ids)
        run = replay(source, ids, output.tokens, lookup.num_tokens, max_new_tokens=60)
        assert (run.tokens, run.steps, run.tokens_a_step) == (len(output.tokens), output.steps, output.mean_tokens)


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").exists(), reason="the demo model's weights are not here")
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_replay_equals_the_demo_run(temperature: float) -> None:
    """The figures that replays are made for: S and step tokens of text that a model wrote, sampled text too."""
    loaded = load("demo")
    sampling = lp.SamplingParams(temperature=temperature, seed=0) if temperature else None
    for prompt in load_builtin(3):
        ids = loaded.tokenizer(prompt.text)["input_ids"]
        output = lp.LookaheadDecoder(loaded.model, lp.PromptLookupConfig()).generate(ids, 96, sampling)
        run = replay(PromptLookup(lp.PromptLookupConfig(), ids), ids, output.tokens, 10, max_new_tokens=96)
        assert (run.compression, run.tokens_a_step) == (output.compression, output.mean_tokens)


class _Forks(DraftSource):
    """Proposes two branches, of which the second holds the truth 5, 6, 7."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def propose(self, text: list[int], budget: int, *_: object) -> DraftTree:
        builder = DraftTreeBuilder(budget)
        builder.add_path([5, 9, 9])
        builder.add_path([5, 6, 7])
        return builder.build()

    def observe(self, text: list[int], moved: int, seen: StepSamples) -> None:
        assert not seen.ngrams and not seen.nodes
        self.seen.append((len(text), moved))


def test_replay_walks_trees() -> None:
    """Only paths would pass a walk that takes the first child."""
    source = _Forks()
    run = replay(source, [1, 2], [5, 6, 7, 8, 5, 6, 1], 10)
    assert source.seen == [(6, 4), (9, 3)]
    assert (run.steps, run.step_tokens) == (2, 1 + 5 + 1 + 3)  # in the last step nodes at depth 3 would be past the end


def test_texts_round_trip(tmp_path: Path) -> None:
    """An interrupted run leaves half a line, which must not count; any other bad line is named."""
    texts = [Text(task="a", index=i, temperature=0.3, prompt=[1], tokens=[2, i]) for i in range(2)]
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps(asdict(text)) + "\n" for text in texts]
    path.write_text("".join(lines) + lines[0][:20])
    assert load_texts(path) == texts
    path.write_text(lines[0] + '{"task": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 is no text .* with python scripts/tables.py texts"):
        load_texts(path)
