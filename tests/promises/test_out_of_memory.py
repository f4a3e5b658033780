"""A device that is full, at every place where a short run allocates: an error with a remedy, and all goes on."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lp
from launch.running.errors import reported
from lp.engine.memory import REMEDY, with_remedy
from tests.conftest import LONG
from tests.support.allocations import MESSAGE, Allocations
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.tiny_models import tiny_model

CONFIG = lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=3, pool_mib=1)
SAMPLING = lp.SamplingParams(temperature=0.8, top_p=0.9, seed=3)
IDS, OTHER, NEW = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], 6
Run = Callable[[lp.LookaheadDecoder], list[list[int]]]


def one(decoder: lp.LookaheadDecoder) -> list[list[int]]:
    return [decoder.generate(IDS, NEW, SAMPLING, prefill_chunk=4).tokens]


def together(decoder: lp.LookaheadDecoder) -> list[list[int]]:
    outputs = decoder.generate_batch([IDS, OTHER], NEW, [SAMPLING, None])
    return [output.tokens for output in outputs]


RUNS: dict[str, Run] = {"one text": one, "texts together": together}


def places(run: Callable[[], Any], every: int = 1) -> list[int]:
    """Numbers of the allocations to fail: the first of every place in `lp`; in the long form, every n-th one too."""
    with Allocations() as seen:
        run()
    return sorted({*seen.sites.values(), *range(0, seen.count if LONG else 0, every)})


@pytest.mark.parametrize("name", RUNS)
def test_a_device_that_is_full_at_any_place(name: str) -> None:
    """State that a failed step left behind would change the next text; and a bare error leaves the user to guess."""
    run = RUNS[name]
    model = tiny_model()
    plain = lp.AutoregressiveDecoder(model)
    expected = [plain.generate(IDS, NEW, SAMPLING).tokens]
    if run is together:
        expected.append(plain.generate(OTHER, NEW).tokens)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    assert run(decoder) == expected
    failures = 0
    for number in places(lambda: run(decoder)):
        try:
            with Allocations(number):
                tokens = run(decoder)
        except (torch.OutOfMemoryError, lp.UserError) as error:
            said = str(error)
            cache = isinstance(error, lp.UserError) and ("would fit" in said or "lower" in said)
            assert REMEDY in said or cache, said
            assert said.count(REMEDY) <= 1
            failures += 1
        else:  # texts that cannot be sampled together are sampled one by one
            assert tokens == expected, number
        assert run(decoder) == expected, number
    assert failures > 30, "the run has become too short to say anything"


def test_a_device_that_is_full_while_a_decoder_is_made() -> None:
    """Its runner belongs to the model, and outlives the decoder that could not be made."""
    model = tiny_model()
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, SAMPLING).tokens
    seen = copy.deepcopy(model)
    for number in places(lambda: lp.LookaheadDecoder(seen, CONFIG))[:: 1 if LONG else 6]:
        full = copy.deepcopy(model)
        with pytest.raises(torch.OutOfMemoryError) as error, Allocations(number):
            lp.LookaheadDecoder(full, CONFIG)
        assert str(error.value).count(REMEDY) == 1
        assert lp.LookaheadDecoder(full, CONFIG).generate(IDS, NEW, SAMPLING).tokens == expected, number


def test_a_device_that_is_full_while_a_plain_decoder_is_made() -> None:
    model = tiny_model()
    with pytest.raises(torch.OutOfMemoryError, match=re.escape(REMEDY)), Allocations(0):
        lp.PlainDecoder(model)


def test_a_cache_without_room_is_no_reason_against_fused_layers() -> None:
    """While they were tried, it was taken for a step that the model can't run, and they were never tried again."""
    model = tiny_model()
    full = copy.deepcopy(model)
    with Allocations() as seen:
        assert lp.LookaheadDecoder(model, CONFIG).runner.fused
    number = min(number for (file, _, _), number in seen.sites.items() if file.endswith("kv_cache.py"))
    with pytest.raises(torch.OutOfMemoryError, match=r"the device is full: a KV cache"), Allocations(number):
        lp.LookaheadDecoder(full, CONFIG)
    assert lp.LookaheadDecoder(full, CONFIG).runner.fused


def test_a_gpu_that_is_full_while_steps_are_captured_and_replayed(gpu: SimulatedCuda) -> None:
    """A capture that is cut off, or a step that was staged and never replayed, must not leak into the next text."""
    model = tiny_model()
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, SAMPLING).tokens
    on_gpu: Any = copy.deepcopy(model).to("cuda")

    def run() -> list[int]:
        return lp.LookaheadDecoder(on_gpu, CONFIG, capture="graph").generate(IDS, NEW, SAMPLING).tokens

    failing = places(run, every=10)  # a run that captures its steps takes a second
    for number in failing[:: 1 if LONG else 25]:
        lp.release(on_gpu)  # so that steps are captured again
        with contextlib.suppress(torch.OutOfMemoryError, lp.UserError), Allocations(number):
            assert run() == expected
        assert run() == expected, number
    assert len(failing) > 60


def test_an_app_on_a_full_device_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback hides the line that says what to lower."""
    with pytest.raises(SystemExit) as ended, reported():
        raise with_remedy(torch.OutOfMemoryError(MESSAGE))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {MESSAGE}; {REMEDY}\n"
    with pytest.raises(RuntimeError, match="a bug"), reported():
        raise RuntimeError("a bug")
