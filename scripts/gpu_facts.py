"""What a GPU does for a decode step, one JSON line a fact: memory, products, small kernels, attention, whole steps.

    python scripts/gpu_facts.py                      # on a GPU, all sections, some four minutes
    python scripts/gpu_facts.py products same_bits   # some of them
    python scripts/gpu_facts.py --dry-run            # on a CPU with tiny sizes, to see that it goes all the way

A fact has `section`, `name`, `value`, `unit`, and what else belongs to it. Times are of CUDA graphs: the host has no
part in them. Each section is a process of its own: one that fails, hangs or leaves the device unusable takes no other
with it. Its line then has `failed`, and the exit code is 1. docs/guide/gpu.md says what the figures mean.

LP_REAL_MODEL=FOLDER: section `texts` takes the model in that folder instead of the demo model.

T: step tokens, L: cached tokens, H: query heads, G: KV heads, D: head dimension, C: cache slots, N: keys, L + T,
E: hidden size, F: intermediate size, V: vocabulary size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
from transformers import PreTrainedModel

import lp
from launch.bench.ceilings import Call, Work, alternated
from launch.bench.machine import device_name
from launch.bench.passes import Passes
from launch.data.prompts import load_builtin
from launch.data.shapes import build_shape, shape_config
from lp.attention.merging import masked_attention
from lp.attention.registry import AUTO
from lp.config import Capture, Exact
from lp.models.bitwise import runner_for
from lp.models.graph_recorder import GraphRecorder
from lp.models.kv_cache import StatesKind
from lp.models.new_cache import new_cache
from lp.models.runner import ModelRunner
from lp.optional import is_installed
from lp.sampling.top_logits import pack_top_logits

MODEL = "codellama_7b"
SECTION_S = 240  # the most that a section may take
MOST_PROCESSES = 12  # that compile at once; each holds half a GB of the device
BEYOND_CACHES = 1 << 29  # bytes of different weights that are read before the first ones come again
COPIES_GIB = (0.25, 1, 4)
ROWS = (1, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 16, 64, 128)  # rows of the products whose bits are compared
STEP_SIZES = (1, 16, 64, 200)
PREFIX = 1024
STEP_TOKENS = 64  # of the small kernels, and of the step whose kernels are listed
LONGEST = 30
MODE_SIZES = (1, 64)  # of the steps of both modes
MODE_CONFIG = lp.LookaheadConfig(window_size=7, ngram_size=5, guess_set_size=7)
MODE_TOKENS = 48  # of the texts whose logits are compared
TEXT_TOKENS = 96  # of the texts of a model, which is the demo model or that of LP_REAL_MODEL
TOGETHER = (1, 4, 8)  # texts in an engine
WARM_UPS = 12  # texts before those that count: sizes that come often are captured meanwhile
MOVES = (64, 8)
TOP_K = (4, 16)
ATTENTION_SHAPES = {"7b": (32, 32), "8b": (32, 8), "34b": (64, 8)}  # H and G, of D = 128
ATTENTION_STEPS = ((1, 1024), (64, 1024), (64, 4096), (200, 1024))  # T and L
TILES: dict[str, dict[str, int]] = {
    "as chosen": {},
    "2 stages": {"num_stages": 2},
    "8 warps": {"num_warps": 8},
    "64 keys, 2 stages": {"BN": 64, "num_stages": 2},
    "64 keys, 3 stages": {"BN": 64, "num_stages": 3},
    "32 rows, 64 keys": {"BM": 32, "BN": 64},
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where facts are measured, and at which size.

    Args:
        device: a GPU; the CPU in a dry run.
        dtype: type of weights and activations.
        scale: lengths and widths are divided by it.
        rounds: how often everything is measured; the median counts.
        repeats: how often a short call is made within one measurement.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    scale: int = 1
    rounds: int = 7
    repeats: int = 20

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def drawn(self, *shape: int) -> torch.Tensor:
        """A tensor of normal random numbers on the device, in the place's dtype, as an operation's input."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def scaled(self, length: int) -> int:
        return max(length // self.scale, 1)

    def config(self) -> Any:
        """The config of the model whose sizes are measured; in a dry run a small one of two layers."""
        return shape_config(MODEL, None if self.is_gpu else 2, self.scale)

    def seconds(self, calls: Sequence[Call]) -> float:
        """Seconds each call takes on the device, one behind the other: recorded as one graph, and replayed."""

        def work() -> None:
            for call in calls:
                call()

        recorded = GraphRecorder(self.device, self.is_gpu).record(work)
        return self.timed(recorded) / len(calls)

    def timed(self, call: Call) -> float:
        """Median seconds of a call."""
        return alternated({"call": call}, self.rounds, self.device)["call"]


def say(section: str, name: str, value: float | None, unit: str, **more: object) -> None:
    """A fact, as a line of JSON."""
    print(json.dumps({"section": section, "name": name, "value": value, "unit": unit, **more}), flush=True)


def device(place: Place) -> None:
    """What the machine is."""
    more: dict[str, object] = {"torch": torch.__version__, "transformers": version("transformers")}
    if is_installed("triton"):
        more["triton"] = version("triton")
    multiprocessors = None
    if place.is_gpu:
        properties = torch.cuda.get_device_properties(place.device)
        multiprocessors = properties.multi_processor_count
        more |= {"memory_gib": properties.total_memory / 2**30, "l2_mib": properties.L2_cache_size / 2**20}
        more |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
    if place.is_gpu and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
        more["driver, power limit, clock"] = found[0] if found else None
    say("device", device_name(place.device), multiprocessors, "SMs", **more)


def memory(place: Place) -> None:
    """How fast tensors are copied, read and written, by size; a GB counts 10^9 bytes, read and written ones."""
    for gib in COPIES_GIB:
        source = torch.randn(int(gib * 2**28) // place.scale**2, device=place.device)
        target = torch.empty_like(source)
        # torch copies by the driver's copy; a kernel of its own may be faster, or slower
        calls: dict[str, tuple[int, Call]] = {
            "copy": (2, partial(target.copy_, source)),
            "negate": (2, partial(torch.neg, source, out=target)),
            "read": (1, partial(torch.sum, source)),
            "write": (1, target.zero_),
        }
        for name, (passes, call) in calls.items():
            took = place.seconds([call])
            say("memory", f"{name}, {gib:g} GiB", passes * source.nbytes / took / 1e9, "GB/s", us=took * 1e6)


def weights_of(config: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products of a layer, and of the LM head."""
    hidden = config.hidden_size
    dim = hidden // config.num_attention_heads
    return {
        "qkv": ((config.num_attention_heads + 2 * config.num_key_value_heads) * dim, hidden),
        "o": (hidden, hidden),
        "gate and up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "LM head": (config.vocab_size, hidden),
    }


def products(place: Place) -> None:
    """How fast the weights of a layer stream through products of few rows."""
    for name, (outputs, inputs) in weights_of(place.config()).items():
        weight_bytes = outputs * inputs * place.dtype.itemsize
        count = max(2, BEYOND_CACHES // place.scale**2 // weight_bytes)
        matrices = [place.drawn(outputs, inputs).t() for _ in range(count)]
        for rows in ROWS:
            x = place.drawn(rows, inputs)
            took = place.seconds([partial(torch.mm, x, matrix) for matrix in matrices])
            say("products", f"{name}, {rows} rows", weight_bytes / took / 1e9, "GB/s", us=took * 1e6)


def same_bits(place: Place) -> None:
    """Whether a row of a product depends on the other rows, on its place among them, or on how many there are."""
    for name, (outputs, inputs) in weights_of(place.config()).items():
        matrix = place.drawn(outputs, inputs).t() / inputs**0.5
        x = place.drawn(max(WIDTHS), inputs)
        residual = place.drawn(max(WIDTHS), outputs)
        by_width = {rows: torch.mm(x[:rows], matrix) for rows in WIDTHS}
        for rows in (rows for rows in WIDTHS if rows > 1):
            order = torch.randperm(rows, device=place.device)
            place_of_row = rows // 3
            alone = torch.zeros_like(x[:rows])
            alone[place_of_row] = x[0]
            company = place.drawn(rows, inputs)
            company[0] = x[0]
            added = torch.addmm(residual[:rows], x[:rows], matrix)
            row = by_width[rows][0]
            found = {
                "permuted": (torch.mm(x[:rows][order], matrix), by_width[rows][order]),
                "alone among zeros": (torch.mm(alone, matrix)[place_of_row], row),
                "in other company": (torch.mm(company, matrix)[0], row),
                "added to others, permuted": (
                    torch.addmm(residual[:rows][order], x[:rows][order], matrix), added[order],
                ),
            }  # fmt: skip
            for case, (one, other) in found.items():
                say("same_bits", f"{name}, {rows} rows, {case}", _share_same(one, other), "of the numbers")
        for few, many in itertools.combinations(WIDTHS, 2):
            share = _share_same(by_width[few], by_width[many][:few])
            say("same_bits", f"{name}, {few} rows and {many}", share, "of the numbers")


def _share_same(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one == other).double().mean().item()


def small_kernels(place: Place) -> None:
    """What a step does beside products and attention: what fused layers call, a commit's moves, the top logits."""
    config = place.config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    dim = hidden // heads
    capacity = place.scaled(1536)
    x_TE, norm_E = place.drawn(STEP_TOKENS, hidden), place.drawn(hidden)
    rotated = place.drawn(STEP_TOKENS, 2 * heads, dim)
    cos = place.drawn(STEP_TOKENS, 1, dim)
    gate_TF = place.drawn(STEP_TOKENS, config.intermediate_size)
    up_TF = torch.zeros_like(gate_TF)
    keys_1GCD = place.drawn(1, heads, capacity, dim)
    new_1GTD = place.drawn(1, heads, STEP_TOKENS, dim)
    slots_T = torch.arange(STEP_TOKENS, device=place.device) % capacity
    calls: dict[str, Call] = {
        "norm": lambda: torch.rms_norm(x_TE, (hidden,), None, 1e-5),
        "times the norm's weight": lambda: x_TE * norm_E,
        "rope: roll": lambda: rotated.roll(dim // 2, -1),
        "rope: times cos": lambda: rotated * cos,
        "rope: plus times sin": lambda: torch.addcmul(rotated, rotated, cos),
        "write keys": lambda: keys_1GCD.index_copy_(2, slots_T, new_1GTD),
        "silu": lambda: torch.nn.functional.silu(gate_TF),
        "times up": lambda: gate_TF.mul_(up_TF),
    }
    logits_TV = place.drawn(STEP_TOKENS, config.vocab_size)
    for k in TOP_K:
        calls[f"top {k}"] = lambda k=k: logits_TV.float().topk(k)  # type: ignore[misc]
    calls[f"top {TOP_K[0]}, packed"] = lambda: pack_top_logits(logits_TV, TOP_K[0])
    calls["argmax"] = lambda: logits_TV.argmax(-1)
    kind = StatesKind(heads=config.num_key_value_heads, dim=dim, dtype=place.dtype, device=place.device)
    layers = config.num_hidden_layers
    cache = new_cache(layers, capacity, zeroed=True, deferred=True, known={kind: 2 * layers})
    cache.allocate()
    for count in MOVES:
        slots_M = torch.full((count,), capacity - 1, device=place.device)
        calls[f"move {count} slots of {layers} layers"] = partial(cache.move, slots_M, slots_M)
    for name, call in calls.items():
        say("small_kernels", name, place.seconds([call] * place.repeats) * 1e6, "us")


@dataclass(frozen=True)
class AttentionCase:
    """A launch of the tree kernel, which is timed and compared with plain products.

    Args:
        shape: name of the model that has these heads, for the line of the fact.
        heads, kv_heads, dim: H, G and D.
        num_tokens, length: T and L.
        tiles: a key of TILES, the sizes of the kernel's blocks.
    """

    shape: str
    heads: int
    kv_heads: int
    dim: int
    num_tokens: int
    length: int
    tiles: str

    @property
    def name(self) -> str:
        return f"{self.shape}, T={self.num_tokens}, L={self.length}, {self.tiles}"

    def inputs(self, place: Place) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the whole cache, the mask of a chain, and the slots of the step's tokens."""
        capacity = self.length + 512 // place.scale
        q = place.drawn(1, self.heads, self.num_tokens, self.dim)
        k, v = (place.drawn(1, self.kv_heads, capacity, self.dim) for _ in range(2))
        visible = torch.ones(self.num_tokens, self.num_tokens, device=place.device).tril().bool()
        mask = torch.zeros_like(visible, dtype=place.dtype).masked_fill(~visible, torch.finfo(place.dtype).min)
        slots = torch.arange(self.length, self.length + self.num_tokens, device=place.device)
        return q, k, v, mask, slots

    def launch(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The kernel's output, (1, H, T, D), with these tiles."""
        from lp.attention import tree_kernel  # here: it needs Triton, and a dry run interprets it

        def block_sizes(*args: int) -> dict[str, int]:
            return {**chosen(*args), **TILES[self.tiles]}

        chosen = tree_kernel.block_sizes
        with patch.object(tree_kernel, "block_sizes", block_sizes):
            q, k, v, mask, slots = inputs
            return tree_kernel.launch_tree_attention(q, k, v, mask, slots, self.dim**-0.5)

    def error(self, inputs: Sequence[torch.Tensor]) -> float:
        """The largest error of a token's output, relative to its norm, against plain products in float32."""
        q, k, v, mask, _ = inputs
        end = self.length + self.num_tokens
        whole = torch.nn.functional.pad(mask[None, None], (self.length, 0)).float()
        expected = masked_attention(q.float(), k[:, :, :end].float(), v[:, :, :end].float(), whole, None)[0]
        difference = (self.launch(inputs).float() - expected).norm(dim=-1)
        return float((difference / expected.norm(dim=-1)).max())

    def measure(self, place: Place) -> None:
        inputs = self.inputs(place)
        error = self.error(inputs)
        took = place.seconds([partial(self.launch, inputs)] * place.repeats)
        read = 2 * self.kv_heads * (self.length + self.num_tokens) * self.dim * place.dtype.itemsize
        say("attention", self.name, took * 1e6, "us", error=error, gb_per_s=read / took / 1e9)


def attention_cases(place: Place) -> list[AttentionCase]:
    """The launches to measure: all of them on a GPU, few and small ones for the interpreter of a dry run."""
    found = [
        AttentionCase(shape, heads, kv_heads, 128, num_tokens, length, tiles)
        for shape, (heads, kv_heads) in ATTENTION_SHAPES.items()
        for num_tokens, length in ATTENTION_STEPS
        for tiles in TILES
    ]
    if place.is_gpu:
        return found
    small = [replace(case, heads=case.heads // case.kv_heads, kv_heads=1, dim=16) for case in found[: len(TILES)]]
    return [replace(case, length=place.scaled(case.length)) for case in small[:2]]


def attention(place: Place) -> None:
    """The tree kernel's error and time, by shape and by the size of its tiles."""
    if not is_installed("triton"):
        say("attention", "tree kernel", None, "us", note="Triton is not installed")
        return
    cases = attention_cases(place)
    # Compiling takes longer than all else, and what one process has compiled is on the disk for the others. They come
    # before this one has touched the device, which a forked process could not use then.
    number = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(cases))
    started = time.perf_counter()
    shares = [forked(partial(compile_all, place, cases[start::number])) for start in range(number)]
    for share in shares:
        share.join()
    say("attention", f"compiled by {number} processes", time.perf_counter() - started, "s", kernels=len(cases))
    for case in cases:
        try:
            case.measure(place)
        except Exception as error:  # tiles that this device has no shared memory for
            say("attention", case.name, None, "us", refused=summary(error))


def compile_all(place: Place, cases: Sequence[AttentionCase]) -> None:
    """Compile the kernels of these launches, so that other processes find them in Triton's cache."""
    for case in cases:
        with contextlib.suppress(Exception):  # said when the case is measured
            case.launch(case.inputs(place))


def step(place: Place) -> None:
    """t(T) of the whole model behind a prefix, as its graph alone takes, and the kernels that take longest."""
    model = build_shape(place.config(), str(place.dtype).removeprefix("torch."), place.device)
    started = time.perf_counter()
    runner = ModelRunner(model)
    with torch.inference_mode():  # not before: fused layers follow their weights, and inference tensors have no version
        _measure_steps(place, model, runner, started)


def _measure_steps(place: Place, model: PreTrainedModel, runner: ModelRunner, started: float) -> None:
    prefix = [7 * at % 1000 for at in range(place.scaled(PREFIX))]
    passes = Passes(runner, prefix, max(STEP_SIZES), 512)
    mode = str(runner.captured.mode) if runner.captured else "off"
    more = {"attention": runner.attention, "fused": runner.fused, "capture": mode}
    say("step", "runner, probe and prefill", time.perf_counter() - started, "s", **more)
    weights = Work.of(model).weight_bytes
    calls = {}
    for size in STEP_SIZES:
        call = passes.chain(size)
        started = time.perf_counter()
        call()  # a captured step keeps these inputs, and may run again and again
        first_s = time.perf_counter() - started
        calls[size] = runner.captured.step_of(size).run if runner.captured else call
        took = place.timed(_repeated(calls[size], place.repeats)) / place.repeats
        say("step", f"t({size})", took * 1e3, "ms", weights_gb_per_s=weights / took / 1e9, first_s=first_s)
    for name, us, count in longest_kernels(calls[STEP_TOKENS], place):
        say("step", f"in t({STEP_TOKENS}): {name}", us, "us", calls=count)


def bitwise(place: Place) -> None:
    """The mode exact=bitwise: its widths, whether lookahead's logits are plain decoding's, and t(T) beside `tokens`."""
    model = build_shape(place.config(), str(place.dtype).removeprefix("torch."), place.device)
    started = time.perf_counter()
    plain = lp.PlainDecoder(model, exact="bitwise")
    took, runner = time.perf_counter() - started, plain.runner
    mode = str(runner.captured.mode) if runner.captured else "off"
    more = {"widths": list(runner.widths), "attention": runner.attention, "capture": mode}
    say("bitwise", "runner, probe and widths", took, "s", **more)
    prefix = [7 * at % 1000 for at in range(place.scaled(PREFIX))]
    for exact in (Exact.TOKENS, Exact.BITWISE):
        passes = _passes_of(runner_for(model, AUTO, Capture.AUTO, exact), prefix)
        with torch.inference_mode():
            for size in MODE_SIZES:
                call = passes.chain(size)
                call()
                captured = passes.runner.captured
                call = captured.step_of(size).run if captured else call
                took = place.timed(_repeated(call, place.repeats)) / place.repeats
                say("bitwise", f"t({size}), {exact}", took * 1e3, "ms")
    expected, *others = (
        decoder.generate(prefix, MODE_TOKENS, eos_token_id=(), output_logits=True)
        for decoder in (
            plain,
            lp.PlainDecoder(model, capture="off", exact="bitwise"),
            lp.LookaheadDecoder(model, MODE_CONFIG, capture="off", exact="bitwise"),
            lp.LookaheadDecoder(model, MODE_CONFIG, exact="bitwise"),
        )
    )
    for name, found in zip(("plain, uncaptured", "lookahead, uncaptured", "lookahead"), others, strict=True):
        assert found.logits is not None and expected.logits is not None
        share = _share_same(found.logits, expected.logits)
        say("bitwise", f"logits of {name}", share, "of plain decoding's numbers", steps=found.steps)
        assert share == 1, f"{name}: logits are not plain decoding's bit for bit"


def texts(place: Place) -> None:
    """Tokens a second of whole texts, alone and together, and what a text takes beside its steps."""
    folder = os.environ.get("LP_REAL_MODEL", "demo")
    model, tokenizer = lp.load(folder, place.dtype, place.device)
    together, warm_ups = (TOGETHER, WARM_UPS) if place.is_gpu else (TOGETHER[:1], 1)
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in load_builtin(max(together))]
    new = max(TEXT_TOKENS // place.scale, 4)
    decoders = {
        "plain": lp.PlainDecoder(model),
        "W7 N5 G7": lp.LookaheadDecoder(model, MODE_CONFIG),
        "adaptive": lp.LookaheadDecoder(model),
    }
    for name, decoder in decoders.items():
        for _ in range(warm_ups):
            decoder.generate(prompts[0], new, eos_token_id=())
        started = time.perf_counter()
        outputs = [decoder.generate(ids, new, eos_token_id=()) for ids in prompts]
        took = time.perf_counter() - started
        steps = [each for output in outputs for each in output.step_stats]
        beside = took - sum(each.forward_s + each.exchange_s + each.host_s for each in steps)
        more = {"tokens_per_s": new * len(prompts) / took, "steps": len(steps), "model": Path(folder).name}
        say("texts", f"{name}: a text beside its steps", beside / len(prompts) * 1e3, "ms", **more)
        with lp.Engine(decoder, max(together), max(together) * 4 * (new + max(map(len, prompts)))) as engine:
            for count in together:
                rates = [_tokens_per_s(engine, prompts[:count], new) for _ in range(min(warm_ups, 4))]
                say("texts", f"{name}: {count} together", rates[-1], "tokens/s", first=rates[0])


def _tokens_per_s(engine: lp.Engine, prompts: Sequence[list[int]], new: int) -> float:
    started = time.perf_counter()
    handles = [engine.submit(ids, new, eos_token_id=()) for ids in prompts]
    engine.run()
    return sum(len(handle.result().tokens) for handle in handles) / (time.perf_counter() - started)


def _passes_of(runner: ModelRunner, prefix: list[int]) -> Passes:
    with torch.inference_mode():
        return Passes(runner, prefix, max(*MODE_SIZES, runner.most_padding + 1), 512)


def _repeated(call: Call, times: int) -> Call:
    """One call that makes several, so that the first one's launch does not count in the mean."""

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def longest_kernels(call: Call, place: Place) -> list[tuple[str, float, int]]:
    """The kernels (on a CPU operators) that took longest: name, microseconds of all launches, number of launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if place.is_gpu else ProfilerActivity.CPU]) as profiler:
        call()
        if place.is_gpu:
            torch.cuda.synchronize(place.device)
    events = profiler.key_averages()
    times = [(each.self_device_time_total if place.is_gpu else each.self_cpu_time_total, each) for each in events]
    times.sort(key=lambda pair: -pair[0])
    return [(each.key[:90], us, each.count) for us, each in times[:LONGEST]]


SECTIONS: Mapping[str, Callable[[Place], None]] = {
    section.__name__: section
    for section in (device, memory, products, same_bits, small_kernels, attention, step, bitwise, texts)
}


def summary(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def forked(work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    """Start `work` in a process that has all modules imported, and a device of its own."""
    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def run_section(name: str, place: Place) -> None:
    """Measure one section in its own process; a failure becomes a fact with `failed`, and exit code 1."""
    started = time.perf_counter()
    try:
        SECTIONS[name](place)
    except Exception as error:
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else None
        say(name, "section", None, "", failed=summary(error), at=where)
        sys.exit(1)
    say(name, "took", time.perf_counter() - started, "s")


def finishes(name: str, place: Place) -> bool:
    """Run a section; whether it came to its end."""
    process = forked(partial(run_section, name, place))
    try:
        process.join(SECTION_S)
        if process.exitcode is None:
            say(name, "section", None, "", failed=f"it had not ended after {SECTION_S} s")
        elif process.exitcode not in (0, 1):
            say(name, "section", None, "", failed=f"its process ended with {process.exitcode}")
        return process.exitcode == 0
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all without one")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU with tiny sizes")
    args = parser.parse_args()
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; the sections are {', '.join(SECTIONS)}")
    place = Place(device=torch.device("cuda"))
    if args.dry_run:
        torch.set_num_threads(1)
        place = Place(device=torch.device("cpu"), dtype=torch.float32, scale=32, rounds=1, repeats=1)
    finished = [finishes(name, place) for name in args.sections or SECTIONS]
    sys.exit(not all(finished))


if __name__ == "__main__":
    main()
