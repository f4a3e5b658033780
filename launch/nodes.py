"""Launch ranks on several nodes from one app: node 0 leads, the other nodes follow.

Every node runs the app with the same arguments, and has its own NODE_RANK. Node 0 listens at RDZV_ENDPOINT until all
other nodes have connected. For each launch it tells the nodes that take part a free port at which their torchruns meet;
the rest wait for the next launch. At the end it tells all of them its exit code. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from lp.checks import check_int
from lp.errors import RankLost, UserError

from .running.errors import INTERRUPTED, USER_ERROR
from .torchrun import GRACE_S, of_ranks

# A launch on this node: the ranks of all nodes, those of this one, and torchrun's options for meeting the others.
Start = Callable[..., object]  # of ranks, nproc and place, and of options by name
STANDALONE = ("--standalone",)
RETRY_S = 0.2
HELLO_S = 10.0  # a node says at once who it is; who says nothing must not keep the nodes behind it waiting


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many nodes a run has, which of them this process is on, and where node 0 listens.

    Args:
        count: how many nodes there are.
        rank: this node's number, from 0.
        nproc: ranks on each node, in launches that need several nodes.
        host: address of node 0; None with one node.
        port: port at which node 0 listens for the other nodes; 0 with one node.
    """

    count: int
    rank: int
    nproc: int
    host: str | None
    port: int

    @classmethod
    def from_env(cls) -> Nodes:
        """Read the nodes from the environment variables of torchrun.sh: NNODES, NODE_RANK, RDZV_ENDPOINT and NPROC.

        Raises:
            ValueError: a value out of range, or several nodes without an endpoint.
        """
        count = _variable("NNODES", "1", 1, 1024, "give the number of nodes")
        rank = _variable("NODE_RANK", "0", 0, count - 1, "each node has its own, from 0")
        if count == 1:
            return cls(count=1, rank=0, nproc=1, host=None, port=0)
        endpoint = os.environ.get("RDZV_ENDPOINT", "")
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"RDZV_ENDPOINT is {endpoint!r} with {count} nodes; give host:port, a free port of node 0")
        check_int("the port of RDZV_ENDPOINT", int(port), 1, 65535, "give a free one of node 0")
        return cls(count=count, rank=rank, nproc=ranks_of_a_node() or _devices(), host=host.strip("[]"), port=int(port))

    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that cannot be spread over the nodes: too many, or nodes that would not be full.

        Args:
            ranks: world size of the launch.

        Raises:
            ValueError: names the limit and the remedy.
        """
        if self.count == 1 or ranks <= self.nproc:
            return
        if ranks > self.count * self.nproc:
            raise UserError(f"ranks has {ranks}, and {self.count} nodes of {self.nproc} ranks have fewer; leave it out")
        if ranks % self.nproc:
            raise UserError(
                f"ranks has {ranks}, more than a node's {self.nproc} and no multiple of it; take a multiple"
            )

    def needed(self, ranks: int) -> int:
        """How many nodes a launch of `ranks` ranks needs; it takes nodes 0, 1 and so on, up to this number."""
        return 1 if self.count == 1 else math.ceil(ranks / self.nproc)

    def place(self, ranks: int, port: int) -> list[str]:
        """torchrun's options for this node's part of a launch on several nodes, as in ["--nnodes", "2", ...].

        Args:
            ranks: world size of the launch.
            port: port on node 0 at which the torchruns of this launch meet.
        """
        where = ["--nnodes", str(self.needed(ranks)), "--node-rank", str(self.rank), "--rdzv-backend", "static"]
        host = f"[{self.host}]" if ":" in str(self.host) else self.host
        return [*where, "--rdzv-endpoint", f"{host}:{port}"]


def ranks_of_a_node() -> int | None:
    """Ranks on each node from the environment variable NPROC; None where it is not set.

    Raises:
        ValueError: NPROC is no number from 1 to 1024.
    """
    return _variable("NPROC", "", 1, 1024, "give the number of ranks on a node") if os.environ.get("NPROC") else None


def _variable(name: str, default: str, low: int, high: int, remedy: str) -> int:
    text = os.environ.get(name) or default
    return check_int(name, int(text) if text.isdecimal() else text, low, high, remedy)


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Node 0's side of a run on several nodes: it tells the other nodes what to launch and collects their exit codes.

    Args:
        nodes: the run's nodes.
        timeout_s: seconds to wait for the other nodes' exit codes after a launch has ended here.
        others: by node number, the socket to that node and a file of the lines that it sends.
    """

    nodes: Nodes
    timeout_s: float
    others: dict[int, tuple[socket.socket, TextIO]] = field(default_factory=dict)

    def launch(self, ranks: int, start: Start, **options: int) -> None:
        """Start ranks on every node that they need, and wait until all have ended.

        Args:
            ranks: world size of the launch.
            start: starts this node's part: called with the world size, the ranks of this node, torchrun's options for
                meeting the other nodes, and `options`.
            options: keyword arguments of `start`, which are also sent to the other nodes.

        Raises:
            SystemExit: the exit code of the ranks, if it is not 0.
            RankLost: another node has ended or does not answer.
        """
        needed = {node: ends for node, ends in self.others.items() if node < self.nodes.needed(ranks)}
        if not needed:
            start(ranks, ranks, STANDALONE, **options)
            return
        self._check_alive()
        port = _free_port()
        for connection, _ in needed.values():
            _send(connection, {"ranks": ranks, "port": port, "options": options})
        codes = {0: _code(partial(start, ranks, self.nodes.nproc, self.nodes.place(ranks, port), **options))}
        for node, (_, lines) in needed.items():
            answer = _receive(lines)
            if answer is None:
                raise RankLost(f"node {node} ended, or did not answer for {self.timeout_s:g} s, in a launch of {ranks}")
            codes[node] = answer["code"]
        failed = {node: code for node, code in codes.items() if code}
        if failed:
            raise SystemExit(of_ranks(failed))

    def _check_alive(self) -> None:
        """Raise RankLost if a node has ended: between launches nodes send nothing, so a readable socket is closed."""
        sockets = {connection: node for node, (connection, _) in self.others.items()}
        ended = sorted(sockets[connection] for connection in select.select([*sockets], [], [], 0)[0])
        if ended:
            raise RankLost(f"nodes {ended} have ended; start the command on all nodes again")


