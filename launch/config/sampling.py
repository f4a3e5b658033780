"""How the tokens of a run are sampled: by its config, else by the checkpoint; in words, too."""

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
    """Sampling with its seed known on every rank and for every run, or they could not be compared.

    Args:
        sampling: sampling as the user gave it.
        context: the ranks, of which rank 0 draws a seed if none was given.
        before: the seed of a run that goes on.
    """
    if sampling is None or sampling.greedy or sampling.seed is not None:
        return sampling
    drawn = shared_seed(context.ranks, "drawing the seed of a run")
    return replace(sampling, seed=drawn if before is None else before)


def sampled_by_checkpoint(
    sampling: lp.SamplingParams | None, checkpoint: Checkpoint, seed: int | None
) -> lp.SamplingParams | None:
    """The run's sampling; where it is not set and the checkpoint samples, the checkpoint's.

    Args:
        sampling: the run's sampling; None is greedy, the apps' default.
        checkpoint: what is followed of the model's.
        seed: the run's seed.
    """
    if sampling is not None or not checkpoint.samples:
        return sampling
    return lp.SamplingParams(**checkpoint.sampling, seed=seed)


def sampling_of(config: Common) -> lp.SamplingParams | None:
    """How tokens are sampled; None is greedy.

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
    """The temperature, the seed, the verifier, and what else is not as by default."""
    if sampling is None:
        return "greedy"
    if sampling.greedy:
        penalty = sampling.repetition_penalty
        return "greedy" if penalty == 1 else f"greedy with repetition_penalty={penalty}"
    always = ("temperature", "seed", "verifier")
    values = asdict(sampling)
    shown = [name for name in values if name in always or values[name] != asdict(lp.SamplingParams())[name]]
    return "sampled with " + " ".join(f"{name}={'null' if values[name] is None else values[name]}" for name in shown)
