"""Suffix decoding, where arctic-inference's tree is there: installed, or in the folder that LP_SUFFIX_TREE names."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp
from lp.draft.suffix import SuffixTree, native_tree
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from scripts.studies.parts.replay import replay
from tests.conftest import ROOT, Processes
from tests.support.apps import Ran
from tests.support.layouts import NOTHING
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model

NATIVE = "arctic_inference.suffix_decoding._C"
if folder := os.environ.get("LP_SUFFIX_TREE"):
    sys.path.append(folder)
try:
    native_tree()
    MISSING = ""
except ValueError as error:
    MISSING = str(error)
needs_tree = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}, and name its folder with LP_SUFFIX_TREE")


def _drawn(rng: random.Random) -> tuple[list[int], lp.SuffixConfig]:
    """A text that repeats itself, and settings."""
    piece = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 12))]
    ids = [rng.choice(piece) if rng.random() < 0.1 else piece[i % len(piece)] for i in range(rng.randint(1, 80))]
    return ids, lp.SuffixConfig(
        max_tree_depth=rng.choice([2, 8, 64]),
        max_tokens=rng.randint(1, 20),
        max_spec_factor=rng.choice([0.5, 1.0, 4.0]),
        max_spec_offset=rng.choice([0.0, 3.0]),
        min_token_prob=rng.choice([0.0, 0.1]),
        tree=rng.random() < 0.5,
    )


def test_absent_package_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, launch_generate: Callable[..., Ran]
) -> None:
    """An ImportError from inside a run, or another method in its place, would leave the user guessing."""
    monkeypatch.setitem(sys.modules, NATIVE, None)
    with pytest.raises(ValueError, match="pip install arctic-inference"):
        lp.LookaheadDecoder(tiny_model(), lp.SuffixConfig())
    ran = launch_generate("decoder=suffix")
    assert ran.code == 2 and "pip install arctic-inference" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tree_depth": 1}, r"max_tree_depth is 1; it must be an integer in \[2, 4096\]"),
        ({"max_tokens": 0}, r"max_tokens is 0; it must be an integer in \[1, 1024\]"),
        ({"max_spec_factor": -1.0}, r"max_spec_factor is -1.0; it must be a number in \[0, 1024\]"),
        ({"max_spec_offset": float("nan")}, "max_spec_offset is nan"),
        ({"min_token_prob": 1.5}, r"min_token_prob is 1.5; it must be a number in \[0, 1\]"),
        ({"tree": 1}, "tree is 1; it must be true or false"),
    ],
)
def test_config_checks_itself(values: dict[str, Any], message: str) -> None:
    """The tree takes C++ ints and floats: what it cannot hold must not reach it."""
    with pytest.raises(ValueError, match=message):
        lp.SuffixConfig(**values)


@needs_tree
def test_path_and_tree() -> None:
    """A path is the likeliest continuation, a tree has the others too; both keep to the match and to the budget."""
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4, 6, 8, 1, 2, 3]
    path = SuffixTree(lp.SuffixConfig(), text).propose(text, 99)
    assert (path.tokens[:2], path.parents) == ([4, 6], [-1, 0, 1])  # three tokens matched, so three are proposed
    rare = SuffixTree(lp.SuffixConfig(min_token_prob=0.3), text).propose(text, 99)
    assert rare.tokens == [4, 6]  # what follows them did so once in four times
    tree = SuffixTree(lp.SuffixConfig(tree=True, max_spec_factor=2.0), text).propose(text, 5)
    assert (tree.tokens[0], tree.parents[0], len(tree)) == (4, -1, 5)
    assert {tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == 0} == {5, 6}
    assert SuffixTree(lp.SuffixConfig(max_tokens=2), text).propose(text, 99).tokens == [4, 6]
    assert len(SuffixTree(lp.SuffixConfig(), text).propose(text, 0)) == 0


@needs_tree
def test_proposals_equal_arctics_own(cases: Callable[[int, int], range]) -> None:
    """Another context, or another order of learning, and the peer would be compared unfairly."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    for case in cases(20, 200):
        rng = random.Random(case)
        ids, config = _drawn(rng)
        cache = SuffixDecodingCache(config.max_tree_depth, max_cached_requests=0)
        cache.start_request(0, ids)
        source, text = SuffixTree(config, ids), list(ids)
        for _ in range(12):
            draft = cache.speculate(
                0,
                text,
                config.max_tokens,
                config.max_spec_factor,
                config.max_spec_offset,
                config.min_token_prob,
                config.tree,
            )
            tree = source.propose(text, config.max_tokens)
            assert (tree.tokens, tree.parents) == (draft.token_ids, draft.parents)
            new = [rng.choice(text) for _ in range(rng.randint(1, 4))]
            text += new
            cache.add_active_response(0, new)
            source.observe(text, len(new), NOTHING)


