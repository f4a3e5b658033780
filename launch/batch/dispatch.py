"""Requests go to places as these are free, and answers to the file as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from lp.errors import UserError

from .answers import Answers
from .lines import BadLine, Line, Lines, Request
from .places import Later, Place, Reply, Server
from .progress import BatchProgress

SUSPECT = 2  # servers that fail while they have a request among others: from then on it is sent alone
MOST_FAILURES = 3  # servers that fail while they have one request alone: then it is the reason
TURN_S = 0.5  # at least as often, servers that rest are looked at
FLUSH_S = 5.0  # for texts to end that were told to

Asking = dict[asyncio.Task[Reply | Later], tuple[Place, Request]]


class Dispatch:
    """Has all requests answered that are not.

    Args:
        lines: the requests.
        answers: the file of answers.
        places: where requests are answered.
        progress: shows how far it is.
        timeout_s: it ends with an error when no place has worked for so many seconds; 0: never.
        drain_s: seconds that requests under way may go on when it is asked to stop.
    """

    def __init__(
        self,
        lines: Lines,
        answers: Answers,
        places: Sequence[Place],
        progress: BatchProgress,
        timeout_s: float,
        drain_s: float,
    ) -> None:
        self._lines = lines
        self._answers = answers
        self._places = places
        self._progress = progress
        self._timeout_s = timeout_s
        self._drain_s = drain_s
        self._left: deque[Line | Request] = deque(line for line in lines.lines if line.key not in answers.done)
        # Whose servers failed: sent behind all others, each to a server that has no other request.
        self._suspects: deque[Request] = deque()
        self._asking: Asking = {}
        self._looking: dict[asyncio.Task[None], Place] = {}
        self._stops_s: float | None = None  # when requests under way are ended
        self._awake = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop before all was done."""
        return self._stops_s is not None

    def stop(self) -> None:
        """Send no more requests; asked a second time, end those under way. On the event loop."""
        self._stops_s = time.monotonic() + (0 if self.stopped else self._drain_s)
        for place in self._places:
            place.drain()
        self._awake.set()

    async def run(self) -> None:
        """Have the requests answered, until all are or it was asked to stop.

        Raises:
            OSError: the file of answers cannot be written.
            ValueError: no place has worked for long, or one wants another key.
            BaseException: what the engine of this process has failed with.
        """
        try:
            while self._goes_on():
                found = self._send()
                self._look()
                if not found:
                    await self._wait()
                    found = self._take()
                await self._record(found)
                self._check_places()
        finally:
            await self._end()

    def _goes_on(self) -> bool:
        if not self.stopped:
            return bool(self._left or self._suspects or self._asking)
        assert self._stops_s is not None
        return bool(self._asking) and time.monotonic() < self._stops_s

    def _send(self) -> list[tuple[Line, Reply | BadLine]]:
        """Send requests to places that are free; lines that are none."""
        bad: list[tuple[Line, Reply | BadLine]] = []
        alone = {place for place, request in self._asking.values() if request.failures >= SUSPECT}
        places = [place for place in self._places if place not in alone]
        while self._left and places and not self.stopped:
            place = max(places, key=lambda place: place.free)
            if place.free <= 0:
                break
            first = self._left.popleft()
            try:
                request = first if isinstance(first, Request) else self._lines.request(first)
            except BadLine as error:
                assert isinstance(first, Line)
                bad.append((first, error))
                continue
            self._ask(place, request)
        while self._suspects and not (self._left or self.stopped) and (idle := self._place_alone()):
            self._ask(idle, self._suspects.popleft())
        return bad

    def _ask(self, place: Place, request: Request) -> None:
        place.busy += 1
        self._asking[asyncio.create_task(place.ask(request))] = (place, request)

    def _place_alone(self) -> Place | None:
        """Where a request can be sent alone: one whose last request failed would fail by itself, if others work."""
        works = [place for place in self._places if not place.trouble] or self._places
        return next((place for place in works if not place.busy and place.free > 0), None)

    def _look(self) -> None:
        """Look at servers that are due."""
        for place in self._places:
            if isinstance(place, Server) and place.is_due and place not in self._looking.values():
                self._looking[asyncio.create_task(place.look())] = place

    async def _wait(self) -> None:
        """Until something has happened."""
        awake = asyncio.create_task(self._awake.wait())
        try:
            tasks = {*self._asking, *self._looking, awake}
            await asyncio.wait(tasks, timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            awake.cancel()
        self._awake.clear()
        for looked in [task for task in self._looking if task.done()]:
            del self._looking[looked]
            looked.result()

    def _take(self) -> list[tuple[Line, Reply | BadLine]]:
        """What was answered; the rest is to be asked again."""
        found: list[tuple[Line, Reply | BadLine]] = []
        for task in [task for task in self._asking if task.done()]:
            place, request = self._asking.pop(task)
            place.busy -= 1
            reply = task.result()
            if isinstance(reply, Reply):
                found.append((request.line, reply))
                continue
            request.failures += reply.under_way
            if request.failures < SUSPECT:
                self._left.appendleft(request)
                continue
            if request.failures < SUSPECT + MOST_FAILURES:
                self._suspects.append(request)
                continue
            message = f"{MOST_FAILURES} servers failed while they had this request alone; the last one: {reply.why}"
            self._clear_suspects()
            found.append((request.line, BadLine("server_error", message)))
        return found

    def _clear_suspects(self) -> None:
        """Send the others as before: what their servers failed by has been found."""
        for request in self._suspects:
            request.failures = 0
        self._left.extend(self._suspects)
        self._suspects.clear()

    async def _record(self, found: Sequence[tuple[Line, Reply | BadLine]]) -> None:
        if found:
            # The disk may be slow: meanwhile other texts go on, and what ends then is written together.
            await asyncio.to_thread(self._answers.add, [record(line, reply) for line, reply in found])
            replies = [reply if isinstance(reply, Reply) else None for _, reply in found]
            self._progress.count(replies, len(self._answers.done), self._answers.failed)

    def _check_places(self) -> None:
        """End where nothing has worked for long."""
        if self._asking or not (self._left or self._suspects) or self.stopped:
            return
        idle_s = time.monotonic() - max(place.seen_s for place in self._places)
        troubles = "; ".join(f"{place.name}: {place.trouble}" for place in self._places if place.trouble)
        if troubles:
            self._progress.say(f"waiting for a server ({troubles})")
        if self._timeout_s and idle_s > self._timeout_s:
            remedy = "start one, and the same command goes on"
            raise UserError(f"no server has taken a request for {self._timeout_s:g} s ({troubles}); {remedy}")

    async def _end(self) -> None:
        """End what is under way."""
        if self._asking:
            for place in self._places:
                place.drain()
                place.abandon()
            own = [task for task, (place, _) in self._asking.items() if not isinstance(place, Server)]
            if own:
                await asyncio.wait(own, timeout=FLUSH_S)
        for task in (*self._asking, *self._looking):
            task.cancel()
        await asyncio.gather(*self._asking, *self._looking, return_exceptions=True)


def record(line: Line, reply: Reply | BadLine) -> dict[str, Any]:
    """A line of the file of answers.

    Args:
        line: the request's line.
        reply: what came of it.
    """
    response, error = None, None
    if isinstance(reply, Reply):
        response = {"status_code": reply.status, "request_id": reply.request_id or line.key, "body": reply.body}
    else:
        error = {"code": reply.code, "message": str(reply), "param": reply.param, "line": line.number}
    return {"id": line.key, "custom_id": line.custom_id, "response": response, "error": error}
