"""What the probe of a model finds of planted faults: the smallest fault that it refuses, by model.

    python scripts/tables.py probe                            # every architecture of the tests, in bfloat16
    python scripts/tables.py probe --weights 20               # drawn weights of one architecture, outliers among them
    python scripts/tables.py probe --model FOLDER --dtypes float32 bfloat16 float16

Every node of the probe's step has each fault in turn: it sees one node too many, one too few, has another position. The
probe refuses what moves a node's output by more than its limit, which lies between what rounding does and what such
faults do. Without --model it needs a clone: the models are those of the tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from lp.errors import UserError
from lp.models.loader import load
from lp.models.probe import probed
from lp.models.probe_step import PARENTS
from lp.models.runner import ModelRunner
from lp.models.support import check_supported

from .harness import Method, Result, Row, Study, Table, option

BACKENDS = ["sdpa", "eager", "flash"]
HEADS = ("model", "dtype", "attention", "fused", "honest step", "limit", "planted", "refused", "least refused")


@dataclass(kw_only=True)
class Probe(Study):
    """Plants faults in every model under every attention backend, and shows which the probe refuses."""

    model: str | None = option(None, "folder or hub name; the tests' models without it")
    weights: int = option(0, "drawn sets of weights instead of architectures")
    dtypes: list[str] = option(["bfloat16"])
    attention: list[str] = option(BACKENDS, choices=BACKENDS)
    SHARED = ()

    def rows(self) -> Iterable[Row]:
        for name in self.dtypes:
            dtype = getattr(torch, name)
            if self.model:
                yield Row({"model": self.model, "dtype": name}, partial(_loaded, self.model, name))
                continue
            from tests.support.tiny_models import MATRIX, drawn_weights, tiny_config, tiny_model  # of the clone alone

            for seed in range(self.weights):
                yield Row({"model": f"weights {seed}", "dtype": name}, partial(drawn_weights, seed, dtype))
            for arch in () if self.weights else MATRIX:
                try:
                    check_supported(tiny_config(arch))
                except UserError:
                    continue
                yield Row({"model": arch, "dtype": name}, partial(tiny_model, arch, dtype=dtype))

    def methods(self) -> Mapping[str, Method]:
        torch.set_num_threads(1)
        return {attention: partial(find, attention) for attention in self.attention}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        heads = (*HEADS, "largest missed")
        lines = [[str((result | {"attention": result["method"]})[head]) for head in heads] for result in results]
        yield Table(heads, lines)


def _loaded(name: str, dtype: str) -> torch.nn.Module:
    return load(name, dtype).model


def find(attention: str, row: Row) -> Result | None:
    """What the probe finds; None where the model has no such attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runner = ModelRunner(row.item(), attention)
        except UserError:
            return None
    with torch.inference_mode():
        found = probed(runner, range(1, len(PARENTS)))
    effects = [effect for _, effect in found.faults]
    refused = [effect for effect in effects if effect > found.limit]
    missed = [effect for effect in effects if effect <= found.limit]
    return {
        "fused": "yes" if runner.fused else "no",
        "honest step": f"{found.error:.1e}",
        "limit": f"{found.limit:.1e}",
        "planted": len(effects),
        "refused": len(refused),
        "least refused": f"{min(refused, default=0):.1e}",
        "largest missed": f"{max(missed):.1e}" if missed else "-",
    }
