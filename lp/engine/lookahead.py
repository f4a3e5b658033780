"""Decoders over THE loop of `lp.engine.step`: a method is a window (or none) and a candidate source."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from safetensors import SafetensorError
from transformers import PreTrainedModel

from lp.budget.explain import describe_budget, describe_steps
from lp.budget.policy import AdaptiveBudget, Budget, FixedBudget
from lp.budget.step_times import StepTimes
from lp.config import (
    Capture,
    LookaheadConfig,
    PaperConfig,
    PoolScope,
    PromptLookupConfig,
    RecyclingConfig,
    SuffixConfig,
)
from lp.digest import chain_digest, text_digest
from lp.draft.paper import PaperPool
from lp.draft.pool.ngram_pool import NGramPool, fresh_tables, load_tables, save_tables, tables_digest
from lp.draft.pool.tables import Tables
from lp.draft.prompt_lookup import PromptLookup
from lp.draft.source import DraftSource
from lp.draft.suffix import SuffixTree, native_tree
from lp.draft.token_recycling import TokenRecycling
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats
from lp.engine.request import Request
from lp.engine.step import Generation
from lp.engine.step_timing import decoder_step_times
from lp.models.digests import model_digests
from lp.models.loader import vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel.agreement import check_same
from lp.parallel.context import ParallelContext
from lp.parallel.message import check_vocabulary

DecoderConfig = LookaheadConfig | PaperConfig | PromptLookupConfig | RecyclingConfig | SuffixConfig
ROW_BYTES, LEAST_ROWS = 256, 8  # of the pool, by token of a text and row that its steps may have; its own n-grams
C = TypeVar("C", PaperConfig, PromptLookupConfig, RecyclingConfig, SuffixConfig)


class LookaheadDecoder(Decoder):
    """Exact greedy decoding in fewer steps (arXiv 2402.02057).

    Args:
        model: an HF causal LM, loaded and on its device.
        config: W, N, G and policies; None lets every step take what pays on this machine.
        context: the ranks to share each step with; None is this process alone.
        attention: "auto", or a backend's name: "sdpa", "eager", "flash", "flex"; the model itself stays as loaded.
        capture: "auto", "off", "graph" or "compile": whether steps have a few fixed shapes whose kernels are replayed.
        step_times: for an adaptive config; None measures them once and stores them in the user's cache folder.

    Raises:
        ValueError: a model whose architecture or attention takes no tree mask, or whose steps can't be captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig | None = None,
        context: ParallelContext | None = None,
        attention: str = "auto",
        capture: str = "auto",
        step_times: StepTimes | None = None,
    ) -> None:
        super().__init__(model, context)
        self.config = config or LookaheadConfig(adaptive=True)
        self.runner = ModelRunner(model, attention, Capture(capture))
        self._tables: Tables | None = None  # of a session's pool
        self._last: list[StepStats] = []
        check_vocabulary(model.get_input_embeddings().weight.shape[0])
        if self.context.world_size > 1:  # a single rank has nobody to differ from, and the checksum reads every weight
            check_same(self.context, f"making a {type(self).__name__}", model_digests(model))
        self.step_times: StepTimes | None = None
        if self.config.adaptive:
            self.step_times = step_times or decoder_step_times(self.runner, self.config, self.context)

    def budget(self, temperature: float = 0.0) -> Budget:
        """What steps take, made anew for every call."""
        if self.step_times is None:
            return FixedBudget(self.config)
        return AdaptiveBudget(self.config, self.step_times, self.context.world_size, temperature)

    def explain(self) -> str:
        """What steps may take, what they cost, and what those of the last text took: two lines."""
        return f"{describe_budget(self.config, self.step_times)}\n{describe_steps(self._last)}"

    @property
    def span(self) -> int:
        """Window and candidates, whichever goes further."""
        return self.config.window_size + self.config.ngram_size + self.config.draft_budget

    @property
    def noisy_guesses(self) -> bool:
        """The window's policy."""
        return self.config.window_noise

    @property
    def settings(self) -> DecoderConfig:
        """What ranks must agree on."""
        return self.config

    def source(self, request: Request) -> DraftSource:
        """What proposes candidates, made anew for every call."""
        config = self.config
        if self.step_times and config.pool_scope is PoolScope.REQUEST:  # clearing more than a text can fill takes time
            needed = request.limit * max(self.step_times.affordable_tokens, LEAST_ROWS) * ROW_BYTES >> 20
            config = replace(config, pool_mib=min(config.pool_mib, 1 + needed))
        tables = self._tables or fresh_tables(config, vocabulary_size(self.model))
        if self.config.pool_scope is PoolScope.SESSION and self._tables is None:
            self._begin(tables)
        return NGramPool(self.config, request.prompt, request.sampler.noise_key, tables)

    def _begin(self, tables: Tables) -> None:
        """A session's tables, from the file if there is one: the same on every rank."""
        file = self.config.pool_file
        if file and Path(file).exists():
            load_tables(tables, file, vocabulary_size(self.model))
        elif file and not Path(file).parent.is_dir():  # said now, not when a text that took minutes is done
            raise ValueError(f"pool_file is {file!r}, but there is no folder {str(Path(file).parent)!r}; make it first")
        check_same(self.context, "beginning a session's pool", {"pool": tables_digest(tables)})
        self._tables = tables

    def _asked(self, request: Request) -> dict[str, int]:
        """Digests of what ranks must agree on, by name."""
        asked = {item.name: getattr(self.settings, item.name) for item in fields(self.settings)}
        asked |= {"max_new_tokens": request.max_new_tokens, **request.stopping.settings, **request.sampler.settings}
        asked |= {"context limit": request.limit, "step times": self.step_times}
        digests = {name: text_digest(repr(value)) for name, value in asked.items()}
        return {"prompt": chain_digest(0, request.prompt), **digests}

    def _decode(self, request: Request) -> GenerationOutput:
        check_same(self.context, f"beginning {self.call}", self._asked(request))
        budget = self.budget(request.sampler.full_vocabulary_temperature)
        generation = Generation(self.config, self.context, self.runner, self.source(request), request, budget)
        with self.runner.reserve(generation.cache), self.context.stepping(generation.message_shape.size):
            output = generation.run()
        self._last = output.step_stats
        if self._tables and self.config.pool_file and self.context.is_main:
            try:
                save_tables(self._tables, self.config.pool_file)
            except (OSError, SafetensorError) as error:  # a full disk must not cost the text
                warnings.warn(f"pool_file {self.config.pool_file} was not written: {error}", stacklevel=3)
        return output


