"""Requests and many servers: busy, full, failing and gone ones, without a request lost or answered twice."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")

from launch.batch import places  # noqa: E402
from launch.batch.answers import Answers  # noqa: E402
from launch.batch.dispatch import MOST_FAILURES, Dispatch  # noqa: E402
from launch.batch.lines import Lines  # noqa: E402
from launch.batch.places import Server, retry_after_s, server_urls  # noqa: E402
from launch.batch.progress import BatchProgress  # noqa: E402
from lp.errors import UserError  # noqa: E402

Handler = Callable[[Any], Any]


class Fake:
    """A server of the test's own, without a socket.

    Args:
        slots: what /props says; None: there is no /props.
        others: requests of other clients, as /metrics has them.
        seconds: what a request takes.
        handler: answers in its place where it returns something.
    """

    def __init__(
        self,
        slots: int | None = 4,
        others: int = 0,
        seconds: float = 0.01,
        handler: Handler | None = None,
        key: str | None = None,
    ) -> None:
        self.slots, self.others, self.seconds, self.handler, self.key = slots, others, seconds, handler, key
        self.running = self.most = 0
        self.asked: Counter[str] = Counter()
        self.times: list[float] = []
        self.ready = True
        self.held: asyncio.Event | None = None  # no request ends before it is set

    async def answer(self, request: Any) -> Any:
        """An answer as a server's."""
        path = request.url.path
        if not self.ready:
            raise httpx.ConnectError("refused")
        if path == "/ready":
            return httpx.Response(404 if self.slots is None else 200)
        if path == "/metrics":
            running = f'vllm:num_requests_running{{model="x"}} {self.running}.0\n'
            return httpx.Response(200, text=f"{running}vllm:num_requests_waiting {self.others}.0\nlp_x 7\n")
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": {}})
        if path == "/props":
            return httpx.Response(404) if self.slots is None else httpx.Response(200, json={"total_slots": self.slots})
        body = json.loads(request.content)
        self.asked[body["prompt"]] += 1
        self.times.append(time.monotonic())
        if self.handler and (answered := self.handler(body)) is not None:
            if isinstance(answered, Exception):
                raise answered
            return answered
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
            if self.held:
                await self.held.wait()
        finally:
            self.running -= 1
        usage = {"completion_tokens": 3, "steps": 2}
        return httpx.Response(200, json={"id": f"cmpl-{body['prompt']}", "text": body["prompt"], "usage": usage})


