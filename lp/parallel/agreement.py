"""Ranks must hold the same model and be asked the same thing: compared by digest before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lp.parallel.context import ParallelContext


def check_same(context: ParallelContext, items: Mapping[str, int]) -> None:
    """Compare named digests over the ranks, with one all-gather.

    Raises:
        ValueError: names the ranks that differ from rank 0 and the items.
    """
    mine = torch.tensor(list(items.values()), dtype=torch.int64, device=context.device)
    gathered = context.all_gather(mine)  # (R, items)
    for column, item in enumerate(items):
        other = (gathered[:, column] != gathered[0, column]).nonzero().flatten().tolist()
        if other:
            ranks = ", ".join(map(str, other))
            raise ValueError(f"the {item} of rank {ranks} differs from rank 0's; give every rank the same {item}")
