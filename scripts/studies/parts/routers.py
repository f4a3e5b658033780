"""Routers of other people, in front of servers: how each is started, and where it listens."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence

LAUNCH = {"smg": ["smg", "launch"], "sglang-router": ["sglang-router", "launch"], "vllm-router": ["vllm-router"]}


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program(router: str) -> str | None:
    """The router's program, in the folders of LP_ROUTERS or else of PATH; None where it is not installed."""
    return shutil.which(LAUNCH[router][0], path=os.environ.get("LP_ROUTERS", os.environ["PATH"]))


def router_command(router: str, policy: str, urls: Sequence[str], port: int) -> list[str]:
    """The command that starts an installed router in front of servers.

    Args:
        router: name of it.
        policy: how it chooses a server, by its own name.
        urls: the servers' addresses.
        port: where it listens, on the loopback address.
    """
    path = program(router)
    assert path
    settings = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    settings += ["--worker-urls", *urls, "--policy", policy]
    settings += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"]
    return [path, *LAUNCH[router][1:], *settings, "--cb-timeout-duration-secs", "5"]
