"""Plain decoding, one token a forward pass: the reference for tokens, which shares no code with the lookahead path."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from lp.config import KVDtype
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.rounded_cache import RoundedCache
from lp.engine.sharded_sampling import agreed_token
from lp.engine.stopping import FINISH_REASON
from lp.models.recurrent_layers import limits_prompt
from lp.models.releases import cache_keyword
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop
from lp.sampling.generation_config import NONE
from lp.sampling.sampler import check_sampled


class AutoregressiveDecoder(Decoder):
    """Plain decoding by transformers' own cache and masks, to check the tokens of the other decoders.

    A forward pass computes one token. Unlike the other decoders, this decoder ignores the checkpoint's
    generation_config.json by default. To compare its tokens with those of a `LookaheadDecoder`, which follows that
    file, call `generate` with `generation_config="auto"`.

    Args:
        model: an HF causal LM, loaded and on its device.
        context: the ranks that hold one copy of the model between them (tensor parallelism); None: this process alone.
        kv_dtype: "auto", "int8" or "fp8": the dtype that keys and values are rounded to before attention reads them.
            Rounded values are still stored in the model's dtype; "auto" rounds nothing.

    Raises:
        ValueError: `kv_dtype` is none of the three.
    """

    follows = NONE

    def __init__(
        self, model: PreTrainedModel, context: ParallelContext | None = None, kv_dtype: str = KVDtype.AUTO
    ) -> None:
        super().__init__(model, context)
        self._kv_dtype = KVDtype.of(kv_dtype)

    @property
    def kv_dtype(self) -> KVDtype:
        """The dtype that keys and values are rounded to: "int8", "fp8", or "auto" for no rounding."""
        return self._kv_dtype

    def _cache(self) -> DynamicCache:
        """An empty KV cache of transformers, which rounds what it is given where `kv_dtype` says so."""
        if self.kv_dtype is KVDtype.AUTO:
            return DynamicCache(config=self.model.config)
        return RoundedCache(self.kv_dtype, config=self.model.config)

    def _decode(self, request: Request) -> GenerationOutput:
        timer = StepTimer()
        cache = self._cache()
        prompt = torch.tensor([request.prompt], device=self.model.device)
        boundary = request.boundary
        start = 0
        num_prefilled = len(request.prompt) - 1
        if boundary and boundary.grows:
            self.model(prompt[:, :1], use_cache=False, logits_to_keep=1)  # forget how far an earlier text grew
        if boundary and num_prefilled >= boundary.length:
            num_prefilled = 0  # its frequencies are those of the whole prompt: the first step takes all of it
        if limits_prompt(self.model):
            num_prefilled = 0
        if images := request.images:
            self.model(**images.first_pass(self.model, request.prompt, cache))
            start = images.end
            num_prefilled = max(num_prefilled, start)
        for chunk in prompt[:, start:num_prefilled].split(request.prefill_chunk, dim=1):
            if chunk.shape[1]:
                self._pass(chunk, cache, start, request.rotary_offset)
                start += chunk.shape[1]
        prefill_s = timer.restart()
        decoding = StepTimer()
        text = list(request.prompt)
        stats: list[StepStats] = []
        inputs = prompt[:, num_prefilled:]
        reason = Stop.NONE
        while not reason:
            with timer.forward:
                if boundary and boundary.refills and request.crosses(len(text) - 1):
                    cache = self._cache()
                    inputs = prompt.new_tensor([text])
                logits = self._pass(inputs, cache, len(text) - inputs.shape[1], request.rotary_offset)
                token = request.sampler.sample_last(logits, text)
            stop = Stop.INTERRUPTED if request.signals.requested else Stop.NONE
            token, stop = agreed_token(self.context.replica, self.model.device, token, stop)
            check_sampled(token, len(stats), len(text) - 1, request.sampler)
            request.sampler.record([0], [0])
            text.append(token)
            inputs = prompt.new_tensor([[token]])
            with timer.callback if request.stopping.criteria else nullcontext():
                reason, _ = request.stopping.check(text[len(request.prompt) :], 1)
            if request.stopping.criteria:  # those of each rank, which may look at the clock
                reason = Stop(agreed_token(self.context.replica, self.model.device, reason, Stop.NONE)[0])
            if request.on_tokens:
                with timer.callback:
                    request.on_tokens([token], len(stats))
            reason = reason or stop
            stats.append(StepStats(1, 0, 0, *timer.seconds()))
            timer.restart()
        tokens = text[len(request.prompt) :]
        return GenerationOutput(tokens, FINISH_REASON[reason], stats, prefill_s, decoding.restart())

    def _pass(self, inputs: torch.Tensor, cache: DynamicCache, start: int, offset: int) -> torch.Tensor:
        """Run one forward pass.

        Args:
            inputs: int64 (1, tokens).
            cache: has all tokens before these.
            start: index of the first of these tokens in the text.
            offset: what to add to a token's index to get its rotary position; not 0 only after images.

        Returns:
            Logits of the last token, (1, vocabulary).
        """
        arguments: dict[str, object] = {cache_keyword(self.model): cache}
        if "position_ids" in inspect.signature(self.model.forward).parameters:  # as `generate`
            first = start + offset
            arguments["position_ids"] = torch.arange(first, first + inputs.shape[1], device=inputs.device)[None]
        logits: torch.Tensor = self.model(inputs, use_cache=True, logits_to_keep=1, **arguments).logits
        return logits[:, -1]