@contextlib.contextmanager
def leading(nodes: Nodes, arguments: Sequence[str], timeout_s: float) -> Iterator[Leader]:
    """Wait on node 0 until all other nodes have connected, and lead them within the block.

    At the end of the block the other nodes get the exit code.

    Args:
        nodes: the run's nodes.
        arguments: the app's arguments, which must be equal on all nodes.
        timeout_s: most seconds to wait for the other nodes.

    Raises:
        ValueError: nodes are missing, two have one number, or a node has other arguments.
    """
    leader = Leader(nodes=nodes, timeout_s=timeout_s + float(GRACE_S))
    with contextlib.ExitStack() as stack:
        code = 1
        try:
            if nodes.count > 1:
                server = stack.enter_context(_server(nodes.port))
                _gather(leader, server, [*arguments], timeout_s, stack)
                server.close()  # the next job of a sweep needs the port, and another node comes too late for this one
            yield leader
            code = 0
        except BaseException as error:
            code = code_of(error)
            raise
        finally:
            for connection, _ in leader.others.values():
                with contextlib.suppress(RankLost):
                    _send(connection, {"code": code})


def _gather(
    leader: Leader, server: socket.socket, arguments: list[str], timeout_s: float, stack: contextlib.ExitStack
) -> None:
    nodes = leader.nodes
    end = time.monotonic() + timeout_s
    while len(leader.others) < nodes.count - 1:
        server.settimeout(max(end - time.monotonic(), 0.001))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = [node for node in range(1, nodes.count) if node not in leader.others]
            raise UserError(
                f"nodes {missing} of {nodes.count} did not come to {nodes.host}:{nodes.port} within {timeout_s:g} s; "
                "start the same command there with their NODE_RANK, or raise parallel.timeout_s"
            ) from None
        stack.enter_context(connection)
        connection.settimeout(min(HELLO_S, timeout_s))
        lines = stack.enter_context(connection.makefile(encoding="utf-8"))
        hello = _receive(lines)
        if not isinstance(hello, dict) or "node" not in hello:
            continue  # no node of ours
        connection.settimeout(leader.timeout_s)
        node = hello["node"]
        twice = node in leader.others
        leader.others[-1 if twice else node] = connection, lines  # it must hear of the end, too
        if twice:
            raise UserError(f"two nodes have NODE_RANK {node}; give each its own, from 0")
        theirs = {"count": nodes.count, "nproc": nodes.nproc, "arguments": arguments}
        for name, value in theirs.items():
            if hello[name] != value:
                raise UserError(
                    f"{name} of node {node} is {hello[name]}, and of node 0 {value}; start all of them alike"
                )


