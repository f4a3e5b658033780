"""The loop of `lp batch`: it sends requests to engines or servers with a free slot, and writes answers as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp.errors import UserError

from .answers import Answers
from .lines import BadLine, Line, Lines, Request
from .places import Later, Place, Reply, Server
from .progress import BatchProgress

MOST_FAILURES = 3  # servers that fail while they have one request alone: then it is the reason
TURN_S = 0.5  # at least as often, servers that rest are looked at
FLUSH_S = 5.0  # for texts to end that were told to


class Asked(NamedTuple):
    """A request that has been sent and is not answered yet.

    Attributes:
        place: the engine or server that has the request.
        request: the request.
        trusted: whether a failure of the place now counts against the request: the place had worked before, or no place
            works.
    """

    place: Place
    request: Request
    trusted: bool


Asking = dict[asyncio.Task[Reply | Later], Asked]


class Dispatch:
    """Sends every unanswered request to an engine or server, and writes the answers.

    A request is sent again if its server fails. Once servers have failed MOST_FAILURES times while they had only this
    request, it gets an error as its answer.

    Args:
        lines: the requests.
        answers: the file of answers.
        places: engines and servers that requests can be sent to: this process' engine, or servers.
        progress: shows how many requests are answered.
        timeout_s: seconds without any working place after which the run ends with an error; 0 waits forever.
        drain_s: seconds that requests under way may still take after `stop`.
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
        # Whose servers failed: sent behind all others, half as many at a time, until the one at fault is alone.
        self._suspects: deque[Request] = deque()
        self._asking: Asking = {}
        self._looking: dict[asyncio.Task[None], Place] = {}
        self._stops_s: float | None = None  # when requests under way are ended
        self._awake = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called before all requests were answered."""
        return self._stops_s is not None

    def stop(self) -> None:
        """Send no more requests, and give those under way `drain_s` seconds; a second call ends them at once.

        The signal handler calls this on the event loop.
        """
        self._stops_s = time.monotonic() + (0 if self.stopped else self._drain_s)
        for place in self._places:
            place.drain()
        self._awake.set()

    async def run(self) -> None:
        """Send requests and write answers until all are answered, or until `stop`.

        Raises:
            OSError: the file of answers cannot be written.
            ValueError: no engine or server has worked for `timeout_s` seconds, or a server refuses the API key.
            BaseException: the error that this process' engine failed with.
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
        """Send requests to places that are free; return the lines that are no valid requests, with their errors."""
        bad: list[tuple[Line, Reply | BadLine]] = []
        suspected = {asked.place for asked in self._asking.values() if asked.request.most_together}
        places = [place for place in self._places if place not in suspected]
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
        while self._suspects and not (self._left or self.stopped) and (free := self._place_for(self._suspects[0])):
            self._ask(free, self._suspects.popleft())
        return bad

    def _ask(self, place: Place, request: Request) -> None:
        place.busy += 1
        place.most_at_once = max(place.most_at_once, place.busy)
        trusted = not place.trouble or all(each.trouble for each in self._places)
        self._asking[asyncio.create_task(place.ask(request))] = Asked(place, request, trusted)

    def _place_for(self, suspect: Request) -> Place | None:
        """A place for a request whose server failed before: beside other such requests only, and few at a time."""
        found = []
        for place in self._places:
            limits = [asked.request.most_together for asked in self._asking.values() if asked.place is place]
            if place.free > 0 and place.busy < min([*limits, suspect.most_together]):
                found.append(place)
        return min(found, key=lambda place: (bool(place.trouble), place.busy), default=None)

    def _look(self) -> None:
        """Start a health check of every server that is due for one."""
        for place in self._places:
            if isinstance(place, Server) and place.is_due and place not in self._looking.values():
                self._looking[asyncio.create_task(place.look())] = place

    async def _wait(self) -> None:
        """Wait until a request or a health check has ended, or TURN_S seconds."""
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
        """Collect the answers that have come; put requests without an answer back into a queue."""
        found: list[tuple[Line, Reply | BadLine]] = []
        for task in [task for task in self._asking if task.done()]:
            place, request, trusted = self._asking.pop(task)
            others = place.most_at_once - 1
            place.busy -= 1
            if not place.busy:
                place.most_at_once = 0
            reply = task.result()
            if isinstance(reply, Reply):
                found.append((request.line, reply))
                continue
            if reply.under_way:
                request.most_together = max((others + 1) // 2, 1)
                request.failures += trusted and not others
            if not request.most_together:
                self._left.appendleft(request)
            elif request.failures < MOST_FAILURES:
                self._suspects.append(request)
            else:
                message = f"{MOST_FAILURES} servers failed while they had this request alone; the last one: {reply.why}"
                found.append((request.line, BadLine("server_error", message)))
        return found

    async def _record(self, found: Sequence[tuple[Line, Reply | BadLine]]) -> None:
        if found:
            # The disk may be slow: meanwhile other texts go on, and what ends then is written together.
            await asyncio.to_thread(self._answers.add, [record(line, reply) for line, reply in found])
            replies = [reply if isinstance(reply, Reply) else None for _, reply in found]
            self._progress.count(replies, len(self._answers.done), self._answers.failed)

    def _check_places(self) -> None:
        """End the run where no place has worked for `timeout_s` seconds."""
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
        """End the requests under way."""
        if self._asking:
            for place in self._places:
                place.drain()
                place.abandon()
            own = [task for task, asked in self._asking.items() if not isinstance(asked.place, Server)]
            if own:
                await asyncio.wait(own, timeout=FLUSH_S)
        for task in (*self._asking, *self._looking):
            task.cancel()
        await asyncio.gather(*self._asking, *self._looking, return_exceptions=True)


def record(line: Line, reply: Reply | BadLine) -> dict[str, Any]:
    """Make the line that answers one request, for the file of answers.

    Args:
        line: the request's line in the input.
        reply: the answer, or the reason why the request has none.

    Returns:
        The line as a dict, in OpenAI's batch format.
    """
    response, error = None, None
    if isinstance(reply, Reply):
        response = {"status_code": reply.status, "request_id": reply.request_id or line.key, "body": reply.body}
    else:
        error = {"code": reply.code, "message": str(reply), "param": reply.param, "line": line.number}
    return {"id": line.key, "custom_id": line.custom_id, "response": response, "error": error}
