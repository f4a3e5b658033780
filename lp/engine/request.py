"""A checked `generate` call."""

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
    """A checked `generate` call.

    Attributes:
        prompt: token ids.
        limit: positions below it may be used: a node at or behind it samples no token that is needed and fits.
        max_new_tokens, sampler, stopping, on_tokens, prefill_chunk: what the call asks for, checked.
        signals: SIGINT and SIGTERM, deferred to the end of a step.
        boundary: where the model's rotary frequencies change; None if nowhere.
        prediction: tokens that the caller expects; draft tokens.
        grammar: grammar that the text follows; None for none.
        seed: seed of the text's noise or draws; None where nothing is drawn.
        continued: how many of the prompt's last tokens are of the text itself.
        owner: whose text it is: prefixes, session and history are kept apart by owner; None: the text leaves nothing,
            and uses nothing that others have left.
        corpora: names of the decoder's corpora that the text may look in; None: all.
        images: images of the prompt; None for none.
        adapter: name of the LoRA adapter that the text goes through; None: those that are active on the model.
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
        """Name that what is kept of the text goes by: that of the owner, and the adapter's; None: nothing is kept."""
        return self.owner if self.owner is None or self.adapter is None else f"{self.owner}.{self.adapter}"

    @property
    def rotary_offset(self) -> int:
        """What a position behind the prompt's images is, less its place in the text."""
        return self.images.rotary_offset if self.images else 0

    def keyed(self, tokens: list[int]) -> list[int]:
        """The text's first tokens, as texts that begin alike are found by: those of images stand for their content."""
        return self.images.keyed(tokens) if self.images else tokens

    def limit_at(self, position: int) -> int:
        """Positions below it may be used by a step whose `c` is at `position`."""
        return self.boundary.limit(position, self.limit) if self.boundary else self.limit

    def crosses(self, position: int) -> bool:
        """Whether `position` is generated, and the first one past the rotary boundary."""
        return self.boundary is not None and position == self.boundary.length and position >= len(self.prompt)
