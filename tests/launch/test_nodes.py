"""Nodes of launch.scaling, as threads: who takes part in a launch, exit codes, and nodes that are missing."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from launch.nodes import STANDALONE, Nodes, code_of, follow, leading
from lp.errors import RankLost, UserError

ARGUMENTS = ["W=4", "ranks=[1,4]"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def nodes(count: int = 3, nproc: int = 2) -> list[Nodes]:
    port = free_port()
    return [Nodes(count=count, rank=rank, nproc=nproc, host="127.0.0.1", port=port) for rank in range(count)]


class Launches:
    """A `start` that notes its launches, and ends with these exit codes by ranks and node."""

    def __init__(self, node: int, codes: dict[tuple[int, int], int] | None = None) -> None:
        self.node = node
        self.codes = codes or {}
        self.seen: list[tuple[int, int, list[str]]] = []

    def __call__(self, ranks: int, nproc: int, place: Sequence[str]) -> None:
        self.seen.append((ranks, nproc, [*place]))
        if code := self.codes.get((ranks, self.node)):
            raise SystemExit(code)


def _retried(port: int) -> socket.socket:
    """A connection to node 0, once it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.01)


class Joined:
    """A thread whose error is raised by `join`."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.end: BaseException | None = None
        self.thread = threading.Thread(target=lambda: setattr(self, "end", end_of(body)))
        self.thread.start()

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.end:
            raise self.end


def end_of(body: Callable[[], Any]) -> BaseException | None:
    try:
        body()
    except BaseException as error:
        return error
    return None


def run_nodes(
    places: list[Nodes],
    world_sizes: list[int],
    codes: dict[tuple[int, int], int] | None = None,
    work: Callable[[], Any] = lambda: None,
    arguments: dict[int, list[str]] | None = None,
) -> tuple[list[Launches], list[BaseException | None]]:
    """Each node as a thread; `work` is what node 0 does behind its launches."""
    launches = [Launches(node.rank, codes) for node in places]
    ends: list[BaseException | None] = [None] * len(places)

    def lead() -> None:
        with leading(places[0], ARGUMENTS, 10) as leader:
            for ranks in world_sizes:
                leader.launch(ranks, launches[0])
            work()

    def other(number: int) -> None:
        given = (arguments or {}).get(number, ARGUMENTS)
        ends[number] = end_of(lambda: follow(places[number], given, 10, launches[number]))

    threads = [threading.Thread(target=other, args=(number,)) for number in range(1, len(places))]
    for thread in threads:
        thread.start()
    ends[0] = end_of(lead)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a node waits for ever"
    return launches, ends


def test_the_port_is_free_when_the_nodes_have_met() -> None:
    """The next job of a sweep meets at the same one."""
    places = nodes(2)
    _, ends = run_nodes(places, [], work=lambda: socket.create_server(("127.0.0.1", places[0].port)).close())
    assert ends == [None, None]


def test_a_launch_runs_on_the_nodes_that_it_needs() -> None:
    """Two ranks fit on a node, four need two of three; the third waits for six, and all meet at one port."""
    launches, ends = run_nodes(nodes(), [1, 2, 4, 6])
    assert ends == [None] * 3
    assert [[ranks for ranks, _, _ in each.seen] for each in launches] == [[1, 2, 4, 6], [4, 6], [6]]
    assert launches[0].seen[:2] == [(1, 1, [*STANDALONE]), (2, 2, [*STANDALONE])]
    for launch in (launches[0].seen[2:], launches[1].seen):
        for (ranks, nproc, place), count in zip(launch, ("2", "3"), strict=True):
            assert nproc == 2 and place[place.index("--nnodes") + 1] == count and ranks == 2 * int(count)
    last = [each.seen[-1][2] for each in launches]
    assert [place[place.index("--node-rank") + 1] for place in last] == ["0", "1", "2"]
    assert len({place[-1] for place in last}) == 1


@pytest.mark.parametrize(
    ("codes", "code"),
    [({(4, 0): 2, (4, 1): 2}, 2), ({(4, 1): 3}, 3), ({(4, 0): 1, (4, 1): 137}, 1), ({(1, 0): 130}, 130)],
)
def test_all_nodes_end_with_one_code(codes: dict[tuple[int, int], int], code: int) -> None:
    """Whichever node's ranks failed, and also where it was not among them."""
    launches, ends = run_nodes(nodes(), [1, 4, 6], codes)
    assert [code_of(end) for end in ends if end] == [code] * 3
    assert [6 in [ranks for ranks, _, _ in each.seen] for each in launches] == [False] * 3


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("a bad key"), 2), (KeyboardInterrupt(), 130), (RuntimeError("a bug"), 1)]
)
def test_node_0_fails_behind_its_launches(error: BaseException, code: int) -> None:
    """In the report, or in a projection, of which the others know nothing."""

    def work() -> None:
        raise error

    _, ends = run_nodes(nodes(), [4], work=work)
    assert ends[0] is error and [code_of(end) for end in ends[1:] if end] == [code, code]


