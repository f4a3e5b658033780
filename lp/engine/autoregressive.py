"""Plain decoding, one token a forward pass: the oracle, with no code of the lookahead path in it."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.stopping import FINISH_REASON
from lp.parallel.message import Stop
from lp.sampling.sampler import check_sampled


class AutoregressiveDecoder(Decoder):
    """One token a forward pass over transformers' own cache and masks."""

    def _decode(self, request: Request) -> GenerationOutput:
        clock, cache, stats = StepTimer(), DynamicCache(config=self.model.config), list[StepStats]()
        prompt = torch.tensor([request.prompt], device=self.model.device)
        boundary, last = request.boundary, len(request.prompt) - 1
        if boundary and boundary.grows:
            self.model(prompt[:, :1], use_cache=False, logits_to_keep=1)  # forget how far an earlier text grew
        if boundary and last >= boundary.length:
            last = 0  # its frequencies are those of the whole prompt: the first step takes all of it
        for part in prompt[:, :last].split(request.prefill_chunk, dim=1):
            if part.shape[1]:
                self.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        prefill_s = clock.lap()
        tokens, token, reason = list[int](), prompt[:, last:], Stop.NONE
        while not reason:
            if boundary and boundary.refills and request.crosses(len(request.prompt) + len(tokens) - 1):
                cache, token = DynamicCache(config=self.model.config), prompt.new_tensor([request.prompt + tokens])
            logits = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            text = request.prompt + tokens
            tokens.append(request.sampler.sample_last(logits, text))
            check_sampled(tokens[-1], len(stats), len(text) - 1)
            request.sampler.record([0], [0])
            token = prompt.new_tensor([tokens[-1:]])
            forward_s = clock.lap()
            reason, _ = request.stopping.check(tokens, 1)
            if request.on_tokens:
                request.on_tokens(tokens[-1:], len(stats))
            if not reason and request.signals.requested:
                reason = Stop.INTERRUPTED
            stats.append(StepStats(1, 0, 0, forward_s, 0.0, clock.lap()))
        decode_s = sum(s.forward_s + s.host_s for s in stats)
        return GenerationOutput(tokens, FINISH_REASON[reason], stats, prefill_s, decode_s)
