"""Step times: interpolation, padding, prices, how they are measured, and the cache on disk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lp.budget.measure import Measurement, doubtful_sizes, measure_step_times
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import StepTimesFile, load_or_measure, machine_key, read_step_times
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.tiny_models import tiny_model

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
    with pytest.raises(ValueError, match=r"step times have .*; measure the steps again"):
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


def test_measuring_alternates_and_takes_the_least() -> None:
    """A machine that is slow for one step must not make its size look slow; sizes that never pay are soon left out."""
    measured: list[int] = []

    def step(num_tokens: int) -> float:
        measured.append(num_tokens)
        slow = 50 if len(measured) % 7 == 0 else 1
        return slow * (1e-3 + 1e-4 * num_tokens + (1.0 if num_tokens > 64 else 0))

    times, doubtful = measure_step_times(step, 200, ParallelContext())
    assert times.num_tokens[:4] == (1, 2, 3, 4) and times.max_tokens == 96 and not doubtful
    for size, seconds in zip(times.num_tokens[:-1], times.seconds[:-1], strict=True):
        assert seconds == pytest.approx(1e-3 + 1e-4 * size)
    assert times.plain_s == pytest.approx(1e-3)
    assert measured.count(8) >= 5 > measured.count(96)


def test_large_steps_are_measured_where_they_are_cheap() -> None:
    """Steps of 512 tokens take a CPU seconds, for sizes that it never uses; a GPU reads its weights once for 200."""

    def measured(slope: float, max_tokens: int, plain_s: float = 1e-3) -> tuple[int, ...]:
        times, _ = measure_step_times(lambda size: plain_s * (1 + slope * size), max_tokens, ParallelContext())
        return times.num_tokens

    assert measured(0.001, 200)[-3:] == (128, 192, 200) and measured(0.001, 512)[-1] == 512
    assert measured(0.02, 200)[-2:] == (96, 128) and measured(0.02, 120)[-2:] == (96, 120)
    assert measured(0.02, 200, 3.0) == (1, 8, 32, 128), "slow models too"


@pytest.mark.parametrize(
    ("busy", "doubtful"),
    [
        (lambda size, calls: size == 0, (0,)),  # the plain step is slower than one of a token
        (lambda size, calls: size in (12, 0) and calls[size] % 9, ()),  # in most of its steps, but not in all
        (lambda size, calls: size == 12 and calls[size] <= 5, ()),  # in the first ones
        (lambda size, calls: size == 12, ()),  # always: processors are like that
    ],
)
def test_a_busy_machine_is_noticed(busy: Callable[[int, Counter[int]], bool], doubtful: tuple[int, ...]) -> None:
    """What is measured beside something else would steer every later step."""
    calls: Counter[int] = Counter()

    def step(size: int) -> float:
        calls[size] += 1
        return (1e-3 + 1e-4 * size) * (3 if busy(size, calls) else 1)

    assert measure_step_times(step, 48, ParallelContext()).doubtful == doubtful


def test_doubtful_sizes() -> None:
    """A slow model leaves time for one step of a size: then the times of other sizes tell."""
    assert doubtful_sizes({0: [1.0, 1.1], 1: [1.0], 8: [1.2, 1.6]}) == (8,), "its steps differ"
    assert doubtful_sizes({0: [1.0], 1: [3.0], 8: [1.2], 32: [4.0]}) == (1, 8), "slower than a larger one"
    assert doubtful_sizes({0: [1.0], 1: [3.0] * 4, 8: [1.2] * 4, 32: [4.0]}) == (), "again and again"
    assert doubtful_sizes({0: [9.0] * 4, 1: [4.0] * 4, 32: [4.0] * 4}) == (0,), "does more than a step of a token"


def test_doubtful_sizes_are_measured_again_and_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model's size was slow once; where it always is beyond reason, the next decoder measures it again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: Counter[int] = Counter()

    def step(size: int) -> float:
        calls[size] += 1
        return 2.0 + 0.01 * size + (3.0 if size == 8 and calls[size] == 1 else 0.0)

    times, doubtful = measure_step_times(step, 33, ParallelContext())
    assert times.step_s(8) == pytest.approx(2.08) and not doubtful and calls[8] == 3
    file = StepTimesFile({"model": "m"}, ("key",), {})
    busy = Measurement(StepTimes.constant(1.0, 9), (0,))
    for measured in (busy, Measurement(times, ())):
        assert load_or_measure(file, lambda measured=measured: measured, ParallelContext()) == measured
    again = Measurement(StepTimes.constant(2.0, 9), ())
    assert load_or_measure(file, lambda: again, ParallelContext()).times == times
    assert load_or_measure(file, lambda: again, ParallelContext(), again=True) == again
    assert load_or_measure(file, lambda: busy, ParallelContext()) == again, "it replaced what was stored"


def test_ranks_take_rank_0s_times() -> None:
    """By its own clock each rank would choose another budget."""

    def body(context: ParallelContext) -> Measurement:
        return measure_step_times(lambda size: (1 + context.rank) * (1e-3 + 1e-4 * size), 32, context)

    alone = measure_step_times(lambda size: 1e-3 + 1e-4 * size, 32, ParallelContext())
    assert run_lockstep(3, body) == [alone] * 3


def test_the_file_is_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its lines say what they are of, and what is changed in it holds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = StepTimesFile({"model": "A model/of 7B", "threads": 2}, ("key",), {})
    assert file.path.name.startswith("A-model-of-7B-") and file.path.parent == tmp_path / "lp" / "step_times"
    file.write(StepTimes((1, 8), (0.0012, 0.0025), 0.001))
    text = file.path.read_text()
    assert '"threads": 2,\n' in text and '  "plain": 0.001,\n  "1": 0.0012,\n  "8": 0.0025\n' in text
    file.path.write_text(text.replace("0.0025", "0.005"))
    assert read_step_times(file.text() or "") == StepTimes((1, 8), (0.0012, 0.005), 0.001)


def test_the_cache_is_one_of_model_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times of another model or thread count are wrong; measuring them for every prompt costs seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[StepTimes] = []
    kept: dict[str, str] = {}

    def known(*key: Any, context: ParallelContext | None = None) -> StepTimes:
        file = StepTimesFile({"model": "m"}, key, kept)
        return load_or_measure(file, fresh, context or ParallelContext()).times

    def fresh() -> Measurement:
        measured.append(StepTimes.constant(0.01 * (len(measured) + 1), 9))
        return Measurement(measured[-1], ())

    first = known("a", 1)
    assert known("a", 1) == first and len(measured) == 1
    shared = run_lockstep(2, lambda context: known("a", 1, context=context))
    assert shared == [first, first] and len(measured) == 1, "ranks that do not read the file measure nothing"
    assert known("a", 2) != first
    (file,) = [path for path in tmp_path.rglob("*.json") if f"{first.plain_s}" in path.read_text()]
    file.write_text(file.read_text()[:-9])
    assert known("a", 1) == measured[2], "a cut file is measured again"
    for index, other in enumerate(("[" * 200_000, "[]", '{"seconds": {"plain": 1, "one": 2}}'), start=3):
        file.write_text(other)
        assert known("a", 1) == measured[index], "so is a file of something else"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert known("a", 1) == measured[6]
    assert [*tmp_path.glob("home/.cache/lp/step_times/*.json")], "a relative path is ignored, as XDG has it"
    monkeypatch.delenv("XDG_CACHE_HOME")
    for home in ("/proc/nowhere", "~"):  # the second is what is left of a home where there is none
        monkeypatch.setenv("HOME", home)
        with pytest.warns(UserWarning, match="cannot be written to .*: set XDG_CACHE_HOME"):
            assert known("a", 1) == measured[-1], "only the cache is lost"
        assert known("a", 1) == measured[-1], "it is measured once for a model"
        kept.clear()
    assert len(measured) == 9 and not Path("~").exists() and not Path("cache").exists()
    assert machine_key(tiny_model().device)[1] == 1
