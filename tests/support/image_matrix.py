"""The table of models that take images: what lookahead gives on every tiny one, in docs/reference/models.md."""

from __future__ import annotations

import copy
import random

import lp
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from tests.support.architectures import BACKENDS, CASES, EXACT, PAGE, WRONG, versions
from tests.support.image_models import IMAGE_MODELS, generated, image_model, image_prompt
from tests.support.thread_ranks import run_lockstep

NEW = 24
MARK = "images"
VARIANTS = {
    "gemma3": "an image sees itself both ways; sliding and full layers",
    "gemma4": "an image sees itself both ways; sliding and full layers, shared KV",
    "qwen2_vl": "positions along three axes",
    "qwen2_5_vl": "positions along three axes",
    "qwen3_vl": "positions along three axes, features in several layers",
    "qwen3_vl_moe": "positions along three axes, features in several layers, experts",
    "qwen3_5": "positions along three axes, gated delta rule",
    "qwen3_5_moe": "positions along three axes, gated delta rule, experts",
    "mistral3": "Pixtral's vision",
    "llava": "CLIP's vision",
}


def verdict(name: str, backend: str) -> str:
    """`exact`, the refusal, or `WRONG` and where: greedy text against `generate`, sampled text against the oracle."""
    rng = random.Random(name)
    sampling = lp.SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    try:
        for number in range(CASES):
            model = image_model(name, seed=number)
            inputs = image_prompt(name, number, images=1 + number % 3, words=rng.randint(1, 12))
            shape = lp.LookaheadConfig(
                window_size=rng.randint(0, 8), ngram_size=rng.randint(2, 5), guess_set_size=rng.randint(1, 8)
            )
            decoder = lp.LookaheadDecoder(model, shape, attention=backend)
            if decoder.generate(**inputs, max_new_tokens=NEW).tokens != generated(model, inputs, NEW):
                return f"{WRONG}: greedy, case {number}"
        plain = lp.AutoregressiveDecoder(model).generate(**inputs, max_new_tokens=NEW, sampling=sampling)
        if decoder.generate(**inputs, max_new_tokens=NEW, sampling=sampling).tokens != plain.tokens:
            return f"{WRONG}: sampled"
    except ValueError as refusal:
        return str(refusal)
    return EXACT


def divided_verdict(name: str) -> str:
    """What `verdict` says of a model whose text two ranks divide."""
    model, inputs = image_model(name), image_prompt(name, 1, 2)
    expected = generated(model, inputs, NEW)

    def body(context: ParallelContext) -> list[int]:
        part = divide(copy.deepcopy(model), context.replica)
        return lp.LookaheadDecoder(part, context=context).generate(**inputs, max_new_tokens=NEW).tokens

    try:
        return EXACT if run_lockstep(2, body, tp=2) == [expected] * 2 else WRONG
    except ValueError as refusal:
        return f"refused: {str(refusal).partition(';')[0]}"


def table() -> str:
    """The rows in Markdown."""
    lines = ["| model type | tested with | result | two ranks divide its text |", "|---|---|---|---|"]
    for name in sorted(IMAGE_MODELS):
        verdicts = {backend: verdict(name, backend) for backend in BACKENDS}
        odd = [f"{backend}: {text}" for backend, text in verdicts.items() if text != EXACT]
        lines.append(f"| {name} | {VARIANTS.get(name, '')} | {'; '.join(odd) or EXACT} | {divided_verdict(name)} |")
    return "\n".join(lines) + "\n"


def image_page() -> str:
    """The page of models as it stands, around a new table of those that take images."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {MARK} -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    return f"{before}<!-- {MARK} -->\nRun with {versions()}.\n\n{table()}<!-- end -->\n{after}"
