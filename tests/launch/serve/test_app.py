"""launch.serve as an app: what it refuses before it loads a model."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch.serve.start_up
from launch.config.schema import ServeConfig
from launch.serve import serve
from launch.serve.server import PACKAGES, bind
from launch.serve.start_up import unfinished_requests
from launch.serve.unfinished import UnfinishedRequests, only_server
from lp.commands import install_command
from lp.errors import UserError
from tests.support.apps import Ran

BAD = {
    "decoder=autoregressive": "take decoder=plain instead",
    "sampling.verifier=rejection": "use sampling.verifier=coupled",
    "fim.middle=x": "fim.prefix is not given, but fim.middle is",
    "max_sequences=0": "max_sequences is 0; it must be an integer in [1, 65536]",
    "max_waiting=-1": "max_waiting is -1; it must be an integer >= 0",
    "port=70000": "port is 70000; it must be an integer in [0, 65535]",
    "timeout_s=-1": "timeout_s is -1.0; it must be a number >= 0",
    "timeout_s=nan": "timeout_s is nan; it must be a number >= 0",
    "api_key=''": "api_key is empty",
    "chat_template=nowhere.jinja": "chat_template",
    "hostt=x": "unknown config key 'hostt'; did you mean 'host'?",
    "journal=/dev/null/folder": "/dev/null/folder can't keep unfinished requests",
    "host=no.such.host.example": "host= is an address of this machine",
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is the same where the extra is missing."""
    monkeypatch.setattr(launch.serve.start_up, "is_installed", lambda package: True)


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings(start_app: Callable[..., Ran], setting: str) -> None:
    ran = start_app(serve, "serve", "port=0", setting)
    assert ran.code == 2 and BAD[setting] in ran.err and len(ran.err.splitlines()) == 1, ran.err


def test_a_port_that_is_taken(start_app: Callable[..., Ran]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = start_app(serve, "serve", f"port={port}")
    assert ran.code == 2 and f"cannot listen on 127.0.0.1:{port}" in ran.err and "give another port=" in ran.err


def test_a_bound_port_takes_no_connections_yet() -> None:
    """Who asks whether the server is up must not be kept waiting while the model is loaded."""
    with bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)


def test_events_are_sent_at_once() -> None:
    """Held back until the client has acknowledged what came before (Nagle), the first token would be 40 ms late."""

    async def no_delay() -> bool:
        with bind("127.0.0.1", 0) as bound:
            found = asyncio.get_running_loop().create_future()

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                found.set_result(bool(option))
                writer.close()

            async with await asyncio.start_server(connected, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname())
                writer.close()
                return bool(await asyncio.wait_for(found, 10))

    assert asyncio.run(no_delay())


def test_without_the_extra_it_says_which(start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.serve.start_up, "is_installed", lambda package: package != PACKAGES[1])
    ran = start_app(serve, "serve", "port=0")
    assert ran.code == 2 and f"lp serve needs uvicorn; install the extra: {install_command('serve')}" in ran.err


def test_requests_that_did_not_end_are_found_again(tmp_path: Path) -> None:
    """By the server that comes after, once; one whose file was being written, too."""
    folder = tmp_path / "unfinished"
    first = UnfinishedRequests(folder)
    noted = [first.begin(name, "", texts=2, seed=7) for name in ("a", "b", "c")]
    noted[1].end()
    paths = sorted(folder.iterdir())
    assert len(paths) == 2 and first.earlier == []
    paths[1].write_text('{"id":"')  # and no more
    found = UnfinishedRequests(folder).earlier
    assert [request.pop("began", 0) > 0 for request in found] == [True, False]
    assert found == [{"id": "a", "texts": 2, "seed": 7}, {"id": "unknown"}]
    assert UnfinishedRequests(folder).earlier == []
    paths[1].touch()
    UnfinishedRequests(None).begin("a", "").end()
    with pytest.raises(UserError, match=r"can't keep unfinished requests .* set LP_RUN_DIR to another folder"):
        UnfinishedRequests(paths[1])


def test_a_folder_of_another_server(start_app: Callable[..., Ran], tmp_path: Path) -> None:
    """It would delete the other's files, and each would add its tokens to requests of the other."""
    folder = tmp_path / "kept"
    with only_server(folder, "journal"):
        ran = start_app(serve, "serve", "port=0", f"journal={folder}", "model.name=./none")
    assert ran.code == 2 and "has the requests of a server that runs; end it, or set journal" in ran.err, ran.err
    with only_server(folder, "journal"):
        assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    "line",
    [
        *('{"question":"1 + 1?"}', '{"id":0,"question":"1 + 1?"}', '{"id":"a","n":1}'),
        '{"id":"17","began":"1066-10-14","who":"William"}',
        *('{\n  "question": "1 + 1?"\n}', '\n{"question":"1 + 1?"}', '{"id":"a\n'),
    ],
)
def test_files_of_something_else_stay(line: str, tmp_path: Path) -> None:
    """A data set in numbered files, whose folder is given by mistake, must not be deleted."""
    UnfinishedRequests(tmp_path).begin("a", "")
    other = tmp_path / "7.jsonl"
    other.write_text(line + "\n")
    with pytest.raises(UserError, match=r"can't keep unfinished requests \(7\.jsonl is no request's\)"):
        UnfinishedRequests(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "7.jsonl"]
    assert other.read_text() == line + "\n"


def test_a_file_that_has_come_meanwhile_stays(tmp_path: Path) -> None:
    """Somebody has put it into the folder: the request under its number must neither write nor delete it."""
    requests = UnfinishedRequests(tmp_path, "model")
    other = tmp_path / "0.jsonl"
    other.write_text("mine")
    noted = requests.begin("a", "key")
    noted.add(0, [1])
    assert not noted.has_tokens
    noted.end()
    assert other.read_text() == "mine"


def test_a_disk_that_has_gone_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder whose handle is stale: every request was an error of the server."""

    def stale(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    requests = UnfinishedRequests(tmp_path, "model")
    with monkeypatch.context() as patch:
        for name in ("stat", "open", "unlink"):
            patch.setattr(os, name, stale)
        noted = requests.begin("a", "key")
        noted.add(0, [1])
        assert not noted.has_tokens
        noted.end()
    assert not [*tmp_path.iterdir()]


def test_no_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`journal=` turns it off; it must not take the current folder."""
    monkeypatch.chdir(tmp_path)
    unfinished_requests(ServeConfig(journal=""), None).begin("a", "")
    assert not [*tmp_path.iterdir()]


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
