"""`lp doctor [MODEL]`: list what works on this machine, and with a model on it, and why the rest does not.

    lp doctor                       # packages, devices, threads, folders
    lp doctor MODEL --dtype auto    # loads it too: attention, fused layers, captured steps, and what is refused

It prints one line for each finding; a check that fails prints a line with its error. The exit code is 1 where the model
cannot be decoded.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import lp
from lp.attention.registry import attention_choices
from lp.budget.step_times_cache import cache_folder
from lp.commands import app_command, in_clone, install_command
from lp.compile_cache import why_not_compiled
from lp.compiled import COMPILED
from lp.config import KVDtype
from lp.draft.pool.model_ngrams import FILE_NAME
from lp.models.kv_cache import slot_bytes
from lp.models.loader import Loaded, context_limit, load, model_source
from lp.models.runner import ModelRunner
from lp.optional import is_installed
from lp.waits import waiting

from .bench.machine import device_name, machine_now, remarks
from .running.weights_bar import tensors_counted

WHY_NOT_FUSED = "lp.models.fused"  # the logger
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "hydra-core")
# What is refused without these packages, by the extra that brings them.
EXTRAS = {
    "serve": (("fastapi", "uvicorn", "prometheus_client", "httpx"), f"{app_command('serve')}, {app_command('batch')}"),
    "images": (("PIL",), "images of prompts"),
    "grammar": (("llguidance",), "json_schema=, and grammars of a server's clients"),
    "watch": (("watchfiles",), f"{app_command('corpus')} watch"),
    "quantized": (("torchao",), "models whose weights torchao quantised"),
    "datasets": (("datasets",), "tasks that come from the hub"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lp doctor` to its parser."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a name on the hub, or demo")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto: as the checkpoint says (auto)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (a GPU if there is one)")
    parser.add_argument("--attention", default="auto", choices=attention_choices(), help="a backend (auto)")
    parser.add_argument("--capture", default="auto", choices=[str(each) for each in lp.Capture], help="(auto)")


def run(args: argparse.Namespace) -> None:
    """Print what works on this machine, and with a model on it if one is named, and why the rest does not.

    Args:
        args: the parsed options of `lp doctor`.

    Raises:
        SystemExit: exit code 1 where the model cannot be decoded.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for line in (*_each(*_MACHINE), *_each(lambda: _remarks(device))):
        print(line, flush=True)
    if args.model and not _examine(args, device):
        raise SystemExit(1)


def _each(*checks: Callable[[], Sequence[tuple[str, str]]]) -> Iterator[str]:
    """The lines that some checks print; a check that fails gives a line with its error instead."""
    for check in checks:
        try:
            yield from (f"{name:13}{text}" for name, text in check())
        except Exception as error:  # whatever is broken is what this program is asked for
            yield f"{'failed':13}{check.__name__.strip('_')}: {_of(error)}"


