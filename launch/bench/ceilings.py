"""Measure a device's memory bandwidth and arithmetic speed, and compute the least time of a forward pass from them."""

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
    """Measure for how many seconds a call keeps the device busy: by CUDA events on a GPU, by the clock elsewhere.

    Args:
        call: the call to time; the device is idle before it.
        device: the device that the call keeps busy.
    """
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
    """Median seconds of each call; a round runs all calls once, and begins with another call than the round before.

    Args:
        calls: the calls to time, by name.
        rounds: how many rounds count; WARM_UP (2) more rounds run before them and do not count.
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
    """Memory bandwidth and arithmetic speed of the device, measured in this run; no forward pass can exceed them.

    Args:
        bytes_per_s: bandwidth of a large copy, where bytes read and bytes written both count.
        flop_per_s: floating-point operations per second in a large matrix product in the model's dtype.
    """

    bytes_per_s: float
    flop_per_s: float


class CeilingCalls:
    """Two calls, a large copy and a large matrix product, whose times give a device's `Ceilings`.

    They are timed in turn with the calls that are compared with these limits.

    Args:
        device: the device to measure.
        dtype: dtype of the matrix product, the model's.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        size = PRODUCT_SIZE.get(device.type, PRODUCT_SIZE["cpu"])
        self.source = torch.randn(copy_bytes(device) // 4, device=device, dtype=torch.float32)
        self.target = torch.empty_like(self.source)
        self.left, self.right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self.product = torch.empty_like(self.left)

    def calls(self) -> dict[str, Call]:
        """The calls to time, by name: "copy" for the bandwidth, "product" for the arithmetic speed."""
        return {
            "copy": lambda: self.target.copy_(self.source),
            "product": lambda: torch.mm(self.left, self.right, out=self.product),
        }

    def read(self, times: Mapping[str, float]) -> Ceilings:
        """Compute the device's bandwidth and arithmetic speed from the times of the calls.

        Args:
            times: seconds of each call, under the names that `calls` gives them.
        """
        return Ceilings(
            bytes_per_s=2 * self.source.nbytes / times["copy"],
            flop_per_s=2 * self.left.shape[0] ** 3 / times["product"],
        )


def copy_bytes(device: torch.device) -> int:
    """Bytes of the tensor that is copied to measure the bandwidth; the copy itself takes as many bytes again.

    Args:
        device: the device to measure; a CPU copies a smaller tensor, as it is slower.
    """
    return COPY_BYTES.get(device.type, COPY_BYTES["cpu"])


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes and floating-point operations (FLOP) of a forward pass, from which ceilings of speed (roofline) follow.

    They are computed from the sizes of the model, and are the least that a pass needs. In a mixture of experts all
    experts count as if every one ran, so there they are too high, and the ceilings too low.

    Args:
        weight_bytes: bytes of the weights that a forward pass reads. The embedding counts only if it is also the LM
            head, since a pass reads just a few of its rows.
        kv_token_bytes: bytes that the keys and values of one token take in the cache, all layers together.
        token_flop: FLOP per token in the matrices of all layers.
        head_flop: FLOP per token in the LM head.
        key_flop: FLOP of attention for each pair of a token and a token that it attends to, all layers together.
    """

    weight_bytes: int
    kv_token_bytes: int
    token_flop: int
    head_flop: int
    key_flop: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Work:
        """Count the bytes and FLOP of a model's forward pass from its parameters and config.

        Args:
            model: an HF causal LM; its weights are not read.
        """
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
        """FLOP of a forward pass whose tokens all go through the LM head.

        Args:
            num_tokens: number of tokens in the pass.
            prefix: number of cached tokens, all of which each token of the pass attends to.
        """
        return num_tokens * (self.token_flop + self.head_flop + self.key_flop * (prefix + num_tokens))

    def moved_bytes(self, num_tokens: int, prefix: int) -> int:
        """Bytes of weights, keys and values that a forward pass reads or writes.

        Args:
            num_tokens: number of tokens in the pass.
            prefix: number of cached tokens, all of which each token of the pass attends to.
        """
        return self.weight_bytes + self.kv_token_bytes * (prefix + num_tokens)

    def floor_s(self, num_tokens: int, prefix: int, ceilings: Ceilings) -> float:
        """Least seconds that a forward pass can take on a device with this bandwidth and arithmetic speed.

        Args:
            num_tokens: number of tokens in the pass.
            prefix: number of cached tokens, all of which each token of the pass attends to.
            ceilings: the device's bandwidth and arithmetic speed.
        """
        moved_s = self.moved_bytes(num_tokens, prefix) / ceilings.bytes_per_s
        return max(moved_s, self.flop(num_tokens, prefix) / ceilings.flop_per_s)
