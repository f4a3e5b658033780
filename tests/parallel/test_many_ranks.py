"""What a step takes on many ranks: as many tokens on each as pay, the same text, and memory that is bounded."""

from __future__ import annotations

import random
import tracemalloc
from statistics import median

import pytest

import lp
from launch.bench.one_rank import record, replayed
from lp.budget.step_times import StepTimes
from lp.draft.share import step_tokens
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, tiny_model

RANK_TOKENS = 200
MIB = 1 << 20
# Steps that take no longer up to 200 tokens, as on a GPU; and steps of a CPU, whose every token costs time.
FLAT = StepTimes.constant(1e-3, RANK_TOKENS)
STEEP = StepTimes((1, 120, 200), (1.1e-3, 13e-3, 25e-3), 1e-3)


def _outputs(
    ranks: int, config: lp.LookaheadConfig, step_times: StepTimes, num_new: int, sampling: lp.SamplingParams | None
) -> list[lp.GenerationOutput]:
    model, ids = tiny_model(), drawn_text(random.Random(1), 40)

    def body(context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(model, config, context, step_times=step_times)
        return decoder.generate(ids, num_new, sampling, eos_token_id=())

    outputs = run_lockstep(ranks, body)
    plain = lp.AutoregressiveDecoder(model).generate(ids, num_new, sampling, eos_token_id=())
    assert [output.tokens for output in outputs] == [plain.tokens] * ranks
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("sampling", [None, lp.SamplingParams(temperature=0.8, seed=3)])
def test_tokens_that_cost_nothing_are_spent_on_every_rank(ranks: int, sampling: lp.SamplingParams | None) -> None:
    """Bounds of the whole step would leave each of 8 GPUs an eighth of what it computes for nothing."""
    outputs = _outputs(ranks, lp.LookaheadConfig(), FLAT, 60, sampling)
    spent = [[step.num_tokens for step in output.step_stats] for output in outputs]
    assert max(map(max, spent)) <= RANK_TOKENS
    for sizes in spent:  # the last steps have no room for deep trees, and no rank's part of one need be large
        assert median(sizes[:3]) >= 0.9 * RANK_TOKENS, spent


def test_tokens_that_cost_time_are_spent_as_before() -> None:
    """A larger bound is no reason for larger steps."""
    before = lp.LookaheadConfig(guess_set_size=104, adaptive=True)
    small = StepTimes(STEEP.num_tokens[:2], STEEP.seconds[:2], STEEP.plain_s)
    for sampling in (None, lp.SamplingParams(temperature=0.8, seed=3)):
        (old,) = _outputs(1, before, small, 120, sampling)
        (new,) = _outputs(1, lp.LookaheadConfig(), STEEP, 120, sampling)
        taken = [[(s.num_tokens, s.num_draft, s.columns, s.accepted, s.idle) for s in o.step_stats] for o in (old, new)]
        assert taken[0] == taken[1] and max(size for size, *_ in taken[0]) > 1


def test_64_ranks_of_200_tokens() -> None:
    """12,800 tokens a step: the text of one rank, and on each rank memory for its own tokens and all messages.

    Ranks run as threads first, then two of them alone. What a rank keeps beside its model and cache is the pool, all
    ranks' messages and nodes, and its tree: at most 12 times the messages. (R x B) ** 2 flags would take 156 MiB.
    """
    ranks, num_new = 64, 40
    model, ids = tiny_model(), drawn_text(random.Random(1), 40)
    config = lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=ranks * (RANK_TOKENS - 1))
    assert step_tokens(config, ranks) == RANK_TOKENS
    sampling = lp.SamplingParams(temperature=0.8, seed=3)
    outputs: list[lp.GenerationOutput] = []

    def build(context: ParallelContext) -> lp.LookaheadDecoder:
        return lp.LookaheadDecoder(model, config, context)

    def decode(decoder: lp.LookaheadDecoder) -> lp.GenerationOutput:
        outputs.append(decoder.generate(ids, num_new, sampling, eos_token_id=()))
        return outputs[-1]

    recorded = record(build, decode, ranks)
    plain = lp.AutoregressiveDecoder(model).generate(ids, num_new, sampling, eos_token_id=())
    alone = lp.LookaheadDecoder(model, lp.LookaheadConfig(guess_set_size=20))
    assert alone.generate(ids, num_new, sampling, eos_token_id=()).tokens == plain.tokens
    assert [output.tokens for output in outputs] == [plain.tokens] * ranks
    totals = [sum(step.num_tokens for step in steps) for steps in zip(*(o.step_stats for o in outputs), strict=True)]
    assert ranks * RANK_TOKENS >= max(totals) >= 0.9 * ranks * RANK_TOKENS, totals
    message_bytes = 8 * ranks * RANK_TOKENS * (1 + config.ablation.num_logits)  # of all ranks
    for rank in (0, ranks - 1):
        again = replayed(build, decode, rank, ranks, recorded)
        tracemalloc.start()
        try:
            output = again()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert output.tokens == plain.tokens
        assert peak <= config.pool_mib * MIB + 12 * message_bytes, f"rank {rank}: {peak / MIB:.1f} MiB"
