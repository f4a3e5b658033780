"""Step times: interpolation, padding, prices, what they begin with, and the cache on disk."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lp.budget.observed_times import Estimate
from lp.budget.prior import HOST_S, HOST_TOKEN_S, LARGE_SIZE, prior_times
from lp.budget.step_times import StepTimes, differ, scaled
from lp.budget.step_times_cache import StepTimesFile, machine_key, read_estimate
from tests.support.tiny_models import tiny_model

BUMP = StepTimes((1, 8, 31, 32, 64), (10.0, 12.0, 14.0, 5.0, 7.0), 9.0)


def _drawn(rng: random.Random) -> StepTimes:
    sizes = sorted({1, *rng.sample(range(2, 120), rng.randint(1, 8))})
    return StepTimes(tuple(sizes), tuple(rng.uniform(0.5, 2) * (1 + 0.02 * size) for size in sizes), 1.0)


def test_a_bump_is_padded_over() -> None:
    """bf16 on some processors takes five times as long for 8 tokens as for 32."""
    assert [BUMP.padded_size(size) for size in (1, 8, 31, 32, 33, 64, 65)] == [32, 32, 32, 32, 33, 64, 65]
    assert [BUMP.step_s(size) for size in (1, 8, 31, 32, 64)] == [5, 5, 5, 5, 7]
    assert BUMP.step_s(48) == pytest.approx(6)
    assert "padded up to [32]" in str(BUMP) and "padded" not in str(StepTimes.constant(0.01, 64))


def test_past_the_largest_size_time_grows_with_the_tokens() -> None:
    """And there are marginal seconds of every size up to it."""
    step_times = StepTimes((1, 2, 4), (1.0, 2.0, 3.0), 1.0)
    assert step_times.step_s(8) == 6.0 and step_times.step_s(4) == 3.0
    assert step_times.marginal_seconds.tolist() == pytest.approx([0.0, 2 / 3, 0.5, 0.5, np.inf])


def test_lists_are_step_times_too() -> None:
    """A file has lists; the same times are equal, and can be a key."""
    of_lists = StepTimes([1, 4], [1.0, 2.0], 1.0)  # type: ignore[arg-type]
    assert of_lists == StepTimes((1, 4), (1.0, 2.0), 1.0) and hash(of_lists) == hash(StepTimes((1, 4), (1.0, 2.0), 1.0))


def test_noise_is_no_reason_to_pad() -> None:
    """Padding is real work: a size measured a little too fast must not draw all smaller steps to it."""
    step_times = StepTimes((1, 4, 5, 64), (1.0, 1.2, 1.15, 3.0), 1.0)
    assert [step_times.padded_size(size) for size in range(1, 65)] == list(range(1, 65))


def test_marginal_seconds_are_the_least_of_all_larger_steps() -> None:
    """Too high a price stops a tree before a larger step that pays as a whole."""
    for seed in range(40):
        times = _drawn(random.Random(seed))
        assert (np.diff(times.seconds_by_tokens) >= 0).all()
        for size in range(1, times.max_tokens):
            costs = [
                (times.step_s(larger) - times.step_s(size)) / (larger - size)
                for larger in range(size + 1, times.max_tokens + 1)
            ]
            assert times.marginal_seconds[size] == pytest.approx(min(costs), abs=1e-12)
        assert times.marginal_seconds[times.max_tokens] == np.inf


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "plain_s"),
    [
        ((), (), 1.0),
        ((1, 2.5), (1.0, 1.0), 1.0),
        ((2, 3), (1.0, 1.0), 1.0),
        ((1, 1), (1.0, 1.0), 1.0),
        ((1, 10**13), (1.0, 2.0), 1.0),
        ((1,), (0.0,), 1.0),
        ((1,), (1.0,), -1.0),
    ],
)
def test_impossible_step_times_are_refused(
    num_tokens: tuple[int, ...], seconds: tuple[float, ...], plain_s: float
) -> None:
    """A cut cache file would steer every step."""
    with pytest.raises(ValueError, match=r"step times have .*; remove their file, or mend them"):
        StepTimes(num_tokens, seconds, plain_s)


def test_own_work_is_not_negative() -> None:
    """A plain step that was timed on a busier machine made the host's work of a batch less than nothing."""
    assert StepTimes((1, 64), (0.03, 0.04), 0.01).own_work_s == pytest.approx(0.02)
    assert StepTimes((1, 64), (0.03, 0.04), 0.05).own_work_s == 0


def test_affordable_tokens() -> None:
    """The size of the pool depends on them: they bound what the steps of a text can leave in it."""
    assert StepTimes((1, 17, 120), (1.0, 2.0, 30.0), 1.0).affordable_tokens == 17
    assert StepTimes.constant(1.0, 120).affordable_tokens == 120
    assert StepTimes((1, 9), (3.0, 4.0), 1.0).affordable_tokens == 1


