"""The methods that a benchmark compares, by name: decoders of ours, also alone on rank 0, and baselines."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import lp
from lp.config import KVDtype
from lp.errors import UserError

from ..config.builders import ALONE, METHODS, ORACLE, PLAIN, decoder_names, draft_configs
from ..config.schema import BenchmarkConfig
from ..data.prompts import Prompt
from .baselines import BASELINES, BaselineOptions
from .pass_at_1 import check_limits, check_prompts


def bare_name(name: str) -> str:
    """A method's name without the ending by which it runs on rank 0 alone."""
    return name.removesuffix(ALONE)


def own_names(methods: Iterable[str]) -> list[str]:
    """The decoders of ours among the methods."""
    return [bare_name(name) for name in methods if bare_name(name) in decoder_names()]


def shares_steps(name: str) -> bool:
    """Whether all ranks share a method's steps."""
    if name.endswith(ALONE) or name in (PLAIN, ORACLE):
        return False
    return BASELINES[name].all_ranks if name in BASELINES else True


def baseline_options(config: BenchmarkConfig) -> BaselineOptions:
    """What a config says of baselines: their files, and whether texts are greedy."""
    return BaselineOptions(draft=config.draft, gguf=config.gguf, greedy=config.sampling.name == "greedy")


def missing_methods(config: BenchmarkConfig, methods: Iterable[str]) -> dict[str, str]:
    """What baselines among the methods lack here: a package, GPUs, an option; each with its remedy."""
    options = baseline_options(config)
    found = {name: BASELINES[name].missing(options) for name in methods if name in BASELINES}
    return {name: lacking for name, lacking in found.items() if lacking}


def check_divisible(config: BenchmarkConfig, methods: list[str]) -> None:
    """Refuse what needs the whole model on one rank where ranks hold parts of it.

    Raises:
        ValueError: names it.
    """
    if config.parallel.tp == 1:
        return
    whole = [name for name in methods if name in BASELINES]
    if whole or config.quality:
        what = f"method {whole[0]!r}" if whole else "quality=true"
        raise UserError(
            f"{what} needs the whole model on a rank, and parallel.tp is {config.parallel.tp}; leave it out"
        )


def check_kv_dtype(config: BenchmarkConfig, methods: Iterable[str]) -> None:
    """Refuse methods whose caches would hold something else than those that they are compared with.

    Raises:
        ValueError: names the first of them.
    """
    others = [name for name in methods if name in BASELINES]
    if config.model.kv_dtype != KVDtype.AUTO and others:
        raise UserError(
            f"method {others[0]!r} has no cache of model.kv_dtype={config.model.kv_dtype}; leave it out, or take "
            "model.kv_dtype=auto"
        )


def check_sessions(config: BenchmarkConfig, methods: Iterable[str]) -> None:
    """Refuse a pool that has a text before its method is measured on it.

    Raises:
        ValueError: names the setting.
    """
    own = draft_configs(config, map(bare_name, methods))
    keeping = [
        name for name in methods if isinstance(each := own.get(bare_name(name)), lp.LookaheadConfig) and each.remembers
    ]
    if config.repeats > 1 and keeping:
        kept = "pool.scope=session" if config.pool.history is None else "pool.history"
        without = "pool.scope=request" if config.pool.history is None else "pool.history=null"
        raise UserError(
            f"repeats is {config.repeats} with {kept}, which has the text from the first one on; "
            f"take repeats=1, or {without}"
        )
    files = {"file": config.pool.file, "history": config.pool.history}
    for key, file in files.items():
        if file is not None and len(keeping) > 1:
            raise UserError(
                f"pool.{key} is {file!r} for {' and '.join(keeping)}, each of which would begin with what the "
                f"other wrote; name one of them in methods, or take pool.{key}=null"
            )


def check_pass_at_1(config: BenchmarkConfig, prompts: list[Prompt]) -> None:
    """Refuse prompts whose texts cannot be judged, and machines that cannot run a program within limits.

    Raises:
        ValueError: names what is missing.
    """
    task = config.task
    given = config.prompt is not None or config.prompt_file is not None
    where = "the prompt that was given" if given else str(task.path or task.hub)
    check_prompts(task.check, task.name, where, prompts)
    if task.check != "number" and not check_limits():
        print("no Landlock here: programs that the model writes may write where you may", file=sys.stderr)


def methods_of(config: BenchmarkConfig) -> list[str]:
    """The methods of the config, or the decoder with plain decoding and prompt lookup beside it.

    Raises:
        ValueError: one that does not exist, or twice the same.
    """
    methods = config.methods or list(dict.fromkeys([config.decoder.name, *METHODS[1:]]))
    known = [*decoder_names(), *BASELINES]
    for name in methods:
        if bare_name(name) not in known or (name.endswith(ALONE) and bare_name(name) in BASELINES):
            names = ", ".join(known)
            raise UserError(f"methods has {name!r}; it must be one of {names}; {ALONE} behind ours runs it on one rank")
    if len(set(methods)) < len(methods):
        raise UserError(f"methods is {methods}, with one of them twice; name each once")
    return methods
