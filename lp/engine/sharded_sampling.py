"""What the ranks of a replica sample together, each from its part of the vocabulary: one all-gather a step.

    [DIGEST, STOP, LENGTH, (score, token) of every node, best logits of `c`, top-k logits of every node]

Tokens, top-k logits and flags follow from what was gathered, so the ranks of a replica have them bit for bit alike.
n: sampled nodes; V: vocabulary; T: ranks of the replica; K: top-k logits of a node.
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

HEAD = 3  # int64s before the nodes


class ShardedSampling:
    """Samples the steps of one generation on the ranks of a replica.

    Args:
        head: the model's LM head.
        context: who this rank is, and which ranks share its steps.
    """

    def __init__(self, head: ShardedHead, context: ParallelContext) -> None:
        self.head = head
        self.replica = head.replica
        self.context = context
        self.compared = context.steps.size > 1
        self.failure: Exception | None = None  # of this rank, which the others know
        self.heads = torch.zeros(1, HEAD, dtype=torch.int64)  # of the last step, of all ranks of the replica

    def sample(
        self,
        logits: torch.Tensor,
        by_host: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        sampling: NodeSampling | None,
        num_logits: int,
        header: Header,
    ) -> tuple[Sampled, torch.Tensor]:
        """What the nodes sampled, and STOP and LENGTH of the replica's message, (2,), on the device.

        The host learns of the other ranks with the message, so that it waits once a step.

        Args:
            logits: (n, V), or this rank's part of them.
            by_host: scores and tokens of logits (n, V), where `sampling` is None.
            sampling: how nodes are sampled by tensors alone; None where the host has a part in it.
            num_logits: K.
            header: what this rank's message begins with.

        Raises:
            Exception: what a processor raised on this rank, once the others know of it.
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
        """What the nodes sampled, the flags, and `heads`: of tensors alone, so that it can be captured.

        Args:
            known: DIGEST, STOP and LENGTH of this rank's message, int64 (HEAD,).
            logits: (n, V), or this rank's part of them.
            sampling: how the nodes are sampled.
            num_logits: K.
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
        # Of equal ones the first, as of one rank.
        winner = scores.contiguous().view(torch.float64).argmax(0, keepdim=True)
        sampled = Sampled(
            tokens.gather(0, winner)[0],
            merged(top.view(self.replica.size, count, num_logits), num_logits),
            merged(best[:, None], NUM_BEST)[0] if self.compared else None,
        )
        return sampled, self._flags(heads), heads

    def _of_first(self, known: torch.Tensor, mine: Sampled) -> tuple[Sampled, torch.Tensor, torch.Tensor]:
        """What the first rank sampled, which has all logits as the others have; the flags and `heads`."""
        parts = [mine.tokens, *([] if mine.best is None else [mine.best]), mine.top_logits.flatten()]
        gathered = self.replica.all_gather(torch.cat([known, *parts]))
        heads = gathered[:, :HEAD]
        tokens, *best, top = gathered[0, HEAD:].split([len(part) for part in parts])
        return Sampled(tokens, top.view_as(mine.top_logits), *best), self._flags(heads), heads

    def top_logits(self, logits: torch.Tensor, scale: Sampler, prompt: Sequence[int], k: int) -> torch.Tensor:
        """The k best scores of nodes that no walk can reach, packed: (n, k).

        Args:
            logits: (n, V), or this rank's part of them.
            scale: the sampler.
            prompt: the text.
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
        """The k best of this rank's part, packed, (n, k), with its tokens' own numbers; filled up with nothing."""
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
        """STOP and LENGTH for all ranks: every rank's flags, with PARTED where their states differ; tp 0's length."""
        stop = (heads[:, 0] != heads[0, 0]).any() * int(Stop.PARTED)
        for flags in heads[:, 1]:
            stop = stop | flags
        return torch.stack([stop, heads[0, 2]])

    def check_alike(self, step: int) -> None:
        """Refuse to go on where the ranks of this replica had different states in the last step.

        Raises:
            RuntimeError: names the ranks and the step.
        """
        digests = self.replica.on_host(self.heads[:, 0]).numpy()
        if (digests != digests[0]).any():
            odd = ", ".join(str(rank) for rank in np.flatnonzero(digests != digests[0]))
            ranks = self.context.steps
            raise RuntimeError(
                f"in the replica of rank {ranks.name_of(ranks.rank)}, tp {odd} differs from tp 0 at step {step}: their "
                "tokens, windows or draft trees are not the same, so the job stops before a wrong token is used"
            )


NOTHING = int(np.array([-math.inf], np.float32).view(np.int32)[0]) & 0xFFFFFFFF  # a logit of -inf, of token 0


def merged(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of what the ranks have as their k best: (T, n, k) to (n, k), packed; of equal ones the first."""
    if not k:
        return packed[0]
    everyones = torch.cat([*packed], -1)
    logits = (everyones & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return everyones.gather(-1, order)


def agreed_token(replica: Replica, device: torch.device, token: int, stop: Stop) -> tuple[int, Stop]:
    """The first rank's token, and the flags of all ranks of a replica."""
    if replica.size == 1:
        return token, stop
    gathered = replica.on_host(replica.all_gather(torch.tensor([token, stop], device=device))).tolist()
    for _, flags in gathered:
        stop |= Stop(flags)
    return gathered[0][0], stop
