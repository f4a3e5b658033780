"""A rank that makes other calls than the other, of two, and writes down how each ended.

torchrun ... -m tests.support.workers.calls FOLDER     # -> FOLDER/rank.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lp
from lp.errors import CallsDiffer, RankLost
from lp.parallel.context import ParallelContext
from tests.support.tiny_models import plain_greedy, tiny_model

CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=4)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
MAKING, SEED = "making a LookaheadDecoder", "drawing the seed of LookaheadDecoder.generate"
STEP, ENDED = "in a step of generate", "done with all calls"


def _decoder_more(context: ParallelContext, decoder: lp.LookaheadDecoder) -> None:
    if context.rank == 1:
        lp.LookaheadDecoder(decoder.model, CONFIG, context)
    decoder.generate(IDS, 8)


def _decoder_within(context: ParallelContext, decoder: lp.LookaheadDecoder) -> None:
    def on_tokens(tokens: list[int], step: int) -> None:
        if context.rank == 1 and step == 3:
            lp.LookaheadDecoder(decoder.model, CONFIG, context)

    decoder.generate(IDS, 60, on_tokens=on_tokens)


def _text_within(context: ParallelContext, decoder: lp.LookaheadDecoder) -> None:
    def on_tokens(tokens: list[int], step: int) -> None:
        if context.rank == 1 and step == 3:
            decoder.generate(IDS, 8)

    decoder.generate(IDS, 60, on_tokens=on_tokens)


def _generate_more(context: ParallelContext, decoder: lp.LookaheadDecoder) -> None:
    if context.rank == 1:
        decoder.generate(IDS, 8)
    lp.LookaheadDecoder(decoder.model, CONFIG, context)


def _text_for_seed(context: ParallelContext, decoder: lp.LookaheadDecoder) -> None:
    if context.is_main:
        context.share_text("line")
    decoder.generate(IDS, 8)


CALLS: dict[str, tuple[Callable[..., None], str, str]] = {
    "a decoder more": (_decoder_more, SEED, MAKING),
    "a decoder within a text": (_decoder_within, STEP, MAKING),
    "a text within a text": (_text_within, STEP, SEED),
    "a text more": (_generate_more, MAKING, SEED),
    "a shared line more": (_text_for_seed, "sharing a text", SEED),
}


def ends(context: ParallelContext, name: str, model: PreTrainedModel) -> str:
    """How a sequence of calls ends on this rank; the ranks can generate again after it."""
    decoder = lp.LookaheadDecoder(model, CONFIG, context)
    try:
        CALLS[name][0](context, decoder)
    except CallsDiffer as error:
        tokens = decoder.generate(IDS, 20).tokens
        return f"{error}" if tokens == plain_greedy(decoder.model, IDS, 20) else f"{tokens}"
    return "nothing"


def error_of(name: str) -> str:
    """What every rank of two must say."""
    _, main, other = CALLS[name]
    return f"rank 0 is {main}, rank 1 is {other}; give every rank the same calls in the same order"


SETTINGS: dict[str, list[dict[str, Any]]] = {  # what each rank generates with, by the name of what differs
    "max_new_tokens": [{"max_new_tokens": 8}, {"max_new_tokens": 9}],
    "eos_token_id": [{"eos_token_id": 3}, {"eos_token_id": 4}],
    "seed": [{"sampling": lp.SamplingParams(seed=seed)} for seed in (1, 2)],
    "logits_processor": [{"sampling": lp.SamplingParams(seed=1, top_k=k)} for k in (1, 2)],
}


def settings_end(decoder: lp.LookaheadDecoder, settings: dict[str, Any]) -> str:
    """How a text with other settings than the other rank's ends."""
    try:
        return str(decoder.generate(IDS, **settings).tokens)
    except ValueError as error:
        return str(error)


def left_alone(decoder: lp.LookaheadDecoder) -> str:
    """Rank 1 leaves a text by an error that no header carries, and makes a decoder: each waits in another group."""

    class Broken(lp.LookaheadDecoder):
        def budget(self, *args: Any) -> Any:
            made: Any = super().budget(*args)
            if self.context.rank == 1:
                made.learns, made.record_step = True, lambda *step: 1 // 0
            return made

    try:
        Broken(decoder.model, CONFIG, decoder.context).generate(IDS, 60)
    except RankLost as error:
        return str(error)
    except ZeroDivisionError:
        try:
            lp.LookaheadDecoder(decoder.model, CONFIG, decoder.context)
        except RankLost as error:
            return str(error)
    return "nothing"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    context = lp.ParallelContext.from_env(timeout_s=float(os.environ["TIMEOUT_S"]))
    model = tiny_model()
    found = {name: ends(context, name, model) for name in CALLS}
    decoder = lp.LookaheadDecoder(model, CONFIG, context)
    found |= {name: settings_end(decoder, each[context.rank]) for name, each in SETTINGS.items()}
    found["left alone"] = left_alone(decoder)
    (folder / f"{context.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