@needs_tree
def test_decoder_is_exact_and_replays(cases: Callable[[int, int], range]) -> None:
    """The tokens of plain decoding, with EOS inside a step or none, within the budget, in the steps of the replay."""
    for case in cases(12, 120):
        rng = random.Random(case)
        model = tiny_model(["llama", "gemma3"][case % 2], seed=case % 8)
        ids, config = _drawn(rng)
        sampling = lp.SamplingParams(temperature=0.5, seed=case) if case % 3 == 0 else None
        eos = rng.choice(plain_greedy(model, ids, 50)) if case % 2 else ()
        plain = lp.AutoregressiveDecoder(model).generate(ids, 50, sampling, eos_token_id=eos)
        output = lp.LookaheadDecoder(model, config).generate(ids, 50, sampling, eos_token_id=eos)
        assert (output.tokens, output.finish_reason) == (plain.tokens, plain.finish_reason)
        assert all(step.num_draft <= config.max_tokens for step in output.step_stats)
        run = replay(SuffixTree(config, ids), ids, output.tokens, config.max_tokens, max_new_tokens=50)
        assert (run.steps, run.tokens_a_step) == (output.steps, output.mean_tokens)


@needs_tree
def test_on_ranks() -> None:
    """Every rank grows its own tree from the same text: they must propose alike, and settings that differ be named."""
    model, (ids, config) = tiny_model(), _drawn(random.Random(3))

    texts = run_lockstep(3, lambda context: lp.LookaheadDecoder(model, config, context).generate(ids, 40).tokens)
    assert texts == [plain_greedy(model, ids, 40)] * 3

    def differ(context: ParallelContext) -> None:
        lp.LookaheadDecoder(model, lp.SuffixConfig(max_tokens=8 + context.rank // 2), context).generate(ids, 40)

    with pytest.raises(ValueError, match="the max_tokens of rank 2 differs"):
        run_lockstep(3, differ)


@needs_tree
def test_launch(launch_generate: Callable[..., Ran]) -> None:
    """The group must reach the decoder, and its values the config's checks."""
    overrides = ("decoder=suffix", "decoder.tree=true", "limit=1", "max_new_tokens=12")
    ran = launch_generate(*overrides)
    assert ran.code == 0 and "suffix" in ran.out, ran.err
    assert "max_tokens is 0" in launch_generate("decoder=suffix", "decoder.max_tokens=0").err


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_script_builds_the_tree(tmp_path: Path, processes: Processes) -> None:
    """Where nobody installed it, every test above must still run once, on a tree built as the documentation says."""
    env = {"LP_SETUP": "skip", "PYTHON": sys.executable}
    script = str(ROOT / "scripts" / "build_suffix_tree.sh")
    built = processes.run(["bash", script, str(tmp_path / "tree")], env, timeout_s=600)
    if "No matching distribution" in built.stderr:
        pytest.skip("no package index has it here")
    assert built.returncode == 0, built.stderr
    tests = [sys.executable, "-m", "pytest", __file__, "-m", "not slow", "-rs"]
    ran = processes.run(tests, {"LP_SUFFIX_TREE": str(tmp_path / "tree")}, timeout_s=600)
    assert ran.returncode == 0 and "skipped" not in ran.stdout, ran.stdout