class Site:
    """A batch over fakes.

    Args:
        folder: has the files.
        requests: how many requests there are.
        fakes: the servers.
    """

    def __init__(
        self, folder: Path, requests: int, *fakes: Fake, timeout_s: float = 60, key: str | None = None
    ) -> None:
        names = [f"r{index}" for index in range(requests)]
        url = "/v1/completions"
        asked = [{"custom_id": each, "method": "POST", "url": url, "body": {"prompt": each}} for each in names]
        self.path = folder / "in.jsonl"
        self.path.write_text("".join(json.dumps(each) + "\n" for each in asked))
        self.out = folder / "out.jsonl"
        self.fakes = fakes
        self.timeout_s = timeout_s
        self.key = key
        self.dispatch: Dispatch | None = None

    def run(self, meanwhile: Callable[[], Any] | None = None) -> None:
        asyncio.run(self._run(meanwhile))

    async def _run(self, meanwhile: Callable[[], Any] | None) -> None:
        lines = Lines(self.path)
        servers = [
            Server(f"http://s{index}", self.key, 2, self.timeout_s, httpx.MockTransport(fake.answer))
            for index, fake in enumerate(self.fakes)
        ]
        with Answers(self.out, lines) as answers, BatchProgress(len(lines.lines), 0, 0, "out") as progress:
            self.dispatch = Dispatch(lines, answers, servers, progress, self.timeout_s, 1)
            other = asyncio.create_task(meanwhile()) if meanwhile else None
            async with asyncio.timeout(60):
                await self.dispatch.run()
            if other:
                await other

    def records(self) -> dict[str, Any]:
        """Answers by custom_id, each of which is there once."""
        found = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert len({record["custom_id"] for record in found}) == len(found)
        return {record["custom_id"]: record for record in found}

    def check(self, requests: int) -> None:
        """All are answered, each with its own text."""
        records = self.records()
        assert sorted(records) == sorted(f"r{index}" for index in range(requests))
        for name, record in records.items():
            response = record["response"]
            assert response["status_code"] == 200 and response["body"]["text"] == name and record["error"] is None
            assert response["request_id"] == f"cmpl-{name}" and record["id"].startswith("batch_req_")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are looked at often."""
    monkeypatch.setattr(places, "LOOK_S", 0.05)
    monkeypatch.setattr("launch.batch.dispatch.TURN_S", 0.02)


def test_servers_are_busy_up_to_their_places(tmp_path: Path) -> None:
    """A server that has four places gets four; one that does not say, as many as max_sequences; none waits.

    The third server has three places, two of which are others'. It ends nothing before the rest is done: then it has
    one request, or two where it was looked at just as it got the first.
    """
    fakes = Fake(slots=4, seconds=0.05), Fake(slots=None, seconds=0.05), Fake(slots=3, others=2)
    fakes[2].held = asyncio.Event()
    site = Site(tmp_path, 70, *fakes)

    async def release() -> None:
        while sum(len(fake.asked) for fake in fakes) < 70 or fakes[0].running or fakes[1].running:
            await asyncio.sleep(0.01)
        assert fakes[2].held
        fakes[2].held.set()

    site.run(release)
    site.check(70)
    assert [fake.most for fake in fakes[:2]] == [4, 2]
    assert 1 <= sum(fakes[2].asked.values()) <= 2
    assert all(count == 1 for fake in fakes for count in fake.asked.values())


def test_a_full_server_is_left_alone_as_long_as_it_says(tmp_path: Path) -> None:
    """Retry-After: asked again at once, it would do nothing but refuse; meanwhile others answer."""
    refused: list[float] = []

    def full(body: Any) -> Any:
        if refused:
            return None
        refused.append(time.monotonic())
        return httpx.Response(429, headers={"Retry-After": "0.4"}, json={"error": {}})

    fakes = Fake(slots=1, handler=full), Fake(slots=1)
    site = Site(tmp_path, 80, *fakes)
    site.run()
    site.check(80)
    first, *others = fakes[0].times
    assert first <= refused[0] and others and min(others) >= refused[0] + 0.4
    assert sum(fakes[0].asked.values()) + sum(fakes[1].asked.values()) == 81


@pytest.mark.parametrize("answer", [503, 500, 502, "read", "connect", "hangs"])
def test_a_server_that_fails_is_no_loss(answer: int | str, tmp_path: Path) -> None:
    """Its requests go to the other one; where it works again, it gets some again."""
    failures = 0

    def failing(body: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures > 3:
            return None
        errors = {"read": httpx.ReadError(""), "connect": httpx.ConnectError(""), "hangs": httpx.ReadTimeout("")}
        if isinstance(answer, str):
            return errors[answer]
        return httpx.Response(answer, headers={"Retry-After": "0"} if answer == 503 else {}, text="<html>")

    fakes = Fake(handler=failing), Fake()
    site = Site(tmp_path, 400, *fakes)
    site.run()
    site.check(400)
    assert failures > 3 and sum(fakes[0].asked.values()) + sum(fakes[1].asked.values()) == 403


def test_a_request_that_brings_servers_down_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not go round for ever."""
    monkeypatch.setattr(places, "MOST_REST_S", 0.01)
    rest = Server._rest
    monkeypatch.setattr(Server, "_rest", lambda self, seconds: rest(self, 0.01))
    fatal: Handler = lambda body: httpx.ReadError("reset") if body["prompt"] == "r3" else None  # noqa: E731
    fakes = Fake(handler=fatal), Fake(handler=fatal)
    site = Site(tmp_path, 8, *fakes)
    site.run()
    records = site.records()
    bad = records.pop("r3")
    assert bad["response"] is None and bad["error"]["code"] == "server_error" and bad["error"]["line"] == 4
    said = f"{MOST_FAILURES} servers failed while they had this request alone; the last one: ReadError"
    assert said in str(bad["error"])
    assert all(record["response"]["status_code"] == 200 for record in records.values()) and len(records) == 7


class Crashing(Fake):
    """A server whose process ends where it has one of these requests, and with it all that are under way."""

    def __init__(self, fatal: set[str], slots: int) -> None:
        super().__init__(slots, seconds=0)
        self.fatal = fatal
        self.crashes = self.fatal_ones = 0

    async def answer(self, request: Any) -> Any:
        if not request.content:
            return await super().answer(request)
        crashes, is_fatal = self.crashes, json.loads(request.content)["prompt"] in self.fatal
        self.fatal_ones += is_fatal
        await asyncio.sleep(0.02)
        self.fatal_ones -= is_fatal
        self.crashes += is_fatal
        if self.fatal_ones or self.crashes > crashes:
            raise httpx.ReadError("reset")
        return await super().answer(request)