def test_other_arguments_are_refused() -> None:
    """Ranks of other settings would gather messages of other sizes."""
    _, ends = run_nodes(nodes(2), [4], arguments={1: ["W=5"]})
    assert "arguments of node 1 is ['W=5'], and of node 0 ['W=4', 'ranks=[1,4]']" in str(ends[0])
    assert [code_of(end) for end in ends if end] == [2, 2]


def test_a_number_taken_twice_is_refused() -> None:
    places = nodes()
    _, ends = run_nodes([places[0], places[1], replace(places[1])], [4])
    assert "two nodes have NODE_RANK 1" in str(ends[0])
    assert [code_of(end) for end in ends if end] == [2, 2, 2]


def test_a_missing_node_is_named() -> None:
    """Not a launch that waits for torchrun's fifteen minutes."""
    places = nodes(2)
    late = pytest.raises(UserError, match=r"nodes \[1\] of 2 did not come .* raise parallel.timeout_s")
    with late, leading(places[0], ARGUMENTS, 0.3):
        raise AssertionError("it goes on without node 1")
    with pytest.raises(UserError, match=r"node 0 does not answer .* with NODE_RANK=0"):
        follow(places[1], ARGUMENTS, 0.3, Launches(1))


def test_a_stranger_at_the_port_is_no_node() -> None:
    places = nodes(2)
    launches, ends = [Launches(0), Launches(1)], []

    def come() -> None:
        with _retried(places[0].port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
        ends.append(end_of(lambda: follow(places[1], ARGUMENTS, 10, launches[1])))

    other = threading.Thread(target=come)
    other.start()
    with leading(places[0], ARGUMENTS, 10) as leader:
        leader.launch(4, launches[0])
    other.join(30)
    assert ends == [None] and len(launches[1].seen) == 1


def test_a_stranger_that_says_nothing_keeps_nobody_waiting() -> None:
    """A probe of the port that stays connected: the nodes behind it have come in time."""
    places = nodes(2)
    gathered = threading.Event()

    def come() -> None:
        with _retried(places[0].port):
            other = threading.Thread(target=lambda: follow(places[1], ARGUMENTS, 1, Launches(1)))
            other.start()
            assert gathered.wait(10), "node 0 listens to a stranger"
            other.join(30)

    stranger = Joined(come)
    with leading(places[0], ARGUMENTS, 1):
        gathered.set()
    stranger.join()


def _cut(connection: socket.socket) -> None:
    """End it so that whatever is sent to this side is an error at once, as when a machine is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_node_that_is_lost_hides_no_error_of_node_0() -> None:
    """What it is sent last is not taken, which must not be the error that is reported."""
    places = nodes(2)

    def vanish() -> None:
        connection = _retried(places[0].port)
        connection.sendall(json.dumps({"node": 1, "count": 2, "nproc": 2, "arguments": ARGUMENTS}).encode() + b"\n")
        gathered.wait(10)
        _cut(connection)

    gathered = threading.Event()
    other = Joined(vanish)
    with pytest.raises(ZeroDivisionError), leading(places[0], ARGUMENTS, 10):
        gathered.set()
        other.join()
        raise ZeroDivisionError


def test_node_0_that_is_lost_in_a_launch_is_one_line() -> None:
    """A broken pipe would be a traceback."""
    places = nodes(2)
    launched = threading.Event()

    def vanish() -> None:
        with socket.create_server(("127.0.0.1", places[0].port)) as server:
            connection, _ = server.accept()
            connection.sendall(json.dumps({"ranks": 4, "port": 5}).encode() + b"\n")
            launched.wait(10)
            _cut(connection)

    leader = Joined(vanish)

    def start(*_: object) -> None:
        launched.set()
        leader.join()

    with pytest.raises(RankLost, match="a node has ended"):
        follow(places[1], ARGUMENTS, 10, start)


def test_a_node_that_fails_in_a_launch_ends_the_run() -> None:
    places = nodes(2)

    def vanish() -> None:
        with pytest.raises(ZeroDivisionError):
            follow(places[1], ARGUMENTS, 10, lambda *_: 1 / 0)

    other = Joined(vanish)
    with pytest.raises(RankLost, match="node 1 ended, or did not answer"), leading(places[0], ARGUMENTS, 10) as leader:
        leader.launch(4, Launches(0))
    other.join()


def test_a_node_that_is_gone_is_no_part_of_a_launch() -> None:
    """Node 0's torchrun would wait for it."""
    places = nodes(2)
    hello = {"node": 1, "count": 2, "nproc": 2, "arguments": ARGUMENTS}

    def vanish() -> None:
        with _retried(places[0].port) as connection:
            connection.sendall(json.dumps(hello).encode() + b"\n")

    other = Joined(vanish)
    launches = Launches(0)
    gone = pytest.raises(RankLost, match=r"nodes \[1\] have ended; start the command on all nodes again")
    with gone, leading(places[0], ARGUMENTS, 10) as leader:
        other.join()
        leader.launch(4, launches)
    assert not launches.seen


def test_the_others_hear_of_the_end_of_node_0() -> None:
    """Killed, it can send no exit code."""
    places = nodes(2)
    ended: list[BaseException | None] = []
    with socket.create_server(("127.0.0.1", places[0].port)) as server:
        other = threading.Thread(
            target=lambda: ended.append(end_of(lambda: follow(places[1], ARGUMENTS, 10, Launches(1))))
        )
        other.start()
        server.accept()[0].close()
    other.join(30)
    assert isinstance(ended[0], RankLost) and "has ended without an exit code" in str(ended[0])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "0"}, "NNODES is 0"),
        ({"NNODES": "two"}, "NNODES is 'two'; it must be an integer"),
        ({"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "host:1"}, "NODE_RANK is 2"),
        ({"NODE_RANK": "1"}, "NODE_RANK is 1"),
        ({"NNODES": "2"}, "RDZV_ENDPOINT is '' with 2 nodes"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host"}, "give host:port"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host:70000"}, r"the port of RDZV_ENDPOINT is 70000; .* in \[1, 65535\]"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host:0"}, "the port of RDZV_ENDPOINT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host:1", "NPROC": "0"}, "NPROC is 0"),
    ],
)
def test_variables_out_of_range(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun would end later, on every node, with a traceback."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        Nodes.from_env()


def test_world_sizes_fill_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nodes.from_env().count == 1
    Nodes.from_env().check(3)  # one node takes any
    variables = {"NNODES": "2", "NODE_RANK": "1", "NPROC": "4", "RDZV_ENDPOINT": "[::1]:29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = Nodes.from_env()
    assert (place.host, place.port, place.place(8, 5)[-1]) == ("::1", 29500, "[::1]:5")
    for ranks in (1, 3, 4, 8):
        place.check(ranks)
    for ranks, said in ((6, "no multiple of it"), (12, "have fewer")):
        with pytest.raises(UserError, match=said):
            place.check(ranks)
