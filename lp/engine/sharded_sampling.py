"""Sampling under tensor parallelism: each rank of a replica has the logits of a part of the vocabulary.

A replica is a group of ranks that hold one copy of the model between them. In a step they exchange, by one all-gather,

    [DIGEST, STOP, LENGTH, (score, token) of every node, best logits of `c`, top-k logits of every node]

and each rank derives tokens, top-k logits and flags from what was gathered, so that these are equal bit for bit. A
node is a token of the step's draft tree; its root `c` is the newest token of the generated text.
n: sampled nodes; V: vocabulary; T: ranks of the replica; K: top-k logits of a node. Packed top-k logits are int64s that
hold a token id and a float32 logit each (`lp.sampling.top_logits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lp.models.sharded_layers import ShardedHead
from lp.parallel.context import ParallelContext
from lp.parallel.message import NUM_BEST, Header, Sampled, Stop, best_logits
from lp.parallel.replica import Replica
from lp.sampling.node_sampling import NodeSampling
from lp.sampling.sampler import Sampler
from lp.sampling.top_logits import INVALID_TOKEN, pack_top_logits
from lp.to_device import to_device

HEAD = 3  # int64s of DIGEST, STOP and LENGTH


class ShardedSampling:
    """Samples the draft-tree nodes of one request's steps where tensor parallelism divides the LM head among ranks.

    Args:
        head: this rank's part of the LM head.
        context: who this rank is, and which ranks share its steps.

    Attributes:
        compared: whether messages have the largest logits of `c`, the newest token: True if several copies of the
            model share steps and so can be compared.
        failure: this rank's exception in the last step, once the other ranks with this copy of the model know of it.
        heads: first int64s (state digest, stop flags, number of tokens to return) of the last step's messages from all
            T ranks with this copy of the model, int64 (T, 3).
    """

    def __init__(self, head: ShardedHead, context: ParallelContext) -> None:
        self.head = head
        self.replica = head.replica
        self.context = context
        self.compared = context.steps.size > 1
        self.failure: Exception | None = None
        self.heads = torch.zeros(1, HEAD, dtype=torch.int64)

    def sample(
        self,
        logits: torch.Tensor,
        by_host: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        sampling: NodeSampling | None,
        num_logits: int,
        header: Header,
    ) -> tuple[Sampled, torch.Tensor]:
        """Sample the draft-tree nodes of a step together with the other ranks of the replica (one copy of the model).

        Args:
            logits: logits of the n nodes, (n, V), or this rank's columns of these logits.
            by_host: computes scores (n, V) and tokens (n,) from whole logits (n, V), by processors on the host; used if
                `sampling` is None.
            sampling: samples by tensor operations alone; None: the request has a logits processor that needs the host.
            num_logits: K, how many top-k logits to take of each node.
            header: first int64s of this rank's message.

        Returns:
            The sampled tokens; and stop flags and number of tokens to return, for the replica's message, int64 (2,).
            All stays on the device: the host waits for it once a step, when it reads the messages.

        Raises:
            Exception: a processor's exception on this rank, after the other ranks of the replica have learned of it.
        """
        known = to_device([header.digest, int(header.stop), header.length], logits.device)
        if sampling is not None:
            sampled, flags, self.heads = self.sample_all(known, logits, sampling, num_logits)
            return sampled, flags
        count = len(logits)
        try:
            whole = self.head.whole(logits)
            mine = self._with_top(whole, *by_host(whole), num_logits)
        except Exception as error:
            self.failure = error
            known[1] |= int(Stop.FAILED)
            nothing = known.new_zeros(count, num_logits)
            mine = Sampled(nothing.sum(1), nothing, known.new_zeros(NUM_BEST) if self.compared else None)
        sampled, flags, self.heads = self._of_first(known, mine)
        if self.failure:
            raise self.failure
        return sampled, flags

    def sample_all(
        self, known: torch.Tensor, logits: torch.Tensor, sampling: NodeSampling, num_logits: int
    ) -> tuple[Sampled, torch.Tensor, torch.Tensor]:
        """Sample the draft-tree nodes of a step by tensor operations alone, so that a CUDA graph can record it.

        Args:
            known: the head of this rank's message, int64 (3,): state digest, stop flags and number of tokens to return.
            logits: logits of the n nodes, (n, V), or this rank's columns of these logits.
            sampling: samples the nodes.
            num_logits: K, how many top-k logits to take of each node.

        Returns:
            Three things: the sampled tokens; stop flags and number of tokens to return, for the message of this copy of
            the model, int64 (2,); and the heads of the messages of the T ranks that hold this copy, int64 (T, 3).
        """
        if logits.shape[-1] == self.head.out_features or not sampling.rules.shardable:
            whole = self.head.whole(logits)
            return self._of_first(known, self._with_top(whole, *sampling.sample(whole), num_logits))
        count = len(logits)
        mine = self._best_of_part(logits, sampling, num_logits)
        gathered = self.replica.all_gather(torch.cat([known, *(part.flatten() for part in mine)]))
        heads = gathered[:, :HEAD]
        sizes = [count, count, NUM_BEST if self.compared else 0, count * num_logits]
        scores, tokens, best, top = gathered[:, HEAD:].split(sizes, 1)
        # Of equal scores the first wins, as where one rank has all of them.
        winner = scores.contiguous().view(torch.float64).argmax(0, keepdim=True)
        sampled = Sampled(
            tokens.gather(0, winner)[0],
            merged(top.view(self.replica.size, count, num_logits), num_logits),
            merged(best[:, None], NUM_BEST)[0] if self.compared else None,
        )
        return sampled, self._flags(heads), heads

    def _of_first(self, known: torch.Tensor, mine: Sampled) -> tuple[Sampled, torch.Tensor, torch.Tensor]:
        """Let every rank take what the first rank of the replica sampled from whole logits; results as `sample_all`."""
        parts = [mine.tokens, *([] if mine.best is None else [mine.best]), mine.top_logits.flatten()]
        gathered = self.replica.all_gather(torch.cat([known, *parts]))
        heads = gathered[:, :HEAD]
        tokens, *best, top = gathered[0, HEAD:].split([len(part) for part in parts])
        return Sampled(tokens, top.view_as(mine.top_logits), *best), self._flags(heads), heads

    def top_logits(self, logits: torch.Tensor, scale: Sampler, prompt: Sequence[int], k: int) -> torch.Tensor:
        """Select the k best scores of each prompt token, for the draft source to learn from.

        Args:
            logits: logits of n tokens of the prompt, (n, V), or this rank's columns of these logits.
            scale: the request's sampler, which turns logits into scores.
            prompt: token ids of the prompt.
            k: number of scores to select for each token.

        Returns:
            int64 (n, k), each holding a token id and a float32 score.
        """
        scores = scale.scores(logits, [None] * len(logits), prompt)
        if logits.shape[-1] == self.head.out_features:
            return self.replica.all_gather(pack_top_logits(scores, k))[0]
        return merged(self.replica.all_gather(self._packed(scores, k)), k)

    def _best_of_part(self, logits: torch.Tensor, sampling: NodeSampling, num_logits: int) -> list[torch.Tensor]:
        first = self.head.first
        scores = sampling.scores(logits, self._best)
        best, token = sampling.noisy(scores, first).double().max(-1)  # a NaN wins
        token = (token + first).masked_fill(~(best < math.inf), INVALID_TOKEN)
        packed_best = [self._packed(logits[:1], NUM_BEST)] if self.compared else []
        return [best.view(torch.int64), token, *packed_best, self._packed(scores, num_logits)]

    def _with_top(self, logits: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, num_logits: int) -> Sampled:
        top = pack_top_logits(scores, num_logits) if num_logits else tokens.new_zeros(len(tokens), 0)
        return Sampled(tokens, top, best_logits(logits) if self.compared else None)

    def _packed(self, scores: torch.Tensor, k: int) -> torch.Tensor:
        """The k best scores of this rank's columns, packed, int64 (n, k), with token ids of the whole vocabulary.

        A rank with fewer than k columns fills up with logits of -inf.
        """
        if not k:
            return torch.zeros(len(scores), 0, dtype=torch.int64, device=scores.device)
        packed = pack_top_logits(scores, k) + (self.head.first << 32)
        return torch.nn.functional.pad(packed, (0, k - packed.shape[1]), value=NOTHING)

    def _best(self, scores: torch.Tensor, k: int) -> torch.Tensor:
        k = min(k, self.head.out_features)
        best = scores.topk(min(k, scores.shape[-1])).values
        best = torch.nn.functional.pad(best, (0, k - best.shape[-1]), value=-math.inf)
        everyones = torch.cat([*self.replica.all_gather(best)], -1)
        return everyones.topk(k).values

    def _flags(self, heads: torch.Tensor) -> torch.Tensor:
        """STOP and LENGTH for the replica's message: all ranks' flags, and PARTED if digests differ; tp 0's length."""
        stop = (heads[:, 0] != heads[0, 0]).any() * int(Stop.PARTED)
        for flags in heads[:, 1]:
            stop = stop | flags
        return torch.stack([stop, heads[0, 2]])

    def check_alike(self, step: int) -> None:
        """Raise an error if the ranks that hold this copy of the model had different states in the last step.

        Args:
            step: number of the decode step, for the error message.

        Raises:
            RuntimeError: names the ranks that differ, and the step.
        """
        digests = self.replica.on_host(self.heads[:, 0]).numpy()
        if (digests != digests[0]).any():
            odd = ", ".join(str(rank) for rank in np.flatnonzero(digests != digests[0]))
            ranks = self.context.steps
            raise RuntimeError(
                f"in the replica of rank {ranks.name_of(ranks.rank)}, tp {odd} differs from tp 0 at step {step}: their "
                "tokens, windows or draft trees are not the same, so the job stops before a wrong token is used"
            )