def test_a_crash_is_no_fault_of_all_that_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a hundred requests under way bring the server down: these are named, and the others are answered."""
    monkeypatch.setattr(places, "MOST_REST_S", 0.01)
    rest = Server._rest
    monkeypatch.setattr(Server, "_rest", lambda self, seconds: rest(self, 0.01))
    fatal = {"r7", "r93"}
    fake = Crashing(fatal, 100)
    site = Site(tmp_path, 150, fake)
    site.run()
    records = site.records()
    assert {name for name, record in records.items() if record["error"]} == fatal and len(records) == 150
    # Among 100, 50, 25, 12, 6, 3 and 1 others, and then alone.
    assert fake.crashes <= len(fatal) * (7 + MOST_FAILURES)


def test_hundreds_under_way_go_on_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a crash that no request is to blame for: one at a time they would take hours."""
    monkeypatch.setattr(Server, "_rest", lambda self, seconds: None)
    fake = Crashing(set(), 300)
    ask = fake.answer

    async def answer(request: Any) -> Any:
        if request.content and not fake.crashes:
            await asyncio.sleep(0.3)  # until all are there
            fake.most = 0
            raise httpx.ReadError("reset")
        return await ask(request)

    async def crash() -> None:
        await asyncio.sleep(0.6)
        fake.crashes += 1

    monkeypatch.setattr(fake, "answer", answer)
    fake.seconds = 0.05
    site = Site(tmp_path, 300, fake)
    site.run(crash)
    site.check(300)
    assert fake.most > 30


def test_nobody_joins_a_request_that_is_alone(tmp_path: Path) -> None:
    """One that another server has refused meanwhile would go down with it, and be suspected itself."""
    site = Site(tmp_path, 2)
    lines = Lines(site.path)
    suspect, other = (lines.request(line) for line in lines.lines)
    suspect.most_together = 1

    async def sent() -> list[set[str]]:
        server = Server("http://s", None, 4, 60, httpx.MockTransport(Fake(seconds=5).answer))
        await server.look()
        found = []
        with Answers(site.out, lines) as answers, BatchProgress(2, 0, 0, "out") as progress:
            dispatch = Dispatch(lines, answers, [server], progress, 60, 1)
            dispatch._left.clear()
            dispatch._suspects.append(suspect)
            for request in (None, other):
                dispatch._left.extend(filter(None, [request]))
                dispatch._send()
                found.append({json.loads(asked.request.body)["prompt"] for asked in dispatch._asking.values()})
            assert server.free == 3 and [*dispatch._left] == [other]
            await dispatch._end()
        return found

    assert asyncio.run(sent()) == [{"r0"}, {"r0"}]


def test_a_server_that_works_again_has_suspects_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was idle to the end of the run where the other one had not failed."""
    monkeypatch.setattr(Server, "_rest", lambda self, seconds: None)
    crashed: list[str] = []

    def crashes(body: Any) -> Any:
        if len(crashed) < 8:
            crashed.append(body["prompt"])
            return httpx.ReadError("reset")
        return None

    fakes = Fake(slots=8, seconds=0.05, handler=crashes), Fake(slots=1, seconds=0.05)
    site = Site(tmp_path, 40, *fakes)
    site.run()
    site.check(40)
    assert sum(fakes[0].asked[name] == 2 for name in crashed) > 4


def test_a_server_that_only_fails_condemns_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are tried elsewhere: that it fails whatever it has says nothing of them."""
    monkeypatch.setattr(places, "MOST_REST_S", 0.01)
    rest = Server._rest
    monkeypatch.setattr(Server, "_rest", lambda self, seconds: rest(self, 0.001))
    broken: Handler = lambda body: httpx.Response(500, text="<html>")  # noqa: E731
    site = Site(tmp_path, 60, Fake(slots=1, handler=broken), Fake(slots=1, seconds=0.03))
    site.run()
    site.check(60)


def test_a_gateway_that_forbids_what_is_not_openais(tmp_path: Path) -> None:
    """403 for /props and /ready says nothing of the key; of every request it does."""
    site = Site(tmp_path, 12, Gateway({"/props", "/ready", "/metrics"}))
    site.run()
    site.check(12)
    site.out.unlink()
    site.fakes = (Gateway({"/props", "/ready", "/metrics", "/v1/completions"}),)
    with pytest.raises(UserError, match=r"http://s0 refuses all requests \(403: .*forbidden.*\); if it wants a key"):
        site.run()
    assert site.out.read_text() == ""
    bad: Handler = lambda body: httpx.Response(403, json={}) if body["prompt"] == "r1" else None  # noqa: E731
    site.fakes = (Fake(slots=1, handler=bad),)  # which says how many places it has, and turns down a text
    site.run()
    assert [name for name, record in site.records().items() if record["response"]["status_code"] == 403] == ["r1"]


