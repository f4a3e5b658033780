"""exact="bitwise" where ranks divide the model: logits of lookahead are those of plain decoding on as many ranks."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import lp
from lp.models import bitwise, equal_widths
from lp.models.runner import ModelRunner
from lp.models.sharded_layers import replica_of
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from lp.parallel.replica import InRankOrder, Replica
from tests.support.thread_ranks import LockstepReplica, run_lockstep
from tests.support.tiny_models import drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=7, ngram_size=5, guess_set_size=7)
SAMPLED = lp.SamplingParams(temperature=0.8, seed=5)
NEW = 20


def around_a_ring(self: LockstepReplica, tensor: torch.Tensor) -> torch.Tensor:
    """Each part of a tensor is summed from another rank on, as libraries do: a row's order goes by its place."""
    parts = [each.flatten().tensor_split(self.size) for each in self._trade(tensor)]
    sums = []
    for first in range(self.size):
        total = parts[first][first].clone()
        for behind in range(1, self.size):
            total += parts[(first + behind) % self.size][first]
        sums.append(total)
    return tensor.copy_(torch.cat(sums).view_as(tensor))


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads add up as those that are processes."""
    monkeypatch.setattr(LockstepReplica, "all_reduce", around_a_ring)


@pytest.mark.subset(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("arch", "tp"), [("llama", 2), ("llama", 4), ("phi3", 4), ("mixtral", 4), ("deepseek_v3", 4)])
def test_logits_are_plain_decodings(arch: str, tp: int, dtype: torch.dtype) -> None:
    """A library's sum over ranks has another order for a step's rows than for a plain step's; the usual mode shows it,
    and that experts and merged projections are summed so, too.
    """
    model = tiny_model(arch, dtype=dtype, sharpness=2.0)
    ids = drawn_text(random.Random(3), 60)

    def body(context: ParallelContext) -> tuple[list[list[int]], bool]:
        part = divide(copy.deepcopy(model), context.replica)
        plain = lp.PlainDecoder(part, context, exact="bitwise")
        texts, usual_differs = [], False
        for sampling in (None, SAMPLED):
            how: dict[str, Any] = {"sampling": sampling, "eos_token_id": (), "output_logits": True}
            expected = plain.generate(ids, NEW, **how)
            found = lp.LookaheadDecoder(part, CONFIG, context, exact="bitwise").generate(ids, NEW, **how)
            usual = lp.LookaheadDecoder(part, CONFIG, context).generate(ids, NEW, **how)
            assert found.logits is not None and expected.logits is not None and usual.logits is not None
            assert found.tokens == expected.tokens and torch.equal(found.logits, expected.logits)
            assert found.exact == "bitwise" and found.steps < expected.steps
            usual_differs |= not torch.equal(usual.logits, expected.logits)
            texts.append(found.tokens)
        return texts, usual_differs

    results = run_lockstep(tp, body, tp=tp)
    assert len({str(texts) for texts, _ in results}) == 1 and all(differs for _, differs in results)


@pytest.mark.parametrize(("arch", "world", "tp"), [("llama", 8, 4), ("qwen3_moe", 4, 2)])
def test_replicas_that_share_steps(arch: str, world: int, tp: int) -> None:
    """They compare the bits of each `c`; texts in one batch, whose prompts are of several lengths."""
    model = tiny_model(arch, dtype=torch.bfloat16, sharpness=2.0)
    prompts = [drawn_text(random.Random(length), length) for length in (5, 60)]

    def body(context: ParallelContext) -> list[list[int]]:
        part = divide(copy.deepcopy(model), context.replica)
        plain = lp.PlainDecoder(part, context, exact="bitwise")
        expected = [
            plain.generate(ids, NEW, SAMPLED, eos_token_id=(), sequence=index).tokens
            for index, ids in enumerate(prompts)
        ]
        decoder = lp.LookaheadDecoder(part, CONFIG, context, exact="bitwise")
        outputs = decoder.generate_batch(prompts, NEW, [SAMPLED] * len(prompts), eos_token_id=())
        assert [output.tokens for output in outputs] == expected
        return expected

    assert len({str(texts) for texts in run_lockstep(world, body, tp=tp)}) == 1


def test_ranks_take_the_widths_at_which_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one rank's rows differ at a width. Ranks that pad otherwise would send tensors of other sizes."""
    rows = equal_widths._rows

    def differing(runner: ModelRunner, cache: Any, tokens: Any) -> torch.Tensor:
        planted = replica_of(runner.model).rank == 1 and len(tokens) == 32
        return rows(runner, cache, tokens) + (1e-6 if planted else 0.0)

    monkeypatch.setattr(equal_widths, "_rows", differing)
    model = tiny_model("llama", dtype=torch.float32)

    def body(context: ParallelContext) -> tuple[int, ...]:
        part = divide(copy.deepcopy(model), context.replica)
        decoder = lp.LookaheadDecoder(part, CONFIG, context, exact="bitwise")
        decoder.generate([1, 2, 3], 4)
        return decoder.runner.widths

    first, second = run_lockstep(2, body, tp=2)
    assert first == second and 32 not in first and 48 in first


def test_all_ranks_ask_again_where_one_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking has collectives: a rank that asked by itself would wait for ranks that have begun a text."""
    asked = []
    ask = bitwise.equal_widths
    monkeypatch.setattr(
        bitwise, "equal_widths", lambda runner: (asked.append(replica_of(runner.model).rank), ask(runner))[1]
    )
    model = tiny_model("llama", dtype=torch.float32)

    def body(context: ParallelContext) -> None:
        decoder = lp.PlainDecoder(divide(copy.deepcopy(model), context.replica), context, exact="bitwise")
        decoder.generate([1, 2, 3], 4)
        if context.rank == 1:
            decoder.runner.asked_threads = 0  # as if it had other threads since
        decoder.generate([1, 2, 3], 4)

    run_lockstep(2, body, tp=2)
    assert sorted(asked) == [0, 0, 1, 1]


def test_sums_are_of_float32_and_rounded_once() -> None:
    """A sum that is rounded after each addition loses small parts: 1 + 2**-8 + 2**-8 would be 1 in bfloat16."""

    class Three(Replica):
        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack([tensor, tensor * 2**-8, tensor * 2**-8])

    ones = torch.ones(5, dtype=torch.bfloat16)
    assert InRankOrder.of(Three(0, 3)).all_reduce(ones).tolist() == [1 + 2**-7] * 5
