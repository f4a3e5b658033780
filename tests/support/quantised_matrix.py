"""The table of quantised models: what lookahead gives on every kind, in docs/reference/models.md."""

from __future__ import annotations

import contextlib
import random
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import lp
from lp.models.float32_excerpt import PRECISE
from lp.models.loader import load
from lp.models.quantisation import inexact_quantisation, tokens_share_scales
from lp.optional import is_installed
from lp.parallel.context import ParallelContext
from tests.support.architectures import CASES, EXACT, PAGE, WRONG, versions
from tests.support.quantised import QUANTISED, quantised_folder
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, plain_greedy

NEW = 24
MARK = "quantised"
# By transformers' name of the method: what has not been tried here, and what that needs.
NOT_TRIED = {
    "aqlm": "a quantised checkpoint; its CPU kernels compile with numba",
    "awq, and gptq by itself": "the package gptqmodel, of which there was no wheel",
    "compressed-tensors, zero points": "releases that load them: transformers 5.23 finds other sizes in 0.20.1's files",
    "eetq": "a GPU and the package kernels",
    "fbgemm_fp8": "a GPU of compute capability 9.0 and the package fbgemm-gpu",
    "fouroversix": "a GPU and its package",
    "fp8, mxfp8 without expansion": "a GPU of compute capability 8.9",
    "fp_quant": "a GPU and the package fp_quant; with qutlass a Blackwell GPU",
    "higgs": "a GPU and the package flute-kernel",
    "hqq": "the package hqq, of which there was no wheel",
    "metal": "Apple silicon",
    "mxfp4 without expansion": "triton and the package kernels",
    "nvfp4": "a Blackwell GPU and the package kernels",
    "quark": "the package quark with its own dependencies",
    "sinq": "a GPU and the package gemlite",
    "spqr": "a GPU and the package spqr_quant",
    "torchao int4": "a GPU and the package mslk: its packing and its products are kernels of theirs",
    "torchao float8, activations too": "a GPU of compute capability 8.9",
    "vptq": "a GPU and the package vptq",
}
DIVIDED = {"awq, and gptq by itself": "exact, against weights expanded by the test"}  # which needs no package
PACKAGES = {
    "torchao": "torchao",
    "compressed-tensors": "compressed_tensors",
    "bitsandbytes": "bitsandbytes",
    "optimum-quanto": "optimum",
    "auto-round": "auto_round",
}  # as they are installed, and imported


def verdict(name: str) -> str:
    """`exact`, by which mode, or the refusal; `WRONG` and where. Greedy text is compared with `generate`."""
    rng = random.Random(name)
    sampling = lp.SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    with tempfile.TemporaryDirectory() as folder, _quietly():
        for number in range(CASES):
            model = quantised_folder(name, Path(folder), seed=number)
            ids = drawn_text(rng, rng.randint(1, 40))
            shape = lp.LookaheadConfig(
                window_size=rng.randint(0, 8), ngram_size=rng.randint(2, 5), guess_set_size=rng.randint(1, 8)
            )
            if reason := tokens_share_scales(model):
                return f"refused by exact=bitwise, else with a warning: {reason}"
            exact_by_rows = inexact_quantisation(model) is not None
            mode = "bitwise" if exact_by_rows or model.dtype not in PRECISE else "auto"
            plain: Any = lp.PlainDecoder(model, exact=mode) if mode == "bitwise" else lp.AutoregressiveDecoder(model)
            expected = plain.generate(ids, NEW).tokens if mode == "bitwise" else plain_greedy(model, ids, NEW)
            decoder = lp.LookaheadDecoder(model, shape, exact=mode)
            if decoder.generate(ids, NEW).tokens != expected:
                return f"{WRONG}: greedy, case {number}"
            if decoder.generate(ids, NEW, sampling).tokens != plain.generate(ids, NEW, sampling).tokens:
                return f"{WRONG}: sampled, case {number}"
    if exact_by_rows:
        return f"{EXACT} by exact=bitwise; else with a warning"
    return EXACT if mode == "auto" else f"{EXACT}, seen by exact=bitwise: it computes in {str(model.dtype)[6:]}"


def divided_verdict(name: str) -> str:
    """What two ranks give that read the checkpoint by parts."""
    if not QUANTISED[name].saved:
        return "no checkpoint to read"
    with tempfile.TemporaryDirectory() as folder:
        model = quantised_folder(name, Path(folder))
        ids = drawn_text(random.Random(name), 20)

        def body(context: ParallelContext) -> list[int]:
            part = load(folder, "auto", context=context).model
            return lp.LookaheadDecoder(part, context=context).generate(ids, NEW).tokens

        try:
            return EXACT if run_lockstep(2, body, tp=2) == [plain_greedy(model, ids, NEW)] * 2 else WRONG
        except ValueError as refusal:
            reason = str(refusal).partition(";")[0].replace(repr(folder), "it")
            return f"refused: {reason}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Show no warnings within the block, and compile nothing, as BitNet's layers would."""
    stance: Any = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else None
    with warnings.catch_warnings(), stance or contextlib.nullcontext():
        warnings.simplefilter("ignore")
        yield


def row(name: str) -> str:
    """The row of a kind in Markdown; a test is skipped where its package is not installed."""
    try:
        result = verdict(name)
    except ValueError as refusal:
        result = f"refused: {refusal}"
    return f"| {name} | {result} | {divided_verdict(name)} |"


def standing_rows() -> dict[str, str]:
    """The rows of the page as it stands, by kind."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {MARK} -->\n")
    lines = rest.partition("<!-- end -->")[0].splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}


def quantised_page() -> str:
    """The page of models as it stands, around a new table of quantised ones; rows that need other packages stay."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {MARK} -->\n")
    standing, _, after = rest.partition("<!-- end -->\n")
    run_with = standing.partition("\n")[0]
    if all(map(is_installed, PACKAGES.values())):
        run_with = f"Run with {versions()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}."
    known = standing_rows()
    tried = [row(name) if is_installed(kind.package) else known[name] for name, kind in QUANTISED.items()]
    not_tried = [f"| {name} | not tried: needs {what} | {DIVIDED.get(name, '')} |" for name, what in NOT_TRIED.items()]
    table = "\n".join(["| kind | result | two ranks divide it |", "|---|---|---|", *tried, *not_tried])
    return f"{before}<!-- {MARK} -->\n{run_with}\n\n{table}\n<!-- end -->\n{after}"
