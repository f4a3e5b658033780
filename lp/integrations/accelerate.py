"""`lp.accelerate(model)`: replaces the `generate` of one model, so that unchanged code decodes by lookahead.

In this way lp also gets the streamer and the tokenizer, which transformers does not pass to a `custom_generate`
callable. Calls that lp can't run exactly go to transformers' own `generate`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StopStringCriteria

from lp.attention.registry import AUTO
from lp.checks import check_kind
from lp.config import Capture, Exact
from lp.draft.registry import DraftConfig
from lp.engine.inputs import check_model
from lp.engine.lookahead import LookaheadDecoder
from lp.errors import UserError
from lp.integrations.custom_generate import Plan
from lp.models.bitwise import runner_for
from lp.models.loader import context_limit
from lp.models.model_lock import lock_of
from lp.models.releases import CACHE_NAMES
from lp.models.runner import release
from lp.models.support import check_adapter
from lp.parallel.agreement import exchange
from lp.parallel.context import ParallelContext
from lp.sampling.generation_config import FIELDS, Does, refusals

logger = logging.getLogger(__name__)
NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:-1]  # positional arguments of `generate`
OWN_DRAFTS = "lp drafts by itself, and needs no other model or n-grams"
# Removed from reasons before they are compared, so that two that differ in a length or an address are logged once.
NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")
M = TypeVar("M")


def accelerate(
    model: M,
    config: DraftConfig | None = None,
    context: ParallelContext | None = None,
    exact: str = Exact.AUTO,
) -> M:
    """Make `model.generate(...)` decode by lookahead, without changes to pipelines and other code that calls it.

    Streamers, stop strings, batches and sampling work as before. A call that lp can't run exactly, such as beam search
    or one with its own `custom_generate`, runs transformers' own `generate`, and the log gives each reason once. Greedy
    tokens are those of transformers. A sampled text is reproducible by torch's seed, but differs from the text that
    transformers would draw with that seed.

    Only this model object is changed: `generate` becomes an attribute of the object; its class stays as it is. Deep
    copies and pickled models stay accelerated, but only for one process, without other ranks. A second call replaces
    the arguments of the first. A model that lp has refused is tried again after a second call, or when its dtype,
    device or attention has changed.

    Args:
        model: an HF causal LM, also one with a LoRA adapter of PEFT.
        config: draft settings, see `lp.LookaheadDecoder`. None: each step takes as many draft tokens as make decoding
            fastest on this machine.
        context: the ranks that share decode steps. Each rank accelerates its model and makes the same calls, and a call
            runs through lp either on all ranks or on none. None: this process alone.
        exact: "bitwise": logits equal those of `lp.PlainDecoder(model, exact="bitwise")` bit for bit, except in calls
            that run transformers' own `generate`. "auto" and "tokens": logits equal plain decoding's up to rounding.

    Returns:
        The model.

    Raises:
        ValueError: `model` is no model; or lp can't decode it, and there are several ranks or `exact` is not "auto".
    """
    check_model(model)
    check_kind("context", context, (ParallelContext, type(None)), "lp.ParallelContext, or None for this process")
    if not hasattr(type(model), "generate"):
        raise UserError(f"{type(model).__name__} has no generate; give the model of transformers that it holds")
    before = vars(model).get("generate")
    original = before.original if isinstance(before, Accelerated) else before
    accelerated = Accelerated(model, config, context, original, exact)
    among_ranks = context is not None and not context.alone
    if among_ranks or exact != Exact.AUTO:  # where all ranks are, and where a mode that was asked for is refused
        check_adapter(model)
        accelerated.make_decoder(_handed_over(model))
    model.generate = accelerated  # type: ignore[attr-defined]
    return model


def restore(model: M) -> M:
    """Undo `accelerate`: give a model its own `generate` back, and free lp's caches and CUDA graphs for the model.

    A model that is not accelerated stays as it is.

    Args:
        model: the model that `accelerate` was given.

    Returns:
        The model.
    """
    check_model(model)
    accelerated = vars(model).get("generate")
    if isinstance(accelerated, Accelerated):
        del model.generate  # type: ignore[attr-defined]
        if accelerated.original is not None:
            model.generate = accelerated.original  # type: ignore[attr-defined]
        accelerated.forget()
    return model


class Accelerated:
    """The callable that `accelerate` sets as a model's `generate`.

    It decodes through lp if lp can run the call exactly, otherwise through transformers.

    Args:
        model: the model whose `generate` it replaces.
        config, context, exact: see `accelerate`.
        original: the attribute `generate` that the model object had before; None: only its class has one.
    """

    __name__ = "generate"

    def __init__(
        self,
        model: Any,
        config: DraftConfig | None,
        context: ParallelContext | None,
        original: Callable[..., Any] | None,
        exact: str,
    ) -> None:
        self.model, self.config, self.context, self.original, self.exact = model, config, context, original, exact
        self._decoder: LookaheadDecoder | None = None
        self._unfit: tuple[_State, str] | None = None
        self._told = set[str]()

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy of the model: without the decoder, which is for these weights, and without the ranks."""
        return vars(self) | {"context": None, "_decoder": None, "_unfit": None, "_told": set()}

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of transformers' own `generate`, for programs that inspect it to find the arguments."""
        return inspect.signature(self._transformers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate through lp if it can do the call exactly, else by transformers; arguments are transformers' own."""
        if kwargs.get("custom_generate") is not None or kwargs.get("continuous_batching_config") is not None:
            return self._transformers(*args, **kwargs)
        try:
            return self._through_lp(*args, **kwargs)
        except _Refused as refused:
            reason, kind = str(refused), refused.kind
        self._tell(f"this call of generate is transformers' own: {reason}", kind)
        return self._transformers(*args, **kwargs)

    def make_decoder(self, model: PreTrainedModel) -> LookaheadDecoder:
        """Make the decoder for this and later calls; among several ranks, all must call it together.

        Args:
            model: the model to decode with; for a PEFT wrapper, the model inside it.

        Raises:
            ValueError: `LookaheadDecoder` refuses the model or the config.
        """
        self._decoder = LookaheadDecoder(model, self.config, self.context, exact=self.exact)
        return self._decoder

    def forget(self) -> None:
        """Free the decoder, and the caches and CUDA graphs that are kept for later calls."""
        if self._decoder is not None:
            release(self._decoder.model)
            self._decoder = None

    @property
    def _transformers(self) -> Callable[..., Any]:
        own: Callable[..., Any] = type(self.model).generate.__get__(self.model)
        return own if self.original is None else self.original

    def _through_lp(self, *args: Any, **kwargs: Any) -> Any:
        """Generate through lp; raises _Refused on every rank, before the first token, if lp can't do the call."""
        positional = NAMES[: len(args)]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        try:
            if len(args) > len(NAMES) or kwargs.keys() & {*positional}:
                raise UserError("generate is given an argument twice, or too many positional ones")
            asked = self._checked(given)
        except UserError as error:
            self._refuse(str(error))
        streamer = asked.pop("streamer", None)

        def decode(model: PreTrainedModel, input_ids: Any, **prepared: Any) -> Any:
            try:
                plan = Plan.of(model, input_ids, streamer=streamer, **prepared)
                self._check(plan, model)
            except UserError as error:
                self._refuse(str(error))
            return plan.run(self._agreed_decoder(model))

        return self._transformers(**asked, custom_generate=decode)

    def _agreed_decoder(self, model: PreTrainedModel) -> LookaheadDecoder:
        """Get the decoder for a call, once every rank has said that it can do the call.

        If some rank has no decoder yet, all make one. Making one is a collective call, so each rank first says whether
        its model can be run.

        Raises:
            _Refused: on every rank, if one of them can't do the call.
        """
        with nullcontext() if self._among_ranks else lock_of(model):
            decoder = self._decoder if self._decoder is not None and self._decoder.model is model else None
            if self._agree("", has_decoder=decoder is not None) and decoder is not None:
                return decoder
            try:
                runner_for(model, AUTO, Capture.AUTO, self.exact)
                self._agree("")
                return self.make_decoder(model)
            except UserError as error:
                self._unfit = _State.of(model), str(error)
                self._refuse(str(error))

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments of a call, and rewrite them so that transformers hands over all that lp needs.

        Transformers keeps the tokenizer from a `custom_generate` callable: stop strings become a ready criterion.

        Returns:
            Arguments for transformers' own `generate`, by name.

        Raises:
            UserError: an argument asks for something that lp does not do.
            _Refused: a field of the generation config does.
        """
        owner = type(self.model).generate
        own = owner is GenerationMixin.generate or owner.__module__.partition(".")[0] == "peft"
        if self.original is not None or not own:
            raise UserError(f"{type(self.model).__name__} has a generate of its own, which is not transformers'")
        if given.get("synced_gpus"):
            raise UserError("synced_gpus=True; lp's ranks end their texts together")
        if given.get("adapter_names") is not None:
            raise UserError(
                "adapter_names is given; PEFT takes one adapter for each row of a pass, and a step of lp has other "
                "rows: leave it out"
            )
        for name in CACHE_NAMES:
            if given.get(name) is not None:
                raise UserError(f"{name} is given, to be filled; lp fills a cache of its own: leave it out")
        config = self._effective(given)
        if refused := refusals(config):
            self._refuse(". ".join(refused.values()), ", ".join(refused))
        asked = dict(given)
        tokenizer = asked.pop("tokenizer", None)
        asked.pop("assistant_tokenizer", None)
        unused = ["assistant_model"] if asked.pop("assistant_model", None) is not None else []
        for name, field in FIELDS.items():
            if field.does is Does.DRAFTS and field.asks(getattr(config, name)):
                unused.append(name)
                self._unset(asked, name)
        if unused:
            self._tell(f"{', '.join(unused)} of generate is unused: {OWN_DRAFTS}")
        if config.stop_strings is not None and tokenizer is not None:
            self._unset(asked, "stop_strings")
            criterion = StopStringCriteria(tokenizer, config.stop_strings)
            asked["stopping_criteria"] = [criterion, *(asked.get("stopping_criteria") or ())]
        return asked

    def _effective(self, given: Mapping[str, Any]) -> GenerationConfig:
        """The generation settings of a call: its keywords, else its generation config, else the model's."""
        sources = (given.get("generation_config"), self.model.generation_config)
        config = GenerationConfig()
        for name in FIELDS:
            values = [getattr(source, name, None) for source in sources if source is not None]
            value = next((value for value in values if value is not None), None)
            setattr(config, name, given.get(name, value))
        return config

    def _unset(self, asked: dict[str, Any], name: str) -> None:
        """Unset a field of the generation config for one call, wherever it was set.

        Args:
            asked: arguments of the call; changed in place.
            name: name of the field.
        """
        asked.pop(name, None)
        if getattr(asked.get("generation_config"), name, None) is not None:
            asked["generation_config"] = copy.copy(asked["generation_config"])
            setattr(asked["generation_config"], name, None)
        if getattr(self.model.generation_config, name, None) is not None:
            asked[name] = None

    def _check(self, plan: Plan, model: PreTrainedModel) -> None:
        """Refuse a call that is longer than the model's context, that needs one rank, or whose model lp has refused.

        Raises:
            UserError: names the obstacle.
        """
        check_adapter(model)  # here too, where the call can still be transformers' own
        if self._unfit is not None and self._unfit[0] == _State.of(model):
            raise UserError(self._unfit[1])
        context = context_limit(model)
        if context is not None and plan.stops.max_length > context:
            raise UserError(
                f"texts may have {plan.stops.max_length} tokens and the model's context {context}, where lp ends them; "
                "lower max_new_tokens"
            )
        recorded = plan.config.return_dict_in_generate and (plan.config.output_scores or plan.config.output_logits)
        if recorded and self.context is not None and self.context.steps.size > 1:
            raise UserError(
                "output_scores or output_logits is on among ranks, of which each has those of its own nodes"
            )

    @property
    def _among_ranks(self) -> bool:
        return self.context is not None and not self.context.alone

    def _refuse(self, reason: str, kind: str = "") -> NoReturn:
        self._agree(reason)
        raise _Refused(reason, kind)

    def _agree(self, reason: str, has_decoder: bool = True) -> bool:
        """Exchange with the other ranks whether lp can do the call; every rank calls it at the same points.

        Args:
            reason: why this rank can't go through lp; empty if it can.
            has_decoder: whether this rank has made its decoder.

        Returns:
            Whether every rank has made its decoder.

        Raises:
            _Refused: another rank can't go through lp, and this one can.
        """
        if self.context is None or self.context.alone:
            return has_decoder
        words = exchange(self.context.ranks, "choosing who generates", [bool(reason), has_decoder])
        refused, have = words.T.tolist()
        if any(refused) and not reason:
            raise _Refused(f"rank {refused.index(1)} can't go through lp")
        return all(have)

    def _tell(self, line: str, kind: str = "") -> None:
        """Log a warning unless one of its kind was logged before; the default kind is the line without numbers."""
        kind = kind or NUMBER.sub("", line)
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(line)


class _Refused(Exception):
    """Raised where a call asks for something that lp does not do, so that transformers runs it.

    Args:
        reason: one line that says what it is.
        kind: reasons with the same kind are logged once; empty: the reason without numbers.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class _State(NamedTuple):
    """State of a model that lp has refused; while the state is the same, lp is not tried again."""

    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device
    attention: str | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> _State:
        return cls(model, model.dtype, model.device, getattr(model.config, "_attn_implementation", None))


def _handed_over(model: Any) -> Any:
    """The model that transformers passes to a `custom_generate` callable: for a wrapper of PEFT, the one inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
