"""What a first use costs before its first token and against plain decoding, beside busy cores.

NUMBA_CACHE_DIR=$(mktemp -d) python scripts/tables.py first_contact --model FOLDER --busy 1
python scripts/tables.py first_contact --model FOLDER --task mtbench.jsonl --chat --temperature 0.8 --parts text

1. With empty cache folders, numba's among them: this thread's seconds for loading, for a runner (fusing and the probe),
   for a decoder, and from there to the first token, in plain steps of the same process; and what ten calls of
   `custom_generate` take beyond their steps.
2. The default and plain decoding of each prompt, step by step in turn: the ratio of their seconds with its interval of
   95 %, and the most that a text was ever behind.
3. A plain step's seconds by the wall with one thread and with a core each, and the number that an app takes.

Seconds are this thread's own but for 3: other programs do not lengthen them by taking its core away.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

import torch

import lp
from launch.running.threads import settle_threads
from launch.text.chat_tokens import chat_tokens
from lp.models.loader import load
from lp.models.runner import runner_of

from .harness import Method, PromptStudy, Result, Row, Table, grouped, option, sampling_at, values

SPIN = "import time\nwhile True: sum(range(10**5))"
CALLS = 10
PLAIN_STEPS = 16
FIRST, TEXT, THREADS = "first token", "text", "threads"  # the parts


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many other programs computing until the block ends, so that cores are as busy as a user's."""
    programs = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()


