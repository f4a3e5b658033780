"""Faults of a GPU, planted in the decode loop: each must show on the simulated one.

A simulation that passes everything would let `test_simulated_cuda_decoding.py` pass whatever the loop does. The sixth,
a copy from pageable memory in every step, is in `test_simulated_cuda_counts.py`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import lp
from lp.attention.base import StepView, View
from lp.attention.masks import StepMasks
from lp.errors import RankLost
from lp.models.graph_recorder import CaptureFailed, GraphRecorder
from lp.models.kv_cache import PreallocatedLayer, StaticKVCache
from lp.parallel.context import ParallelContext
from lp.parallel.rank_group import ProcessRankGroup
from lp.sampling.score_recorder import RecordingSampler
from tests.support.simulated_cuda import DeviceError, SimulatedCuda, run_on_gpus
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 16
TEXTS = [drawn_text(random.Random("faults"), length) for length in (9, 30)]


def decoded(capture: str = "graph", **asked: Any) -> list[lp.GenerationOutput]:
    """What a decoder on the GPU gives for both texts."""
    model: Any = copy.deepcopy(tiny_model()).to("cuda")
    decoder = lp.LookaheadDecoder(model, CONFIG, capture=capture)
    return [decoder.generate(ids, NEW, **asked) for ids in TEXTS]


def expected() -> list[list[int]]:
    return [plain_greedy(tiny_model(), ids, NEW) for ids in TEXTS]


@pytest.mark.parametrize("what", ["all_gather", "broadcast"])
def test_a_host_tensor_in_a_collective(what: str, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo takes it; NCCL does not."""
    carried = ProcessRankGroup._carried

    def on_the_host(self: ProcessRankGroup, tensor: torch.Tensor) -> torch.Tensor:
        broadcasts = tensor.is_floating_point()  # KV; the messages of steps are integers
        return tensor.contiguous().cpu() if broadcasts == (what == "broadcast") else carried(self, tensor)

    monkeypatch.setattr(ProcessRankGroup, "_carried", on_the_host)
    config = lp.LookaheadConfig(
        window_size=4, ngram_size=3, guess_set_size=6, ablation=lp.Ablation(kv_sync=lp.KVSync.BROADCAST)
    )
    models: list[Any] = [copy.deepcopy(tiny_model()).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> list[int]:
        return lp.LookaheadDecoder(models[context.rank], config, context).generate(TEXTS[1], NEW).tokens

    with pytest.raises(RankLost, match="No backend type associated with device type cpu"):
        run_on_gpus(2, body)


def test_an_item_in_a_captured_region(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is a number like any other."""
    build = StepMasks.build

    def waiting(self: StepMasks, view: View) -> Any:
        if isinstance(view, StepView) and view.slot_mapping_T is not None:
            view.slot_mapping_T[0].item()
        return build(self, view)

    monkeypatch.setattr(StepMasks, "build", waiting)
    with pytest.raises(CaptureFailed, match="synchronizing CUDA operation"):
        decoded()
    assert [output.tokens for output in decoded("auto")] == expected()  # goes on uncaptured


def test_a_length_that_a_graph_bakes_in(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that writes by a Python length: a replay then writes to the slots of the step that was captured."""
    update = PreallocatedLayer.update

    def by_length(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.extent.slot_mapping_T is None:
            return update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.extent.length
        self.keys[:, :, start : start + key_states.shape[2]] = key_states
        self.values[:, :, start : start + key_states.shape[2]] = value_states
        return self.keys, self.values

    monkeypatch.setattr(PreallocatedLayer, "update", by_length)
    assert [output.tokens for output in decoded()] != expected()


def test_buffers_that_are_replaced(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows the memory that it was captured with, not the tensor that has its name now."""
    clear = StaticKVCache.clear
    kept: list[torch.Tensor] = []

    def replacing(self: StaticKVCache, keep: bool = False) -> None:
        clear(self)
        if keep:
            kept.extend(self.buffers)
        for kind, buffers in self._extent.buffers.items():
            self._extent.buffers[kind] = [buffer.clone() for buffer in buffers]
        (buffer,) = self.buffers  # of all layers
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = buffer[2 * index : 2 * index + 1], buffer[2 * index + 1 : 2 * index + 2]

    monkeypatch.setattr(StaticKVCache, "clear", replacing)
    with pytest.raises(DeviceError, match=r"memory that was freed; it was allocated at lp/models/captured_steps.py:\d"):
        decoded()
    monkeypatch.setattr(StaticKVCache, "clear", lambda self: replacing(self, keep=True))
    assert [output.tokens for output in decoded()] != expected()


def test_a_replay_that_is_left_out(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a graph's memory is of an earlier replay."""
    recorded = GraphRecorder._recorded

    def without_the_second_replay(self: GraphRecorder, work: Callable[[], Any]) -> Callable[[], Any]:
        replay = recorded(self, work)
        results: list[Any] = []

        def run() -> Any:
            results.append(results[0] if len(results) == 1 else replay())
            return results[-1]

        return run

    monkeypatch.setattr(GraphRecorder, "_recorded", without_the_second_replay)
    assert [output.tokens for output in decoded()] != expected()


def test_a_buffer_that_a_later_replay_overwrites(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's logits are valid until the next one: who needs them longer copies them."""
    model = tiny_model()
    right = [lp.AutoregressiveDecoder(model).generate(ids, NEW, output_logits=True).logits for ids in TEXTS]

    def compared() -> list[bool]:
        found = [output.logits for output in decoded(output_logits=True)]
        return [
            a is not None and b is not None and torch.allclose(a.cpu(), b) for a, b in zip(found, right, strict=True)
        ]

    def holding(self: RecordingSampler, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        for name, steps in self._recorded.items():
            steps += [self._step[name][nodes.index(node)][None] for node in sampled_at]  # views, where a copy is due

    assert all(compared())
    monkeypatch.setattr(RecordingSampler, "record", holding)
    assert not any(compared())


def test_a_rank_whose_memory_is_full_lets_go_of_captured_steps(gpu: SimulatedCuda) -> None:
    """They and their cache are the most that lp holds, and the next call may need the room; other ranks keep theirs."""
    models: list[Any] = [copy.deepcopy(tiny_model()).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> tuple[str, bool, list[int]]:
        decoder = lp.LookaheadDecoder(models[context.rank], CONFIG, context, capture="graph")
        decoder.generate(TEXTS[0], NEW)
        captured = decoder.runner.captured
        assert captured and captured.cache

        def full(tokens: list[int], step: int) -> None:
            if step == 1 and context.rank == 1:
                raise torch.OutOfMemoryError("full")

        try:
            decoder.generate(TEXTS[0], NEW, on_tokens=full)
            ended = "at its end"
        except (torch.OutOfMemoryError, lp.Interrupted) as error:
            ended = type(error).__name__
        held = captured.cache is not None
        assert not captured.reserved
        return ended, held, decoder.generate(TEXTS[1], NEW).tokens

    tokens = expected()[1]
    assert run_on_gpus(2, body) == [("Interrupted", True, tokens), ("OutOfMemoryError", False, tokens)]
