"""How many tokens a pass may have so that a token's row has the same bits as in any other such pass.

Rows of a product are summed alike whatever else is in it, on most machines and at most numbers of rows, but libraries
have other kernels for a few rows, and element-wise code rounds otherwise at the end of a thread's share. So the model
is asked, under the threads that it runs with: tokens that follow one prefix are computed at each width, beside others
and in other places, and every row is compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from lp.errors import UserError
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from lp.models.shallow import shallow_runner

WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)  # tokens
REFERENCE = 64  # that the others are compared with
PREFIX = 320  # cached tokens before them: attention has a tile and a tail


def equal_widths(runner: ModelRunner) -> tuple[int, ...]:
    """The widths, ascending, at which logits and KV of a token have the same bits.

    The first layer is asked, and the LM head: other layers are taken to have its shapes.

    Raises:
        ValueError: not even passes of one width agree.
    """
    shallow, _ = shallow_runner(runner, lambda layer: layer)
    shallow.widths = ()
    rng = random.Random(0)
    tokens = [rng.randrange(shallow.config.vocab_size) for _ in range(PREFIX)]
    with torch.inference_mode():
        cache = shallow.cache_without_buffers(PREFIX + WIDTHS[-1])
        shallow.forward(tokens, range(PREFIX), np.tri(PREFIX, dtype=bool), cache, [0], capture=False)
        cache.commit(range(PREFIX))
        tokens = tokens[: WIDTHS[-1]]
        blocks = [tokens[start : start + REFERENCE] for start in range(0, len(tokens), REFERENCE)]
        reference = torch.cat([_rows(shallow, cache, block) for block in blocks])

        def agrees(width: int) -> bool:
            drawn = rng.sample(range(len(tokens)), width)
            return torch.equal(_rows(shallow, cache, [tokens[index] for index in drawn]), reference[drawn])

        equal = tuple(width for width in WIDTHS if agrees(width))
    if REFERENCE not in equal:
        where, remedy = f" on {runner.device.type!r}", ""
        if runner.device.type == "cpu":
            where = f", with {torch.get_num_threads()} threads"
            remedy = "try one thread (threads=1, or torch.set_num_threads(1)), or "
        name = type(runner.model).__name__
        raise UserError(
            f"exact is 'bitwise', but {name} gives a token other bits beside other tokens{where}; "
            f"{remedy}choose exact=tokens"
        )
    return equal


def _rows(runner: ModelRunner, cache: StaticKVCache, tokens: Sequence[int]) -> torch.Tensor:
    """Logits and KV of tokens that each follow the prefix, in one pass.

    Returns:
        (len(tokens), numbers of a token).
    """
    count, first = len(tokens), cache.length
    logits = runner.forward(tokens, [first] * count, np.eye(count, dtype=bool), cache, range(count), capture=False)
    states = cache.whole(0)
    assert states is not None
    return torch.cat([logits, *(part[0, :, first : first + count].transpose(0, 1).flatten(1) for part in states)], 1)