class _Peer(LookaheadDecoder, Generic[C]):
    """A method of the loop with settings of its own."""

    made: type[C]

    def __init__(
        self,
        model: PreTrainedModel,
        config: C | None = None,
        context: ParallelContext | None = None,
        attention: str = "auto",
        capture: str = "auto",
    ) -> None:
        self._settings: C = config or self.made()
        super().__init__(model, self._settings.shape(), context, attention, capture)

    @property
    def settings(self) -> C:
        """What the method may be told."""
        return self._settings


class PromptLookupDecoder(_Peer[PromptLookupConfig]):
    """Prompt lookup decoding: the same loop without a window, candidates copied from the text.

    Args:
        model, context, attention, capture: as in LookaheadDecoder.
        config: how much to match and to copy.
    """

    made = PromptLookupConfig

    def source(self, request: Request) -> DraftSource:
        """The prompt's runs of tokens."""
        return PromptLookup(self.settings.max_matching_ngram, request.prompt)


class SuffixDecoder(_Peer[SuffixConfig]):
    """Suffix decoding: the same loop without a window, candidates by frequency from arctic-inference's suffix tree.

    Args:
        model, context, attention, capture: as in LookaheadDecoder.
        config: how much to match and to propose.

    Raises:
        ValueError: arctic-inference is not installed, or as in LookaheadDecoder.
    """

    made = SuffixConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        native_tree()  # refused here, not at the first call
        super().__init__(*args, **kwargs)

    def source(self, request: Request) -> DraftSource:
        """The prompt's suffix tree."""
        return SuffixTree(self.settings, request.prompt)


class PaperDecoder(_Peer[PaperConfig]):
    """Lookahead decoding as the paper has it, for comparison.

    Args:
        model, context, attention, capture: as in LookaheadDecoder.
        config: W, N, G and whether the text is a reference.
    """

    made = PaperConfig

    def source(self, request: Request) -> DraftSource:
        """The paper's pool."""
        return PaperPool(self.settings, request.prompt)


class RecyclingDecoder(_Peer[RecyclingConfig]):
    """Token recycling: the same loop without a window, candidates from the logits of rows read before.

    Args:
        model, context, attention, capture: as in LookaheadDecoder.
        config: successors and nodes.
    """

    made = RecyclingConfig

    def source(self, request: Request) -> DraftSource:
        """The adjacency of tokens."""
        return TokenRecycling(self.settings)
