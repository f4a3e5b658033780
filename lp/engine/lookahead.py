"""The lookahead decoder: texts of `lp.engine.generation`, over any registered draft source."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lp.budget.explain import describe_budget, describe_steps
from lp.budget.policy import AdaptiveBudget, Budget, FixedBudget
from lp.budget.step_times import StepTimes
from lp.compile_cache import complete_in_background
from lp.config import Capture, Exact, KVDtype, LookaheadConfig
from lp.digest import chain_digest, text_digest
from lp.draft.grammar_drafts import GrammarDrafts
from lp.draft.prediction import Prediction
from lp.draft.registry import Call, CallInfo, DraftConfig, source_of
from lp.draft.share import step_tokens
from lp.draft.source import DraftSource
from lp.engine.batch import BatchDecoder
from lp.engine.generation import Beginning, Generation
from lp.engine.memory import remedy_named
from lp.engine.output import StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.step_timing import GivenStepTimes, KnownStepTimes
from lp.errors import UserError
from lp.models.bitwise import check_step_tokens, runner_for
from lp.models.digests import model_digests
from lp.models.kv_cache import StaticKVCache
from lp.models.loader import vocabulary_size
from lp.models.vocabulary import embedded_tokens
from lp.parallel.agreement import check_same, exchange
from lp.parallel.context import ParallelContext
from lp.parallel.message import check_vocabulary
from lp.sampling.grammar import Cursor
from lp.waits import waiting

MEASURE = "measure"  # for `step_times`


class LookaheadDecoder(BatchDecoder):
    """Exact decoding in fewer steps (arXiv 2402.02057), with the draft source that the config is of.

    Args:
        model: an HF causal LM, loaded and on its device.
        config: LookaheadConfig, or that of another registered draft source, such as PromptLookupConfig; None is
            LookaheadConfig(), whose steps take what pays on this machine.
        context: the ranks to share each step with; None is this process alone.
        attention: "auto", or a backend's name: "sdpa", "eager", "flash", "flex", "by_position"; the model itself stays
            as it was loaded.
        capture: "auto", "off", "graph" or "compile": whether steps have a few fixed shapes whose kernels are replayed.
        step_times: step times for an adaptive config; None takes those that the user's cache folder has, or begins with
            a guess by one layer, and corrects them by the steps of every text; "measure" begins anew, whatever is
            known.
        exact: "auto", "tokens" or "bitwise": whether logits are plain decoding's up to rounding, or bit for bit
            (`lp.models.bitwise` has what that takes).
        kv_dtype: "auto", "int8" or "fp8": what the cache holds keys and values as; auto is the model's dtype. The
            others take one byte a value and 4 bytes for each head and token; tokens are those of plain decoding with
            the same `kv_dtype`.

    Attributes:
        settings: the config as it was given, which ranks must agree on.
        config: the shape of its steps.
        merges_late: what a step sampled is merged into the draft source's memory while the next one is computed: where
            the model is on a device that runs beside the host.

    Raises:
        ValueError: a model whose architecture or attention takes no tree mask, or whose steps can't be captured; a
            config of no draft source, or of one that can't be used here.
        torch.OutOfMemoryError: the device is full; says what to lower.
    """

    @remedy_named()
    def __init__(
        self,
        model: PreTrainedModel,
        config: DraftConfig | None = None,
        context: ParallelContext | None = None,
        attention: str = "auto",
        capture: str = "auto",
        step_times: StepTimes | str | None = None,
        exact: str = Exact.AUTO,
        kv_dtype: str = KVDtype.AUTO,
    ) -> None:
        super().__init__(model, context)
        self.settings: DraftConfig = LookaheadConfig() if config is None else config
        self.factory = source_of(self.settings).factory(self.settings)
        self.corpora = self.factory.corpora
        if capture not in list(Capture):
            raise UserError(f"capture is {capture!r}; it must be one of {[str(choice) for choice in Capture]}")
        self.runner = runner_for(model, attention, Capture(capture), exact, kv_dtype)
        self.config = self._within_widths(self.settings.shape())
        complete_in_background()
        self.merges_late = self.runner.beside_host
        self._last: list[StepStats] = []
        check_vocabulary(embedded_tokens(model))
        making = f"making a {type(self).__name__}"
        if self.context.steps.size > 1:  # a rank has nobody else to differ from, and the checksum reads every weight
            check_same(self.context.steps, making, model_digests(model))
        if not (step_times is None or step_times == MEASURE or isinstance(step_times, StepTimes)):
            raise UserError(f"step_times is {step_times!r}; give StepTimes, {MEASURE!r}, or None for those known")
        self._step_times: GivenStepTimes | None = None
        if self.config.adaptive and isinstance(step_times, StepTimes):
            self._step_times = GivenStepTimes(step_times)
        elif self.config.adaptive:
            self._step_times = KnownStepTimes(self.runner, self.config, self.context, again=step_times == MEASURE)
        else:
            FixedBudget(self.config, self.context.steps.size)  # refused now, not when a text is there

    def _within_widths(self, config: LookaheadConfig) -> LookaheadConfig:
        """The config, with a lower G where `exact=bitwise` has passes of fewer tokens than an adaptive step may take.

        Raises:
            ValueError: a fixed step has more tokens than such a pass.
        """
        widths = self.runner.widths
        if config.adaptive and widths and (beyond := step_tokens(config) - widths[-1]) > 0:
            fewer = math.ceil(beyond / (config.ngram_size - 1))
            config = replace(config, guess_set_size=max(config.guess_set_size - fewer, 0))
        check_step_tokens(self.runner, step_tokens(config))
        return config

    def budget(self, source: DraftSource, temperature: float = 0.0, texts: int = 1) -> Budget:
        """What steps take, made anew for every call.

        Ranks divide a fixed budget where the source grows each one's share. A source that does not may propose a path,
        which cannot be divided: there every rank may have as many tokens as one alone.

        Args:
            source: the text's draft source.
            temperature: temperature of sampling from the whole vocabulary, 0 if there is none.
            texts: most texts that a step may compute together.
        """
        if self.step_times is None:
            return FixedBudget(self.config, self.context.steps.size if source.divides else 1)
        assert self._step_times
        times, clock = self._step_times.careful, self._step_times.observe
        return AdaptiveBudget(self.config, times, self.context.steps.size, temperature, texts, clock)

    def explain(self) -> str:
        """What steps may take, what they cost, and what those of the last text took: two lines."""
        origin = self._step_times.origin if self._step_times else ""
        return f"{describe_budget(self.config, self.step_times)}{origin}\n{describe_steps(self._last)}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self.explain().splitlines())}>"

    @property
    def step_times(self) -> StepTimes | None:
        """Step times of an adaptive config, as far as they are known; None for a fixed budget."""
        return self._step_times.times if self._step_times else None

    @property
    def attention(self) -> str:
        """The name of the backend that the runner took."""
        return self.runner.attention

    @property
    def span(self) -> int:
        """Window and draft tree, whichever goes further."""
        return step_tokens(self.config)

    @property
    def noisy_guesses(self) -> bool:
        """Whether window nodes that no walk can reach are sampled under the noise too; an ablation turns it off."""
        return self.config.ablation.window_noise

    @property
    def _model_folder(self) -> str:
        return getattr(self.model.config, "_name_or_path", None) or ""

    def source(self, request: Request) -> DraftSource:
        """What proposes draft tokens in one call."""
        call = Call(
            **self._known(request.kept_for),
            prompt=request.prompt,
            max_length=request.limit,
            noise=request.sampler.noise_key,
            step_tokens=self.step_times.affordable_tokens * self.context.steps.size if self.step_times else None,
            temperature=request.sampler.processors.temperature,
            corpora=request.corpora,
        )
        return self.factory.new_source(call)

    def _asked(self, request: Request) -> dict[str, int]:
        """Digests of what ranks must agree on, by name."""
        asked = {item.name: getattr(self.settings, item.name) for item in fields(self.settings)}
        asked |= {"max_new_tokens": request.max_new_tokens, **request.stopping.settings, **request.sampler.settings}
        asked |= {
            "owner": request.owner,
            "choice of corpora": request.corpora,
            "adapter": request.adapter,
            "exact": str(self.exact),
            "kv_dtype": str(self.runner.kv_dtype),
            "context limit": request.limit,
            "step time table": self.step_times,
        }
        asked |= {"step tokens": self.span}  # of which `exact=bitwise` may allow fewer on one device than on another
        if self.exact == Exact.BITWISE and self.model.device.type == "cpu":
            asked["threads"] = torch.get_num_threads()
        digests = {name: text_digest(repr(value)) for name, value in asked.items()}
        digests["prediction"] = chain_digest(0, request.prediction)
        digests["images"] = chain_digest(0, [*request.images.digest] if request.images else [])
        digests |= self.factory.digests(CallInfo(**self._known(request.kept_for)))
        return {"prompt": chain_digest(0, request.prompt), **digests}

    def open_for(self, owner: str) -> None:
        """Open what is kept of an owner's texts, a session's pool and a history, so that no text waits for it.

        Args:
            owner: the owner that `generate` is given, equal on all ranks.

        Raises:
            ValueError: a file that can't be used, or that differs among ranks.
        """
        digests = self.factory.digests(CallInfo(**self._known(owner)))
        check_same(self.context.ranks, "opening what is kept of texts", digests)

    def _known(self, owner: str | None) -> dict[str, Any]:
        """The fields of CallInfo."""
        return {
            "vocabulary_size": vocabulary_size(self.model),
            "model_folder": self._model_folder,
            "owner": owner,
            "is_main": self.context.is_main,
            "share": partial(self.context.share_numbers, call="opening a history"),
            "gather": lambda number: exchange(self.context.ranks, "looking at corpora", [number])[:, 0].tolist(),
        }

    @property
    def most_step_tokens(self) -> int:
        """Most tokens that one rank computes of one text in a step, with padding."""
        own = self.step_times.max_tokens if self.step_times else step_tokens(self.config)
        return own + self.runner.most_padding

    def check(self, request: Request) -> None:
        if not self.context.alone:
            check_same(self.context.ranks, f"beginning {self.call}", self._asked(request))
        else:
            self.factory.digests(CallInfo(**self._known(request.kept_for)))  # refuses a file that is missing
        if self._step_times:
            self._step_times.update()

    def begin(self, request: Request, texts: int = 1) -> Beginning:
        check_step_tokens(self.runner, self.span)  # of `exact=bitwise`, under other threads or weights than before
        source = self.source(request)
        budget = self.budget(source, request.sampler.full_vocabulary_temperature, texts)
        if request.prediction:
            source = Prediction(source, request.prediction, len(request.prompt))
        if request.grammar is not None:
            cursor = Cursor(request.grammar.matcher(sorted(request.stopping.eos)))
            source = GrammarDrafts(source, cursor, len(request.prompt))
        return Beginning(source, budget)

    def generation(self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer) -> Generation:
        return Generation(self.config, self.context, self.runner, *beginning, request, cache, timer, self.merges_late)

    def capture_steps(self, capture: Callable[[], None]) -> None:
        on_gpu = self.runner.device.type == "cuda"  # where a rank may capture, and the others wait for it
        with self.context.setting_up("capturing steps") if on_gpu else nullcontext(), waiting("capturing steps"):
            capture()

    def ended(self, stats: list[StepStats]) -> None:
        self._last = stats