class Gateway(Fake):
    """A server behind a gateway that answers 403 for some paths."""

    def __init__(self, forbidden: set[str]) -> None:
        super().__init__(slots=2)
        self.forbidden = forbidden

    async def answer(self, request: Any) -> Any:
        if request.url.path in self.forbidden:
            return httpx.Response(403, json={"message": "forbidden"})
        return await super().answer(request)


def test_errors_of_requests_are_answers(tmp_path: Path) -> None:
    """A request that is refused is refused by every server: it is recorded, and the rest goes on."""
    bad: Handler = lambda body: (  # noqa: E731
        httpx.Response(400, json={"error": {"message": "no"}}) if body["prompt"] in ("r1", "r5") else None
    )
    site = Site(tmp_path, 9, Fake(handler=bad))
    site.run()
    records = site.records()
    assert {name for name, record in records.items() if record["response"]["status_code"] == 400} == {"r1", "r5"}
    assert records["r1"]["response"]["body"] == {"error": {"message": "no"}} and records["r1"]["error"] is None


def test_an_answer_that_is_no_json(tmp_path: Path) -> None:
    """A proxy's page must not be taken for an answer."""
    page: Handler = lambda body: httpx.Response(200, text="<html>")  # noqa: E731
    site = Site(tmp_path, 1, Fake(handler=page))
    site.run()
    response = site.records()["r0"]["response"]
    assert response["status_code"] == 502 and "no JSON object: <html>" in response["body"]["error"]["message"]


def test_a_page_of_a_proxy_whose_server_has_gone(tmp_path: Path) -> None:
    """504 with a page is no word of the server: its requests go elsewhere. With an error in JSON it is the server's."""
    page: Handler = lambda body: httpx.Response(504, text="<html>time-out</html>")  # noqa: E731
    site = Site(tmp_path, 6, Fake(handler=page), Fake())
    site.run()
    site.check(6)
    site.out.unlink()
    late: Handler = lambda body: httpx.Response(504, json={"error": {"message": "not in time"}})  # noqa: E731
    site.fakes = (Fake(handler=late),)
    site.run()
    assert all(record["response"]["status_code"] == 504 for record in site.records().values())


def test_a_server_that_is_elsewhere(tmp_path: Path) -> None:
    """http:// of one that wants https://: each redirect would be recorded as an answer, and never be asked again."""
    moved: Handler = lambda body: httpx.Response(  # noqa: E731
        308, headers={"Location": "https://elsewhere/v1/completions"}
    )
    site = Site(tmp_path, 3, Fake(handler=moved))
    with pytest.raises(UserError, match=r"http://s0 redirects to 'https://elsewhere' \(308\); give that address"):
        site.run()
    assert site.out.read_text() == ""


def test_a_server_that_refuses_for_long(tmp_path: Path) -> None:
    """A quota that is used up: it answers, but takes nothing, and the run must not wait beyond timeout_s."""
    full: Handler = lambda body: httpx.Response(429, headers={"Retry-After": "0.05"})  # noqa: E731
    site = Site(tmp_path, 3, Fake(handler=full), timeout_s=0.6)
    with pytest.raises(UserError, match=r"has taken a request for 0\.6 s \(http://s0: it answered 429\)"):
        site.run()


def test_no_server_for_long(tmp_path: Path) -> None:
    """It ends with an error that says how it goes on, and goes on."""
    fakes = Fake(), Fake()
    for fake in fakes:
        fake.ready = False
    site = Site(tmp_path, 5, *fakes, timeout_s=0.3)
    with pytest.raises(UserError, match=r"has taken a request for 0\.3 s \(http://s0: ConnectError: refused; h"):
        site.run()
    assert site.out.read_text() == ""
    fakes[1].ready = True
    site.run()
    site.check(5)


def test_a_key_is_sent_and_a_wrong_one_named(tmp_path: Path) -> None:
    """Without it, every request would be recorded as one that was refused."""
    site = Site(tmp_path, 5, Fake(key="secret"), key="secret")
    site.run()
    site.check(5)
    for slots in (2, None):
        site.out.unlink()
        site.fakes = (Fake(key="other", slots=slots),)
        with pytest.raises(UserError, match=r"http://s0 wants its API key \(401\); give it as LP_API_KEY") as error:
            site.run()
        assert "secret" not in str(error.value) and site.out.read_text() == ""


