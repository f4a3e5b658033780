"""The generation of one sequence on one rank: its state, which is equal on all ranks, and its part of a decode step.

A sequence is a prompt and the tokens that are generated after it; the code calls it a text. A decode step computes a
tree of nodes: draft tokens and window guesses, with `c` at the root. `c` is the newest token of the sequence, whose KV
is not in the cache yet. Each rank grows and computes its own part of the tree, and learns the other parts from the
messages of the other ranks.
R: ranks that share the step, P: int64s of a message, n: sampled nodes, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lp.budget.calibration import DraftRecord
from lp.budget.policy import Budget
from lp.config import KVSync, LookaheadConfig
from lp.digest import chain_digest
from lp.draft.layout import StepLayout
from lp.draft.share import NO_DRAFT, Share
from lp.draft.source import DraftSource, ShareInput, StepSamples
from lp.draft.tree import DraftTree
from lp.draft.verify import Outcome, RankTrees, UnionTree
from lp.draft.window import LookaheadWindow, WindowSlice, WindowSlices, slice_window
from lp.engine.delivery import Delivery
from lp.engine.failures import Failures
from lp.engine.memory import too_large
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.prompt_reader import PromptReader
from lp.engine.request import Request
from lp.engine.step_sampler import StepSampler
from lp.engine.stopping import FINISH_REASON
from lp.errors import UserError
from lp.models.kv_cache import CacheTooLarge, StaticKVCache
from lp.models.loader import vocabulary_size
from lp.models.runner import ModelRunner
from lp.models.support import logit_rounding
from lp.models.tree_pass import TreePass
from lp.models.vocabulary import embedded_tokens
from lp.parallel.context import ParallelContext
from lp.parallel.message import Header, MessageShape, Sampled, Stop, sampled_at_c, state_digest, unpack
from lp.sampling.sampler import check_sampled
from lp.sampling.top_logits import INVALID_TOKEN

T = TypeVar("T")


class Beginning(NamedTuple):
    """The objects that a decoder makes anew for each request, from which its state is built; see `StepDecoder.begin`.

    Attributes:
        source: proposes the draft tree of each step.
        budget: decides how many window columns and draft tokens a step has.
    """

    source: DraftSource
    budget: Budget


class StepPart(NamedTuple):
    """One rank's part in a sequence's decode step: `begin_step` makes it, `end_step` takes it.

    Attributes:
        layout: the nodes (draft tokens and window guesses) that this rank computes, as they are laid out in the step.
        header: first int64s of this rank's message to the other ranks.
        slices: which columns of the lookahead window each rank computes.
        merges: whether a draft node that repeats a window node becomes one node with it; see `DraftTree.merge`.
        num_logits: how many top-k logits of each node the message has.
        plain: whether this is a step of plain decoding, which computes only the newest token. Such a step drafts
            nothing, and nothing is learned from it.
    """

    layout: StepLayout
    header: Header
    slices: WindowSlices
    merges: bool
    num_logits: int
    plain: bool


class Generation:
    """The state of one sequence (prompt and generated tokens) on one rank, and the parts of its decode steps.

    Token ids, lookahead window and draft source are equal on all ranks, since they change only by gathered messages.
    Each rank has its own KV cache, which may lack accepted tokens that other ranks computed: the rank computes these
    tokens again, along with its next step (catch-up tokens).

    Args:
        config: shape of the steps, and which parts of lookahead decoding are switched off.
        context: who this rank is, and which ranks share its steps.
        runner: computes the forward passes.
        source, budget: see `Beginning`.
        request: the checked call.
        cache: KV cache with at least `cache_slots` slots; empty, or with the first tokens of the prompt.
        timer: splits the time of steps into forward passes, all-gathers and host work.
        merges_late: let the draft source learn a part of each step while the device computes the next one.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        context: ParallelContext,
        runner: ModelRunner,
        source: DraftSource,
        budget: Budget,
        request: Request,
        cache: StaticKVCache,
        timer: StepTimer,
        merges_late: bool = False,
    ) -> None:
        self.config = config
        self.context = context
        self.runner = runner
        self.source = source
        self.request = request
        self.budget = budget
        self.text = list(request.prompt)
        self.window = LookaheadWindow(budget.columns, config.ngram_size, request.prompt)
        self.num_logits = min(source.num_logits, vocabulary_size(runner.model))
        self.propose_share = source.propose_share
        self._vocabulary = embedded_tokens(runner.model)
        self.message_shape = MessageShape(budget.step_tokens, self.num_logits)
        self.trees = self.message_shape.room(context.steps.size)
        self.union = UnionTree(context.steps.size, budget.step_tokens)
        bitwise = bool(runner.widths)
        self.rounding = 0.0 if context.alone or bitwise else logit_rounding(runner.model, runner.kv_dtype)
        self.cache = cache
        self.catch_up: list[int] = []  # accepted tokens whose KV this rank lacks
        self.catch_up_counts = np.zeros(context.steps.size, np.int64)  # by rank, how many such tokens it lacks
        self._some_lack = False  # whether any rank lacks some
        self._no_columns = WindowSlice(0, 0, config.ngram_size - 1)
        self.digest = chain_digest(0, request.prompt)
        self.num_digested = len(request.prompt)  # tokens of the text that are in the digest
        self.last_tokens = 1  # step tokens in the last step, of the rank that had most
        self.timer = timer
        self.step_sampler = StepSampler(runner, request.sampler, context, self.message_shape)
        explained = partial(_explained, request, config, budget, runner.device)  # not a method, which would be a cycle
        self.failures = Failures(context, self.step_sampler.announced, explained)
        self.delivery = Delivery(request, context, timer, self.failures)
        self.stats = self.delivery.stats
        parts = config.ablation
        learns_prompt = parts.prompt_logits and parts.prompt_ngrams
        self.prompt = PromptReader(
            request.prompt,
            runner,
            context,
            self.step_sampler,
            source,
            self.num_logits,
            budget.prompt_logits if learns_prompt and self.num_logits else 0,
            cache.length,
            self.failures,
            request.images,
            request.adapter,
        )
        self._observe = source.observe_part if merges_late else source.observe
        self._merge: Callable[[], None] | None = None  # what of the last step the source has yet to learn

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens generated so far, without the prompt."""
        return self.text[len(self.request.prompt) :]

    def output(self, reason: Stop, prefill_s: float, decode_s: float) -> GenerationOutput:
        """Make the output of a sequence that has ended.

        Args:
            reason: why it ended.
            prefill_s, decode_s: seconds before its first decode step, and seconds from then on.

        Raises:
            BaseException: an exception that this rank has met, such as one that the caller's callback raised.
        """
        self.failures.raise_failure()
        tokens = self.tokens[: self.delivery.num_kept]
        output = GenerationOutput(tokens, FINISH_REASON[reason], self.stats, prefill_s, decode_s, self.cache.nbytes())
        output.accepted_prediction = min(self.source.accepted_prediction, len(tokens))
        return output

    def capture_steps(self, capture: Callable[[int, Sequence[int]], None]) -> None:
        """Before the first step, have CUDA graphs captured for all step sizes that this sequence may need.

        Args:
            capture: captures the graphs. It is called with the number of tokens of the largest step, and a list of all
                numbers of top-k logits that steps may take of each node, such as [0, 16].
        """
        largest = max(self.budget.step_tokens, self.budget.max_padded_tokens)
        kinds = sorted({0, self.num_logits})  # a plain step takes none
        self.failures.attempt(lambda: capture(largest, kinds))

    @property
    def cached_everywhere(self) -> list[int]:
        """Ids of the first tokens of the sequence, as many as every rank has KV for; later prompts may reuse that KV.

        Empty if some rank may have failed to compute them.
        """
        known = self.context.alone or self.stats  # a message has told what failed before it
        if Stop.FAILED in self.delivery.stopped_by or not known:
            return []
        missing = self.catch_up_counts.max() - self.catch_up_counts[self.context.steps.rank]
        return self.text[: self.cache.length - missing]

    def tree_pass(self, part: StepPart, padded: bool) -> TreePass:
        """Make the input of the forward pass for this sequence's part of a step: tokens, positions and visibility.

        Args:
            part: this rank's part in the step.
            padded: whether to add padding tokens where the token budget knows that a larger step takes less time.
        """
        layout = part.layout
        step = layout.step_tokens, layout.step_positions, layout.step_parents
        request = self.request
        tree = TreePass(
            *step,
            self.cache,
            layout.sampled_tokens,
            rotary_offset=request.rotary_offset,
            adapter=request.adapter,
        )
        return tree.padded(self.budget.padded_size(layout.num_tokens) - layout.num_tokens) if padded else tree

    def own_message(
        self, part: StepPart, logits: torch.Tensor | None, failure: Exception | None, sampled: Sampled | None
    ) -> torch.Tensor:
        """Sample this rank's nodes, and write its message; if that fails, the message tells the other ranks.

        Args:
            part: this rank's part in the step.
            logits: logits of the sampled nodes, (n, V); None if this rank has failed before.
            failure: exception of the forward pass; None if it succeeded.
            sampled: the sampled tokens, if the nodes were sampled along with those of other sequences; else None.

        Returns:
            The message, int64 (P,), on the device of the logits.
        """

        def sample() -> torch.Tensor:
            if failure:
                raise failure
            assert logits is not None
            return self.step_sampler.message(logits, part.layout, part.header, self.text, part.num_logits, sampled)

        try:
            message = self.failures.attempt(sample)
        finally:
            failure = None  # raised there, it has this frame, which would keep it until gc finds the cycle
        if message is None:
            header = part.header._replace(stop=self.delivery.wanted_stop)
            return self.step_sampler.failed(header, part.layout)
        return message

    def observe_step(self, part: StepPart) -> None:
        """Tell the token budget how long the last step took; called only for steps that computed this sequence alone.

        Args:
            part: this rank's part in that step.
        """
        # Other processors, as a grammar's, take time of their own.
        if self.budget.learns and not self.delivery.stopped_by and self.request.sampler.prefix_free:
            # On a CPU, of one rank, this thread's own seconds, which other programs do not lengthen.
            on_cpu = self.runner.device.type == "cpu" and self.context.alone
            seconds = self.delivery.thread_s if on_cpu else self.stats[-1].seconds
            self.budget.observe(0 if part.plain else self.last_tokens, seconds)

    def begin_step(self) -> StepPart:
        """Decide what this rank computes in the next decode step: propose drafts, divide the window, lay out both."""
        self._cross_rope_boundary()
        if self.budget.idle and not self._some_lack:
            assert not self.catch_up
            c_alone = self._layout(self._no_columns, NO_DRAFT)
            slices = WindowSlices()
            return StepPart(c_alone, self._header(NO_DRAFT, slices), slices, NO_DRAFT.merge, 0, plain=True)
        slices = self._slice_window()
        columns = slices[self.context.steps.rank]
        share = self.failures.attempt(partial(self._propose, slices)) or Share(NO_DRAFT)
        layout = self.failures.attempt(partial(self._layout, columns, share.draft))
        if layout is None:  # this rank has failed, and says so in its message
            share, layout = Share(NO_DRAFT), self._layout(columns, NO_DRAFT)
        header = self._header(share.common, slices)
        return StepPart(layout, header, slices, share.draft.merge, self.num_logits, plain=False)

    def end_step(self, part: StepPart, messages: np.ndarray) -> Stop:
        """Finish a decode step: verify the draft tokens, commit the accepted ones, learn, and stream new tokens.

        Args:
            part: this rank's part in the step.
            messages: the messages of all ranks, int64 (R, P), on the host.

        Returns:
            Why generation ends with this step; Stop.NONE: it continues.
        """
        stop, length = unpack(messages, self.trees, len(self.stats), self.rounding, self.context.steps.name_of)
        self.step_sampler.check_replicas(stop, len(self.stats))
        if stop:
            return self.delivery.stop(stop, length, self.tokens)
        if part.plain:
            return self._take_plain(sampled_at_c(messages), part.layout)
        self.union.merge(self.trees, part.slices, part.merges)
        outcome = self._verify(part.layout)
        self._record(outcome)
        self._commit(part.layout, outcome)
        self._learn(messages, outcome, part.slices)
        step = StepStats(
            part.layout.num_tokens, self.union.num_draft, outcome.accepted, 0, 0, 0, part.slices.num_columns
        )
        return self.delivery.deliver(self.tokens, step._replace(most_tokens=self.last_tokens))

    def _take_plain(self, token: int, layout: StepLayout) -> Stop:
        """Finish a plain step: add the one token that `c` sampled."""
        check_sampled(token, len(self.stats), layout.sampled_positions[0], self.request.sampler)
        self.request.sampler.record([0], [0])
        self.cache.commit([0])
        self.text.append(token)
        self.last_tokens = 1
        self.budget.record_step([token], 1, DraftRecord())
        return self.delivery.deliver(self.tokens, StepStats(1, 0, 0, 0, 0, 0, idle=True, most_tokens=1))

    @property
    def _warming_up(self) -> bool:
        return len(self.stats) < self.config.ablation.warmup_steps

    def _cross_rope_boundary(self) -> None:
        """If the model's rotary frequencies change at `c`, compute the KV cache anew, as plain decoding does there."""
        if self.request.crosses(len(self.text) - 1):
            self.failures.attempt(lambda: self.runner.cross(self.text, self.cache, self.request.prefill_chunk))
            self.catch_up = []
            self.catch_up_counts[:] = 0
            self._some_lack = False

    def _limit_at(self, position: int) -> int:
        """The first position that a step must not use, the same on every rank.

        Args:
            position: position of the step's `c`.
        """
        limit = self.request.limit_at(position)
        if (depth := self.runner.backend.depth) is not None:
            limit = min(limit, position + depth + 1)
        return limit

    def _slice_window(self) -> WindowSlices:
        """Divide the window's columns among ranks: a rank with catch-up tokens has room for fewer."""
        position = len(self.text) - 1
        room = self._limit_at(position) - position - (self.config.ngram_size - 2)
        columns = max(min(self.window.window_size, room), 0)
        enough = columns * self.config.ngram_size  # for all of them, so that most steps have the same rooms
        rooms = np.minimum(self.budget.step_tokens - self.catch_up_counts, enough)
        return slice_window(columns, self.config.ngram_size, tuple(rooms.tolist()))

    def _propose(self, slices: WindowSlices) -> Share:
        """Let the draft source propose this rank's share of the draft tree."""
        rank = self.context.steps.rank
        base_tokens = self.catch_up_counts + slices.num_nodes
        own_tokens, largest = int(base_tokens[rank]), int(base_tokens.max())
        drafts_nothing = self._warming_up or self.budget.idle
        step = ShareInput(
            rank=rank,
            budget=self.budget.step_tokens,
            max_draft=0 if drafts_nothing else self.config.draft_budget,
            base_tokens=base_tokens,
            window=self.window.drafts(slices[rank]),
            price=self.budget.price(own_tokens, largest if len(slices) > 1 else 0),
        )
        return self.propose_share(self.text, step)

    def _layout(self, columns: WindowSlice, draft: DraftTree) -> StepLayout:
        position = len(self.text) - 1
        limit = self._limit_at(position)
        layout = StepLayout(self.window, columns, draft, self.text[-1], position, limit, self.catch_up)
        if layout.num_nodes > self.message_shape.nodes:  # compiled code would write beyond the message
            raise UserError(
                f"{type(self.source).__name__} proposed {len(draft)} draft tokens, which makes a step of "
                f"{layout.num_tokens} tokens; the budget is {self.message_shape.nodes}: propose no more than asked for"
            )
        tokens = layout.tokens.view(np.uint64)  # where negative ones are the largest
        if len(draft) and tokens.max() >= self._vocabulary:
            wrong = next(token for token in layout.tokens.tolist() if not 0 <= token < self._vocabulary)
            raise UserError(
                f"{type(self.source).__name__} proposed the token {wrong}; the model has 0..{self._vocabulary - 1}: "
                "propose no others"
            )
        return layout

    def finish_learning(self) -> None:
        """Let the draft source learn the rest of the last step, which `merges_late` has put off.

        A rank that has failed calls it, too: all ranks have completed that step, and the draft tables that a session
        keeps must stay equal on all of them.
        """
        if self._merge:
            merge, self._merge = self._merge, None
            self.failures.attempt(merge, in_any_case=True)

    def finish(self) -> None:
        """Let the draft source learn the rest of the last step, and tell it that generation has ended.

        Every rank calls it.
        """
        self.finish_learning()
        prompt_tokens = len(self.request.prompt) - self.request.continued
        text = self.text[: len(self.request.prompt) + self.delivery.num_kept]
        self.failures.attempt(lambda: self.source.ended(text, prompt_tokens), in_any_case=True)

    def _header(self, common: DraftTree, slices: WindowSlices) -> Header:
        """The header of this rank's message, whose digest lets ranks compare their state before they read its tree."""
        if not self.context.alone:  # a single rank has none to differ from
            widths = slices.num_nodes.tolist()
            shape = [self.budget.step_tokens, *widths, *self.catch_up_counts.tolist()]
            state = (*self.window.levels, list(common.tokens), list(common.parents), shape)
            self.digest = state_digest(self.digest, self.text[self.num_digested :], *state)
            self.num_digested = len(self.text)
        return Header(self.digest, self.delivery.wanted_stop, self.delivery.num_kept)

    def _verify(self, layout: StepLayout) -> Outcome:
        """Walk from `c` through the union of all ranks' trees, as long as a child has the token that a node sampled."""
        outcome = self.union.walk(self.context.steps.rank, 0 if self._warming_up else self.union.num_nodes)
        position = len(self.text) - 1 + outcome.accepted
        check_sampled(outcome.tokens[-1], len(self.stats), position, self.request.sampler)
        self.request.sampler.record(layout.sampled_nodes.tolist(), outcome.own_path)
        return outcome

    def _record(self, outcome: Outcome) -> None:
        """Tell the token budget how many of the step's draft tokens were accepted."""
        self.last_tokens = int((np.asarray(self.trees.counts) + self.catch_up_counts).max())
        if self.budget.learns:
            drafts = DraftRecord(self.union.stated_probs(), outcome.expected, outcome.accepted_drafts)
            self.budget.record_step(outcome.tokens, self.last_tokens, drafts)

    def _commit(self, layout: StepLayout, outcome: Outcome) -> None:
        """Add the accepted tokens to the text, and to the cache the KV of those that this rank has computed."""
        accepted = [self.text[-1], *outcome.tokens[:-1]]  # the path's tokens
        self.text += outcome.tokens
        missing = len(layout.catch_up)
        computed = [*range(missing), *(missing + node for node in outcome.own_path)]
        if self.config.ablation.kv_sync is KVSync.BROADCAST and min(outcome.held) < len(accepted):
            self._broadcast_kv(computed, outcome)
            return
        self.cache.commit(computed)
        self.catch_up = accepted[len(outcome.own_path) :]
        self.catch_up_counts = len(accepted) - np.array(outcome.held)
        self._some_lack = min(outcome.held) < len(accepted)

    def _broadcast_kv(self, computed: Sequence[int], outcome: Outcome) -> None:
        """Send the KV of all accepted tokens to the ranks that lack some, for the ablation kv_sync=broadcast.

        The rank that computed the last accepted node has computed its ancestors too: it sends.
        """
        path = outcome.path[1:]
        padding = [0] * (len(path) + 1 - len(computed))
        flat = self.cache.pack([*computed, *padding][1:])
        with self.timer.exchange:
            self.context.steps.broadcast(flat, self.union.speaker(path[-1]))
        self.cache.commit(computed[:1])
        self.cache.append(flat, len(path))

    def _learn(self, messages: np.ndarray, outcome: Outcome, slices: WindowSlices) -> None:
        """Advance the window, and let the draft source learn from the tokens that the step's nodes sampled."""
        last_level = _last_level(self.trees, slices)
        ngrams = self.window.ngrams(last_level)
        union = self.union
        sampled = union.sampled
        if self._warming_up:  # the reference code's window has no full column yet
            ngrams = []
            sampled = np.full_like(sampled, INVALID_TOKEN)
        samples = StepSamples(
            tokens=union.tokens,
            positions=union.depths + (len(self.text) - 1 - len(outcome.tokens)),
            parents=union.parents,
            sampled=sampled,
            packed=messages.reshape(-1),
            starts=union.starts,
            num_logits=self.num_logits,
            ngrams=ngrams,
        )
        self.window.window_size = self.budget.columns
        self.window.advance(self.text, len(outcome.tokens), last_level)
        self._merge = self.failures.attempt(partial(self._observe, self.text, len(outcome.tokens), samples))


def _explained(
    request: Request, config: LookaheadConfig, budget: Budget, device: torch.device, error: CacheTooLarge
) -> Exception:
    """The error for the user where the device has no room for a text's KV cache: says which settings to lower."""
    prompt = len(request.prompt)
    return too_large(error, config, budget, prompt, request.limit + 1 - prompt, device)


def _last_level(trees: RankTrees, slices: WindowSlices) -> list[int]:
    """The tokens that the nodes of the window's last level sampled, one a column: they become its new level."""
    last_level: list[int] = []
    sampled = np.asarray(trees.sampled)
    for rank in slices.holders:
        own = slices[rank]
        first = own.first_of_last_level
        # A node that no walk can reach may have sampled nothing: its scores were not finite.
        last_level += (sampled[rank, first : first + own.num_columns] % INVALID_TOKEN).tolist()
    return last_level
