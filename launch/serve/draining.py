"""How a server ends on SIGINT or SIGTERM: it refuses new requests, and finishes the texts that it is generating."""

from __future__ import annotations

import threading
from types import FrameType

import uvicorn

from .engine_loop import EngineLoop

FLUSH_S = 5  # for the last events of texts that have ended, whose clients may be slow to read them


class DrainingServer(uvicorn.Server):
    """uvicorn's server, but after SIGINT or SIGTERM it gives running requests up to `drain_s` seconds to finish.

    Meanwhile it still listens, so that /health is answered and new requests are refused with a reason. This also helps
    when a rank dies under torchrun, which then signals the other ranks before they know what has happened.

    Args:
        config: uvicorn's settings.
        loop: the loop that runs the engine; it is closed before the server ends.
        drain_s: seconds that running requests get to finish after the first signal; then they are cut off.
    """

    def __init__(self, config: uvicorn.Config, loop: EngineLoop, drain_s: int) -> None:
        super().__init__(config)
        self._loop = loop
        self._drain_s = drain_s
        self._asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end the server; uvicorn calls this on SIGINT or SIGTERM.

        A second signal ends the running requests at once.

        Args:
            sig: number of the signal.
            frame: where the program was interrupted, for uvicorn.
        """
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
