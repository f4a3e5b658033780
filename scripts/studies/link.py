"""The alpha-beta model of this machine's all-gather, for `links` of lp scaling, as one line of JSON.

NPROC=2 bash torchrun.sh scripts.tables link
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from launch.bench.projection import Link
from lp.errors import UserError
from lp.parallel.context import ParallelContext

from .harness import Command


@dataclass(kw_only=True)
class MeasureLink(Command):
    """Times gathers of two message sizes on all ranks, and prints the link's latency and speed that explain them."""

    def run(self) -> None:
        torch.set_num_threads(1)
        context = ParallelContext.from_env()
        self.stack.callback(context.close)
        if context.world_size == 1:
            raise UserError("one rank has no other to gather from; NPROC=2 bash torchrun.sh scripts.tables link")
        link = Link.measured(context, f"{context.world_size} ranks, {context.backend}, torch {torch.__version__}")
        if context.is_main:
            print(json.dumps(asdict(link)))
