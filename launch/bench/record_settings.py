"""Settings with which a record was measured; records of different settings are never added up."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

import lp

from ..config.builders import draft_configs, guess_set_sizes, has_pool
from ..config.schema import BenchmarkConfig, PoolSchema
from .methods import bare_name


def settings_of(
    config: BenchmarkConfig,
    methods: list[str],
    sampling: lp.SamplingParams | None,
    ranks: int,
    parameters: int,
    context: lp.ParallelContext | None = None,
) -> dict[str, Any]:
    """All settings on which a measurement depends, except prompt and machine; the record file's name has their digest.

    Args:
        config: the benchmark's config.
        methods: names of the methods that are measured.
        sampling: how texts are sampled, with a known seed; None is greedy.
        ranks: world size.
        parameters: number of parameters that the model has.
        context: this rank's context, which has chosen a device and a backend; None where no rank runs yet, which takes
            those that this machine will choose.

    Returns:
        Values that JSON can hold, by name. "G" is the guess set size, or a dict by method if methods have different
        defaults.
    """
    model = config.model
    decoder: dict[str, Any] = {"name": config.decoder.name}
    for chosen in draft_configs(config, [config.decoder.name]).values():
        decoder |= asdict(chosen)
    decoder.pop("ablation", None)  # which no key sets
    for own in ("corpora", "history"):  # settings of their own, where there are any
        decoder.pop(own, None)
    sizes = guess_set_sizes(config, map(bare_name, methods))
    guess_set_size: dict[str, int] | int | None = sizes
    if len({*sizes.values()}) < 2:
        guess_set_size = next(iter(sizes.values()), config.G)
    settings: dict[str, Any] = {
        "model": model.name,
        "parameters": parameters,
        "dtype": model.dtype,
        "attention": config.attention.name,
        "capture": config.attention.capture,
    }
    settings |= {"task": config.task.name, "chat": config.task.chat, "W": config.W, "N": config.N, "G": guess_set_size}
    settings |= _place(config, ranks, context)
    settings |= {"decoder": decoder, "methods": methods, "draft": config.draft, "ranks": ranks}
    settings |= {"sampling": asdict(sampling) if sampling else None, "max_new_tokens": config.max_new_tokens}
    settings |= {"stop_strings": config.stop_strings, "repeats": config.repeats, "quality": config.quality}
    settings |= {"prompt_tokens": config.prompt_tokens} if config.prompt_tokens else {}
    settings |= {"gguf": config.gguf} if config.gguf else {}
    settings |= {"pass_at_1": True} if config.pass_at_1 else {}
    settings |= {"exact": str(config.exact)} if config.exact not in ("auto", "tokens") else {}
    settings |= {"kv_dtype": model.kv_dtype} if model.kv_dtype != "auto" else {}
    settings |= {"one_shot_sums": True} if config.parallel.one_shot_sums else {}
    settings |= {"tp": config.parallel.tp} if config.parallel.tp > 1 else {}
    pool = asdict(config.pool)
    beside = {name: pool.pop(name) for name in ("corpora", "history")}
    without = {name: value for name, value in asdict(PoolSchema()).items() if name in pool}
    named = {f"pool_{name}": value for name, value in pool.items()}.items() <= decoder.items()
    if pool != without and not named and has_pool(map(bare_name, methods)):
        settings |= {"pool": pool}
    if has_pool(map(bare_name, methods)):
        settings |= {name: value for name, value in beside.items() if value}
    return settings | {"threads": torch.get_num_threads()}


def _place(config: BenchmarkConfig, ranks: int, context: lp.ParallelContext | None) -> dict[str, str]:
    """The type of device on which ranks compute, and where there are several, the backend of their collectives."""
    if context:
        device, backend = context.device.type, context.backend
    else:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        asked, backend = config.model.device, config.parallel.backend
        device = ("cuda" if gpus else "cpu") if asked == "auto" else asked.partition(":")[0]
        if backend == "auto":
            has_own = device == "cuda" and ranks <= gpus * int(os.environ.get("NNODES", "1"))
            backend = "nccl" if has_own else "gloo"
    return {"device": device} | ({"backend": backend} if ranks > 1 else {})
