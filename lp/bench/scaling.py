"""Strong scaling: the same steps on one rank and on all, in alternation, so that drift of the machine hits both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from lp.config import LookaheadConfig
from lp.decoding.base import GenerationOutput
from lp.decoding.lookahead import LookaheadDecoder
from lp.distributed import ParallelContext


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the steps of one rank went, as means over steps.

    Args:
        rank, ranks: whose, and of how many that shared the steps.
        rows: of a step.
        forward_ms, exchange_ms, host_ms: in the model, in the collectives (waiting for slower ranks too), elsewhere.
    """

    rank: int
    ranks: int
    rows: float
    forward_ms: float
    exchange_ms: float
    host_ms: float


@dataclass(frozen=True, kw_only=True)
class StrongScaling:
    """What R ranks make of the steps of one.

    Args:
        alone_ms, together_ms: decode time a token, median of the rounds, mean of the prompts.
        ratio: together over alone, of these.
        ratios: the same by round.
        compression: S, equal for both.
        splits: of the single rank, then of every one.
    """

    alone_ms: float
    together_ms: float
    ratio: float
    ratios: list[float]
    compression: float
    splits: list[Split]

    def table(self) -> str:
        """Markdown."""
        ranks = self.splits[-1].ranks
        lines = [
            f"1 rank {self.alone_ms:.2f} ms a token, {ranks} ranks {self.together_ms:.2f} ms: {self.ratio:.3f} x "
            f"(by round {', '.join(f'{ratio:.3f}' for ratio in self.ratios)}); S = {self.compression:.2f}",
            "",
            "| ranks | rank | rows a step | forward ms | exchange ms | host ms |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for s in self.splits:
            times = f"{s.forward_ms:.2f} | {s.exchange_ms:.2f} | {s.host_ms:.2f}"
            lines.append(f"| {s.ranks} | {s.rank} | {s.rows:.1f} | {times} |")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def strong_scaling(
    model: PreTrainedModel,
    config: LookaheadConfig,
    context: ParallelContext,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rounds: int,
) -> StrongScaling:
    """Decode every prompt on rank 0 alone and on all ranks, in turn, `rounds` times after a warm-up.

    Args:
        model: this rank's replica.
        config: W, N, G in total: the same for both.
        context: all ranks; each calls this.
        prompts: token ids.
        max_new_tokens: of every run; EOS ends none.
        rounds: each begins with the other one.

    Raises:
        RuntimeError: the texts or their steps differ, so that times would not compare.
    """
    alone = LookaheadDecoder(model, config, ParallelContext(device=context.device))
    together = LookaheadDecoder(model, config, context)
    seconds: list[list[tuple[float, float]]] = []  # by round and prompt, a token alone and together
    outputs: list[tuple[GenerationOutput, GenerationOutput]] = []
    for turn in range(-1, rounds):
        taken = []
        for ids in prompts:
            pair: dict[bool, GenerationOutput] = {}
            for shared in (True, False) if turn % 2 else (False, True):
                _meet(context)  # the others wait while rank 0 decodes alone
                if shared or context.is_main:
                    pair[shared] = (together if shared else alone).generate(ids, max_new_tokens, eos_token_id=())
            one, all_ = pair.get(False, pair[True]), pair[True]
            _check_alike(one, all_)
            taken.append((one.decode_s / len(one.tokens), all_.decode_s / len(all_.tokens)))
            outputs += [(one, all_)] * (turn >= 0)
        seconds += [taken] * (turn >= 0)
    return _summary(seconds, outputs, context)


def _meet(context: ParallelContext) -> None:
    context.all_gather(torch.zeros(1, dtype=torch.int64, device=context.device))


def _check_alike(one: GenerationOutput, all_: GenerationOutput) -> None:
    accepted = [[step.accepted for step in output.step_stats] for output in (one, all_)]
    if one.tokens != all_.tokens or accepted[0] != accepted[1]:
        raise RuntimeError("one rank and all ranks took different steps: a near-tie; try another prompt or float64")


def _summary(
    seconds: list[list[tuple[float, float]]],
    outputs: list[tuple[GenerationOutput, GenerationOutput]],
    context: ParallelContext,
) -> StrongScaling:
    by_prompt = list(zip(*seconds, strict=True))
    alone, together = (fmean(median(pair[which] for pair in rounds) for rounds in by_prompt) for which in (0, 1))
    ratios = [sum(pair[1] for pair in taken) / sum(pair[0] for pair in taken) for taken in seconds]
    # Nanoseconds and thousandths of a row, as the collective carries integers.
    mine = torch.tensor(_means([all_ for _, all_ in outputs]), device=context.device)
    splits = [_split(0, 1, _means([one for one, _ in outputs]))]
    splits += [_split(rank, context.world_size, row) for rank, row in enumerate(context.all_gather(mine).tolist())]
    tokens, steps = (sum(n) for n in zip(*((len(one.tokens), one.steps) for one, _ in outputs), strict=True))
    return StrongScaling(
        alone_ms=1e3 * alone,
        together_ms=1e3 * together,
        ratio=together / alone,
        ratios=ratios,
        compression=tokens / steps,
        splits=splits,
    )


def _means(outputs: list[GenerationOutput]) -> list[int]:
    steps = [step for output in outputs for step in output.step_stats]
    rows = fmean(step.slots for step in steps)
    times = (fmean(getattr(step, name) for step in steps) for name in ("forward_s", "exchange_s", "host_s"))
    return [round(1e3 * rows), *(round(1e9 * seconds) for seconds in times)]


def _split(rank: int, ranks: int, means: list[int]) -> Split:
    rows, forward, exchange, host = means
    return Split(
        rank=rank,
        ranks=ranks,
        rows=rows / 1e3,
        forward_ms=forward / 1e6,
        exchange_ms=exchange / 1e6,
        host_ms=host / 1e6,
    )