def test_scaled_times_decide_alike() -> None:
    """A text goes on in the seconds in which its rate is counted."""
    twice = scaled(BUMP, 2 * BUMP.plain_s)
    assert twice.plain_s == 18 and twice.seconds == tuple(2 * each for each in BUMP.seconds)
    assert differ(BUMP, twice) and not differ(BUMP, scaled(BUMP, 1.02 * BUMP.plain_s))


def test_a_prior_by_four_passes() -> None:
    """A wrong end of the sizes would cut trees, or make a slow machine plan steps that never pay."""
    flat = prior_times({1: 0.010, 2: 0.010, 8: 0.010, 48: 0.011}, 512)
    assert flat.num_tokens[0] == 1 and flat.num_tokens[-1] == 512 and flat.plain_s == 0.010
    assert flat.seconds[0] == pytest.approx(0.010 + HOST_S + HOST_TOKEN_S)
    steep = prior_times({1: 0.010, 2: 0.02, 8: 0.03, 48: 0.07}, 200)
    assert steep.num_tokens[-1] == LARGE_SIZE, "larger ones cost more than three plain steps"
    assert steep.step_s(88) == pytest.approx(0.07 + 40 * 0.001 + HOST_S + 88 * HOST_TOKEN_S, rel=0.01)
    never = prior_times({1: 0.001, 2: 0.002, 8: 0.008, 48: 0.048}, 120)
    assert never.num_tokens[-1] == 24, "no larger size can pay"
    assert prior_times({1: 0.010, 2: 0.010, 8: 0.010, 48: 0.011}, 5).num_tokens == (1, 2, 3, 4, 5)
    falling = prior_times({1: 0.010, 2: 0.010, 8: 0.010, 48: 0.009}, 200)
    assert falling.step_s(200) == pytest.approx(0.009 + HOST_S + 200 * HOST_TOKEN_S), "no step takes less than nothing"


def test_a_prior_finds_padding() -> None:
    """bfloat16 on some processors takes up to 48 tokens in a fifth of the time of 8."""
    times = prior_times({1: 0.3, 2: 0.31, 8: 0.4, 48: 0.08}, 128)
    assert times.padded_size(1) == times.padded_size(8) == 48 and times.plain_s == 0.08
    careful = Estimate.of_prior(times).careful
    assert careful.padded_size(1) == careful.padded_size(8) == 48, "doubt does not hide it"


def test_the_file_is_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its lines say what they are of, and what is changed in it holds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = StepTimesFile({"model": "A model/of 7B", "threads": 2}, ("key",), {})
    assert file.path.name.startswith("A-model-of-7B-") and file.path.parent == tmp_path / "lp" / "step_times"
    estimate = Estimate.of_prior(StepTimes((1, 8), (0.0012, 0.0025), 0.001))
    file.write(estimate)
    text = file.path.read_text()
    assert '"threads": 2,\n' in text and '  "plain": 0.001,\n  "1": 0.0012,\n  "8": 0.0025\n' in text
    assert '"doubts in per cent": {\n  "1": 10.0,' in text
    file.path.write_text(text.replace("0.0025", "0.005"))
    found = read_estimate(file.text() or "")
    assert found and found.times == StepTimes((1, 8), (0.0012, 0.005), 0.001)
    assert np.allclose(found.covariance, estimate.covariance, atol=1e-5) and found.steps == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: "[" * 200_000,
        lambda text: "[]",
        lambda text: '{"seconds": {"plain": 1, "one": 2}}',
        lambda text: text.replace('"[', '"[1.0, ', 1),  # a row of the covariance with one number too many
        lambda text: text.replace('"[1.0', '"[-9.0', 1),  # no covariance
        lambda text: text.replace('"[1.0', '"[NaN', 1),
        lambda text: text.replace('"steps": 0', '"steps": null'),
    ],
)
def test_a_file_of_something_else_is_not_read(change: Callable[[str], str]) -> None:
    """It would steer every step."""
    text = json.dumps(Estimate.of_prior(StepTimes((1, 8), (0.0012, 0.0025), 0.001)).as_json())
    changed = change(text)
    assert read_estimate(text) and changed != text and read_estimate(changed) is None


def test_where_the_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is ignored, as XDG has it; where nothing can be written, only what is learned is lost."""
    estimate = Estimate.of_prior(StepTimes((1, 8), (0.0012, 0.0025), 0.001))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    StepTimesFile({"model": "m"}, ("key",), {}).write(estimate)
    assert [*tmp_path.glob("home/.cache/lp/step_times/*.json")] and not Path("cache").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    for home in ("/proc/nowhere", "~"):  # the second is what is left of a home where there is none
        monkeypatch.setenv("HOME", home)
        kept: dict[str, str] = {}
        file = StepTimesFile({"model": "m"}, ("key",), kept)
        with pytest.warns(UserWarning, match="cannot be written to .*: set XDG_CACHE_HOME"):
            file.write(estimate)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            file.write(estimate)
        assert read_estimate(file.text() or "") and not Path("~").exists()
    assert machine_key(tiny_model().device)[1] == 1
