"""Cases of the tree kernel, and its parity with a softmax in float64; as a program, in Triton's interpreter on a CPU.

H: query heads, G: KV heads, T: step tokens, L: cached tokens, C: cache slots, D: head dimension, E: of values.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Case:
    """One step; 0 for `value_dim` is `dim`, and for `num_splits` what the launch chooses."""

    heads: int = 4
    kv_heads: int = 2
    num_tokens: int = 7
    length: int = 70
    dim: int = 16
    value_dim: int = 0
    capacity: int = 300
    dtype: torch.dtype = torch.float32
    num_splits: int = 0
    size: float = 1.0  # of queries and keys
    sequences: tuple[tuple[int, int], ...] = ()  # their tokens and cached tokens, in a pool, instead of one's
    sinks: bool = False


SMALL = {
    "nothing cached": Case(length=0),
    "one token": Case(num_tokens=1, heads=2),
    "one token and nothing cached": Case(num_tokens=1, length=0, kv_heads=4),
    "the whole cache": Case(capacity=77),
    "head dimension 80": Case(dim=80),
    "head dimension 96": Case(dim=96, kv_heads=4),
    "values of another dimension": Case(dim=48, value_dim=24),
    "one split": Case(num_splits=1),
    "splits without keys": Case(length=10, num_splits=7),
    "more splits than are combined at once": Case(length=400, capacity=500, num_splits=19, heads=2, kv_heads=1),
    "own keys on both sides of a split": Case(num_tokens=40, length=40, num_splits=3, heads=2, kv_heads=1),
    "many rows": Case(num_tokens=50, length=30, heads=3, kv_heads=1, num_splits=2),
    "float16": Case(dtype=torch.float16, num_splits=3),
    "bfloat16": Case(dtype=torch.bfloat16, num_splits=3),
    "scores beyond float16": Case(dtype=torch.float16, size=30.0, dim=64),
    "sequences": Case(num_tokens=0, sequences=((3, 40), (9, 0), (1, 70))),
    "sequences without tokens": Case(num_tokens=0, sequences=((0, 0), (5, 66), (0, 0)), num_splits=3),
    "sequences of many rows": Case(num_tokens=0, sequences=((40, 30), (2, 90), (21, 5)), heads=6, num_splits=1),
    "sequences of float16": Case(num_tokens=0, sequences=((8, 129), (8, 1)), dtype=torch.float16),
    "sinks": Case(sinks=True, num_splits=1),
    "sinks and splits": Case(sinks=True, num_splits=3, heads=6),
    "sinks and splits without keys": Case(sinks=True, length=10, num_splits=7),
    "sinks of sequences": Case(num_tokens=0, sequences=((3, 40), (0, 5), (9, 0)), sinks=True),
    "sinks of bfloat16": Case(sinks=True, dtype=torch.bfloat16, num_splits=2),
    "512 tokens": Case(num_tokens=512, heads=2, kv_heads=1, capacity=600),
}
# Whether a launch has an additive mask instead of booleans, and the cached length as data instead of a shape.
KINDS = [(False, True), (True, False), (False, False), (True, True)]
# Largest error of an output, in eps of the dtype over the largest value: sums are in float32, where scores carry an eps
# each into the weights; weights and outputs of halves are rounded once. The interpreter cuts bfloat16 off instead.
TOLERANCE = {torch.float32: 4.0, torch.float16: 0.6, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class Drawn:
    """Arguments of the kernel, and what it must give: (1, H, T, E) in float64."""

    q_1HTD: torch.Tensor
    k_1GCD: torch.Tensor
    v_1GCE: torch.Tensor
    visible_TT: torch.Tensor
    slot_mapping_T: torch.Tensor
    scale: float
    sinks_H: torch.Tensor | None
    expected_1HTE: torch.Tensor


def draw(case: Case, device: torch.device) -> Drawn:
    """Draw a step over a tree; keys and values are views, of unlike strides, and NaN behind the step's."""
    rng = random.Random(repr(case))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    value_dim = case.value_dim or case.dim
    q = (drawn(1, case.num_tokens, case.heads, case.dim) * case.size).transpose(1, 2).to(case.dtype)
    k = (drawn(1, case.capacity, case.kv_heads, case.dim) * case.size).transpose(1, 2).to(case.dtype)
    v = drawn(3, 1, case.kv_heads, case.capacity, value_dim)[1].to(case.dtype)
    visible_TT = torch.eye(case.num_tokens, dtype=torch.bool)
    for token in range(1, case.num_tokens):
        visible_TT[token] |= visible_TT[rng.randrange(token)]
    end = case.length + case.num_tokens
    scale = random.Random(case.heads).choice([case.dim**-0.5, 1 / case.dim])
    k_HND, v_HNE = (x[0, :, :end].double().repeat_interleave(case.heads // case.kv_heads, 0) for x in (k, v))
    scores_HTN = q[0].double() @ k_HND.mT * scale
    scores_HTN[..., case.length :].masked_fill_(~visible_TT, -torch.inf)
    sinks = torch.linspace(-2, 4, case.heads).to(case.dtype) if case.sinks else None
    if sinks is not None:
        scores_HTN = torch.cat([scores_HTN, sinks.double()[:, None, None].expand(-1, case.num_tokens, 1)], -1)
        v_HNE = torch.nn.functional.pad(v_HNE, (0, 0, 0, 1))
    expected = (scores_HTN.softmax(-1) @ v_HNE)[None]
    k[:, :, end:] = torch.nan
    v[:, :, end:] = torch.nan
    slots = torch.arange(case.length, end)
    sinks = None if sinks is None else sinks.to(device)
    return Drawn(*(x.to(device) for x in (q, k, v, visible_TT, slots)), scale, sinks, expected.to(device))


def draw_sequences(case: Case, device: torch.device) -> tuple[Drawn, torch.Tensor]:
    """Steps of several sequences side by side, whose caches lie in one pool, the last one's first; NaN in free slots.

    Returns:
        The step, and int64 (Q, 4), where each sequence lies.
    """
    sequences, steps, first_token, first_slot = [], [], 0, 0
    for num_tokens, length in case.sequences:
        capacity = length + num_tokens + 3
        steps.append(draw(replace(case, num_tokens=num_tokens, length=length, capacity=capacity, sequences=()), device))
        sequences.append([first_token, num_tokens, first_slot, length])
        first_token += num_tokens
        first_slot += capacity
    for sequence, step in zip(sequences, steps, strict=True):  # in the other order
        sequence[2] = first_slot - sequence[2] - step.k_1GCD.shape[2]
    together = Drawn(
        torch.cat([step.q_1HTD for step in steps], 2),
        torch.cat([step.k_1GCD for step in reversed(steps)], 2),
        torch.cat([step.v_1GCE for step in reversed(steps)], 2),
        torch.block_diag(*(step.visible_TT for step in steps)).bool(),
        steps[0].slot_mapping_T,
        steps[0].scale,
        steps[0].sinks_H,
        torch.cat([step.expected_1HTE for step in steps], 2),
    )
    return together, torch.tensor(sequences, device=device)


def worst_error(case: Case, device: torch.device, kinds: Sequence[tuple[bool, bool]] = KINDS) -> float:
    """The kernel's largest error in launches of these kinds; in TOLERANCE."""
    from lp.attention.tree_kernel import launch_tree_attention  # here: the environment says whether it is interpreted

    step, sequences = draw_sequences(case, device) if case.sequences else (draw(case, device), None)
    end = step.k_1GCD.shape[2] if case.sequences else case.length + case.num_tokens
    lowest = torch.finfo(case.dtype).min
    additive_TT = torch.zeros_like(step.visible_TT, dtype=case.dtype).masked_fill_(~step.visible_TT, lowest)
    errors = []
    for additive, has_slots in kinds:
        mask_TT, slots = additive_TT if additive else step.visible_TT, step.slot_mapping_T if has_slots else None
        keys = step.k_1GCD.shape[2] if slots is not None else end
        k, v = step.k_1GCD[:, :, :keys], step.v_1GCE[:, :, :keys]
        laid_out = step.q_1HTD, k, v, mask_TT, slots, step.scale, sequences
        out = launch_tree_attention(*laid_out, step.sinks_H, case.num_splits or None)
        assert out.shape == step.expected_1HTE.shape and out.dtype == case.dtype
        errors.append((out.double() - step.expected_1HTE).abs().max())
    largest_value = step.v_1GCE[:, :, :end].double().abs().nan_to_num().max()
    return float(torch.stack(errors).max() / largest_value / torch.finfo(case.dtype).eps / TOLERANCE[case.dtype])


def results_by_capacity() -> int:
    """How many different results a step has, whose cache has room for few tokens or for many."""
    from lp.attention.tree_kernel import launch_tree_attention  # here: the environment says whether it is interpreted

    step = draw(Case(num_tokens=3, length=500, capacity=510), torch.device("cpu"))
    found: list[torch.Tensor] = []
    for capacity in (0, 30, 1000):
        k, v = (
            torch.nn.functional.pad(each, (0, 0, 0, capacity), value=torch.nan) for each in (step.k_1GCD, step.v_1GCE)
        )
        out = launch_tree_attention(step.q_1HTD, k, v, step.visible_TT, step.slot_mapping_T, step.scale)
        found += [] if any(torch.equal(out, other) for other in found) else [out]
    return len(found)


def main() -> None:
    """Prints the error of every case as JSON, and in how many ways the cache's capacity changed a result.

    Each case is launched in one of the four kinds, the next one in the next; in the long form, in all of them.
    """
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels need a GPU"
    names = sys.argv[1:] or [*SMALL]
    kinds = [KINDS] if os.environ.get("LP_TEST_LONG") == "1" else [[kind] for kind in KINDS]
    errors = {
        name: worst_error(SMALL[name], torch.device("cpu"), kinds[number % len(kinds)])
        for number, name in enumerate(names)
    }
    print(json.dumps(errors | {"results at different capacities": results_by_capacity()}))


if __name__ == "__main__":
    main()
