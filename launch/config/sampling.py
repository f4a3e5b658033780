"""How a run samples tokens: as the config says, else as the checkpoint does; and a line of text that says how."""

from __future__ import annotations

from dataclasses import asdict, replace

import lp
from lp.errors import UserError
from lp.parallel.agreement import shared_seed
from lp.sampling.generation_config import CheckpointDefaults

from .schema import Common, frozen


def seeded(
    sampling: lp.SamplingParams | None, context: lp.ParallelContext, before: int | None = None
) -> lp.SamplingParams | None:
    """Give sampling a seed that is equal on all ranks and for all texts of a run, so that the texts can be compared.

    Args:
        sampling: the user's sampling; if it is greedy or has a seed, it is returned unchanged.
        context: this rank's context; rank 0 draws a seed if none was given.
        before: seed of the interrupted run that this run continues; None: it continues none, and takes the drawn seed.
    """
    if sampling is None or sampling.greedy or sampling.seed is not None:
        return sampling
    drawn = shared_seed(context.ranks, "drawing the seed of a run")
    return replace(sampling, seed=drawn if before is None else before)


def sampled_by_checkpoint(
    sampling: lp.SamplingParams | None, checkpoint: CheckpointDefaults, seed: int | None
) -> lp.SamplingParams | None:
    """The run's sampling: what the user chose, else what the checkpoint's generation config asks for.

    Args:
        sampling: the user's sampling; None: the user chose none.
        checkpoint: the part of the checkpoint's generation config that this run follows.
        seed: seed for the checkpoint's sampling; None: no seed yet.
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

    Other settings are named only if they differ from their defaults.
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
