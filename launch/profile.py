"""`lp profile`: where the time of a decode step goes, beside what the device can do at most.

    lp profile                                            # the demo model
    lp profile model=codellama_7b W=15 N=5 G=15           # a shape with random weights, no download
    lp profile model=codellama_7b R=4 rank=3              # the work of rank 3 of 4, on one device
    lp profile model=codellama_7b shape.layers=2 shape.divide=16 model.dtype=float32   # on a CPU

`--cfg job` shows the keys.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from hydra.core.hydra_config import HydraConfig
from transformers import PreTrainedModel

import lp
from lp.compiled import COMPILED
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.waits import waiting

from .bench.alternation import alternate, warm_up
from .bench.baselines import BASELINES, BaselineOptions
from .bench.machine import device_name
from .bench.step_profile import Plan, profile
from .bench.step_tables import ProfileResult, as_json, draw, print_tables
from .bench.terminal import console_on
from .bench.totals import Total
from .cli import start
from .config.builders import ORACLE, PLAIN, decoder_builders, measured
from .config.sampling import sampling_of, seeded
from .config.schema import Output, ProfileConfig
from .data.prompts import load_builtin
from .data.shapes import SHAPES, build_shape, shape_config, sketch, weight_bytes
from .running.once import on_rank_0
from .running.session import check_common, check_forgets, load_model, open_context

TRANSFORMERS = "transformers generate"


def profile_model(config: ProfileConfig) -> None:
    """Measure where the time of a decode step goes, and print it beside what the device can do at most.

    Args:
        config: this job's config.

    Raises:
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    check_common(config)
    check_forgets(config, "lp profile")
    if config.decoder.name in (PLAIN, ORACLE):
        name = config.decoder.name
        raise UserError(f"decoder.name is {name!r}, which runs no lookahead steps; compare=true times plain decoding")
    if config.parallel.tp > 1:
        raise UserError(
            f"parallel.tp is {config.parallel.tp}, but lp profile measures models that are whole on every rank; "
            "leave it, or compare splits with lp scaling tp=[1,2]"
        )
    builder = _builder(config)
    plain_builder = _builder(_uncaptured(config))
    context = open_context(config)
    plan = _plan(config, context)
    model, ids = (_shape if config.model.name in SHAPES else _loaded)(config, plan, context)
    build = partial(builder, model)
    plain = partial(plain_builder, model)
    with waiting("timing the parts of a step"):
        found = profile(model, build, plain, ids, plan, context)
    compared = config.compare and plan.ranks == 1 and plan.sampling is None
    methods = _methods(model, ids, config) if compared else {}
    compared_speeds = speeds(methods, plan.rounds) if methods else {}
    setting = _setting(config, plan, model, build(lp.ParallelContext(device=model.device)))
    report = ProfileResult(setting=setting, found=found, speeds=compared_speeds)
    try:
        if config.plot and context.is_main:
            with waiting("drawing"):
                draw(report, Path(HydraConfig.get().runtime.output_dir))
    finally:  # a picture that can't be written must not take what was measured with it
        with on_rank_0(context, sys.stdout) as file:
            if config.output is Output.json:
                print(as_json(report), file=file, flush=True)
            else:
                print_tables(report, console_on(file, 100))


def _plan(config: ProfileConfig, context: lp.ParallelContext) -> Plan:
    """The measurements that a config asks for; under torchrun R and rank are those of the launch."""
    ranks = config.R
    rank = config.rank
    running = context.world_size
    if running > 1 and (ranks not in (None, running) or rank not in (None, context.rank)):
        raise UserError(f"R is {ranks} and rank {rank}, but torchrun runs rank {context.rank} of {running}; leave them")
    if running > 1:
        ranks = running
        rank = context.rank
    return Plan(
        prefix=config.prefix,
        sizes=tuple(config.tokens),
        max_new_tokens=config.max_new_tokens,
        rounds=config.rounds,
        ranks=1 if ranks is None else ranks,
        rank=rank or 0,
        sampling=seeded(sampling_of(config), context),
    )


