"""The app `lp batch`: opens the files, then an engine or connections to servers, and gets the requests answered."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from lp.checks import env_int
from lp.engine.interrupts import interruption, sigterm_raises
from lp.errors import UserError
from lp.waits import waiting

from ..config.schema import BatchConfig
from ..running.once import rank
from ..serve.engine_loop import EngineLoop
from ..serve.start_up import check_answering, check_packages, follow, open_engine, own_journal, read_settings, report
from .answers import Answers
from .lines import Lines

if TYPE_CHECKING:
    from .dispatch import Dispatch  # whose package is of an extra
    from .places import Place

PACKAGES = ("fastapi", "prometheus_client", "httpx")  # of the extra `serve`
ANY_NUMBER = 1 << 30  # most texts that may wait in the engine: here a request may ask for any number of choices
OF_SERVERS = ("input", "out", "servers", "api_key", "max_sequences", "timeout_s", "drain_s")  # keys used with servers
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def batch(config: BatchConfig) -> None:
    """Answer a file of requests, leaving out those that an earlier run has answered.

    Args:
        config: the app's config.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the same command, started again, answers the rest.
        ValueError: a setting or a file can't be used; the message has the remedy.
    """
    with sigterm_raises():
        _batch(config)


def _batch(config: BatchConfig) -> None:
    check_packages("batch", PACKAGES)
    check_answering(config)
    if config.servers:
        _by_servers(config)
        return
    settings = read_settings(config)
    with ExitStack() as held:
        files = _files(config, held) if rank() == 0 else None
        if files and env_int("WORLD_SIZE", 1) == 1 and not _left(*files):
            _answer(config, *files, [])
            return
        held.enter_context(own_journal(config))
        opened = open_engine(config, settings)
        if files is None:
            follow(opened)
            return
        loop = EngineLoop(opened.engine, opened.grammars, ANY_NUMBER)
        held.callback(loop.close)
        loop.start()
        _by_engine(config, files, opened.served(config, loop), loop)


def _files(config: BatchConfig, held: ExitStack) -> tuple[Lines, Answers]:
    with waiting(f"reading {config.input}"):
        lines = Lines(Path(config.input))
    return lines, held.enter_context(Answers(Path(config.out), lines))


def _left(lines: Lines, answers: Answers) -> int:
    return sum(line.key not in answers.done for line in lines.lines)


def _by_engine(config: BatchConfig, files: tuple[Lines, Answers], served: Any, loop: EngineLoop) -> None:
    from ..serve.api import build_app
    from .places import OwnEngine

    report(served.unfinished.earlier)
    place = OwnEngine(build_app(served, max_body_bytes=config.max_body_bytes), loop)
    _answer(config, *files, [place])


def _by_servers(config: BatchConfig) -> None:
    from .places import Server, server_urls

    urls = server_urls(config.servers)
    _refuse_unused()
    if (ranks := env_int("WORLD_SIZE", 1)) > 1:
        raise UserError(f"servers is given in a launch of {ranks} ranks; start one process")
    with ExitStack() as held:
        lines, answers = _files(config, held)
        servers = [Server(url, config.api_key, config.max_sequences, config.timeout_s) for url in urls]
        _answer(config, lines, answers, servers)


def _refuse_unused() -> None:
    """Refuse keys of a model or of sampling beside `servers`: servers have their own, so these would be ignored.

    Raises:
        ValueError: names the keys.
    """
    if not HydraConfig.initialized():
        return
    given = [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]
    if unused := [name for name in given if name not in OF_SERVERS]:
        raise UserError(
            f"with servers=[...] {', '.join(unused)} would change nothing; leave it out, and give it to the servers, "
            f"or to each request. Of use are {', '.join(OF_SERVERS)}"
        )


def _answer(config: BatchConfig, lines: Lines, answers: Answers, places: Sequence[Place]) -> None:
    """Have the requests answered at these places, show progress, and print a summary.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came.
    """
    from .dispatch import Dispatch
    from .progress import BatchProgress

    with BatchProgress(len(lines.lines), len(answers.done), answers.failed, config.out) as progress:
        dispatch = Dispatch(lines, answers, places, progress, config.timeout_s, config.drain_s)
        number = asyncio.run(_run(dispatch, places)) if places else 0
    print(progress.summary(), flush=True)
    if number and _left(lines, answers):
        raise interruption(number)


async def _run(dispatch: Dispatch, places: Sequence[Place]) -> int:
    """Have the requests answered; return the number of the first signal that came meanwhile, 0 for none."""
    event_loop = asyncio.get_running_loop()
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        dispatch.stop()

    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        event_loop.add_signal_handler(number, stop, number)
    try:
        await dispatch.run()
    finally:
        for number in handled:
            event_loop.remove_signal_handler(number)
        for place in places:
            await place.client.aclose()
    return came[0] if came else 0
