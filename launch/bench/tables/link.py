"""The alpha-beta model of this machine's all-gather, for `links` of conf/scaling.yaml, as one line of JSON.

NPROC=2 bash torchrun.sh scripts.link
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from launch.bench.projection import Link
from lp.parallel.context import ParallelContext


def main() -> None:
    torch.set_num_threads(1)
    context = ParallelContext.from_env()
    if context.world_size == 1:
        sys.exit("error: one rank has nobody to gather from; NPROC=2 bash torchrun.sh scripts.link")
    link = Link.measured(context, f"{context.world_size} ranks, {context.backend}, torch {torch.__version__}")
    if context.is_main:
        print(json.dumps(asdict(link)))
    context.close()


if __name__ == "__main__":
    main()
