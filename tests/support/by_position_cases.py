"""Trees behind cached tokens for attention by position, and its kernels held against them: each case compares a step in
a cache of its own, in cache slots that are data, in a pool beside others, and of one token or path alone. As a program,
in Triton's interpreter on a CPU.

H: query heads, G: KV heads, T: step tokens, L: cached tokens, N: keys, D: head dimension, E: of values.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from dataclasses import dataclass

import torch

from lp.attention.base import PooledView, StepView, Window
from lp.attention.by_position import attention_by_position
from lp.attention.key_places import DEPTH, TILE, KeyPlaces, key_places
from lp.draft.layout import ancestors

LENGTHS = (0, 1, DEPTH, 63, 64, 95, 96, 97, 160, TILE, TILE + DEPTH, 2 * TILE + 77, 700)  # cached tokens
# Largest error of an output, in eps of the dtype over the largest value: sums are in float32, where scores carry an eps
# each into the weights; weights and outputs of halves are rounded once. The interpreter cuts bfloat16 off instead.
TOLERANCE = {torch.float32: 4.0, torch.float16: 0.6, torch.bfloat16: 1.0}


def drawn_tree(rng: random.Random, length: int, most: int = 40) -> tuple[list[int], list[int]]:
    """Parents and positions of a tree behind so many cached tokens, no deeper than a step may go."""
    size = rng.randint(1, most)
    parents, positions = [-1], [length]
    for node in range(1, size):
        parent = node - 1 if rng.random() < 0.6 else rng.randrange(node)
        if positions[parent] - length == DEPTH:
            parent = 0
        parents.append(parent)
        positions.append(positions[parent] + 1)
    return parents, positions


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def view_of(parents: list[int], positions: list[int], length: int, window: Window | None = None) -> StepView:
    return StepView(torch.from_numpy(ancestors(parents)), torch.tensor(positions), length, None, window, torch.float32)


@dataclass(frozen=True)
class Case:
    """Steps behind so many cached tokens; 0 for `value_dim` is `dim`."""

    lengths: tuple[int, ...] = LENGTHS
    heads: int = 4
    kv_heads: int = 2
    most_tokens: int = 10
    dim: int = 16
    value_dim: int = 0
    window: Window | None = None
    dtype: torch.dtype = torch.float32


FEW = (TILE + 97,)
SMALL = {
    "prefixes": Case((0, 63, 97, TILE + DEPTH), heads=2, kv_heads=1),
    "long prefixes": Case((96, 700), heads=2, kv_heads=1),
    "sliding window of 20": Case(FEW, window=Window(20)),
    "sliding window of 300": Case((700,), window=Window(300)),
    "chunks of 20": Case(FEW, window=Window(20, chunked=True)),
    "chunks of 300": Case((290, 700), window=Window(300, chunked=True)),
    "three heads of a KV head": Case(FEW, heads=6, most_tokens=40),
    "as many KV heads": Case(FEW, kv_heads=4),
    "head dimension 80, values of 24": Case(FEW, heads=2, kv_heads=1, dim=80, value_dim=24),
    "float16": Case(FEW, dtype=torch.float16),
    "bfloat16": Case(FEW, heads=2, kv_heads=1, dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Step:
    """A tree behind cached tokens: (1, H or G, T or N, D or E) each. Its keys and values lie behind the cached ones."""

    parents: list[int]
    positions: list[int]
    length: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def path_to(self, node: int) -> list[int]:
        """The nodes that a node sees, from the root to itself: what plain decoding would have computed before it."""
        return [at for at, seen in enumerate(ancestors(self.parents)[node]) if seen]

    def end_of(self, path: list[int], count: int) -> Step:
        """The last nodes of a path, as if those before them were cached."""
        kept = [*range(self.length), *(self.length + at for at in path)]
        rows = path[-count:]
        positions = [self.positions[at] for at in rows]
        length = len(kept) - count
        return Step(
            [*range(-1, count - 1)], positions, length, self.q[:, :, rows], self.k[:, :, kept], self.v[:, :, kept]
        )


def draw(case: Case, length: int, device: torch.device) -> Step:
    """Draw a step over a tree, with random queries, keys and values."""
    seed = random.Random(repr((case, length))).randrange(2**31)
    parents, positions = drawn_tree(random.Random(seed), length, case.most_tokens)
    tokens, keys = len(parents), length + len(parents)
    q = drawn(1, tokens, case.heads, case.dim, seed=seed).transpose(1, 2)
    k = drawn(1, case.kv_heads, keys, case.dim, seed=seed + 1)
    v = drawn(1, keys, case.kv_heads, case.value_dim or case.dim, seed=seed + 2).transpose(1, 2)
    return Step(parents, positions, length, *(part.to(device, case.dtype) for part in (q, k, v)))


class Kernel:
    """Runs the kernels over the steps of a case, whose keys lie in a cache of their own, in slots, or in a pool.

    Args:
        case: gives the sliding window and the scale of the scores.
        device: where the steps' tensors are, and the kernels run.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.window = case.window
        self.device = device
        self.scale = case.dim**-0.5

    def view(self, step: Step, slots: torch.Tensor | None = None, num_slots: int = 0) -> StepView:
        """What a step's tokens see and where their keys lie, as `KeyPlaces` are made of it."""
        view = view_of(step.parents, step.positions, num_slots or step.length, self.window)
        seen, positions = view.visible_TT.to(self.device), view.positions_T.to(self.device)
        return StepView(seen, positions, view.length, slots, self.window, step.q.dtype)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: KeyPlaces, programs: int) -> torch.Tensor:
        """Launch the kernels with `programs` programs; the attention's result (T, H, E)."""
        from lp.attention.by_position_kernel import launch_by_position  # the environment says whether it is interpreted

        return launch_by_position(q, k, v, *places, self.scale, programs)[0]

    def by_itself(self, step: Step, programs: int = 3) -> torch.Tensor:
        """The result of a pass that is not captured, in a cache of its own."""
        return self.run(step.q, step.k, step.v, key_places(self.view(step)), programs)

    def in_slots(self, step: Step, capacity: int, padding: int) -> torch.Tensor:
        """The result of a captured step, in a cache of more slots; padding has positions of its own."""
        count = len(step.parents)
        parents, positions = [*step.parents, *[-1] * padding], [*step.positions, *[0] * padding]
        k, v = (_with_slots(part, 0, capacity, padding) for part in (step.k, step.v))
        q = torch.cat([step.q, step.q[:, :, :1].expand(-1, -1, padding, -1)], 2)
        slots = torch.arange(step.length, step.length + count + padding, device=self.device)
        view = self.view(Step(parents, positions, step.length, q, k, v), slots, capacity)
        return self.run(q, k, v, key_places(view), 1)[:count]

    def in_pool(self, step: Step, others: list[Step], gap: int) -> torch.Tensor:
        """The step's result beside others in a captured step; their caches lie in reverse order, with gaps between."""
        steps = [others[0], step, *others[1:]]
        first_slot, ks, vs, sequences, slots, first_slots, lengths = 0, [], [], [], [], [], []
        first_token = sum(len(each.parents) for each in steps)
        for each in reversed(steps):
            tokens, keys = len(each.parents), each.k.shape[2]
            first_token -= tokens
            sequences = [[first_token, tokens, first_slot + gap, each.length], [0, 0, 0, 0], *sequences]
            slots = [*range(first_slot + gap + each.length, first_slot + gap + keys), *slots]
            first_slots, lengths = [first_slot + gap] * tokens + first_slots, [each.length] * tokens + lengths
            ks.append(_with_slots(each.k, gap, keys + 2 * gap))
            vs.append(_with_slots(each.v, gap, keys + 2 * gap))
            first_slot += keys + 2 * gap
        views = [self.view(each) for each in steps]
        seen = torch.block_diag(*(view.visible_TT for view in views)).bool()
        positions = torch.cat([view.positions_T for view in views])
        data = (torch.tensor(part, device=self.device) for part in (slots, first_slots, lengths, sequences))
        view = PooledView(seen, positions, *data, first_slot, self.window, step.q.dtype)
        q = torch.cat([each.q for each in steps], 2)
        start = len(others[0].parents)
        out = self.run(q, torch.cat(ks, 2), torch.cat(vs, 2), key_places(view), 2)
        return out[start : start + len(step.parents)]