def follow(nodes: Nodes, arguments: Sequence[str], timeout_s: float, start: Start) -> None:
    """Take part, on a node other than 0, in the launches that node 0 asks for, until node 0 ends.

    Args:
        nodes: the run's nodes.
        arguments: the app's arguments, which node 0 compares with its own.
        timeout_s: seconds to wait for node 0 to listen.
        start: starts this node's part of a launch, as in `Leader.launch`.

    Raises:
        SystemExit: node 0's exit code, if it is not 0.
        ValueError: node 0 cannot be reached.
        RankLost: node 0 has ended without sending an exit code.
    """
    with (
        _connection(nodes, timeout_s) as connection,
        connection.makefile(encoding="utf-8") as lines,
    ):
        hello = {"node": nodes.rank, "count": nodes.count, "nproc": nodes.nproc, "arguments": [*arguments]}
        _send(connection, hello)
        while True:
            message = _receive(lines)  # which may come hours later
            if message is None:
                raise RankLost(f"node 0 at {nodes.host}:{nodes.port} has ended without an exit code")
            if "code" in message:
                break
            ranks, place = message["ranks"], nodes.place(message["ranks"], message["port"])
            _send(connection, {"code": _code(partial(start, ranks, nodes.nproc, place, **message.get("options", {})))})
    if message["code"]:
        raise SystemExit(message["code"])


def code_of(error: BaseException) -> int:
    """The exit code of an app that ends with an error: 2 for a user error, 130 for Ctrl-C, else 1.

    A SystemExit keeps its own code.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return USER_ERROR if isinstance(error, UserError) else 1


def _code(start: Callable[[], object]) -> int:
    try:
        start()
    except SystemExit as end:
        return code_of(end)
    return 0


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _server(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f"port {port} of RDZV_ENDPOINT cannot be used ({error.strerror}); give a free one") from None


def _free_port() -> int:
    with _server(0) as server:
        return int(server.getsockname()[1])


def _connection(nodes: Nodes, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((nodes.host, nodes.port), timeout=timeout_s)
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(RETRY_S)
                continue
            raise UserError(
                f"node 0 does not answer at {nodes.host}:{nodes.port} after {timeout_s:g} s ({error}); start the same "
                "command there with NODE_RANK=0, check RDZV_ENDPOINT, or raise parallel.timeout_s"
            ) from None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. A buffered file would, when closed, send again what a lost node did not take.

    Raises:
        RankLost: the other side has ended.
    """
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        raise RankLost(f"a node has ended ({error}); start the command on all nodes again") from None


def _receive(lines: TextIO) -> Any:
    """The next message; None where the other side has ended, is silent for too long, or sends no JSON."""
    try:
        return json.loads(lines.readline())
    except (OSError, ValueError):
        return None
