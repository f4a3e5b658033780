"""The lookahead decoder: runs the decode steps of `lp.engine.generation` with any registered source of draft tokens."""

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
from lp.config import Exact, KVDtype, LookaheadConfig
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
    """Decodes in fewer steps than plain decoding, with the same tokens: lookahead decoding (arXiv 2402.02057).

    Each step verifies draft tokens along with the next token; the class of `config` decides where drafts come from.

    Args:
        model: an HF causal LM, loaded and on its device.
        config: LookaheadConfig, or the config of another registered draft source, such as PromptLookupConfig. None is
            LookaheadConfig(), which chooses the tokens of each step by what pays on this machine.
        context: the ranks to share each step with; None: this process alone.
        attention: attention backend of the steps: "auto", "sdpa", "eager", "flash", "flex", or "by_position" (lp's own,
            for `exact="bitwise"`). The model itself stays as it was loaded.
        capture: how steps are launched: "graph" replays CUDA graphs of a few fixed step sizes, "compile" does so with
            torch.compile, "off" runs the model's operations one by one; "auto" is "graph" on a GPU, else "off".
        step_times: how long steps take, for an adaptive config. None: the times in the user's cache folder, or a first
            guess from timing one layer; the steps of every text then correct them. "measure": ignore the folder and
            begin with the guess. StepTimes: use these, and don't correct them.
        exact: "tokens": logits are plain decoding's up to rounding. "bitwise": they are equal bit for bit, at a cost
            (`lp.models.bitwise`). "auto" is "tokens".
        kv_dtype: how the cache stores keys and values: "auto" in the model's dtype, "int8" or "fp8" in one byte a value
            and 4 bytes for each head and token. Tokens are those of plain decoding with the same `kv_dtype`.

    Attributes:
        settings: the config as it was given; ranks compare it.
        config: the shape of the steps, as a LookaheadConfig, whatever class `settings` has.
        merges_late: whether the draft source learns from a step while the device computes the next one: True on a GPU,
            which computes beside the host.

    Raises:
        ValueError: the model's architecture or attention takes no tree mask, its steps can't be captured as asked, the
            config belongs to no registered draft source, or its draft source can't be used here.
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
        self.runner = runner_for(model, attention, capture, exact, kv_dtype)
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
        """Fit a config to the largest forward pass of `exact=bitwise`: lower G if the config is adaptive.

        Raises:
            ValueError: steps of a fixed config have more tokens than that pass.
        """
        widths = self.runner.widths
        if config.adaptive and widths and (beyond := step_tokens(config) - widths[-1]) > 0:
            fewer = math.ceil(beyond / (config.ngram_size - 1))
            config = replace(config, guess_set_size=max(config.guess_set_size - fewer, 0))
        check_step_tokens(self.runner, step_tokens(config))
        return config

    def budget(self, source: DraftSource, temperature: float = 0.0, texts: int = 1) -> Budget:
        """Make the token budget for one request, which decides how many tokens each of its steps computes.

        Ranks divide a fixed budget if the draft source proposes a different part of the draft tree on each rank. A
        source that proposes a single path can't divide it: every rank then has the budget of one rank alone.

        Args:
            source: the draft source for the request.
            temperature: temperature of sampling from the whole vocabulary; 0 for greedy decoding, or if warpers such as
                top-k leave tokens out.
            texts: most sequences that a step may compute together.
        """
        if self.step_times is None:
            return FixedBudget(self.config, self.context.steps.size if source.divides else 1)
        assert self._step_times
        times, clock = self._step_times.careful, self._step_times.observe
        return AdaptiveBudget(self.config, times, self.context.steps.size, temperature, texts, clock)

    def explain(self) -> str:
        """Describe in two lines how large steps may be and what they cost, and how large the last text's steps were."""
        origin = self._step_times.origin if self._step_times else ""
        return f"{describe_budget(self.config, self.step_times)}{origin}\n{describe_steps(self._last)}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self.explain().splitlines())}>"

    @property
    def step_times(self) -> StepTimes | None:
        """Seconds of a step by its number of tokens, by which an adaptive config decides; None for a fixed budget."""
        return self._step_times.times if self._step_times else None

    @property
    def attention(self) -> str:
        """Name of the attention backend in use, such as "flash"; if "auto" was asked for, the one that was chosen."""
        return self.runner.attention

    @property
    def span(self) -> int:
        """Most consecutive positions for which one step may sample tokens; the sampler keeps noise for that many."""
        return step_tokens(self.config)

    @property
    def noisy_guesses(self) -> bool:
        """Whether the lookahead window's guesses for later positions are sampled under noise, as accepted tokens are.

        They are greedy only with the ablation setting `window_noise=False`.
        """
        return self.config.ablation.window_noise

    @property
    def _model_folder(self) -> str:
        return getattr(self.model.config, "_name_or_path", None) or ""

    def source(self, request: Request) -> DraftSource:
        """Make the draft source for one request, which proposes its draft tokens.

        Args:
            request: the checked call.
        """
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
        """Digests of everything about a call that must be equal on all ranks, by the name that an error says."""
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
        """Open the files that keep an owner's n-gram pool and history, so that the owner's first request need not wait.

        Args:
            owner: the argument `owner` of the `generate` calls to come, equal on all ranks; "" is the default.

        Raises:
            ValueError: a file can't be used, or it differs among ranks.
        """
        digests = self.factory.digests(CallInfo(**self._known(owner)))
        check_same(self.context.ranks, "opening what is kept of texts", digests)

    def _known(self, owner: str | None) -> dict[str, Any]:
        """The fields of `CallInfo`, which tell the draft source's factory about a call, by name."""
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
        """Most tokens that one sequence may have in a step on one rank, padding included."""
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
            source = GrammarDrafts(source, cursor, len(request.prompt) - request.continued)
        return Beginning(source, budget)

    def generation(self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer) -> Generation:
        return Generation(self.config, self.context, self.runner, *beginning, request, cache, timer, self.merges_late)

    def capture_steps(self, capture: Callable[[], None]) -> None:
        on_gpu = self.runner.device.type == "cuda"  # where a rank may capture, and the others wait for it
        with self.context.setting_up("capturing steps") if on_gpu else nullcontext(), waiting("capturing steps"):
            capture()

    def ended(self, stats: list[StepStats]) -> None:
        self._last = stats
