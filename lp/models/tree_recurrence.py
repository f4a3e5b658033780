"""Recurrent layers over a tree: every node's output is that of the recurrence along its own path, in one pass.

T: tokens, nodes of a tree in topological order; H: heads; F: groups of heads that share vectors; R, D: rows and columns
of a head's state S (R, D); K: taps of a convolution; C: its channels; n: layers of one shape; P: tokens of a path. The
state S_0 and the last inputs of the convolution are those behind the cached prefix.

G_i is the sum of the log decays g over the path of node i, which is its ancestors and itself. A state is a sum of outer
products, S_i = exp(G_i) S_0 + sum_j exp(G_i - G_j) left_j right_j^T over the path: so what a node reads from the
others' products is a weighted sum, and the state behind a path is known without any of the states in between.

The gated delta rule is arXiv 2412.06464, its form with a triangular system arXiv 2406.06484, Mamba-2 arXiv 2405.21060.
There the tokens are a chain and j runs over all before i; here it runs over the path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTree:
    """The draft tree of a decode step, as recurrent layers need it.

    Attributes:
        visible_TT: bool; [i, j]: node j is on the path of node i, which is its ancestors and itself.
        roots_T: bool, nodes without a parent, which continue the prefix itself.
        earlier_TK: int64, indices of the K - 1 tokens before each node on its path, then of the node; -1 is the last
            token of the prefix, -2 the one before it. K: the largest number of a convolution's taps.
    """

    visible_TT: torch.Tensor
    roots_T: torch.Tensor
    earlier_TK: torch.Tensor

    @classmethod
    def of(cls, visible_TT: torch.Tensor, taps: int) -> StepTree:
        """Make the tree of a decode step from what its nodes see.

        Args:
            visible_TT: bool; [i, j]: node i sees node j: its ancestors and itself, which come before it.
            taps: the largest number of a convolution's taps.
        """
        device = visible_TT.device
        num_tokens = len(visible_TT)
        index_T = torch.arange(num_tokens, device=device)
        parent_T = torch.where(visible_TT.tril(-1), index_T, -1).amax(1)  # the last ancestor is the nearest
        # Tokens of the prefix are counted backwards, so all are moved up by as many as are looked back to.
        offset = max(taps - 1, 1)
        before = torch.cat([torch.arange(-1, offset - 1, device=device).clamp(min=0), parent_T + offset])
        earlier = [index_T + offset]
        for _ in range(taps - 1):
            earlier.append(before[earlier[-1]])
        return cls(visible_TT, parent_T < 0, torch.stack(earlier[::-1], 1) - offset)

    def to(self, device: torch.device) -> StepTree:
        """A copy of this tree on another device, for layers that lie there."""
        return StepTree(self.visible_TT.to(device), self.roots_T.to(device), self.earlier_TK.to(device))


def decays(tree: StepTree, g_HT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors by which nodes forget the prefix, exp(G_i), and each other, exp(G_i - G_j).

    G is summed in float64: behind a token that forgets nearly all, G is large, and differences of it are small.

    Args:
        tree: the step's tree.
        g_HT: log decays of the nodes.

    Returns:
        exp(G_i), (H, T), and exp(G_i - G_j), (H, T, T), which is 0 for nodes j that are not on the path of i.
    """
    total_HT = g_HT.double() @ tree.visible_TT.double().T
    between_HTT = (total_HT[:, :, None] - total_HT[:, None]).to(g_HT.dtype).exp()
    # Set to 0 last: those that are not on the path may be infinite, and exp(-inf) takes twice as long on a CPU.
    return total_HT.to(g_HT.dtype).exp(), between_HTT.masked_fill(~tree.visible_TT, 0)


