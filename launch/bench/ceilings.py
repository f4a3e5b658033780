"""The device's memory bandwidth and arithmetic speed, measured; and how calls on it are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # beyond the caches; on a CPU also soon done
PRODUCT_SIZE = {"cuda": 8192, "cpu": 768}
WARM_UP = 2  # the first call may capture or compile, the second finds memory allocated

Call = Callable[[], object]


def seconds(call: Call, device: torch.device) -> float:
    """How long a call keeps the device, from idle to idle: by events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def alternated(
    calls: Mapping[str, Call],
    rounds: int,
    device: torch.device,
) -> dict[str, float]:
    """Median seconds of every call, run in turn, each round beginning with another one.

    Args:
        calls: what to time, by name.
        rounds: how many rounds are counted, after WARM_UP others.
        device: the device that the calls keep busy.
    """
    names = list(calls)
    taken = {name: list[float]() for name in calls}
    for turn in range(WARM_UP + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(seconds(calls[name], device))
    return {name: median(times[WARM_UP:]) for name, times in taken.items()}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Speeds of the device, measured in this run.

    Args:
        bytes_per_s: speed of a copy, read and written bytes together.
        flop_per_s: speed of a matrix product in the model's dtype, on random data.
    """

    bytes_per_s: float
    flop_per_s: float


class CeilingCalls:
    """The calls to time for the ceilings, and what their seconds mean.

    Args:
        device: the device to measure.
        dtype: the matrices' type, the model's.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        size = PRODUCT_SIZE.get(device.type, PRODUCT_SIZE["cpu"])
        self.source = torch.randn(copy_bytes(device) // 4, device=device, dtype=torch.float32)
        self.target = torch.empty_like(self.source)
        self.left, self.right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self.product = torch.empty_like(self.left)

    def calls(self) -> dict[str, Call]:
        """The calls to time, by name: a copy for the bandwidth, a product for the FLOPs."""
        return {
            "copy": lambda: self.target.copy_(self.source),
            "product": lambda: torch.mm(self.left, self.right, out=self.product),
        }

    def read(self, times: Mapping[str, float]) -> Ceilings:
        """What the device can do at most, given the seconds of each call."""
        return Ceilings(
            bytes_per_s=2 * self.source.nbytes / times["copy"],
            flop_per_s=2 * self.left.shape[0] ** 3 / times["product"],
        )


def copy_bytes(device: torch.device) -> int:
    """Bytes of the copied tensor; its copy needs as much again."""
    return COPY_BYTES.get(device.type, COPY_BYTES["cpu"])


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least work of a forward pass, by the model's sizes; of experts, as if all of them ran.

    Args:
        weight_bytes: read once, but for an embedding that is no LM head: of that a step reads a few vectors.
        kv_token_bytes: keys and values of one cached token, all layers.
        token_flop: FLOP in the layers' matrices, for one token.
        head_flop: FLOP in the LM head, for one token that is sampled.
        key_flop: FLOP in attention, for one token and one key it sees.
    """

    weight_bytes: int
    kv_token_bytes: int
    token_flop: int
    head_flop: int
    key_flop: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Work:
        """The work of a model, counted from its parameters and config."""
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        read = [p for p in model.parameters() if p is not embedding or p is head]
        heads = config.num_attention_heads
        layers = config.num_hidden_layers
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            weight_bytes=sum(p.nbytes for p in read),
            kv_token_bytes=2 * layers * kv_heads * width * head.element_size(),
            token_flop=2 * sum(p.numel() for p in read if p.ndim > 1 and p is not head),
            head_flop=2 * head.numel(),
            key_flop=4 * layers * heads * width,
        )

    def flop(self, num_tokens: int, prefix: int) -> int:
        """FLOP of a pass of `num_tokens` tokens, all sampled, behind `prefix` cached ones."""
        return num_tokens * (self.token_flop + self.head_flop + self.key_flop * (prefix + num_tokens))

    def moved_bytes(self, num_tokens: int, prefix: int) -> int:
        """Bytes that such a pass moves: weights and cached tokens."""
        return self.weight_bytes + self.kv_token_bytes * (prefix + num_tokens)

    def floor_s(self, num_tokens: int, prefix: int, ceilings: Ceilings) -> float:
        """The least seconds that the ceilings allow for a pass of `num_tokens` tokens behind `prefix` cached ones."""
        moved_s = self.moved_bytes(num_tokens, prefix) / ceilings.bytes_per_s
        return max(moved_s, self.flop(num_tokens, prefix) / ceilings.flop_per_s)
