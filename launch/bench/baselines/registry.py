"""The registry of baselines: by name, how each is built and on which ranks it runs."""

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
    """Options of the benchmark's config that baselines may use.

    Args:
        draft: draft model for `hf_assisted`: a folder, a hub name, or "demo"; None: no draft model.
        gguf: path of the model's GGUF file, for llama.cpp; None: no such file.
        num_tokens: most draft tokens per decode step for `hf_prompt_lookup` and `llama_cpp_prompt_lookup`.
        greedy: whether decoding is greedy.
    """

    draft: str | None = None
    gguf: str | None = None
    num_tokens: int = 10
    greedy: bool = True


Missing = Callable[[BaselineOptions], str | None]


class Build(Protocol):
    """Type of a function that builds a baseline's decoder."""

    def __call__(self, model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
        """Build the decoder.

        Args:
            model: an HF causal LM, loaded.
            context: this rank among the others.
            options: options of the benchmark.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A registered baseline: how its decoder is built, and on which ranks it runs.

    Args:
        build: function that builds the decoder for a loaded model.
        all_ranks: whether all ranks build and run it together; otherwise it runs on rank 0 alone.
        missing: called before any model is loaded; returns why the baseline cannot run here, with the remedy, or None
            if it can run.
    """

    build: Build
    all_ranks: bool = False
    missing: Missing = lambda options: None


BASELINES: dict[str, Baseline] = {}
BuildT = TypeVar("BuildT", bound=Build)


def needs_package(name: str, extra: str) -> Missing:
    """Make the `missing` function of a baseline that needs a package and nothing else.

    That function returns None if the package is installed, else a message that says how to install it.

    Args:
        name: name of the package.
        extra: lp's extra (optional dependencies) that installs the package.
    """
    hint = f"needs the package {name}; {install_command(extra)}, or pip install {name}"
    return lambda options: None if is_installed(name) else hint


def register_baseline(
    name: str, *, all_ranks: bool = False, missing: Missing = lambda options: None
) -> Callable[[BuildT], BuildT]:
    """Decorate the function that builds a baseline's decoder, so that `methods=[NAME]` runs it.

    Args:
        name: name of the baseline in `methods` and tables.
        all_ranks: whether all ranks build and run it together; otherwise it runs on rank 0 alone.
        missing: called before any model is loaded; returns why the baseline cannot run here, with the remedy, or None
            if it can run.

    Raises:
        UserError: another baseline has this name.
    """

    def register(build: BuildT) -> BuildT:
        if name in BASELINES:
            raise UserError(f"a baseline called {name!r} is registered already; choose another name")
        BASELINES[name] = Baseline(build=build, all_ranks=all_ranks, missing=missing)
        return build

    return register
