"""The architecture matrix: exact or refused, never wrong, and docs/reference/models.md is what this run gives."""

from __future__ import annotations

import pytest
from transformers import GPTJForCausalLM

import lp
from tests.support.architectures import BACKENDS, EXACT, PAGE, VARIANTS, WRONG, page, verdict, versions
from tests.support.tiny_models import MATRIX, VOCABULARY, runs_here, tiny_model

pytestmark = pytest.mark.xdist_group("architectures")  # whose verdicts the page needs, too

NEVER = {arch for arch in MATRIX if not runs_here(arch)} | {
    "bloom",
    "falcon_alibi",
    "mpt",
    "roformer",
    "rwkv",
    "gpt_neo",
    "t5",
    "mamba",
}
NO_SDPA = set() if GPTJForCausalLM._supports_sdpa else {"gptj"}  # it came with transformers 5.24
EAGER_ONLY = {"gemma2", "mamba2"} | NO_SDPA
SINKS = {"gpt_oss"}  # for which transformers has no sdpa
NO_FLASH = {"falcon", "deepseek_v2", "deepseek_v3"}  # which `auto` runs with sdpa


@pytest.mark.subset(40)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", MATRIX)
def test_exact_or_refused(arch: str, backend: str) -> None:
    """A mask, position, cache or rotary scaling that one architecture takes otherwise changes a token of a draw."""
    result = verdict(arch, backend)
    assert not result.startswith(WRONG), result
    refused = NEVER | (EAGER_ONLY if backend != "eager" else set()) | (NO_FLASH if backend == "flash" else set())
    refused |= SINKS if backend == "sdpa" else set()
    assert (result == EXACT) == (arch not in refused), result


@pytest.mark.slow  # it needs every architecture, of which the fast suite draws some
def test_the_page_is_this_run() -> None:
    """A matrix written by hand would go on promising what no longer holds."""
    written = PAGE.read_text(encoding="utf-8")
    if versions() not in written:
        pytest.skip(f"docs/reference/models.md was made with other versions than {versions()}")
    assert page() == written, "run python scripts/tables.py models and look at what changed"


@pytest.mark.parametrize("arch", ["gpt2", "opt", "gpt_bigcode"])
def test_learned_positions_end_at_the_context(arch: str) -> None:
    """A node past the table of positions would fail inside the embedding, with tokens still to come."""
    model = tiny_model(arch, max_position_embeddings=64)
    ids = [(5 * i + 2) % VOCABULARY for i in range(50)]
    plain = lp.AutoregressiveDecoder(model).generate(ids, 100)
    config = lp.LookaheadConfig(window_size=9, ngram_size=4, guess_set_size=9)
    output = lp.LookaheadDecoder(model, config).generate(ids, 100)
    assert (output.tokens, output.finish_reason) == (plain.tokens, "context")


def test_variants_name_architectures() -> None:
    """A renamed model would silently lose its description."""
    if versions() not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("another release of transformers may lack some architectures")
    assert set(VARIANTS) <= set(MATRIX)