def _with_slots(states: torch.Tensor, before: int, capacity: int, finite: int = 0) -> torch.Tensor:
    """Keys or values in a buffer of more slots, from slot `before` on; others are NaN, but for some behind them."""
    buffer = states.new_full((1, states.shape[1], capacity, states.shape[3]), math.nan)
    end = before + states.shape[2]
    buffer[:, :, before:end] = states
    buffer[:, :, end : end + finite] = 0.5
    return buffer


def worst_error(case: Case, device: torch.device) -> float:
    """The largest difference from the oracle in float64, in units of TOLERANCE: above 1 is a fault."""
    kernel, errors = Kernel(case, device), []
    for length in case.lengths:
        step = draw(case, length, device)
        out = kernel.by_itself(step)
        assert out.dtype == case.dtype
        wide = (part.double() for part in (step.q, step.k, step.v))
        expected = attention_by_position(*wide, key_places(kernel.view(step)), kernel.scale)[0]
        errors.append((out.double() - expected).abs().max() / step.v.double().abs().max())
    return float(torch.stack(errors).max() / torch.finfo(case.dtype).eps / TOLERANCE[case.dtype])


def differing(case: Case, device: torch.device) -> list[str]:
    """Where a token has other bits than in its tree by itself: none, if the kernels are right."""
    kernel, found = Kernel(case, device), []
    rng = random.Random(repr(case))
    steps = [draw(case, length, device) for length in case.lengths]
    for index, step in enumerate(steps):
        together = kernel.by_itself(step)
        nodes = len(step.parents)
        others = {"programs": kernel.by_itself(step, rng.randint(1, 5))}
        padding = rng.randint(0, case.most_tokens)
        capacity = step.length + nodes + padding + rng.choice([0, 5, 300])
        others[f"slots of {capacity}, padding of {padding}"] = kernel.in_slots(step, capacity, padding)
        company = [steps[index - 1], steps[index - len(steps) // 2]]
        others["a pool"] = kernel.in_pool(step, company, rng.randint(1, 9))
        found += [f"L={step.length}: {name}" for name, out in others.items() if not torch.equal(out, together)]
        path = step.path_to(rng.randrange(nodes))
        for count in {1, len(path)}:
            alone = kernel.by_itself(step.end_of(path, count))
            if not torch.equal(alone, together[path[-count:]]):
                found.append(f"L={step.length}: the last {count} of a path of {len(path)}")
    return found


def main() -> None:
    """Prints the error of every case, and where its bits differ, as JSON."""
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels need a GPU"
    cpu = torch.device("cpu")
    names = sys.argv[1:] or SMALL
    print(json.dumps({name: [worst_error(SMALL[name], cpu), differing(SMALL[name], cpu)] for name in names}))


if __name__ == "__main__":
    main()