NOTHING = int(np.array([-math.inf], np.float32).view(np.int32)[0]) & 0xFFFFFFFF  # packed: token 0 with logit -inf


def merged(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Merge the k best logits that each of T ranks found into the k best of all.

    If logits are equal, the logit of the lower rank comes first.

    Args:
        packed: int64 (T, n, k), for n tokens; each int64 holds a token id and a float32 logit.
        k: number of logits to select for each token.

    Returns:
        int64 (n, k), likewise.
    """
    if not k:
        return packed[0]
    everyones = torch.cat([*packed], -1)
    logits = (everyones & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return everyones.gather(-1, order)


def agreed_token(replica: Replica, device: torch.device, token: int, stop: Stop) -> tuple[int, Stop]:
    """Agree on the next token of plain decoding among the ranks that hold one copy of the model.

    Args:
        replica: the ranks that hold the model between them.
        device: device of the exchange.
        token: the token that this rank sampled.
        stop: why this rank wants to end generation; Stop.NONE: it should continue.

    Returns:
        The first rank's token, and all flags that any rank has set in `stop`.
    """
    if replica.size == 1:
        return token, stop
    gathered = replica.on_host(replica.all_gather(torch.tensor([token, stop], device=device))).tolist()
    for _, flags in gathered:
        stop |= Stop(flags)
    return gathered[0][0], stop
