"""How the tokens of a run are sampled: as the config says, else as the checkpoint does; and a line that says it."""

from __future__ import annotations

from dataclasses import asdict, replace

import lp
from lp.errors import UserError
from lp.parallel.agreement import shared_seed
from lp.sampling.generation_config import Checkpoint

from .schema import Common, frozen


def seeded(
    sampling: lp.SamplingParams | None, context: lp.ParallelContext, before: int | None = None
) -> lp.SamplingParams | None:
    """Sampling with a known seed that is equal on all ranks and for all texts of a run, so that they can be compared.

    Args:
        sampling: the user's; greedy sampling, and one with a seed, stay as they are.
        context: the ranks; rank 0 draws a seed if none was given.
        before: seed of the interrupted run that this one goes on with; None: there is none.
    """
    if sampling is None or sampling.greedy or sampling.seed is not None:
        return sampling
    drawn = shared_seed(context.ranks, "drawing the seed of a run")
    return replace(sampling, seed=drawn if before is None else before)


def sampled_by_checkpoint(
    sampling: lp.SamplingParams | None, checkpoint: Checkpoint, seed: int | None
) -> lp.SamplingParams | None:
    """The run's sampling; if the user chose none, the checkpoint's.

    Args:
        sampling: the user's; None is greedy, the apps' default.
        checkpoint: what is followed of the checkpoint's generation config.
        seed: the run's seed.
    """
    if sampling is not None or not checkpoint.samples:
        return sampling
    return lp.SamplingParams(**checkpoint.sampling, seed=seed)


def sampling_of(config: Common) -> lp.SamplingParams | None:
    """The sampling that a config asks for; None is greedy.

    Raises:
        ValueError: a value out of range.
    """
    name = config.sampling.name
    if name == "sample":
        return frozen(lp.SamplingParams, config.sampling, seed=config.seed)
    if name != "greedy":
        raise UserError(f"sampling.name is {name!r}; choose with sampling=<one of greedy, sample>")
    return None


def describe_sampling(sampling: lp.SamplingParams | None) -> str:
    """Sampling in words, for tables: "greedy", or "sampled with temperature=0.8 seed=1 verifier=coupled".

    Settings that have their default values are left out, but for these three.
    """
    if sampling is None:
        return "greedy"
    if sampling.greedy:
        penalty = sampling.repetition_penalty
        return "greedy" if penalty == 1 else f"greedy with repetition_penalty={penalty}"
    always = ("temperature", "seed", "verifier")
    values = asdict(sampling)
    shown = [name for name in values if name in always or values[name] != asdict(lp.SamplingParams())[name]]
    return "sampled with " + " ".join(f"{name}={'null' if values[name] is None else values[name]}" for name in shown)