def gated_delta_rule(
    tree: StepTree,
    state_HRD: torch.Tensor,
    q_HTR: torch.Tensor,
    k_HTR: torch.Tensor,
    v_HTD: torch.Tensor,
    g_HT: torch.Tensor,
    beta_HT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule along every path of a tree, as Qwen3-Next's linear attention has it.

    S_i = exp(g_i) S_p + k_i delta_i^T, delta_i = beta_i (v_i - exp(g_i) S_p^T k_i), o_i = S_i^T q_i; p is the parent of
    i. With A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for the ancestors j of i, all delta are the solution of (I + A)
    delta = beta (v - exp(G) S_0^T k), unit lower triangular since ancestors come first.

    Args:
        tree: the step's tree.
        state_HRD: S_0.
        q_HTR, k_HTR, v_HTD: queries, keys and values of the nodes.
        g_HT: log decays.
        beta_HT: how much of a value each node writes, 0 to 1 (some models: to 2).

    Returns:
        o (H, T, D), and delta (H, T, D): left and right vectors of the state's outer products are k and delta.
    """
    from_prefix_HT, between_HTT = decays(tree, g_HT)
    read_HTD = torch.cat([k_HTR, q_HTR], 1) @ state_HRD
    of_k_HTD, of_q_HTD = read_HTD.chunk(2, 1)
    target_HTD = beta_HT[..., None] * (v_HTD - from_prefix_HT[..., None] * of_k_HTD)
    keys_HRT = k_HTR.transpose(1, 2)
    system_HTT = beta_HT[..., None] * between_HTT * (k_HTR @ keys_HRT)  # its diagonal is taken as 1
    delta_HTD = torch.linalg.solve_triangular(system_HTT, target_HTD, upper=False, unitriangular=True)
    o_HTD = torch.baddbmm(from_prefix_HT[..., None] * of_q_HTD, between_HTT * (q_HTR @ keys_HRT), delta_HTD)
    return o_HTD, delta_HTD


def state_space(
    tree: StepTree,
    state_HRD: torch.Tensor,
    c_FTD: torch.Tensor,
    b_FTD: torch.Tensor,
    x_HTR: torch.Tensor,
    g_HT: torch.Tensor,
) -> torch.Tensor:
    """Mamba-2's state space along every path of a tree: S_i = exp(g_i) S_p + x_i b_i^T, o_i = S_i c_i; p is i's parent.

    Args:
        tree: the step's tree.
        state_HRD: S_0.
        c_FTD, b_FTD: what nodes read and write with; each group serves H / F neighbouring heads.
        x_HTR: inputs times the time step; left and right vectors of the state's outer products are x and b.
        g_HT: log decays, A times the time step.

    Returns:
        o (H, T, R).
    """
    from_prefix_HT, between_HTT = decays(tree, g_HT)
    groups, num_tokens, columns = c_FTD.shape
    heads, rows, _ = state_HRD.shape
    read = c_FTD @ state_HRD.reshape(groups, -1, columns).transpose(1, 2)  # (F, T, H / F R): the heads of a group
    read_HTR = read.unflatten(2, (-1, rows)).transpose(1, 2).reshape(heads, num_tokens, rows)
    scores_HTT = (c_FTD @ b_FTD.transpose(1, 2)).repeat_interleave(heads // groups, 0)
    return torch.baddbmm(from_prefix_HT[..., None] * read_HTR, between_HTT * scores_HTT, x_HTR)


def convolution(
    tree: StepTree,
    last_CK: torch.Tensor,
    inputs_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
) -> torch.Tensor:
    """A causal convolution of each channel along every path of a tree, as recurrent layers have it before their state.

    Args:
        tree: the step's tree.
        last_CK: the last inputs of the prefix, the newest one last.
        inputs_TC: inputs of the nodes.
        weight_CK, bias_C: weights and bias of the convolution; None: it has no bias.

    Returns:
        (T, C), in float32 or wider.
    """
    taps = weight_CK.shape[1]
    wide = torch.promote_types(inputs_TC.dtype, torch.float32)
    known = torch.cat([last_CK.T[-(taps - 1) :] if taps > 1 else last_CK.T[:0], inputs_TC]).to(wide)
    output_TC = torch.zeros_like(known[taps - 1 :]) if bias_C is None else bias_C.to(wide).expand(len(inputs_TC), -1)
    weight_KC = weight_CK.T.to(wide).contiguous()
    for index_T, weight_C in zip((tree.earlier_TK[:, -taps:] + taps - 1).unbind(1), weight_KC.unbind(0), strict=True):
        output_TC = torch.addcmul(output_TC, known.index_select(0, index_T), weight_C)
    return output_TC


def advanced_state(
    state_nHRD: torch.Tensor, left_nHPR: torch.Tensor, right_nHPD: torch.Tensor, g_nHP: torch.Tensor
) -> torch.Tensor:
    """The states behind a path of P tokens: exp(G) S_0 + sum_j exp(G - G_j) left_j right_j^T, with G of the last token.

    Args:
        state_nHRD: S_0 of n layers.
        left_nHPR, right_nHPD: vectors of the tokens' outer products.
        g_nHP: log decays of the tokens.
    """
    total_nHP = g_nHP.double().cumsum(-1)
    to_the_end_nHP = (total_nHP[..., -1:] - total_nHP).to(g_nHP.dtype).exp()
    sums_nHRD = (left_nHPR * to_the_end_nHP[..., None]).transpose(-1, -2) @ right_nHPD
    return total_nHP[..., -1:, None].to(g_nHP.dtype).exp() * state_nHRD + sums_nHRD
