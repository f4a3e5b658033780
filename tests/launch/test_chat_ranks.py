"""launch.chat on two ranks, at a terminal."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

from tests.conftest import Processes, read_until
from tests.support.apps import save_tiny_model

PROMPT = "> "


def test_two_ranks_follow_one_keyboard(processes: Processes, tmp_path: Path) -> None:
    """One start for all that needs ranks or a terminal: a rank left behind hangs, and a chat must outlive Ctrl-C."""
    folder = save_tiny_model(tmp_path, context=8192)
    master, slave = pty.openpty()
    overrides = ["model=hf", f"model.name={folder}", "W=4", "N=3", "G=4", "max_new_tokens=7000"]
    overrides += ["sampling=sample", "sampling.temperature=0.8"]  # a seed of null, which rank 0 draws for all
    command = processes.torchrun(2, "launch.chat", *overrides)
    process = processes.start(command, {"TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)

    def type_(keys: str, after: str = PROMPT) -> str:
        os.write(master, keys.encode())
        return read_until(master, lambda text: text.endswith(after) or "Traceback" in text)

    greeting = read_until(master, lambda text: text.endswith(PROMPT))
    assert greeting.count("ranks: 2") == 1 and "no chat template" in greeting
    os.write(master, "héllo\n".encode())
    answer = read_until(master, lambda text: len(text) > 1000)
    process.send_signal(signal.SIGINT)
    answer += read_until(master, lambda text: text.endswith(PROMPT))
    assert answer.count("(stopped by Ctrl-C)") == 1 and "Traceback" not in answer
    time.sleep(0.5)  # a signal between the prompt and readline's wait for a key would be heard at the next key only
    process.send_signal(signal.SIGINT)
    assert "(Ctrl-C again, Ctrl-D or /exit to leave)" in type_("")
    assert "max_new_tokens=8" in type_("/set max_new_tokens=8 temperature=0.5\n")
    assert type_("/set heat=1\n").count("error: ") == 1
    assert type_("and\n").count("8 tokens, ") == 1
    assert "answers: 2, " in type_("/stats\n")
    os.write(master, b"\x04")
    assert process.wait(60) == 0
    assert "Traceback" not in read_until(master, lambda text: False, timeout_s=1)
