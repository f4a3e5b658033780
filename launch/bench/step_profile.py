"""Where the time of a decode step goes: forward passes by size, beside the device's limits, and the parts of a step.

T: tokens of a step or forward pass; t(T): seconds of a forward pass of T tokens; L: cached tokens, the prefix; R:
ranks; B: most step tokens of a rank. S: generated tokens per decode step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from lp.attention.ablation import WithoutAttention
from lp.checks import check_count, check_int, set_field
from lp.config import Capture, KVSync, LookaheadConfig
from lp.draft.layout import StepLayout
from lp.draft.registry import Call as SourceCall
from lp.draft.tree import DraftTreeBuilder
from lp.draft.window import LookaheadWindow, slice_window
from lp.engine.decoder import Decoder
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.models.loader import context_limit, vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.rank_group import RankGroup
from lp.sampling.params import SamplingParams

from ..data.shapes import check_memory
from .ceilings import WARM_UP, Call, CeilingCalls, Ceilings, Work, alternated, copy_bytes
from .gpu_calls import GpuCalls, calls_per_step
from .one_rank import Build, record, replayed
from .passes import HEAD_CALLS, Passes, head_call, sampled_of

PREFILL_CHUNK = 512  # tokens of a pass, as `generate` has it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a profile measures: lengths of prefix and forward passes, number of rounds, and which of how many ranks.

    Args:
        prefix: L, cached tokens.
        sizes: numbers of tokens T for which a forward pass is timed.
        max_new_tokens: tokens that every decode generates.
        rounds: how often everything is measured; medians count.
        ranks: R, how many ranks there are.
        rank: the rank whose steps are timed, from 0.
        sampling: how decodes sample, with a known seed; None is greedy.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    prefix: int = 1024
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    max_new_tokens: int = 32
    rounds: int = 9
    ranks: int = 1
    rank: int = 0
    sampling: SamplingParams | None = None

    def __post_init__(self) -> None:
        check_count(self, "prefix", 1, float("inf"), "try 1024")
        if not self.sizes:
            raise UserError("tokens is empty; name at least one T, as in tokens=[1,64]")
        sizes = tuple(check_int("tokens", size, 1, 4096, "try tokens=[1,8,64]") for size in self.sizes)
        set_field(self, "sizes", sizes)
        check_count(self, "max_new_tokens", 2, float("inf"), "try 32")
        check_count(self, "rounds", 1, float("inf"), "measure at least once")
        set_field(self, "ranks", check_int("R", self.ranks, 1, 1024, "try 1"))
        check_count(self, "rank", 0, self.ranks - 1, f"the ranks of R={self.ranks} are numbered from 0")

    def check_room(self, model: PreTrainedModel, step: int, device: torch.device, weights: int = 0) -> None:
        """Refuse a plan that exceeds the model's context or the device's free memory, before anything is measured.

        Args:
            model: the model to be profiled, or a sketch of it without memory for weights.
            step: B, most step tokens of a rank.
            device: where the model computes.
            weights: bytes of weights that are still to be allocated on the device.

        Raises:
            ValueError: names the room needed and the limit.
        """
        num_tokens = max(step, *self.sizes)
        limit = context_limit(model)
        needed = self.prefix + self.max_new_tokens + num_tokens
        if limit is not None and needed > limit:
            raise UserError(
                f"prefix is {self.prefix}, with the text and the step behind it {needed} positions; the model's "
                f"context is {limit}: take a shorter prefix or smaller tokens="
            )
        vocabulary = model.get_output_embeddings().weight.shape[0]
        caches = 3 if self.ranks == 1 else 3 + self.ranks
        cached = caches * needed * Work.of(model).kv_token_bytes
        logits = 3 * 4 * max(num_tokens, PREFILL_CHUNK) * vocabulary  # the model's, these in float32, and processed
        check_memory(weights + cached + logits + 2 * copy_bytes(device), device)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The time of a forward pass of T tokens with logits for all of them.

    Args:
        num_tokens: T, the number of tokens in the pass.
        seconds: seconds of the pass, t(T).
        ratio: t(T) divided by the time of the smallest pass that was measured.
        floor: t(T) divided by the least seconds that the device's bandwidth and arithmetic speed allow: 1.0 is perfect.
        bytes_per_s: bytes of weights, keys and values that the pass moves per second.
        flop_per_s: floating-point operations that the pass does per second.
    """

    num_tokens: int
    seconds: float
    ratio: float
    floor: float
    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """The time of a step in the decode loop and of its parts, medians over steps.

    A step may begin with catch-up tokens: accepted tokens that this rank computes again, since another rank has their
    keys and values.

    Args:
        num_tokens: tokens that this rank computes in the step, with catch-up.
        max_tokens: B, the most tokens that this rank may compute in a step, with catch-up.
        steps: number of decode steps in one decode.
        compression: S, generated tokens per decode step, in that decode; it means nothing where weights are random.
        seconds: seconds of a step.
        parts: seconds of each part: "attention", "LM head", "other layers", "exchange" and "host", which add up to
            `seconds`. Attention is the time of the forward pass minus its time without attention, and 0 where a model
            cannot leave attention out. The LM head is timed alone. "other layers" is the rest of the pass, with
            sampling.
        pass_s: seconds of a forward pass of these tokens outside the decode loop.
        real_exchange: whether R ranks really ran; otherwise the exchange is that of a single rank.
    """

    num_tokens: int
    max_tokens: int
    steps: int
    compression: float
    seconds: float
    parts: dict[str, float]
    pass_s: float
    real_exchange: bool

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in a step's time, 0 to 1, by part."""
        return {name: took / self.seconds for name, took in self.parts.items()}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All measurements of `lp profile` on one model.

    Args:
        ceilings: bandwidth and arithmetic speed of the device.
        work: least bytes and FLOP of a forward pass.
        step_times: times of forward passes, by ascending number of tokens.
        step: parts of a step of the decode loop.
        first_call_s: seconds by which the first decode took longer than later ones, through graph capture, compilation
            and allocation.
        calls: GPU launches, kernels and waits per step; None on a CPU, and with several ranks.
    """

    ceilings: Ceilings
    work: Work
    step_times: list[Point]
    step: Step
    first_call_s: float
    calls: GpuCalls | None

    @property
    def over_weights(self) -> float:
        """Seconds of the smallest forward pass, divided by the seconds in which a copy would read the weights once."""
        return self.step_times[0].seconds * self.ceilings.bytes_per_s / self.work.weight_bytes

    def as_dict(self) -> dict[str, Any]:
        """All figures by name, for a line of JSON."""
        return asdict(self) | {"over_weights": self.over_weights, "shares": self.step.shares}


def largest_step(config: LookaheadConfig, budget: int, ranks: int, rank: int, catch_up: int) -> StepLayout:
    """Lay out the largest decode step of a rank, B tokens, to time it: catch-up, window columns, and draft paths.

    The draft paths share no nodes, and take all tokens that catch-up and window leave of B.

    Args:
        config: the decoder's config.
        budget: B, most step tokens of a rank.
        ranks: R, how many ranks there are.
        rank: the rank whose step it is, from 0.
        catch_up: number of accepted tokens that the rank computes again, since another rank has their keys and values;
            less than B.
    """
    columns = slice_window(config.window_size, config.ngram_size, (budget - catch_up,) * ranks)[rank]
    draft = DraftTreeBuilder(max(budget - catch_up - columns.num_nodes, 0))
    for first in range(0, draft.budget, config.depth):
        draft.add_path(-1 - index for index in range(first, first + config.depth))
    window = LookaheadWindow(config.window_size, config.ngram_size, [0])
    return StepLayout(window, columns, draft.build(), 0, 0, sys.maxsize, [0] * catch_up)


def step_budget(decoder: LookaheadDecoder, ids: Sequence[int], ranks: int) -> int:
    """B, the most step tokens that a decoder would give each rank after a text, if it were one of R ranks.

    Args:
        decoder: the decoder; its context is replaced, and not restored.
        ids: token ids of the text.
        ranks: R, how many ranks there are.
    """
    call = SourceCall(
        prompt=ids,
        vocabulary_size=vocabulary_size(decoder.model),
        max_length=len(ids),
        noise=None,
        step_tokens=None,
        temperature=1.0,
        model_folder="",
    )
    decoder.context = ParallelContext(device=decoder.model.device, steps=RankGroup(size=ranks))
    return decoder.budget(decoder.factory.new_source(call)).step_tokens


def profile(
    model: PreTrainedModel, build: Build, plain: Build, ids: Sequence[int], plan: Plan, context: ParallelContext
) -> Profile:
    """Time a model's forward passes and decode steps on the device on which it is.

    Args:
        model: an HF causal LM, loaded.
        build: makes a decoder of the model for a rank's context.
        plain: makes the decoder as `build` does, but without CUDA graphs, which threads cannot capture at the same
            time.
        ids: token ids of the text so far, L + 1 of them: the last one is not cached yet.
        plan: sizes, rounds and ranks to measure.
        context: this process' rank: a single one, or one of R that all call this.

    Raises:
        ValueError: the plan does not fit the model or the device.
        KeyboardInterrupt: Ctrl-C came during a decode.
    """
    device = model.device
    alone = partial(build, ParallelContext(device=device))
    decoder = alone()
    budget = step_budget(decoder, ids, plan.ranks)
    plan.check_room(model, budget, device)
    decode = _decode(build, plain, ids, plan, context)
    outputs: list[GenerationOutput] = []
    started = time.perf_counter()
    first = decode()
    first_s = time.perf_counter() - started
    count = _typical_size([first])
    catch_up = min(_typical_catch_up(first, decoder.config, plan.ranks), count - 1)
    layout = largest_step(decoder.config, budget, plan.ranks, plan.rank, catch_up)
    ceilings = CeilingCalls(device, model.dtype)
    with torch.inference_mode(), ExitStack() as stack:
        most = max(budget, *plan.sizes)
        # Runners beside the decoder's own, which empties its cache for every text and must keep its attention.
        captured = decoder.runner.captured
        capture = captured.mode if captured else Capture.OFF
        kv_dtype = decoder.runner.kv_dtype
        whole_runner, bare_runner = (
            ModelRunner(model, decoder.attention, capture, kv_dtype=kv_dtype) for _ in range(2)
        )
        # Now, and for good: a step that was captured with attention would replay it.
        attention = stack.enter_context(WithoutAttention(bare_runner.model))
        whole, bare = (Passes(runner, ids[:-1], most, PREFILL_CHUNK) for runner in (whole_runner, bare_runner))
        calls: dict[str, Call] = {
            **ceilings.calls(),
            "decode": lambda: outputs.append(decode()),
            "model": whole.share(layout, count),
            "bare": bare.share(layout, count),
            "head": head_call(model, len(sampled_of(layout, count))),
            **{_name(size): whole.chain(size) for size in plan.sizes},
        }
        times = alternated(calls, plan.rounds, device)
    work = Work.of(model)
    found = ceilings.read(times)
    del outputs[:WARM_UP]
    step = _step(outputs, times, budget, attention.called, context.world_size > 1)
    calls_of_step = None
    if device.type == "cuda" and context.world_size == plan.ranks == 1:
        calls_of_step = calls_per_step(
            lambda tokens: decoder.generate(ids, tokens, plan.sampling, eos_token_id=()), plan.max_new_tokens
        )
    return Profile(
        ceilings=found,
        work=work,
        step_times=_step_times(times, plan, work, found),
        step=step,
        first_call_s=first_s - times["decode"],
        calls=calls_of_step,
    )


def _name(size: int) -> str:
    return f"t({size})"


def _decode(
    build: Build, plain: Build, ids: Sequence[int], plan: Plan, context: ParallelContext
) -> Callable[[], GenerationOutput]:
    """A function that decodes once as the plan's rank, with recorded collectives if the other ranks do not run."""

    def decode(decoder: Decoder) -> GenerationOutput:
        return decoder.generate(ids, plan.max_new_tokens, plan.sampling, eos_token_id=())

    if context.world_size > 1 or plan.ranks == 1:
        return partial(decode, build(context))
    return replayed(build, decode, plan.rank, plan.ranks, record(plain, decode, plan.ranks))


