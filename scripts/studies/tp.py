"""Tensor parallelism side by side: ours, transformers' own and DeepSpeed's, plain decoding and lookahead with it.

    NPROC=2 bash torchrun.sh scripts.tables tp                          # a random Llama, wide and of 110 M parameters
    NPROC=2 bash torchrun.sh scripts.tables tp --hidden 512 --new 32

All ranks hold one model between them. Every method decodes the same text, in turn, in one process a rank. A method
whose package is not installed is named below the table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lp
from launch.bench.baselines import BASELINES, BaselineOptions
from lp.checks import env_int
from lp.errors import UserError
from lp.models.tensor_parallel import divide
from lp.optional import is_installed
from lp.parallel.rank_group import RankGroup
from lp.parallel.replica import Replica

from .harness import Method, Result, Row, Study, Table, compression, counts, grouped, option, ratios, spread, values

PLAIN, TRANSFORMERS = "plain", "transformers_tp"
PACKAGES = {TRANSFORMERS: "transformers", "deepspeed_tp": "deepspeed"}


@dataclass(kw_only=True)
class TensorParallel(Study):
    """Times the methods that divide one model over ranks, on the same text."""

    hidden: int = option(1536, "width; the MLP is 8/3 of it")
    layers: int = option(4)
    vocabulary: int = option(2048)
    new: int = option(24, "tokens a round")
    rounds: int = option(7)
    SHARED = ("hidden", "layers", "vocabulary", "new")
    WARM_UP = 1

    @cached_property
    def context(self) -> lp.ParallelContext:
        """The context of this rank among all that the command started."""
        size = env_int("WORLD_SIZE", 1)
        if size == 1:
            raise UserError("one rank holds the whole model; NPROC=2 bash torchrun.sh scripts.tables tp")
        context = lp.ParallelContext.from_env(tp=size)
        self.stack.callback(context.close)
        return context

    @property
    def prints(self) -> bool:
        return self.context.is_main

    def rows(self) -> Iterable[Row]:
        ids = torch.randint(self.vocabulary, (64,), generator=torch.Generator().manual_seed(1)).tolist()
        return [Row({"ranks": self.context.world_size}, ids)]

    @cached_property
    def whole(self) -> Any:
        """A random model, the same on every rank."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 96,
            num_key_value_heads=self.hidden // 192,
            vocab_size=self.vocabulary,
            bos_token_id=None,
            eos_token_id=None,
        )
        return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    def methods(self) -> Mapping[str, Method]:
        part = divide(copy.deepcopy(self.whole), self.context.replica)
        decoders: dict[str, Any] = {
            PLAIN: lp.PlainDecoder(part, self.context),
            "lookahead": lp.LookaheadDecoder(part, None, self.context),
        }
        for name, package in PACKAGES.items():
            if is_installed(package):
                # These divide the model themselves.
                undivided = replace(self.context, replica=Replica(), replica_ranks=RankGroup(), steps=RankGroup())
                decoders[name] = BASELINES[name].build(self.whole, undivided, BaselineOptions())

        def method(decoder: Any) -> Method:
            def decode(row: Row) -> Result:
                output = decoder.generate(row.item, self.new)
                return {"seconds": output.decode_s} | counts(output)

            return decode

        return {name: method(decoder) for name, decoder in decoders.items()}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        by_name = grouped(results, "method")
        seconds = {name: values(of) for name, of in by_name.items()}
        lines = []
        for name, of in by_name.items():
            times = (
                spread(ratios(seconds[other], seconds[name]), 2, " x") if other in seconds else "-"
                for other in (TRANSFORMERS, PLAIN)
            )
            speed = spread([self.new / each for each in seconds[name]], 1)
            equal = "equal" if of[0]["text"] == by_name[PLAIN][0]["text"] else "other"
            lines.append((name, f"{compression(of):.2f}", speed, *times, equal))
        parameters = sum(each.numel() for each in self.whole.parameters())
        title = f"{self.context.world_size} ranks of one replica, {self.context.backend}, "
        title += f"{parameters / 1e6:.0f} M parameters, float32"
        missing = [name for name in PACKAGES if name not in by_name]
        heads = ("method", "S", "tokens/s", f"over {TRANSFORMERS}", "over plain", "tokens")
        yield Table(heads, lines, title, f"Not installed: {', '.join(missing)}." if missing else "")
