"""What every test shares: one thread, fixed seeds, counts of drawn cases, and processes that end with their test.

Tiny models of every architecture come from `tests.support.tiny_models`.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch

from lp.budget.prior import SIZES
from lp.budget.step_times import StepTimes
from lp.compile_cache import NOW, SETTING
from lp.config import LookaheadConfig
from lp.draft.share import step_tokens
from lp.engine.step_timing import GivenStepTimes

if TYPE_CHECKING:
    import psutil  # not on every machine that runs tests/gpu

pytest_plugins = ["tests.support.apps", "tests.support.forked", "tests.support.known_findings"]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
LONG = os.environ.get("LP_TEST_LONG") == "1"
GPU_DRY_RUN = os.environ.get("LP_GPU_DRY_RUN") == "1"  # of scripts/gpu_check.sh: GPU tests on the CPU, with small sizes


def some_of(cases: Sequence[T], number: int) -> list[T]:
    """All cases in the long form; a seeded draw of so many without it, in their order."""
    if LONG:
        return list(cases)
    return [cases[index] for index in sorted(random.Random(0).sample(range(len(cases)), number))]


def pytest_configure() -> None:
    os.environ.setdefault(SETTING, NOW)  # here and in the processes that tests start
    torch.set_num_threads(1)  # tiny models; threads would only fight over the cores
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in the background ignore it


@pytest.hookimpl(trylast=True)  # behind -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not LONG:
        _keep_subsets(config, items)
    if not torch.cuda.is_available() and not GPU_DRY_RUN:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What is imported stays to the end: each full collection of garbage would walk a million objects, for a second."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def _keep_subsets(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that a mark `subset(N)` draws from those of a test; who names fewer has all of them run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("subset"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for drawn in cases.values():
        mark = drawn[0].get_closest_marker("subset")
        assert mark
        number = min(mark.args[0], len(drawn))
        left_out |= {*drawn} - {*random.Random(0).sample(drawn, number)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """An interrupt that escapes from a test is its failure: pytest would end, and xdist call it a crash."""
    try:
        yield
    except KeyboardInterrupt as error:
        if type(error) is KeyboardInterrupt:  # Ctrl-C
            raise
        raise AssertionError(f"the test was interrupted: {error}") from error


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests draw the same numbers alone and in any order."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def given_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times for decoders that are given none, so that no test depends on how busy the machine is.

    A module that tests the measuring overrides it.
    """

    def fixed(runner: object, config: LookaheadConfig, context: object, again: bool) -> GivenStepTimes:
        sizes = tuple(sorted({1, min(step_tokens(config), SIZES[-1])}))
        return GivenStepTimes(StepTimes(sizes, tuple(1e-3 + 1e-5 * size for size in sizes), 1e-3))

    monkeypatch.setattr("lp.engine.lookahead.KnownStepTimes", fixed)


@pytest.fixture(autouse=True)
def clean_hydra() -> Iterator[None]:
    """A toy backend's or source's choice in the apps ends with its test, or messages that list choices would differ;
    and so does the config of a run, or records of a later test would name its command.
    """
    if "hydra" not in sys.modules:  # not on every machine that runs tests/gpu
        yield
        return
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig

    repo = ConfigStore.instance().repo
    before = {group: dict(repo.get(group, {})) for group in ("attention", "decoder")}
    yield
    repo.update(before)
    HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True, scope="session")
def quick_hydra() -> Iterator[None]:
    """Hydra takes a third of the time for an app in this process: it copies all schemas with each config, and composes
    each config twice, first to ask for hydra.mode, which only conf/experiment/ and overrides say.
    """
    if find_spec("hydra") is None:
        yield
        return
    from hydra._internal.hydra import Hydra
    from hydra.core.config_store import ConfigStore

    composed = Hydra.get_mode

    def get_mode(hydra: Hydra, config_name: str, overrides: list[str]) -> object:
        may_say = any("experiment" in each or "hydra." in each for each in overrides)
        return composed(hydra, config_name, overrides) if may_say else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        patch.setattr(Hydra, "get_mode", get_mode)
        yield


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """An app that is started in a test's own process puts its prompt there, which the next app would take."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What steps take is kept in the user's cache folder: tests have one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cases() -> Callable[[int, int], range]:
    """`for seed in cases(30, 300)`: a seed a drawn case, the first 30 of the same 300 unless the long form runs."""
    return lambda short, full: range(full if LONG else short)


def read_until(terminal: int, enough: Callable[[str], bool], timeout_s: float = 120) -> str:
    """What comes out of the terminal, until it is enough or the other side has closed it."""
    text, end = b"", time.monotonic() + timeout_s
    while not enough(text.decode("utf-8", "replace")) and time.monotonic() < end:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            text += os.read(terminal, 4096)
        except OSError:  # Linux's way to say that nobody has the other side open
            break
    return text.decode("utf-8", "replace")


class Processes:
    """Starts processes and ends them with all their descendants, also those in sessions of their own.

    A variable in the environment marks them: torchrun gives each rank its own session, so that no process group holds
    them all, and an orphan has lost its parent.
    """

    MARK = "LP_TEST_MARK"

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def start(self, args: list[str], env: dict[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """Popen in a session of its own, in the repository, text on pipes; `env` adds to the environment."""
        full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {}), self.MARK: self.mark}
        defaults = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen(args, env=full, text=True, **{**defaults, **options})  # type: ignore[call-overload]

    def run(
        self, args: list[str], env: dict[str, str] | None = None, timeout_s: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """`start`, then wait for its end and its output."""
        process = self.start(args, env, **options)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)

    def torchrun(self, ranks: int, module: str, *args: str) -> list[str]:
        """The command line that launches a module on `ranks` processes as a user does, for `start` or `run`."""
        settings = [f"NPROC={ranks}", "LP_SETUP=skip", f"PYTHON={sys.executable}"]
        return ["env", *settings, "bash", "torchrun.sh", module, *args]

    def alive(self) -> list[psutil.Process]:
        """Every process started here, or by one started here, that has not ended."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(self.MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # gone meanwhile, or another user's
                continue
        return found

    def wait_for_end(self, timeout_s: float = 20) -> list[psutil.Process]:
        """The processes still alive after at most `timeout_s`: none, if the launch cleans up behind itself."""
        end = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def kill(self) -> None:
        import psutil

        while left := self.alive():  # again: a process may start another meanwhile
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=5)


@pytest.fixture
def processes() -> Iterator[Processes]:
    """A `Processes` whose processes are all killed when the test ends, however it ends."""
    started = Processes()
    try:
        yield started
    finally:
        started.kill()
