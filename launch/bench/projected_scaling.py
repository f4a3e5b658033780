"""Make the projected lines of a scaling table on this device: for every number of ranks, over every link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import lp
from lp.waits import Wait, waiting

from ..config.builders import PLAIN, measured
from ..config.schema import ScalingConfig
from .projection import Link, Projection, Run
from .runs import Bench
from .scaling_lines import Line, projected_lines

T = TypeVar("T")
ROUNDS = 3  # how often everything is timed
LOOKAHEAD = "lookahead"  # the decoder that is projected, with W, N and G as they are


def project_all(config: ScalingConfig, bench: Bench) -> list[Line]:
    """Project lookahead's decoding speed on every number of ranks over every link: the lines of the scaling table.

    The ranks share the config's W and G between them. With `weak` (weak scaling), lines are added in which W and G are
    multiplied by the number of ranks. Ranks and plain decoding are timed in alternation, ROUNDS (3) times after a
    warm-up round.

    Args:
        config: the config, with `projected_ranks`, `links` and `weak`.
        bench: the loaded model with its decoders and prompts.
    """
    links = {name: Link(**vars(link)) for name, link in config.links.items()}
    ids = [bench.encode(prompt) for _, prompt in bench.fitting()]
    texts = [partial(bench.run, ids=one, tokens=config.max_new_tokens) for one in ids]
    jobs = {
        (weak, ranks): [Projection(decoder=decoder, decode=text, ranks=ranks) for text in texts]
        for weak in ((False, True) if config.weak else (False,))
        for ranks in config.projected_ranks
        for decoder in [_widened(bench, ranks if weak else 1)]
    }
    runs: dict[tuple[bool, int], list[list[Run]]] = {key: [] for key in jobs}  # by round and prompt
    speeds: list[float] = []
    total = (1 + ROUNDS) * (1 + len(jobs)) * len(texts)
    with waiting("timing every rank's share of the steps", total, "texts") as wait:
        for _ in range(1 + ROUNDS):
            plain = [_counted(partial(text, bench.decoders[PLAIN]), wait) for text in texts]
            speeds.append(sum(len(output.tokens) for output in plain) / sum(output.decode_s for output in plain))
            for key, of_prompts in jobs.items():
                runs[key].append([_counted(job.run, wait) for job in of_prompts])
    lines = []
    for (weak, ranks), of_prompts in jobs.items():
        rounds = runs[weak, ranks][1:]
        found = [job.summed([one[number] for one in rounds]) for number, job in enumerate(of_prompts)]
        shape = of_prompts[0].decoder.config
        lines += projected_lines(found, links, median(speeds[1:]), weak, (shape.window_size, shape.guess_set_size))
    return lines


def _counted(run: Callable[[], T], wait: Wait) -> T:
    result = run()
    wait.done += 1
    return result


def _widened(bench: Bench, factor: int) -> lp.LookaheadDecoder:
    """The lookahead decoder with `factor` times its W and G, for weak scaling."""
    decoder = bench.decoders[LOOKAHEAD]
    attention = bench.config.attention
    assert isinstance(decoder, lp.LookaheadDecoder)
    if factor == 1:
        return decoder
    shape = decoder.config
    shape = replace(shape, window_size=shape.window_size * factor, guess_set_size=shape.guess_set_size * factor)
    settings = attention.name, attention.capture, None, bench.config.exact, bench.config.model.kv_dtype
    return measured(lp.LookaheadDecoder(bench.loaded.model, shape, None, *settings))
