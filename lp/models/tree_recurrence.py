"""Recurrent layers over a tree: every node's output is that of the recurrence along its own path, in one pass.

T: tokens, the nodes of a tree in topological order; H: heads; F: groups of heads that share vectors; R, D: rows and
columns of a head's state S (R, D); K: taps of a convolution; C: its channels; n: layers of one shape; P: tokens of a
path. S_0 is the state at the end of the cached prefix.

The path of node i is its ancestors and itself, and G_i is the sum of the log decays g over this path. A state is a sum
of outer products, S_i = exp(G_i) S_0 + sum_j exp(G_i - G_j) left_j right_j^T, where j runs over the path. So what a
node reads from other nodes' products is a weighted sum, and the state at the end of a path can be computed without the
states in between.

The gated delta rule is from arXiv 2412.06464, its form with a triangular system from arXiv 2406.06484, Mamba-2 from
arXiv 2405.21060. In these papers the tokens are a chain and j runs over all tokens before i; here it runs over the
path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTree:
    """The draft tree of a decode step, as recurrent layers need it.

    Attributes:
        visible_TT: bool; [i, j]: node j is on the path of node i, which is its ancestors and itself.
        roots_T: bool, True for nodes without a parent, which continue the prefix itself.
        earlier_TK: int64, the index of each node after the indices of the K - 1 tokens before it on its path, the
            nearest last; -1 is the last token of the prefix, -2 the token before that. K: the largest number of taps of
            a convolution.
    """

    visible_TT: torch.Tensor
    roots_T: torch.Tensor
    earlier_TK: torch.Tensor

    @classmethod
    def of(cls, visible_TT: torch.Tensor, taps: int) -> StepTree:
        """Make the tree of a decode step from a matrix that says which nodes see which.

        Args:
            visible_TT: bool; [i, j]: node i sees node j. A node sees itself and its ancestors, which come before it.
            taps: the largest number of taps of a layer's convolution.
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
        """Copy this tree to another device, for layers that lie there."""
        return StepTree(self.visible_TT.to(device), self.roots_T.to(device), self.earlier_TK.to(device))


def decays(tree: StepTree, g_HT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors by which nodes of a tree forget the prefix, and forget the nodes before them on their path.

    G_i is the sum of the log decays over the path of node i, its ancestors and itself. It is summed in float64: after a
    token that forgets nearly all, G is large, and its differences are small.

    Args:
        tree: the step's tree.
        g_HT: log decays of the nodes, H heads, T nodes.

    Returns:
        exp(G_i), (H, T), for the prefix; and exp(G_i - G_j), (H, T, T), which is 0 for nodes j that are not on the path
        of i.
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

    S_i = exp(g_i) S_p + k_i delta_i^T, delta_i = beta_i (v_i - exp(g_i) S_p^T k_i), o_i = S_i^T q_i, where p is the
    parent of i, S_0 the state after the prefix, and G_i the sum of g over the path of i. With A_ij = beta_i exp(G_i -
    G_j) (k_i . k_j) for the ancestors j of i, all delta together are the solution of (I + A) delta = beta (v - exp(G)
    S_0^T k), which is unit lower triangular since ancestors come first.

    Args:
        tree: the step's tree.
        state_HRD: S_0.
        q_HTR, k_HTR, v_HTD: queries, keys and values of the nodes.
        g_HT: log decays.
        beta_HT: factor with which each node writes its value, 0 to 1 (in some models 0 to 2).

    Returns:
        Outputs o (H, T, D), and delta (H, T, D). k and delta are the left and right vectors of the outer products that
        the state is a sum of.
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
    """Mamba-2's state space along every path of a tree: S_i = exp(g_i) S_p + x_i b_i^T, o_i = S_i c_i.

    p is the parent of node i. x and b are the left and right vectors of the outer products that the state is a sum of.

    Args:
        tree: the step's tree.
        state_HRD: S_0, the state after the prefix.
        c_FTD, b_FTD: vectors with which nodes read from the state (c) and write to it (b). There are F groups of them;
            each serves H / F neighbouring heads.
        x_HTR: inputs times the time step.
        g_HT: log decays: Mamba-2's A times the time step.

    Returns:
        Outputs o (H, T, R).
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
    """A causal convolution of each channel along every path of a tree, which recurrent layers apply to their inputs.

    Args:
        tree: the step's tree.
        last_CK: the last K inputs of the prefix, the newest one last; C channels, K taps.
        inputs_TC: inputs of the T nodes.
        weight_CK, bias_C: weights and bias of the convolution; a bias of None: it has no bias.

    Returns:
        Outputs (T, C), in float32 or wider.
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
    """The states of n layers after a path of P tokens: exp(G) S_0 + sum_j exp(G - G_j) left_j right_j^T.

    G_j is the sum of the log decays up to token j, and G the sum over the whole path. A state has H heads of R rows and
    D columns.

    Args:
        state_nHRD: S_0, the states of the layers before the path.
        left_nHPR, right_nHPD: left and right vectors of the tokens' outer products.
        g_nHP: log decays of the tokens.
    """
    total_nHP = g_nHP.double().cumsum(-1)
    to_the_end_nHP = (total_nHP[..., -1:] - total_nHP).to(g_nHP.dtype).exp()
    sums_nHRD = (left_nHPR * to_the_end_nHP[..., None]).transpose(-1, -2) @ right_nHPD
    return total_nHP[..., -1:, None].to(g_nHP.dtype).exp() * state_nHRD + sums_nHRD
