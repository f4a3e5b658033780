"""Every causal LM type that transformers maps: exact, or refused by name, as docs/reference/models.md has it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import transformers as tf
from packaging.version import Version

import lp
from lp.models.support import check_supported
from tests.support.mapped import EXACT, MAPPED, WRONG, mapped_config, mapped_model, verdict, written
from tests.support.tiny_models import CONTEXT, SLIDING_WINDOW, plain_greedy

SHUFFLED = random.Random(0).sample(MAPPED, len(MAPPED))


def test_mapped_types_are_exact_or_refused(cases: Callable[[int, int], range]) -> None:
    """A type that nobody tried must not give another text, or a traceback from inside the model."""
    page = written()
    for index in cases(12, len(SHUFFLED)):
        kind = SHUFFLED[index]
        result, why = verdict(kind)
        assert result != WRONG, f"{kind}: {why}"
        assert page.get(kind, result) == result, f"{kind}: {why}; run scripts/tables.py models and look at it"


def test_the_page_has_every_mapped_type() -> None:
    """A type without a line would be one that nobody looked at."""
    page = written()
    if not page:
        pytest.skip("docs/reference/models.md was made with other versions")
    assert sorted(page) == MAPPED and WRONG not in page.values()


def test_a_choice_of_keys_by_place_is_refused() -> None:
    """Doge takes the strongest keys once there are more than it wants, and equal ones by their place: no probe of a few
    rows sees it. Within its window all of them count."""
    config = mapped_config("doge")
    config.keep_window_size = SLIDING_WINDOW
    with pytest.raises(ValueError, match=f"'doge' attends to the {SLIDING_WINDOW} strongest keys of up to {CONTEXT}"):
        check_supported(config)
    result, why = verdict("doge")
    if Version(tf.__version__) < Version("5.18"):
        assert "with sdpa attention" in why
        pytest.skip(why)
    assert result == EXACT
    ids = [3, 1, 4] * 40
    tokens = lp.LookaheadDecoder(mapped_model("doge", 0)).generate(ids, CONTEXT).tokens
    assert tokens == plain_greedy(mapped_model("doge", 0), ids, CONTEXT - len(ids))