def _typical_size(outputs: Sequence[GenerationOutput]) -> int:
    return round(median(step.num_tokens for output in outputs for step in output.step_stats))


def _typical_catch_up(output: GenerationOutput, config: LookaheadConfig, ranks: int) -> int:
    """Expected catch-up of a step: accepted tokens that a rank lacks, if each lies on one rank, as often on any."""
    if config.ablation.kv_sync is KVSync.BROADCAST:
        return 0
    return round((output.compression - 1) * (ranks - 1) / ranks)


def _step_times(times: Mapping[str, float], plan: Plan, work: Work, ceilings: Ceilings) -> list[Point]:
    least = times[_name(min(plan.sizes))]
    return [
        Point(
            num_tokens=size,
            seconds=(took := times[_name(size)]),
            ratio=took / least,
            floor=took / work.floor_s(size, plan.prefix, ceilings),
            bytes_per_s=work.moved_bytes(size, plan.prefix) / took,
            flop_per_s=work.flop(size, plan.prefix) / took,
        )
        for size in sorted(set(plan.sizes))
    ]


def _step(
    outputs: Sequence[GenerationOutput],
    times: Mapping[str, float],
    max_tokens: int,
    left_out: bool,
    real_exchange: bool,
) -> Step:
    stats = [step for output in outputs for step in output.step_stats]
    forward_s, exchange_s, host_s = (
        median(getattr(step, f"{name}_s") for step in stats) for name in ("forward", "exchange", "host")
    )
    attention_s = times["model"] - times["bare"] if left_out else 0.0
    head_s = times["head"] / HEAD_CALLS
    parts = {"attention": attention_s, "LM head": head_s, "other layers": forward_s - attention_s - head_s}
    parts |= {"exchange": exchange_s, "host": host_s}
    return Step(
        num_tokens=_typical_size(outputs),
        max_tokens=max_tokens,
        steps=outputs[0].steps,
        compression=outputs[0].compression,
        seconds=sum(parts.values()),
        parts=parts,
        pass_s=times["model"],
        real_exchange=real_exchange,
    )
