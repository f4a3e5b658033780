"""The app `lp serve`: from a config to an HTTP server that runs until it is asked to end."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import ExitStack
from typing import Any

import lp
from lp.checks import check_int
from lp.config import corpus_name
from lp.engine.interrupts import Terminated, sigterm_raises
from lp.errors import UserError

from ..config.sampling import describe_sampling
from ..config.schema import ServeConfig
from ..running.once import rank
from .engine_loop import EngineLoop
from .named_keys import check_corpora, read_keys
from .start_up import Opened, check_answering, check_packages, follow, open_engine, own_journal, read_settings, report

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra
FAILURE_SHOWN_S = 2.0  # after the engine has failed, /health says so as long
# An idle connection stays open for longer than clients keep theirs (httpx 5 s, load balancers 60 s): a request that is
# sent while the server closes the connection is lost.
KEEP_ALIVE_S = 75


def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; every rank calls it, but only rank 0 listens.

    Args:
        config: the app's config.

    Raises:
        Terminated: Ctrl-C or SIGTERM came, and the running requests have ended.
        ValueError: a setting can't be used; the message has the remedy.
    """
    try:
        with sigterm_raises():
            _serve(config)
    except KeyboardInterrupt:  # how a server ends is no failure, after which torchrun would start it again
        raise Terminated from None


def _serve(config: ServeConfig) -> None:
    check(config)
    settings = read_settings(config)
    with ExitStack() as held:
        bound = None
        if rank() == 0:  # first: loading takes long
            bound = held.enter_context(bind(config.host, config.port))
        held.enter_context(own_journal(config))
        opened = open_engine(config, settings, ["", *read_keys(config.api_keys)])
        if bound:
            listen(config, bound, opened)
        else:
            follow(opened)


def check(config: ServeConfig) -> None:
    """Refuse settings that `lp serve` can't use, before the model is loaded.

    Args:
        config: the app's config.

    Raises:
        ValueError: a setting is refused, or packages are missing; the message has the remedy.
    """
    check_packages("serve", [*PACKAGES, *(["httpx"] if config.allow_image_urls else [])])
    check_answering(config)
    read_keys(config.api_keys, config.api_key)
    check_corpora(config.api_keys, [*map(corpus_name, config.pool.corpora)])
    check_int("port", config.port, 0, 65535, "0 takes any free one")
    check_int("max_waiting", config.max_waiting, 0, float("inf"), "0 refuses what can't begin at once")


def listen(config: ServeConfig, bound: socket.socket, opened: Opened) -> None:
    """Answer requests, on rank 0, until Ctrl-C or SIGTERM.

    Args:
        config: the app's config.
        bound: a socket with the server's address, from `bind`.
        opened: the model, ready to answer.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came.
        BaseException: the error that the engine failed with.
    """
    import uvicorn

    from .api import build_app
    from .draining import DrainingServer

    failed = threading.Event()
    loop = EngineLoop(opened.engine, opened.grammars, config.max_waiting, failed.set)
    served = opened.served(config, loop, config.allow_image_urls)
    keys = config.metrics_key, config.models_key, read_keys(config.api_keys)
    app = build_app(served, config.api_key, config.max_body_bytes, config.host, *keys)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
    server = DrainingServer(settings, loop, config.drain_s)
    watcher = threading.Thread(target=_end_after_failure, args=(failed, server), daemon=True)
    watcher.start()
    try:
        loop.start()
        bound.listen()  # who comes before uvicorn has started waits
        _announce(config, bound, served.short_name, opened.settings.sampling)
        report(served.unfinished.earlier)
        server.run(sockets=[bound])
    finally:
        loop.close()
    if loop.failure:
        raise loop.failure


def bind(host: str, port: int) -> socket.socket:
    """Reserve the server's address before the model is loaded; connections are refused until the socket listens.

    Args:
        host: an address of this machine, such as "127.0.0.1" or "::1".
        port: TCP port; 0 takes any free one.

    Raises:
        ValueError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it sends events at once (TCP_NODELAY), not 40 ms later.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        remedy = "give another port=, or port=0 for any free one; host= is an address of this machine"
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}") from None
    return bound


def _announce(config: ServeConfig, bound: socket.socket, name: str, sampling: lp.SamplingParams | None) -> None:
    from .api import LOOPBACK

    host, port = bound.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(
        f"serving {name} ({config.decoder.name}, {describe_sampling(sampling)}) on {where}; Ctrl-C ends it", flush=True
    )
    if config.api_key is config.api_keys is None and config.host not in LOOPBACK:
        print("warning: there is no api_key: whoever reaches this address can use the model", file=sys.stderr)


def _end_after_failure(failed: threading.Event, server: Any) -> None:
    failed.wait()
    threading.Event().wait(FAILURE_SHOWN_S)
    server.should_exit = True
