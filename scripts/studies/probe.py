"""The smallest planted fault that the probe of a model refuses, by model: docs/experiments/exactness.md.

    python scripts/tables.py probe                            # every architecture of the tests, in bfloat16
    python scripts/tables.py probe --weights 20               # drawn weights of one architecture, outliers among them
    python scripts/tables.py probe --model FOLDER --dtypes float32 bfloat16 float16

Every node of the probe's step has each fault in turn: it sees one node too many, one too few, has another position. The
probe refuses what moves a node's output by more than its limit, which lies between what rounding does and what such
faults do. Without --model it needs a clone: the models are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from launch.bench.summary import markdown
from lp.errors import UserError
from lp.models.loader import load
from lp.models.probe import probed
from lp.models.runner import ModelRunner
from lp.models.support import check_supported
from lp.models.trial import PARENTS

BACKENDS = ("sdpa", "eager", "flash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub name; the tests' models without it")
    parser.add_argument("--weights", type=int, default=0, help="drawn sets of weights instead of architectures")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--attention", nargs="+", default=BACKENDS, choices=BACKENDS)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows = []
    for name, dtype, model in _models(args):
        for attention in args.attention:
            if row := _row(name, dtype, model, attention):
                rows.append(row)
    heads = ("model", "dtype", "attention", "fused", "honest step", "limit", "planted", "refused", "least refused")
    lines = [[str(row[head]) for head in (*heads, "largest missed")] for row in rows]
    print(markdown((*heads, "largest missed"), lines))
    print(json.dumps(rows))


def _models(args: argparse.Namespace) -> Iterator[tuple[str, str, PreTrainedModel]]:
    for dtype in args.dtypes:
        if args.model:
            yield args.model, dtype, load(args.model, dtype).model
            continue
        from tests.tiny_models import MATRIX, drawn_weights, tiny_config, tiny_model  # of the clone alone

        if args.weights:
            for seed in range(args.weights):
                yield f"weights {seed}", dtype, drawn_weights(seed, getattr(torch, dtype))
            continue
        for arch in MATRIX:
            try:
                check_supported(tiny_config(arch))
            except UserError:
                continue
            yield arch, dtype, tiny_model(arch, dtype=getattr(torch, dtype))


def _row(name: str, dtype: str, model: PreTrainedModel, attention: str) -> dict[str, Any] | None:
    """What the probe finds; None where the model has no such attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runner = ModelRunner(model, attention)
        except UserError:
            return None
    with torch.inference_mode():
        found = probed(runner, range(1, len(PARENTS)))
    effects = [effect for _, effect in found.faults]
    refused = [effect for effect in effects if effect > found.limit]
    missed = [effect for effect in effects if effect <= found.limit]
    return {
        "model": name,
        "dtype": dtype,
        "attention": attention,
        "fused": "yes" if runner.fused else "no",
        "honest step": f"{found.error:.1e}",
        "limit": f"{found.limit:.1e}",
        "planted": len(effects),
        "refused": len(refused),
        "least refused": f"{min(refused, default=0):.1e}",
        "largest missed": f"{max(missed):.1e}" if missed else "-",
    }