def _of(error: BaseException) -> str:
    """An error on one line: a user error's message alone, any other error's behind the name of its class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, lp.UserError) else f"{type(error).__name__}: {text}"


def _versions() -> list[tuple[str, str]]:
    where = f"a clone at {Path(lp.__file__).parent.parent}" if in_clone() else f"{Path(lp.__file__).parent}"
    found = [("lp", f"{lp.__version__}, {where}"), ("python", f"{platform.python_version()}, {sys.executable}")]
    for name in NEEDED:
        try:
            found.append((name, torch.__version__ if name == "torch" else version(name)))  # torch's names its CUDA
        except PackageNotFoundError:
            found.append((name, "not installed"))
    if not COMPILED:
        found.append(("compiled", f"no: {why_not_compiled()}; they run as Python, some 20 times slower"))
    return found


def _extras() -> list[tuple[str, str]]:
    found = []
    for extra, (packages, use) in EXTRAS.items():
        missing = [name for name in packages if not is_installed(name)]
        if missing:
            found.append(("refused", f"{use}: {', '.join(missing)} missing; {install_command(extra)}"))
    return found


def _devices() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU that it can use"
        return [("device", f"cpu, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}; no GPU: {built}")]
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = device_name(torch.device("cuda", index))
        found.append(("device", f"cuda:{index} {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"))
    return found


def _threads() -> list[tuple[str, str]]:
    chosen = os.environ.get("OMP_NUM_THREADS")
    why = f"OMP_NUM_THREADS={chosen}" if chosen else "torch's choice; OMP_NUM_THREADS sets it"
    return [("threads", f"{torch.get_num_threads()} ({why})")]


def _folders() -> list[tuple[str, str]]:
    cache = cache_folder().parent
    there = next(each for each in (cache, *cache.parents) if each.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    return [("cache", f"{cache}{'' if writable else ', which cannot be written: step times are found anew each time'}")]


def _remarks(device: str) -> list[tuple[str, str]]:
    return [("machine", line) for line in remarks([{"machine": machine_now(torch.device(device), 1)}])]


_MACHINE = (_versions, _devices, _threads, _folders, _extras)


def _examine(args: argparse.Namespace, device: str) -> bool:
    """Load a model, print what it can do here, and return whether it can be decoded."""
    said: list[str] = []
    try:
        with _heard(said):
            with waiting(f"loading {args.model}") as wait, tensors_counted(wait):
                loaded = load(args.model, args.dtype, device)
            for line in _each(lambda: _model(loaded), lambda: _tokenizer(loaded)):
                print(line, flush=True)
            decoder = lp.PlainDecoder(loaded.model, None, args.attention, args.capture)
    except Exception as error:
        for line in (*_notes(said), f"{'REFUSED':13}{_of(error)}"):
            print(line, flush=True)
        return False
    for line in (*_each(lambda: _runner(decoder)), *_notes(said), *_each(lambda: _ngrams(args.model))):
        print(line, flush=True)
    return True


@contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Within the block, warnings and log lines of lp go to the list instead of the terminal."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING or record.name == WHY_NOT_FUSED:
                said.append(record.getMessage())

    keeper, logger = Keeper(), logging.getLogger("lp")
    logger.addHandler(keeper)
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        said += [str(each.message) for each in found if each.category is UserWarning]


def _notes(said: Sequence[str]) -> list[str]:
    return [f"{'note':13}{' '.join(text.split())}" for text in said]


def _model(loaded: Loaded) -> list[tuple[str, str]]:
    model = loaded.model
    dtype = str(model.dtype).removeprefix("torch.")
    size = f"{model.num_parameters() / 1e6:.1f} M parameters"
    limit = context_limit(model)
    context = f"a context of {limit} tokens" if limit else "no limit of its context"
    return [("model", f"{type(model).__name__}, {size}, {dtype}, on {device_name(model.device)}, {context}")]


def _tokenizer(loaded: Loaded) -> list[tuple[str, str]]:
    chats = "a chat template" if loaded.tokenizer.chat_template else "no chat template: chats are continued as one text"
    return [("tokenizer", f"{len(loaded.tokenizer)} tokens, {chats}")]


def _runner(decoder: lp.PlainDecoder) -> list[tuple[str, str]]:
    runner = decoder.runner
    not_captured = "no" if runner.device.type == "cuda" else "no: the device is no GPU"
    found = [
        ("attention", runner.attention),
        ("layers", "fused" if runner.fused else "transformers' own, not fused"),
        ("capture", str(runner.captured.mode) if runner.captured else not_captured),
        ("exact", "yes" if runner.exact else "NO: activations are quantised, so tokens may differ"),
    ]
    found.append(("memory", f"{_size(runner.model.get_memory_footprint())} of weights; {_kv_cache(runner)}"))
    if not runner.takes_forests:
        found.append(("refused", "steps of several texts at once, which this model's layers keep no states for"))
    return found


def _kv_cache(runner: ModelRunner) -> str:
    if not (kinds := runner.known_kinds):
        return "no keys and values"
    smaller = {replace(kind, kv_dtype=KVDtype.INT8): count for kind, count in kinds.items()}
    each, less = (_size(1000 * slot_bytes(of)) for of in (kinds, smaller))
    return f"keys and values of 1,000 tokens: {each}, {less} with kv_dtype=int8"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _ngrams(name: str) -> list[tuple[str, str]]:
    folder = Path(model_source(name).place)  # or a name on the hub
    if (folder / FILE_NAME).is_file():
        return [("n-grams", str(folder / FILE_NAME))]
    remedy = f"{app_command('ngrams')} {shlex.quote(name)}"
    if not folder.is_dir():
        remedy += f" --output {FILE_NAME}, then pool.model_ngrams={FILE_NAME}"
    return [("n-grams", f"none beside the model; {remedy}")]
