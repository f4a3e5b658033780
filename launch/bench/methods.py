"""The methods that methods=[...] of a benchmark may name, and checks of them before a model is loaded.

A name is one of lp's decoders, such as "lookahead"; such a name followed by "@1", which runs the decoder on rank 0
alone; or a baseline, such as "hf_generate".
"""

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
    """Name of the decoder that a method runs: "lookahead" for "lookahead@1", which runs on rank 0 alone.

    Args:
        name: name of the method.
    """
    return name.removesuffix(ALONE)


def own_names(methods: Iterable[str]) -> list[str]:
    """Pick the names of lp's own decoders out of names of methods, without "@1"; baselines are left out.

    Args:
        methods: names of methods.
    """
    return [bare_name(name) for name in methods if bare_name(name) in decoder_names()]


def shares_steps(name: str) -> bool:
    """Whether all ranks compute each decode step of a method together, rather than each replica by itself.

    A replica is a copy of the model, held by one rank or by several.

    Args:
        name: name of the method.
    """
    if name.endswith(ALONE) or name in (PLAIN, ORACLE):
        return False
    return BASELINES[name].all_ranks if name in BASELINES else True


def baseline_options(config: BenchmarkConfig) -> BaselineOptions:
    """The options of a config that baselines need: the draft model, the GGUF file, and whether sampling is greedy."""
    return BaselineOptions(draft=config.draft, gguf=config.gguf, greedy=config.sampling.name == "greedy")


def missing_methods(config: BenchmarkConfig, methods: Iterable[str]) -> dict[str, str]:
    """Find the baselines that cannot run here, and why: "needs the package ...; pip install ...".

    Args:
        config: the benchmark's config.
        methods: names of methods.

    Returns:
        The reason, with its remedy, for each method that cannot run.
    """
    options = baseline_options(config)
    found = {name: BASELINES[name].missing(options) for name in methods if name in BASELINES}
    return {name: lacking for name, lacking in found.items() if lacking}


def check_divisible(config: BenchmarkConfig, methods: list[str]) -> None:
    """Refuse baselines and quality=true where parallel.tp splits the model over ranks: both need a whole model.

    Args:
        config: the benchmark's config.
        methods: names of the methods to run.

    Raises:
        ValueError: names the method or key.
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
    """Refuse baselines together with model.kv_dtype: their caches keep the model's dtype, so tokens cannot be compared.

    Args:
        config: the benchmark's config.
        methods: names of the methods to run.

    Raises:
        ValueError: names the first such baseline.
    """
    others = [name for name in methods if name in BASELINES]
    if config.model.kv_dtype != KVDtype.AUTO and others:
        raise UserError(
            f"method {others[0]!r} has no cache of model.kv_dtype={config.model.kv_dtype}; leave it out, or take "
            "model.kv_dtype=auto"
        )


def check_sessions(config: BenchmarkConfig, methods: Iterable[str]) -> None:
    """Refuse settings with which an n-gram pool has seen a text before its method is measured on that text.

    Such a pool drafts the very tokens that it has seen, so the method would be measured too fast.

    Args:
        config: the benchmark's config.
        methods: names of the methods to run.

    Raises:
        ValueError: several rounds with a pool that remembers earlier texts, or several methods that write one pool
            file.
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
    """Refuse pass_at_1=true where a task has no tests, or this machine cannot run generated programs within limits.

    Args:
        config: the benchmark's config.
        prompts: the prompts to decode.

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
    """The methods to run: those that the config names, else the chosen decoder, plain decoding and prompt lookup.

    Args:
        config: the benchmark's config.

    Raises:
        ValueError: a method does not exist, or is named twice.
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
