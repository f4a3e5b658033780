"""The request: what a `generate` call asks for, after its arguments were checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lp.engine.interrupts import DeferredSignals
from lp.engine.stopping import Stopping
from lp.models.prompt_images import PromptImages
from lp.models.rope import RopeBoundary
from lp.sampling.grammar import Grammar
from lp.sampling.sampler import Sampler

OnTokens = Callable[[list[int], int], None]


@dataclass
class Request:
    """A checked `generate` call, with everything that a decoder needs to generate its text.

    Attributes:
        prompt: token ids.
        max_new_tokens: most tokens to generate.
        limit: first position that no decode step uses: a node there would sample a token beyond the longest possible
            text.
        sampler: chooses the token of each node, by the call's sampling settings and processors.
        stopping: the call's EOS ids, stop strings and criteria.
        on_tokens: the caller's callback for new tokens; None: no callback.
        prefill_chunk: most prompt tokens that a forward pass computes.
        signals: holds SIGINT and SIGTERM back until the end of a step.
        boundary: text length at which the model's rotary frequencies change; None: they don't change.
        prediction: ids of tokens that the caller expects in the text, which become draft tokens.
        grammar: grammar that the text must follow; None: no grammar.
        seed: seed of a sampled text; None for a greedy one.
        continued: number of tokens at the end of the prompt that an earlier call generated for this text.
        owner: name of the text's owner: reused prefixes, session pool and history are kept apart by owner. None:
            nothing is kept of this text, and it uses nothing that is kept.
        corpora: names of the decoder's corpora that draft tokens may come from; None: all.
        images: images in the prompt; None: there are none.
        adapter: name of the LoRA adapter for this text; None: the adapters that are active on the model.
    """

    prompt: list[int]
    max_new_tokens: int
    limit: int
    sampler: Sampler
    stopping: Stopping
    on_tokens: OnTokens | None
    prefill_chunk: int
    signals: DeferredSignals
    boundary: RopeBoundary | None
    prediction: Sequence[int] = ()
    grammar: Grammar | None = None
    seed: int | None = None
    continued: int = 0
    owner: str | None = ""
    corpora: Sequence[str] | None = None
    images: PromptImages | None = None
    adapter: str | None = None

    @property
    def kept_for(self) -> str | None:
        """Key under which this request's prefixes, n-gram pool and history are kept for later requests, if any.

        The key is the owner's name. If the request names its own LoRA adapter, it is "owner.adapter", since KV computed
        with another adapter must not be reused. None: nothing is kept.
        """
        return self.owner if self.owner is None or self.adapter is None else f"{self.owner}.{self.adapter}"

    @property
    def rotary_offset(self) -> int:
        """Number to add to a token's index to get its rotary position, for tokens after the prompt's images.

        It is 0 without images, and differs from 0 where an image's tokens count as fewer positions, as in Qwen-VL.
        """
        return self.images.rotary_offset if self.images else 0

    def keyed(self, tokens: list[int]) -> list[int]:
        """Replace the ids of image tokens by digests of their images, so that prefix reuse tells other images apart.

        Args:
            tokens: ids of the first tokens of this request's prompt and output.
        """
        return self.images.keyed(tokens) if self.images else tokens

    def limit_at(self, position: int) -> int:
        """The first position that a decode step beginning at `position` must not use.

        A step must not go beyond the length at which the model's rotary frequencies change, so that all its tokens are
        computed with the same frequencies.

        Args:
            position: position of the newest token, with which the step begins.
        """
        return self.boundary.limit(position, self.limit) if self.boundary else self.limit

    def crosses(self, position: int) -> bool:
        """Whether the token at `position` is generated, and the first with the model's changed rotary frequencies.

        Some models change these frequencies once a text has reached a certain length.
        """
        return self.boundary is not None and position == self.boundary.length and position >= len(self.prompt)
