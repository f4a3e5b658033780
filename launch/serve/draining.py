"""How a server ends when it is asked to: it finishes the texts that it has, and tells others that it takes no more."""

from __future__ import annotations

import threading
from types import FrameType

import uvicorn

from .engine_loop import EngineLoop

FLUSH_S = 5  # for the last events of texts that have ended, whose clients may be slow to read them


class DrainingServer(uvicorn.Server):
    """Listens until the texts have ended, so that /health and new requests are answered meanwhile.

    Under torchrun this matters where a rank dies: torchrun asks the others to end before they know why.

    Args:
        config: uvicorn's settings.
        loop: runs the engine.
        drain_s: seconds that texts may go on after a signal.
    """

    def __init__(self, config: uvicorn.Config, loop: EngineLoop, drain_s: int) -> None:
        super().__init__(config)
        self._loop = loop
        self._drain_s = drain_s
        self._asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM came; the second one gives the texts no more time."""
        drain_s = 0 if self._asked else self._drain_s
        self._asked = True
        threading.Thread(target=self._drain, args=(drain_s, sig, frame), daemon=True).start()

    def _drain(self, drain_s: int, sig: int, frame: FrameType | None) -> None:
        if not self._loop.close(drain_s):
            self._loop.abandon()
            self._loop.close(FLUSH_S)
        if not (self._loop.failure or self.should_exit):  # a failure is shown for a while, and ends the server then
            self.config.timeout_graceful_shutdown = FLUSH_S
            super().handle_exit(sig, frame)
