"""The baselines by name, which each module of this package registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from transformers import PreTrainedModel

from lp.commands import install_command
from lp.engine.decoder import Decoder
from lp.errors import UserError
from lp.optional import is_installed
from lp.parallel.context import ParallelContext


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineOptions:
    """Options of the benchmark that a baseline may use.

    Args:
        draft: model that drafts for `hf_assisted`: a folder, a hub name, or "demo".
        gguf: path of the model as llama.cpp reads it.
        num_tokens: tokens that `hf_prompt_lookup` and `llama_cpp_prompt_lookup` copy a step.
        greedy: whether texts are decoded greedily.
    """

    draft: str | None = None
    gguf: str | None = None
    num_tokens: int = 10
    greedy: bool = True


Missing = Callable[[BaselineOptions], str | None]


class Build(Protocol):
    """Builds a baseline's decoder."""

    def __call__(self, model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
        """The decoder for a model, its ranks and the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """How a baseline is built, and on which ranks it runs.

    Args:
        build: makes the decoder, given the model, the ranks and the options.
        all_ranks: whether all ranks build and run it together; without, rank 0 alone.
        missing: says before anything is loaded what it lacks, with the remedy; None if it lacks nothing.
    """

    build: Build
    all_ranks: bool = False
    missing: Missing = lambda options: None


BASELINES: dict[str, Baseline] = {}
BuildT = TypeVar("BuildT", bound=Build)


def needs_package(name: str, extra: str) -> Missing:
    """A baseline's `missing` that looks for a package, which an extra of ours installs."""
    hint = f"needs the package {name}; {install_command(extra)}, or pip install {name}"
    return lambda options: None if is_installed(name) else hint


def register_baseline(
    name: str, *, all_ranks: bool = False, missing: Missing = lambda options: None
) -> Callable[[BuildT], BuildT]:
    """Decorate the function that builds a baseline's decoder: from then on `methods=[NAME]` runs it.

    Args:
        name: what `methods` and every table call it.
        all_ranks: whether all ranks build and run it together; without, rank 0 alone.
        missing: says what the baseline lacks here, with the remedy; None if it lacks nothing.

    Raises:
        UserError: the name is taken.
    """

    def register(build: BuildT) -> BuildT:
        if name in BASELINES:
            raise UserError(f"a baseline called {name!r} is registered already; choose another name")
        BASELINES[name] = Baseline(build=build, all_ranks=all_ranks, missing=missing)
        return build

    return register
