"""Decode time a token on R ranks against one, at the same total W, N, G, one thread a rank, alternated in one run.

    NPROC=2 bash torchrun.sh scripts.strong_scaling                  # the demo model on the built-in prompts
    NPROC=2 bash torchrun.sh scripts.strong_scaling --model wide     # random, wide enough to be bound by compute

Ends in one line of JSON. Exit code 1 if --at-most is given and missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from lp import LookaheadConfig, ParallelContext
from lp.bench.prompts import load_builtin
from lp.bench.scaling import strong_scaling
from lp.models.loader import load

PATIENCE_S = 3600.0  # ranks wait this long while rank 0 decodes alone


def wide_model(hidden: int, layers: int) -> PreTrainedModel:
    """A random Llama; every rank makes the same."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(shape)
    model.generation_config = GenerationConfig(do_sample=False)
    return model.float().eval()


def wide_prompts(count: int) -> list[list[int]]:
    """Random tokens that repeat themselves, so that there are candidates."""
    rng = random.Random(0)
    words = [[rng.randrange(2048) for _ in range(6)] for _ in range(12)]
    return [[token for _ in range(40) for token in rng.choice(words)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, wide, or a folder")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the wide model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the wide model")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new", type=int, default=48, help="tokens a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-most", type=float, help="the ratio that must be met")
    for name, value in (("W", 15), ("N", 5), ("G", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = ParallelContext.from_env(device="cpu", timeout_s=PATIENCE_S)
    if args.model == "wide":
        model, prompts = wide_model(args.hidden, args.layers), wide_prompts(args.prompts)
    else:
        loaded = load(args.model, dtype="float32")
        model = loaded.model
        prompts = [loaded.tokenizer.encode(prompt.text) for prompt in load_builtin(args.prompts)]
    config = LookaheadConfig(window_size=args.W, ngram_size=args.N, guess_set_size=args.G)
    result = strong_scaling(model, config, context, prompts, args.new, args.rounds)
    context.close()
    if not context.is_main:
        return
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.model}, {size / 1e6:.1f} M parameters, float32, W={args.W} N={args.N} G={args.G}, one thread a rank,")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n\n{result.table()}\n")
    print(
        json.dumps({"model": args.model, "parameters": size, "W": args.W, "N": args.N, "G": args.G} | result.as_dict())
    )
    if args.at_most is not None and result.ratio > args.at_most:
        sys.exit(f"{result.ratio:.3f} is more than {args.at_most}")


if __name__ == "__main__":
    main()
