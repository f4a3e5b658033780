"""Layers of a model that the ranks of a replica divide among them (tensor parallelism).

Layers that are divided by columns, so that each rank has some of the outputs, are plain linear layers with fewer
outputs. They need no class here.

E: hidden size; V: vocabulary size; T: ranks of the replica.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lp.errors import UserError
from lp.parallel.replica import InRankOrder, Replica


class RowWiseLinear(nn.Module):
    """A linear layer divided among ranks by its inputs: each rank multiplies its own, and the ranks sum the outputs.

    Args:
        linear: this rank's part of the layer, without a bias.
        bias: bias of the whole layer, added once, after the sum; None: the layer has no bias.
        replica: the ranks that divide the layer.
    """

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, replica: Replica) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self.replica = replica
        self.training = linear.training
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part of the weight, (outputs, inputs / T) with T ranks."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self.replica.all_reduce(self.linear(x))
        return summed if self.bias is None else summed + self.bias


class ShardedExperts(nn.Module):
    """The experts of a layer, divided among ranks by their inner size: a rank has a part of each, and the ranks sum.

    Args:
        experts: transformers' own module, with this rank's weights.
        replica: the ranks that divide the experts.
    """

    def __init__(self, experts: nn.Module, replica: Replica) -> None:
        super().__init__()
        self.experts = experts
        self.training = experts.training
        self.replica = replica

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.replica.all_reduce(self.experts(*inputs))


class ShardedEmbedding(nn.Module):
    """Token embeddings divided among ranks by the vocabulary.

    Each rank looks up the tokens whose rows it has and gives zeros for the others. The ranks sum the results.

    Args:
        embedding: transformers' own module, with this rank's rows.
        num_embeddings: V, rows of the whole embedding.
        replica: the ranks that divide the embedding.
    """

    def __init__(self, embedding: nn.Embedding, num_embeddings: int, replica: Replica) -> None:
        super().__init__()
        self.embedding = embedding
        self.training = embedding.training
        self.num_embeddings = num_embeddings
        self.first, self.last = replica.part(num_embeddings)
        self.replica = replica

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows of the embeddings, (V / T, E) with T ranks."""
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        here = (ids >= self.first) & (ids < self.last)
        own = self.embedding((ids - self.first).clamp(0, self.last - self.first - 1))
        return self.replica.all_reduce(own * here[..., None])


class ShardedHead(nn.Module):
    """An LM head divided among ranks by the vocabulary: each rank computes the logits of its own tokens.

    Called as a module it gathers all logits from the ranks. lp calls `linear` for this rank's logits, and `whole` where
    all are needed.

    Args:
        linear: this rank's rows of the LM head.
        out_features: V, rows of the whole LM head.
        replica: the ranks that divide the LM head.
    """

    def __init__(self, linear: nn.Linear, out_features: int, replica: Replica) -> None:
        super().__init__()
        self.linear = linear
        self.training = linear.training
        self.out_features = out_features
        self.first, self.last = replica.part(out_features)
        self.replica = replica

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows of the LM head, (V / T, E) with T ranks."""
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """This rank's part of the bias, (V / T,) with T ranks; None: the LM head has no bias."""
        return self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(self.linear(x))

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the logits of the whole vocabulary from all ranks.

        Args:
            logits: this rank's logits, (..., about V / T) with T ranks; logits of the whole vocabulary are returned as
                they are.

        Returns:
            Logits (..., V).
        """
        if logits.shape[-1] == self.out_features:
            return logits
        sizes = [last - first for first, last in map(self._part, range(self.replica.size))]
        padded = nn.functional.pad(logits, (0, max(sizes) - logits.shape[-1]))  # a collective takes one size alone
        parts = self.replica.all_gather(padded.contiguous())
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def _part(self, rank: int) -> tuple[int, int]:
        return self.replica.part(self.out_features, rank)


def head_of(model: Any) -> ShardedHead | None:
    """Get the LM head of a model that ranks divide (tensor parallelism); None: this rank has the whole model."""
    head = model.get_output_embeddings()
    return head if isinstance(head, ShardedHead) else None


def replica_of(model: Any) -> Replica:
    """Get the ranks that divide a model among them; a replica of this rank alone if it has the whole model."""
    head = head_of(model)
    return head.replica if head else Replica()


def sum_in_rank_order(model: Any) -> None:
    """Let the ranks that divide a model sum in the order of their numbers from now on.

    An all-reduce may sum in another order for tensors of another size. In rank order a token's bits do not depend on
    how many tokens a pass has.

    Args:
        model: a view of the model, a copy of its modules over the same weights. The layers that talk to other ranks are
            changed.
    """
    for module in model.modules():
        if isinstance(module, (RowWiseLinear, ShardedExperts, ShardedEmbedding, ShardedHead)):
            module.replica = InRankOrder.of(module.replica)


def check_divided(model: Any, replica: Replica) -> None:
    """Refuse a model that is divided among another number of ranks than those that are to run it.

    Args:
        model: the model, whole or divided.
        replica: the ranks that are to run the model.

    Raises:
        ValueError: the numbers differ; names both numbers and the remedy.
    """
    size = replica_of(model).size
    if size != replica.size:
        raise UserError(
            f"the model is divided among {size} ranks, but the context has replicas of {replica.size}; load it with "
            "lp.load(name, context=context), and give decoders that context"
        )
