"""One model, several users at once: a decoder that is made, or that runs, changes nobody else's text."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product

import pytest
from transformers import PreTrainedModel

import lp
from lp.models import probe
from lp.models.runner import ModelRunner
from tests.support.tiny_models import BOUNDARY, drawn_text, plain_greedy, tiny_model

ARCHS = ["llama", "mistral_sliding", "phi3_sliding", "gemma3", "gemma2", "olmo3"]
CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
NEW = 12  # tokens of a text


def _attentions(arch: str) -> list[str]:
    return ["eager"] if arch == "gemma2" else ["flash", "sdpa", "eager"]


@contextmanager
def _meanwhile(model: PreTrainedModel, others: Callable[[], object]) -> Iterator[list[int]]:
    """Others do something between the layers of every forward pass within this block; counts the passes."""
    passes: list[int] = []
    within = threading.local()

    def interrupt(*_: object) -> None:
        if not getattr(within, "already", False):
            within.already = True
            try:
                others()
                passes.append(len(passes))
            finally:
                within.already = False

    hook = model.get_decoder().layers[0].self_attn.o_proj.register_forward_pre_hook(interrupt)
    try:
        yield passes
    finally:
        hook.remove()


@pytest.mark.subset(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_text_while_a_decoder_is_made(arch: str) -> None:
    """The probe runs with a short sliding window and an attention of its own; both were seen by every other thread."""
    model, ids = tiny_model(arch, attention="eager" if arch == "gemma2" else None), drawn_text(random.Random(1), 30)
    plain, config, running = plain_greedy(model, ids, NEW), model.config.to_dict(), model.config._attn_implementation
    ours = lp.LookaheadDecoder(model, CONFIG, attention="eager")
    assert ours.generate(ids, NEW).tokens == plain

    def others() -> None:
        assert model.config.to_dict() == config and model.config._attn_implementation == running
        assert plain_greedy(model, ids, NEW) == plain
        assert ours.generate(ids, NEW).tokens == plain

    for attention in _attentions(arch):
        vars(model).pop(probe._MARK)  # so that it is asked again
        with _meanwhile(model, others) as passes:
            ModelRunner(model, attention)
        assert len(passes) > 10, "those of the probe"
    others()


@pytest.mark.subset(2)
@pytest.mark.parametrize("arch", ["llama", "mistral_sliding", "gemma3"])
def test_decoders_of_different_attention_at_once(arch: str) -> None:
    """One decoder's mask would meet another one's attention: of other size at best, added as it is at worst."""
    model, ids = tiny_model(arch), drawn_text(random.Random(2), 30)
    plain = plain_greedy(model, ids, NEW)
    decoders = [lp.LookaheadDecoder(model, CONFIG, attention=name) for name in _attentions(arch)]
    for outer, inner in product(decoders, decoders):
        found: list[list[int]] = []
        with _meanwhile(model, lambda inner=inner, found=found: found.append(inner.generate(ids, 4).tokens)):  # type: ignore[misc]
            assert outer.generate(ids, NEW).tokens == plain
        assert found and all(tokens == plain[:4] for tokens in found)


@pytest.mark.parametrize("arch", ["llama_dynamic", "llama_longrope"])
def test_frequencies_that_others_change(arch: str) -> None:
    """A rotary scaling remembers how far the last text grew; a shorter one beside it would shrink it again."""
    model, ids = tiny_model(arch), drawn_text(random.Random(3), BOUNDARY - 8)
    plain = plain_greedy(model, ids, 24)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    with _meanwhile(model, lambda: plain_greedy(model, ids[:5], 2)):
        assert decoder.generate(ids, 24).tokens == plain


@pytest.mark.parametrize("arch", ARCHS)
def test_drawn_threads(arch: str) -> None:
    """transformers' `generate` and decoders of every attention, made and used in three threads over one model."""
    model, rng = tiny_model(arch, attention="eager" if arch == "gemma2" else None), random.Random(ARCHS.index(arch))
    prompts = [drawn_text(rng, rng.randint(20, 40)) for _ in range(3)]
    plain = [plain_greedy(model, ids, NEW) for ids in prompts]
    jobs = [(name, index) for name in ["theirs", "theirs", *_attentions(arch)] for index in range(3)]
    rng.shuffle(jobs)

    def run(job: tuple[str, int]) -> list[int]:
        name, index = job
        if name == "theirs":
            return plain_greedy(model, prompts[index], NEW)
        vars(model).pop(probe._MARK, None)
        return lp.LookaheadDecoder(model, CONFIG, attention=name).generate(prompts[index], NEW).tokens

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, jobs)) == [plain[index] for _, index in jobs]
