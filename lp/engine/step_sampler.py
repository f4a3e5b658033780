"""Samples the nodes of a request's draft tree after the forward pass, and writes this rank's message to other ranks.

Here the host launches one operation after the other. After a captured step a CUDA graph does all of it, if the sampler
allows it (`lp.engine.captured_tails`). A node is a token of the step's tree of draft tokens and window guesses; its
root `c` is the newest token of the generated text.
n: sampled nodes, V: vocabulary, K: top-k logits of a node, P: int64s of a message. Packed top-k logits are int64s that
hold a token id and a float32 logit each (`lp.sampling.top_logits`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp.draft.layout import StepLayout, ancestors
from lp.engine.sharded_sampling import ShardedSampling
from lp.models.runner import ModelRunner
from lp.models.sharded_layers import head_of
from lp.parallel.context import ParallelContext
from lp.parallel.message import LENGTH, STOP, Header, MessageShape, Sampled, Stop, best_logits, pack
from lp.sampling.node_sampling import CallRules, NodeSampling, counts_at_nodes
from lp.sampling.noise import NO_NOISE, NoiseCache
from lp.sampling.sampler import Sampler
from lp.sampling.top_logits import pack_top_logits
from lp.to_device import to_device


class StepSampler:
    """Samples the draft-tree nodes of one request's steps, and writes this rank's messages to other ranks.

    Args:
        runner: computes the model's forward passes.
        sampler: chooses tokens by the request's sampling settings and processors.
        context: who this rank is, and which ranks share its steps.
        shape: size of the messages.

    Attributes:
        sharded: samples where tensor parallelism divides the logits among ranks; None: this rank has whole logits.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, context: ParallelContext, shape: MessageShape) -> None:
        self.runner = runner
        self.sampler = sampler
        self.context = context
        self.shape = shape
        head = head_of(runner.model)
        self.sharded = ShardedSampling(head, context) if head else None

    @property
    def joint_key(self) -> Hashable | None:
        """Key that is equal for requests whose nodes one call can sample together; None: this one is sampled alone."""
        rules = self.sampler.rules
        if rules is None or self.sharded:
            return None
        return rules.operations, rules.functions_key, self.sampler.noise is not None

    def message(
        self,
        logits: torch.Tensor,
        layout: StepLayout,
        header: Header,
        text: Sequence[int],
        num_logits: int,
        sampled: Sampled | None = None,
    ) -> torch.Tensor:
        """Sample the nodes of a step, and write this rank's message to the other ranks.

        Args:
            logits: logits of the sampled nodes, (n, V), or this rank's columns of these logits.
            layout: the nodes of the step.
            header: first int64s of the message.
            text: token ids so far: prompt and generated tokens.
            num_logits: how many top-k logits of each node the message has, at most K.
            sampled: the sampled tokens, if the nodes were sampled along with those of other requests; else None.

        Returns:
            The message, int64 (P,), on the device of the logits.
        """
        if sampled is not None:
            return pack(header, layout, sampled, self.shape)

        def by_host(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            branches = self._branches(layout)
            scores = self.sampler.scores(whole, branches, text)
            return scores, self.sampler.sample(scores, layout.sampled_positions, branches, self._drafts(layout))

        rules = self.sampler.rules
        sampling = None if rules is None else node_sampling([StepSequence(self, layout, header, text)], logits.device)
        if not self.sharded:
            scores, tokens = by_host(logits) if sampling is None else sampling.sample(logits)
            return pack(header, layout, self.of_nodes(logits, scores, tokens, num_logits), self.shape)
        sampled, flags = self.sharded.sample(logits, by_host, sampling, num_logits, header)
        message = pack(header, layout, sampled, self.shape)
        message[STOP : LENGTH + 1] = flags
        return message

    def of_nodes(self, logits: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, num_logits: int) -> Sampled:
        """Gather what a message tells about sampled nodes: their tokens, top-k logits, and logits that ranks compare.

        Args:
            logits: the model's logits of the nodes, (n, V); row 0 belongs to the newest token, the tree's root.
            scores: the logits after processors and warpers, (n, V).
            tokens: the sampled tokens, int64 (n,).
            num_logits: number of top-k logits to take of each node.
        """
        top = pack_top_logits(scores, num_logits) if num_logits else tokens.new_zeros(len(tokens), 0)
        return Sampled(tokens, top, best_logits(logits) if self.context.steps.size > 1 else None)

    def top_logits(self, logits: torch.Tensor, prompt: Sequence[int], num_logits: int) -> torch.Tensor:
        """Select the top-k scores of prompt tokens, for the draft source to learn from.

        Args:
            logits: logits of n tokens of the prompt, (n, V), or this rank's columns of these logits.
            prompt: token ids of the prompt.
            num_logits: number of scores to select for each token.

        Returns:
            int64 (n, num_logits), each holding a token id and a float32 score.
        """
        if self.sharded:
            return self.sharded.top_logits(logits, self.sampler, prompt, num_logits)
        return pack_top_logits(self.sampler.scores(logits, [None] * len(logits), prompt), num_logits)

    def announced(self, error: Exception) -> bool:
        """Whether the other ranks with this copy of the model know of this rank's exception, so that none waits for it.

        Args:
            error: the exception.
        """
        return self.sharded is not None and self.sharded.failure is error

    def check_replicas(self, stop: Stop, step: int) -> None:
        """Raise an error if ranks that hold one copy of the model (tensor parallelism) had different states in a step.

        Args:
            stop: all flags of the ranks' messages; Stop.PARTED says that the ranks of some copy differ.
            step: number of the decode step, for the error message.

        Raises:
            RuntimeError: names the ranks of this copy that differ, or says that ranks of another copy do.
        """
        if Stop.PARTED in stop and self.sharded:
            self.sharded.check_alike(step)
            raise RuntimeError(f"the ranks of another replica differ from each other at step {step}; see their errors")

    def failed(self, header: Header, layout: StepLayout) -> torch.Tensor:
        """Make the message of a rank that has failed: a header that says so, and nodes whose tokens nobody uses.

        Args:
            header: first int64s of the message, with the flag for the failure.
            layout: the nodes of the step.

        Returns:
            The message, int64 (P,), on the device.
        """
        nothing = torch.zeros(len(layout.sampled_nodes), 0, dtype=torch.int64, device=self.runner.device)
        return pack(header, layout, Sampled(nothing.sum(1), nothing), self.shape)

    def _drafts(self, layout: StepLayout) -> list[list[int]]:
        """The draft tokens that follow every sampled node, for rejection sampling; empty lists for other samplers."""
        drafts = layout.drafts() if self.sampler.uses_drafts else {}
        nodes = layout.sampled_nodes.tolist()
        return [drafts.get(node, []) for node in nodes] if drafts else [[]] * len(nodes)

    def _branches(self, layout: StepLayout) -> list[list[int] | None]:
        """The tokens from `c` to each sampled node, which processors see as the end of the text.

        None for a node that verification can't accept in this step, whose token only guesses.
        """
        if self.sampler.prefix_free:
            return [[] if reached else None for reached in layout.reachable[layout.sampled_nodes].tolist()]
        return [layout.branch_tokens(node) for node in layout.sampled_nodes.tolist()]


NO_NUMBERS = torch.empty(0, 0, dtype=torch.float64)


class StepSequence(NamedTuple):
    """What sampling reads of one sequence of a decode step.

    Attributes:
        step_sampler: samples the sequence's nodes, and has its sampler.
        layout: the nodes of the sequence's draft tree, as they are laid out in the step.
        header: first int64s of the sequence's message.
        text: token ids of the sequence: prompt and generated tokens.
        first_row: row in the step's logits for `c`, the sequence's newest token; its other sampled nodes follow. Only
            captured steps read it.
        first_token: index of the sequence's first token among the tokens of the forward pass. Only captured steps
            read it.
    """

    step_sampler: StepSampler
    layout: StepLayout
    header: Header
    text: Sequence[int]
    first_row: int = 0
    first_token: int = 0

    @property
    def sampler(self) -> Sampler:
        """Chooses tokens by the sampling settings of the sequence's request."""
        return self.step_sampler.sampler


def node_sampling(sequences: Sequence[StepSequence], device: torch.device) -> NodeSampling:
    """Prepare the call that samples the nodes of several sequences at once: their settings, token counts and noise.

    Args:
        sequences: they have equal `StepSampler.joint_key` and samplers with rules; the logits are in their order.
        device: device of the logits.

    Returns:
        An object whose `sample` takes the logits of all nodes, (n, V).
    """
    rules = [own.sampler.rules for own in sequences if own.sampler.rules is not None]
    noise = [own.sampler.noise for own in sequences if own.sampler.noise is not None]
    call = CallRules.of(rules, bool(noise))
    sampling = NodeSampling(call, rules[0], NO_NUMBERS, None)
    if not (call.operations or call.functions_key or noise):
        return sampling
    reachable = [own.layout.reachable[own.layout.sampled_nodes] for own in sequences]
    if call.operations or call.functions_key:
        numbers = np.array([own.numbers for own in rules])
        if len(sequences) > 1:
            numbers = numbers.repeat([len(own) for own in reachable], 0)
        sampling.numbers = to_device(numbers, device)
        if not all(own.all() for own in reachable):
            sampling.reachable = to_device(np.concatenate(reachable)[:, None], device)
    if call.counts:
        sampling.counts, sampling.columns = _counts(sequences, device)
    if noise:
        positions = [[position + 1 for position in own.layout.sampled_positions] for own in sequences]
        NoiseCache.fill(noise, positions)
        rows = [
            to_device(noise_rows(own.sampler, at, reached), device)
            for own, at, reached in zip(sequences, positions, reachable, strict=True)
        ]
        if len(sequences) == 1:
            sampling.noise_SV, sampling.noise_rows = noise[0].noise_SV, rows[0]
        else:
            parts = [own.noise_SV.index_select(0, at) for own, at in zip(noise, rows, strict=True)]
            sampling.noise_SV = torch.cat(parts)
    return sampling


def noise_rows(sampler: Sampler, positions: Sequence[int], reachable: np.ndarray) -> list[int]:
    """Row of the noise buffer with which each sampled node of a sequence is sampled; NO_NOISE for nodes without noise.

    Args:
        sampler: the sequence's sampler, which must have noise.
        positions: (n,), for each node, the position that its sampled token gets in the sequence.
        reachable: bool (n,), whether verification may accept the token sampled at the node in this step. If
            `sampler.noisy_guesses` is False, the other nodes are sampled without noise.
    """
    assert sampler.noise is not None
    rows = sampler.noise.rows_of(positions)
    if sampler.noisy_guesses:
        return rows
    return [row if reached else NO_NOISE for row, reached in zip(rows, reachable.tolist(), strict=True)]


def _counts(sequences: Sequence[StepSequence], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token counts of every node, for penalties: `counts` and `columns` of `NodeSampling`.

    On a CPU they have only the columns of tokens that occur; a GPU would have to wait for the host to find these.
    """
    rows = [_counted(own, device) for own in sequences]
    tokens = [to_device(own.layout.step_tokens, device) for own in sequences]
    columns = None
    if device.type == "cpu":
        had = [row.nonzero()[:, 0] for row in rows]
        columns = torch.cat([*had, *tokens]).unique()  # ascending
        vocabulary = len(rows[0])
        columns = columns[columns < vocabulary]
        columns = columns if len(columns) else columns.new_zeros(1)  # where all tokens are ones that no head scores
        rows = [row[columns] for row in rows]
        tokens = [torch.searchsorted(columns, own).masked_fill(own >= vocabulary, len(columns)) for own in tokens]
    counts = []
    for own, row, own_tokens in zip(sequences, rows, tokens, strict=True):
        assert own.sampler.counts is not None
        visible = ancestors(own.layout.step_parents)[own.layout.sampled_tokens]
        generated = own.layout.step_positions >= own.sampler.counts.first_generated
        counts_nU = row.repeat(len(visible), 1)
        counts.append(counts_at_nodes(counts_nU, own_tokens, to_device(generated, device), to_device(visible, device)))
    return counts[0] if len(counts) == 1 else torch.cat(counts), columns


def _counted(own: StepSequence, device: torch.device) -> torch.Tensor:
    """How often each token occurs in a sequence before its step, brought up to date: int32 (V,)."""
    counts = own.sampler.counts
    assert counts is not None
    num_tokens = int(own.layout.step_positions[0])
    if pairs := counts.uncounted(own.text, num_tokens, len(own.text)):
        indices, ones = to_device(np.array(pairs), device).unbind(1)
        counts.counts_QV.view(-1).index_add_(0, indices, ones.to(torch.int32))
    counts.counted(num_tokens)
    return counts.counts_QV[counts.place]
