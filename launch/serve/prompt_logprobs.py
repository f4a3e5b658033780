"""Log probabilities of a prompt's own tokens, by which evaluation harnesses rank given answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lp.engine.step_decoder import StepDecoder
from lp.sampling.logprob_sampler import Logprob, logprobs_of

CHUNK = 256  # tokens of a pass, whose logits are held at once


def prompt_logprobs(
    decoder: StepDecoder, prompt: Sequence[int], num_top: int, on_pass: Callable[[], None] = lambda: None
) -> list[Logprob]:
    """Compute the log probability of each token of a prompt, given the tokens before it; the first token has none.

    Args:
        decoder: decoder that has the whole model on this rank; its KV caches are left as they are.
        prompt: token ids of the prompt.
        num_top: how many of the likeliest tokens are reported beside each token.
        on_pass: called after each forward pass, which takes up to CHUNK tokens.

    Returns:
        One entry for each token but the first.
    """
    found: list[Logprob] = []

    def take(logits: torch.Tensor) -> None:
        start = len(found)
        found.extend(logprobs_of(logits, prompt[start + 1 : start + 1 + len(logits)], num_top))
        on_pass()

    if len(prompt) > 1:
        runner = decoder.runner
        with decoder.computing():
            runner.follow()
            cache = runner.cache_without_buffers(len(prompt))  # its own: texts are using the others
            runner.prefill(prompt[:-1], cache, CHUNK, take)
    return found