@dataclass(kw_only=True)
class FirstContact(PromptStudy):
    """Measures a first use, then the default against plain decoding prompt by prompt, then threads."""

    limit: int | None = option(20, "first prompts of the task")
    max_new_tokens: int = option(64)
    busy: int = option(1, "programs that run beside it, a core each")
    temperature: float = option(0.0, "of part 2; 0 is greedy")
    chat: bool = option(False, "prompts are messages, for the model's chat template")
    parts: list[str] = option([FIRST, TEXT, THREADS], "what to measure", choices=[FIRST, TEXT, THREADS])
    SHARED = (*PromptStudy.SHARED, "busy", "temperature", "chat")

    def run(self) -> None:
        os.environ["XDG_CACHE_HOME"] = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.stack.enter_context(busy(self.busy))
        super().run()

    def rows(self) -> Iterable[Row]:
        """The first token first: the process has made no decoder before."""
        if FIRST in self.parts:
            yield Row({"part": FIRST, "index": 0})
        if TEXT in self.parts:
            for index, prompt in enumerate(self.prompts):
                yield Row({"part": TEXT, "index": index}, prompt.text)
        if THREADS in self.parts:
            yield Row({"part": THREADS, "index": 0})

    def methods(self) -> Mapping[str, Method]:
        parts: dict[str, Method] = {FIRST: self.first_token, TEXT: self.against_plain, THREADS: self.by_threads}
        return {"": lambda row: parts[row.key["part"]](row)}

    def first_token(self, row: Row) -> Result:
        """Seconds of a first use, and of calls of `custom_generate` beyond their steps."""
        laps = _Laps()
        torch.set_num_threads(self.threads)
        loaded = load(self.model, self.dtype)
        load_s = laps.lap()
        runner_of(loaded.model)
        runner_s = laps.lap()
        decoder = lp.LookaheadDecoder(loaded.model)
        decoder_s = laps.lap()
        ids = loaded.tokenizer("def quicksort(a):")["input_ids"]
        decoder.generate(ids, 1)
        first_s = laps.lap()
        plain = lp.PlainDecoder(loaded.model)
        plain.generate(ids, 4)
        laps.lap()
        steps = plain.generate(ids, PLAIN_STEPS, eos_token_id=()).steps
        plain_s = laps.lap() / steps
        parts = {"load_s": load_s, "runner_s": runner_s, "decoder_s": decoder_s, "first_s": first_s}
        return parts | {"plain_s": plain_s, "beyond_s": [beyond_steps_s(loaded.model, ids) for _ in range(CALLS)]}

    @cached_property
    def decoders(self) -> dict[str, lp.Decoder]:
        """The default and plain decoding, warm: what a process does once is in the first part."""
        decoders: dict[str, lp.Decoder] = {
            "default": lp.LookaheadDecoder(self.loaded.model),
            "plain": lp.PlainDecoder(self.loaded.model),
        }
        for decoder in decoders.values():
            decoder.generate([1, 2, 3], 4)
        return decoders

    def against_plain(self, row: Row) -> Result:
        """The ratio of both decoders' seconds on a text, and the most plain steps that the default was behind."""
        order = sorted(self.decoders, reverse=bool(row.key["index"] % 2))
        decoders = {name: self.decoders[name] for name in order}
        curves = token_times(decoders, self.prompt_ids(row.item), self.max_new_tokens, sampling_at(self.temperature))
        default, plain = curves["default"], curves["plain"]
        step_s = plain[-1] / len(plain)
        behind = max((d - p) / step_s for d, p in zip(default, plain, strict=False))
        return {"ratio": plain[-1] / default[-1], "behind": behind}

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt: a message of the user with `chat`, else the last 512 tokens of the text."""
        if self.chat:
            return list(chat_tokens(self.loaded.tokenizer, [{"role": "user", "content": text}]))
        return self.ids(text)[-512:]

    def by_threads(self, row: Row) -> Result:
        """Seconds of a plain step by threads, median of rounds in turn."""
        os.environ.pop("OMP_NUM_THREADS", None)
        own = os.cpu_count() or 1
        torch.set_num_threads(own)
        line = settle_threads(self.loaded.model)
        taken = torch.get_num_threads()
        decoder = lp.PlainDecoder(self.loaded.model)
        seconds: dict[int, list[float]] = {1: [], own: []}
        for _ in range(5):
            for count, times in seconds.items():
                torch.set_num_threads(count)
                output = decoder.generate([1, 2, 3], 8, eos_token_id=())
                times.append(output.decode_s / output.steps)
        torch.set_num_threads(self.threads)
        return {"step_s": {str(count): median(times) for count, times in seconds.items()}, "taken": taken, "line": line}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        parts = grouped(results, "part")
        for first in parts.get(FIRST, []):
            step_s = first["plain_s"]
            names = {"load_s": "loading", "runner_s": "runner", "decoder_s": "decoder", "first_s": "first token"}
            heads = (*names.values(), f"{CALLS} calls of custom_generate beyond their steps")
            beyond = ", ".join(f"{each / step_s:.2f}" for each in first["beyond_s"])
            line = (*(f"{first[name] / step_s:.1f}" for name in names), beyond)
            yield Table(heads, [line], f"In plain steps of {1e3 * step_s:.1f} ms")
        if texts := parts.get(TEXT):
            ratios, behind = values(texts, "ratio"), values(texts, "behind")
            low, high = interval(ratios)
            ratio = f"{geometric_mean(ratios):.3f} [{low:.3f}, {high:.3f}]"
            heads = ("texts", "plain decoding's seconds over the default's", "behind, plain steps, median", "most")
            yield Table(heads, [(str(len(texts)), ratio, f"{median(behind):.1f}", f"{max(behind):.1f}")])
        for threads in parts.get(THREADS, []):
            times = [(count, f"{1e3 * step_s:.1f}") for count, step_s in threads["step_s"].items()]
            note = f"Taken: {threads['taken']}. {threads['line'] or ''}".rstrip()
            yield Table(("threads", "a plain step, ms"), times, note=note)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % of the ratios' geometric mean, by bootstrap: the ratios are drawn again many times."""
    drawn = random.Random(0)
    means = sorted(geometric_mean(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    return means[50], means[-51]


class _Laps:
    """A stopwatch of this thread: each `lap` gives its seconds since the one before, other programs' left out."""

    def __init__(self) -> None:
        self._last = time.thread_time()

    def lap(self) -> float:
        before, self._last = self._last, time.thread_time()
        return self._last - before


def beyond_steps_s(model: Any, ids: list[int]) -> float:
    """Seconds of a call of `custom_generate` less those of a plain decoder's that adds as many tokens."""
    laps = _Laps()
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, custom_generate=lp.generate)
    call_s = laps.lap()
    lp.PlainDecoder(model).generate(ids, tokens.shape[1] - len(ids))
    return call_s - laps.lap()


def token_times(
    decoders: dict[str, Any], ids: list[int], new: int, sampling: lp.SamplingParams | None = None
) -> dict[str, list[float]]:
    """Seconds of this thread until each new token of one prompt, by decoder.

    Their steps alternate: a machine's speed changes by more within a text than decoders differ.
    """
    with ExitStack() as stack:
        engines = {name: stack.enter_context(lp.Engine(decoder, 1)) for name, decoder in decoders.items()}
        handles = {name: engine.submit(ids, new, sampling, eos_token_id=()) for name, engine in engines.items()}
        spent_s = dict.fromkeys(engines, 0.0)
        times: dict[str, list[float]] = {name: [] for name in engines}
        while not all(handle.done for handle in handles.values()):
            for name, engine in engines.items():
                if handles[name].done:
                    continue
                start = time.thread_time()
                engine.step()
                spent_s[name] += time.thread_time() - start
                times[name] += [spent_s[name]] * (len(handles[name].tokens) - len(times[name]))
    return times
