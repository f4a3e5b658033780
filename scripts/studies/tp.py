"""Tensor parallelism side by side: ours, transformers' own and DeepSpeed's, plain decoding and lookahead with it.

    NPROC=2 bash torchrun.sh scripts.tables tp                          # a random Llama, wide and of 110 M parameters
    NPROC=2 bash torchrun.sh scripts.tables tp --hidden 512 --new 32

All ranks hold one model between them. Every method decodes the same text, in turn, in one process a rank. Ends with
one line of JSON; a method whose package is not installed is named there.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lp
from launch.bench.baselines import BASELINES, BaselineOptions
from launch.bench.summary import markdown
from lp.checks import env_int
from lp.errors import UserError
from lp.models.tensor_parallel import divide
from lp.optional import is_installed
from lp.parallel.rank_group import RankGroup
from lp.parallel.replica import Replica

from ._common import median_and_range

PACKAGES = {"transformers_tp": "transformers", "deepspeed_tp": "deepspeed"}
HEADS = ("method", "S", "tokens/s", "over transformers_tp", "over plain", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=1536, help="width; the MLP is 8/3 of it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--new", type=int, default=24, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many")


def build(args: argparse.Namespace) -> Any:
    """A random model, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 96,
        num_key_value_heads=args.hidden // 192,
        vocab_size=args.vocabulary,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def run(args: argparse.Namespace) -> None:
    size = env_int("WORLD_SIZE", 1)
    if size == 1:
        raise UserError("one rank holds the whole model; NPROC=2 bash torchrun.sh scripts.tables tp")
    context = lp.ParallelContext.from_env(tp=size)
    whole = build(args)
    parameters = sum(each.numel() for each in whole.parameters())
    part = divide(copy.deepcopy(whole), context.replica)
    decoders: dict[str, Any] = {
        "plain": lp.PlainDecoder(part, context),
        "lookahead": lp.LookaheadDecoder(part, None, context),
    }
    missing = [name for name, package in PACKAGES.items() if not is_installed(package)]
    for name in PACKAGES.keys() - {*missing}:
        # These divide the model themselves.
        undivided = replace(context, replica=Replica(), replica_ranks=RankGroup(), steps=RankGroup())
        decoders[name] = BASELINES[name].build(whole, undivided, BaselineOptions())
    ids = [int(token) for token in torch.randint(args.vocabulary, (64,), generator=torch.Generator().manual_seed(1))]
    texts = {name: partial(decoder.generate, ids, args.new) for name, decoder in decoders.items()}
    outputs: dict[str, list[Any]] = {name: [] for name in texts}
    for number in range(args.rounds + 1):
        for name, text in texts.items():
            output = text()
            outputs[name] += [output] if number else []  # the first round warms up
    seconds = {name: [output.decode_s for output in found] for name, found in outputs.items()}

    def over(name: str, other: str) -> str:
        if other not in seconds:
            return "-"
        return median_and_range([b / a for a, b in zip(seconds[name], seconds[other], strict=True)], 2, " x")

    rows = []
    for name, found in outputs.items():
        equal = "equal" if found[0].tokens == outputs["plain"][0].tokens else "other"
        speed = median_and_range([args.new / each for each in seconds[name]], 1)
        row = [name, f"{found[0].compression:.2f}", speed, over(name, "transformers_tp"), over(name, "plain")]
        rows.append([*row, equal])
    if context.is_main:
        print(f"{size} ranks of one replica, {context.backend}, {parameters / 1e6:.0f} M parameters, float32\n")
        print(markdown(HEADS, rows))
        print(json.dumps({"ranks": size, "parameters": parameters, "missing": missing, "seconds": seconds}))
    context.close()
