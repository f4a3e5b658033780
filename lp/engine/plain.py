"""Plain decoding on the engine of lookahead decoding: the baseline for the speed of lookahead decoding.

The forward pass, its cache, captured steps, samplers and the loop are those of `LookaheadDecoder`, so that a speed-up
over this decoder is due to lookahead alone. `AutoregressiveDecoder` shares none of these: it is the reference for
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from lp.budget.policy import FixedBudget
from lp.config import Exact, KVDtype, LookaheadConfig
from lp.draft.source import DraftSource, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.engine.batch import BatchDecoder
from lp.engine.generation import Beginning, Generation
from lp.engine.memory import remedy_named
from lp.engine.output import StepTimer
from lp.engine.request import Request
from lp.models.bitwise import runner_for
from lp.models.kv_cache import StaticKVCache
from lp.parallel.context import ParallelContext

ONE_TOKEN = LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=0)


class PlainDecoder(BatchDecoder):
    """Plain decoding, one token a step, on the engine of `LookaheadDecoder`: the baseline for its speed-up.

    Ranks share no steps: each rank decodes the whole text. Under tensor parallelism, each group of ranks that holds one
    copy of the model does.

    Args:
        model: an HF causal LM, loaded and on its device.
        context: the ranks of the job; rank 0 draws a seed for all if no seed is given. None: this process alone.
        attention, capture, exact, kv_dtype: see `LookaheadDecoder`; with exact="bitwise" both give the same logits bit
            for bit.

    Raises:
        ValueError: `LookaheadDecoder` refuses such a model, too; `AutoregressiveDecoder` takes it.
        torch.OutOfMemoryError: the device is full; says what to lower.
    """

    @remedy_named()
    def __init__(
        self,
        model: PreTrainedModel,
        context: ParallelContext | None = None,
        attention: str = "auto",
        capture: str = "auto",
        exact: str = Exact.AUTO,
        kv_dtype: str = KVDtype.AUTO,
    ) -> None:
        super().__init__(model, context)
        self.runner = runner_for(model, attention, capture, exact, kv_dtype)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: one token a step, attention {self.attention}>"

    @property
    def attention(self) -> str:
        """Name of the attention backend in use, such as "flash"; if "auto" was asked for, the one that was chosen."""
        return self.runner.attention

    @property
    def steps_with(self) -> ParallelContext:
        """The ranks that share a decode step: only those that hold one copy of the model between them.

        Each copy of the model decodes the whole text by itself.
        """
        return self.context.replica_alone()

    @property
    def most_step_tokens(self) -> int:
        """Most tokens that one sequence has in a step: the newest token, and padding."""
        return 1 + self.runner.most_padding

    def begin(self, request: Request, texts: int = 1) -> Beginning:
        """Make a draft source that drafts nothing, and a token budget of one token a step; arguments are not used."""
        return Beginning(NoDrafts(), PlainBudget(ONE_TOKEN))

    def generation(self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer) -> Generation:
        return Generation(ONE_TOKEN, self.steps_with, self.runner, *beginning, request, cache, timer)


class PlainBudget(FixedBudget):
    """A token budget that makes every step compute one token, as plain decoding does, without drafts or learning."""

    idle = True


class NoDrafts(DraftSource):
    """A draft source that drafts nothing, for a decoder that computes one token in every step."""

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """Return an empty draft tree, whatever the arguments are."""
        return DraftTree()