def test_asked_to_stop_it_waits_for_what_is_under_way(tmp_path: Path) -> None:
    """What servers have computed is kept; nothing is sent any more, and the next run does the rest alone."""
    fake = Fake(slots=3, seconds=0.2)
    site = Site(tmp_path, 12, fake)

    async def stop() -> None:
        await asyncio.sleep(0.3)
        assert site.dispatch
        site.dispatch.stop()

    site.run(stop)
    assert 3 <= len(site.records()) == sum(fake.asked.values()) < 12
    site.run()
    site.check(12)
    assert set(fake.asked.values()) == {1}


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    """What was under way is asked again by the next run."""
    fake = Fake(slots=3, seconds=30)
    site = Site(tmp_path, 6, fake)

    async def stop() -> None:
        await asyncio.sleep(0.2)
        assert site.dispatch
        site.dispatch.stop()
        site.dispatch.stop()

    start = time.monotonic()
    site.run(stop)
    assert time.monotonic() - start < 5 and site.out.read_text() == "" and fake.running == 0
    fake.seconds = 0.01
    site.run()
    site.check(6)


def test_a_disk_that_is_full_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing goes on to be sent."""
    fake = Fake(slots=2)
    site = Site(tmp_path, 50, fake)

    def full(self: Answers, records: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Answers, "add", full)
        with pytest.raises(OSError, match="No space left"):
            site.run()
    assert sum(fake.asked.values()) < 10 and fake.running == 0
    site.run()
    site.check(50)


def test_drawn_troubles_lose_nothing(tmp_path: Path, cases: Callable[[int, int], range]) -> None:
    """Whatever servers do, and wherever the run is stopped: each request has one answer, its own."""
    for seed in cases(6, 60):
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()

        def trouble(body: Any, draw: random.Random = draw) -> Any:
            if draw.random() < 0.85:
                return None
            after = {"Retry-After": str(draw.choice([0, 0.02]))}
            kinds = [httpx.Response(429, headers=after), httpx.Response(503, headers=after), httpx.ConnectError("")]
            return draw.choice(kinds)

        fakes = [Fake(draw.choice([1, 3, None]), draw.choice([0, 2]), 0.005, trouble) for _ in range(3)]
        site = Site(folder, 40, *fakes)

        async def stop(draw: random.Random = draw, site: Site = site) -> None:
            await asyncio.sleep(draw.random() * 0.3)
            assert site.dispatch
            site.dispatch.stop()

        site.run(stop)
        torn = site.out.read_bytes()
        site.out.write_bytes(torn[: draw.randrange(len(torn) + 1)])
        site.run()
        site.check(40)


def test_how_far_it_is_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar on a terminal, lines in a log: hours without a word look like a hang."""
    monkeypatch.setattr("launch.batch.progress.LOGGED_S", 0)
    Site(tmp_path, 5, Fake()).run()
    assert "answered 5 of 5, " in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "out.jsonl").unlink()
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes what is no terminal for one
    Site(tmp_path, 5, Fake()).run()
    bar = capsys.readouterr().err
    assert "5/5" in bar and "tokens/s" in bar and "answered 5 of 5" not in bar


def test_when_a_server_wants_to_be_asked_again() -> None:
    def after(value: str) -> float | None:
        return retry_after_s(httpx.Response(429, headers={"Retry-After": value}))

    assert after("3") == 3 and after("0.5") == 0.5 and after("-1") == 0 and after("99999") == places.MOST_RETRY_AFTER_S
    assert after("nan") is None and after("soon") is None and retry_after_s(httpx.Response(429)) is None
    in_ten = after(formatdate(time.time() + 10, usegmt=True))
    assert in_ten is not None and 7 < in_ten < 11


def test_addresses_of_servers() -> None:
    assert server_urls(["http://a:8000/v1/", "https://b/x"]) == ["http://a:8000", "https://b/x"]
    for bad in (
        "a:8000",
        "ftp://a",
        "http://",
        "http://a?x=1",
        "http://[::1",
        "http://a:x",
        "http://a:99999",
        "http://a b",
    ):
        with pytest.raises(UserError, match=r"servers has .*; give addresses"):
            server_urls([bad])
    with pytest.raises(UserError, match="servers has http://a twice"):
        server_urls(["http://a", "http://a/v1"])