def _shape(config: ProfileConfig, plan: Plan, context: lp.ParallelContext) -> tuple[PreTrainedModel, list[int]]:
    """Build a published model's shape with random weights, and draw random token ids to profile it on."""
    model = config.model
    shape = shape_config(model.name, config.shape.layers, config.shape.divide)
    sketched = sketch(shape, model.dtype)
    plan.check_room(sketched, 0, context.device, weight_bytes(sketched))  # before the weights take time
    rng = random.Random(config.seed)
    return build_shape(shape, model.dtype, context.device), rng.choices(range(shape.vocab_size), k=plan.prefix + 1)


def _loaded(config: ProfileConfig, plan: Plan, context: lp.ParallelContext) -> tuple[PreTrainedModel, list[int]]:
    """Load a model with its own weights, and repeat the built-in prompts to as many token ids as the profile needs."""
    if (config.shape.layers, config.shape.divide) != (None, 1):
        raise UserError(
            f"shape.layers and shape.divide scale a shape, not {config.model.name}; model=codellama_7b is one"
        )
    loaded = load_model(config, context)
    text = [token for prompt in load_builtin() for token in loaded.tokenizer(prompt.text)["input_ids"]]
    return loaded.model, [text[i % len(text)] for i in range(plan.prefix + 1)]


def _uncaptured(config: ProfileConfig) -> ProfileConfig:
    return replace(config, attention=replace(config.attention, capture=str(lp.Capture.OFF)))


def _builder(config: ProfileConfig) -> Callable[[PreTrainedModel, lp.ParallelContext], lp.LookaheadDecoder]:
    """Check the config of a lookahead decoder now, and return the function that builds the decoder."""
    built = decoder_builders(config, [config.decoder.name])[config.decoder.name]
    return cast("Callable[[PreTrainedModel, lp.ParallelContext], lp.LookaheadDecoder]", built)


def speeds(methods: Mapping[str, Callable[[], GenerationOutput]], rounds: int) -> dict[str, Total]:
    """Measure how fast methods decode one text, in alternation after a warm-up.

    Args:
        methods: functions that decode the text once, by the method's name.
        rounds: how often each method runs; the median counts.

    Returns:
        Totals by method: tokens, steps and tokens/s.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    warm_up(methods)
    with waiting("comparing speeds in alternation", len(methods) * rounds, "runs") as wait:
        measured = alternate(methods, rounds, wait=wait)
    return {name: Total.of_runs(name, [run]) for name, run in measured.items()}


def _methods(
    model: PreTrainedModel, ids: list[int], config: ProfileConfig
) -> Mapping[str, Callable[[], GenerationOutput]]:
    """The methods whose speeds are compared, by name; a decoder that captures its steps is also run without capture."""
    context = lp.ParallelContext(device=model.device)
    tokens = config.max_new_tokens
    decoders: dict[str, Decoder] = {TRANSFORMERS: BASELINES["hf_generate"].build(model, context, BaselineOptions())}
    captured = False
    for variant, suffix in ((config, ""), (_uncaptured(config), ", not captured")):
        decoder = _builder(variant)(model, context)
        if suffix and not captured:
            break
        captured = bool(decoder.runner.captured)
        decoders[config.decoder.name + suffix] = decoder
        backend = variant.attention
        decoders[PLAIN + suffix] = measured(
            lp.PlainDecoder(model, context, backend.name, backend.capture, config.exact, config.model.kv_dtype)
        )
    return {name: partial(decoder.generate, ids, tokens, eos_token_id=()) for name, decoder in decoders.items()}


def _setting(
    config: ProfileConfig, plan: Plan, model: PreTrainedModel, decoder: lp.LookaheadDecoder
) -> dict[str, object]:
    shape = decoder.config
    captured = decoder.runner.captured
    return {
        "model": config.model.name,
        "random": config.model.name in SHAPES,
        "layers": model.config.get_text_config().num_hidden_layers,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "attention": str(decoder.runner.attention),
        "capture": str(captured.mode if captured else lp.Capture.OFF),
        "compiled": COMPILED,
        "W": shape.window_size,
        "N": shape.ngram_size,
        "G": shape.guess_set_size,
        "R": plan.ranks,
        "rank": plan.rank,
        "decoder": config.decoder.name,
        "prefix": plan.prefix,
        "max_new_tokens": plan.max_new_tokens,
        "rounds": plan.rounds,
    }


if __name__ == "__main__":
    start("profile", sys.argv[1:])
