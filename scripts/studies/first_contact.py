"""What a first use costs before its first token, and beside plain decoding, on busy cores: docs/experiments/budget.md.

NUMBA_CACHE_DIR=$(mktemp -d) python scripts/tables.py first_contact --model FOLDER --busy 1

1. With empty cache folders, numba's among them: this thread's seconds for loading, for a runner (fusing and the probe),
   for a decoder, and from there to the first token, in plain steps of the same process; and what ten calls of
   `custom_generate` take beyond their steps.
2. The default and plain decoding of each prompt, step by step in turn: the ratio of their seconds with its interval of
   95 %, and the most that a text was ever behind.
3. A plain step's seconds by the wall with one thread and with a core each, and the number that an app takes.

Seconds are this thread's own but for 3: other programs do not lengthen them by taking its core away.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import geometric_mean, median
from typing import Any

import torch

import lp
from launch.running.threads import settle_threads
from lp.models.runner import runner_of

from ._common import add_model_arguments, add_prompt_arguments, load_model, load_prompts

SPIN = "import time\nwhile True: sum(range(10**5))"
CALLS = 10
PLAIN_STEPS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=20, max_new_tokens=64)
    parser.add_argument("--busy", type=int, default=1, help="programs that run beside it, a core each")


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, busy(args.busy):
        os.environ["XDG_CACHE_HOME"] = folder
        found = first_token(args) | against_plain(args) | by_threads(args)
    print(json.dumps({"model": args.model, "dtype": args.dtype, "busy": args.busy} | found))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many other programs run meanwhile."""
    programs = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()


class _Laps:
    """This thread's seconds between calls."""

    def __init__(self) -> None:
        self._last = time.thread_time()

    def lap(self) -> float:
        before, self._last = self._last, time.thread_time()
        return self._last - before


def first_token(args: argparse.Namespace) -> dict[str, Any]:
    """Part 1; the process has made no decoder before."""
    laps = _Laps()
    loaded = load_model(args)
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
    beyond = [beyond_steps_s(loaded.model, ids) for _ in range(CALLS)]
    print(
        f"{args.model}, {args.dtype}, {args.threads} thread(s), {args.busy} busy: "
        f"in plain steps of {1e3 * plain_s:.1f} ms: loading {load_s / plain_s:.1f}, "
        f"runner {runner_s / plain_s:.1f}, decoder {decoder_s / plain_s:.1f}, "
        f"first token {first_s / plain_s:.1f}; {CALLS} calls of custom_generate beyond their steps: "
        f"{', '.join(f'{each / plain_s:.2f}' for each in beyond)}"
    )
    parts = {"load_s": load_s, "runner_s": runner_s, "decoder_s": decoder_s, "first_s": first_s, "plain_s": plain_s}
    return {**parts, "beyond_s": beyond}


def beyond_steps_s(model: Any, ids: list[int]) -> float:
    """Seconds of a call of `custom_generate` less those of a plain decoder's that adds as many tokens."""
    laps = _Laps()
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, custom_generate=lp.generate)
    call_s = laps.lap()
    lp.PlainDecoder(model).generate(ids, tokens.shape[1] - len(ids))
    return call_s - laps.lap()


def against_plain(args: argparse.Namespace) -> dict[str, Any]:
    """Part 2."""
    loaded = load_model(args)
    decoders = {"default": lp.LookaheadDecoder(loaded.model), "plain": lp.PlainDecoder(loaded.model)}
    for decoder in decoders.values():  # what a process does once is in part 1
        decoder.generate([1, 2, 3], 4)
    ratios, behind = [], []
    for index, prompt in enumerate(load_prompts(args)):
        ids = loaded.tokenizer(prompt.text)["input_ids"][-512:]
        order = sorted(decoders, reverse=bool(index % 2))
        curves = token_times({name: decoders[name] for name in order}, ids, args.max_new_tokens)
        default, plain = curves["default"], curves["plain"]
        ratios.append(plain[-1] / default[-1])
        step_s = plain[-1] / len(plain)
        behind.append(max((d - p) / step_s for d, p in zip(default, plain, strict=False)))
    drawn = random.Random(0)
    means = sorted(geometric_mean(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = means[50], means[-51]
    print(
        f"plain decoding's seconds over the default's, {len(ratios)} texts: {geometric_mean(ratios):.3f} "
        f"[{low:.3f}, {high:.3f}]; the most that a text was behind, in plain steps: median {median(behind):.1f}, "
        f"most {max(behind):.1f}"
    )
    return {"ratios": ratios, "interval": [low, high], "behind": behind}


def token_times(decoders: dict[str, Any], ids: list[int], new: int) -> dict[str, list[float]]:
    """Seconds of this thread until each new token of one prompt, by decoder.

    Their steps alternate: a machine's speed changes by more within a text than decoders differ.
    """
    with ExitStack() as stack:
        engines = {name: stack.enter_context(lp.Engine(decoder, 1)) for name, decoder in decoders.items()}
        handles = {name: engine.submit(ids, new, eos_token_id=()) for name, engine in engines.items()}
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


def by_threads(args: argparse.Namespace) -> dict[str, Any]:
    """Part 3: seconds of a plain step, median of rounds in turn."""
    os.environ.pop("OMP_NUM_THREADS", None)
    own = os.cpu_count() or 1
    loaded = load_model(args)
    torch.set_num_threads(own)
    line = settle_threads(loaded.model)
    taken = torch.get_num_threads()
    decoder = lp.PlainDecoder(loaded.model)
    seconds: dict[int, list[float]] = {1: [], own: []}
    for _ in range(5):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            output = decoder.generate([1, 2, 3], 8, eos_token_id=())
            times.append(output.decode_s / output.steps)
    steps = {count: median(times) for count, times in seconds.items()}
    torch.set_num_threads(args.threads)
    by_number = ", ".join(f"{count}: {1e3 * step_s:.1f}" for count, step_s in steps.items())
    print(f"a plain step by threads, ms: {by_number}; taken {taken}. {line}")
    return {"step_s_by_threads": steps, "threads_taken": taken}
