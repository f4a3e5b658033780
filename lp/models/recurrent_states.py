"""The states of a model's recurrent layers, which a commit advances along accepted tokens without computing them again.

A state is a sum of outer products (see `lp.models.tree_recurrence`). A decode step leaves the states as they are. For
every node of the draft tree it stashes (keeps for the commit) both vectors of the node's outer product, its log decay
and its input of the convolution. A commit adds the outer products of the accepted path to the states, for all layers of
one shape at once.

n: layers of one shape, H: heads, R, D: rows and columns of a head's state, T: step tokens, P: tokens of a path, C:
channels of the convolution, K: taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lp.models.tree_recurrence import StepTree, advanced_state
from lp.to_device import to_device

DTYPE = torch.float32  # of states, whatever the model's: transformers' own


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of the state that one recurrent layer keeps for a sequence; layers of equal shape share tensors.

    Attributes:
        channels, taps: C channels and K taps of the convolution.
        dtype, device: dtype and device of the convolution's inputs.
        heads, rows, columns: H heads, each with a state of R rows and D columns; 0: the layer is a convolution alone.
        left_heads, right_heads: number of heads that the left and the right vectors have, whose outer products are
            added to the state; several heads of the state may use one head of vectors.
    """

    channels: int
    taps: int
    dtype: torch.dtype
    device: torch.device
    heads: int = 0
    rows: int = 0
    columns: int = 0
    left_heads: int = 0
    right_heads: int = 0

    def nbytes(self, tokens: int) -> int:
        """Bytes of the layer's state, and of what a step of so many tokens keeps so that the state can be advanced."""
        state = self.heads * self.rows * self.columns
        products = self.left_heads * self.rows + self.right_heads * self.columns + self.heads
        inputs = self.channels * (self.taps + tokens)
        return DTYPE.itemsize * (state + products * tokens) + self.dtype.itemsize * inputs


class Stash(NamedTuple):
    """What a decode step keeps of its tokens, so that a commit can advance the states along the accepted ones.

    Dimension 2 of each tensor is the token. n: layers of one shape, T: step tokens, H: heads, R, D: rows and columns of
    a head's state, C: channels of the convolution.

    Attributes:
        left: left vectors of the outer products, (n, left heads, T, R).
        right: right vectors of the outer products, (n, right heads, T, D).
        g: log decays, (n, H, T).
        inputs: inputs of the convolution, (n, 1, T, C).
    """

    left: torch.Tensor
    right: torch.Tensor
    g: torch.Tensor
    inputs: torch.Tensor

    @classmethod
    def room(cls, shape: RecurrentShape, layers: int, tokens: int) -> Stash:
        """Allocate tensors, filled with zeros, for what decode steps of up to so many tokens keep.

        Args:
            shape: sizes of one layer's state.
            layers: n, number of layers.
            tokens: the most tokens that a step may have.
        """
        *products, inputs = cls.sizes(shape, layers, tokens)
        left, right, g = (torch.zeros(size, dtype=DTYPE, device=shape.device) for size in products)
        return cls(left, right, g, torch.zeros(inputs, dtype=shape.dtype, device=shape.device))

    @staticmethod
    def sizes(shape: RecurrentShape, layers: int, tokens: int) -> list[tuple[int, ...]]:
        """Shapes of a stash's four tensors, in the order of the fields.

        Args:
            shape: sizes of one layer's state.
            layers: n, number of layers.
            tokens: tokens that the stash has room for.
        """
        return [
            (layers, shape.left_heads, tokens, shape.rows),
            (layers, shape.right_heads, tokens, shape.columns),
            (layers, shape.heads, tokens),
            (layers, 1, tokens, shape.channels),
        ]

    def of(self, tokens: torch.Tensor | slice) -> Stash:
        """Select what was kept of some of the step's tokens, such as the accepted ones.

        Args:
            tokens: indices of these tokens in the step, as int64 tensor or slice.
        """
        return Stash(*(part[:, :, tokens] for part in self))


class LayerState:
    """The state of one recurrent layer, as its forward pass over a draft tree reads it.

    The pass leaves the state as it is. It calls `keep` to store what a commit needs to advance the state.

    Attributes:
        last_CK: the last K inputs of the convolution at the end of the prefix, the newest one last; C channels, K taps.
        state_HRD: the layer's state at the end of the prefix; H heads, R rows, D columns.
        first_step: bool (1,), whether this is the first decode step of a sequence. The root of its tree is the last
            token of the prompt, which some models compute in another way than generated tokens.
    """

    def __init__(self, group: _Group, index: int) -> None:
        self._group = group
        self._index = index
        self.last_CK = group.last_nCK[index]
        self.state_HRD = group.state_nHRD[index]
        self.first_step = group.first_step

    def keep(
        self,
        inputs_TC: torch.Tensor,
        left: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
        g_HT: torch.Tensor | None = None,
    ) -> None:
        """Keep what a commit needs to advance this layer's state along some of this step's tokens.

        Args:
            inputs_TC: inputs of the convolution, T tokens and C channels.
            left, right: vectors whose outer products are added to the state, (heads, T, R) and (heads, T, D), for a
                state of R rows and D columns; None: the layer is a convolution alone.
            g_HT: log decays of the state, by head and token; None: the layer is a convolution alone.
        """
        num_tokens = len(inputs_TC)
        stash = self._group.stash
        stash.inputs[self._index, 0, :num_tokens] = inputs_TC
        if left is not None and right is not None and g_HT is not None:
            stash.left[self._index, :, :num_tokens] = left
            stash.right[self._index, :, :num_tokens] = right
            stash.g[self._index, :, :num_tokens] = g_HT


class _Group:
    """The states of all layers of one shape, in common tensors, so that one operation advances them all.

    Args:
        shape: the layers' shape.
        layers: n.

    Attributes:
        stash: what the last step left. Steps whose sizes round up to the same power of two share one stash, which stays
            where it is, since captured steps of these sizes write to it.
    """

    def __init__(self, shape: RecurrentShape, layers: int) -> None:
        self.shape = shape
        self.layers = layers
        self.last_nCK = torch.zeros(layers, shape.channels, shape.taps, dtype=shape.dtype, device=shape.device)
        self.state_nHRD = torch.zeros(layers, shape.heads, shape.rows, shape.columns, dtype=DTYPE, device=shape.device)
        self.first_step = torch.ones(1, dtype=torch.bool, device=shape.device)
        self.stashes: dict[int, Stash] = {}  # by tokens
        self.stash = Stash.room(shape, layers, 0)

    def reserve(self, tokens: int) -> None:
        """Use the stash for steps of so many tokens from now on; allocated where there is none."""
        room = 1 << (tokens - 1).bit_length()
        if room not in self.stashes:
            self.stashes[room] = Stash.room(self.shape, self.layers, room)
        self.stash = self.stashes[room]

    def advance(self, path: Stash) -> None:
        """Advance the states along a path of tokens, to the state after its last one."""
        if self.shape.heads:
            left, right = (
                part.repeat_interleave(self.shape.heads // part.shape[1], 1) for part in (path.left, path.right)
            )
            self.state_nHRD.copy_(advanced_state(self.state_nHRD, left, right, path.g))
        inputs_nCP = path.inputs[:, 0].transpose(1, 2)
        self.last_nCK.copy_(torch.cat([self.last_nCK, inputs_nCP], 2)[..., -self.shape.taps :])


class RecurrentStates:
    """The recurrent states of one sequence, in all layers that have such a state.

    Args:
        shapes: shape of the state that each recurrent layer keeps, by index of the layer.

    Attributes:
        layers: the state of each recurrent layer, by index of the layer.
        taps: the largest number of taps that a layer's convolution has.
        tree: draft tree of the pass that runs; None: its tokens are a chain, along which the model's own code advances
            the states.
        started: by index of the layer, {0: whether the layer has a state yet}, as in transformers' cache layers.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape]) -> None:
        of_shape: dict[RecurrentShape, list[int]] = {}
        for layer, shape in shapes.items():
            of_shape.setdefault(shape, []).append(layer)
        self._groups = [_Group(shape, len(layers)) for shape, layers in of_shape.items()]
        self.layers = {
            layer: LayerState(group, index)
            for group, layers in zip(self._groups, of_shape.values(), strict=True)
            for index, layer in enumerate(layers)
        }
        self.taps = max(shape.taps for shape in of_shape)
        self.tree: StepTree | None = None
        self.started = {layer: {0: False} for layer in shapes}
        self._trees: dict[torch.device, StepTree] = {}
        self._stashed = False  # by the last pass; a chain has advanced the states itself
        self._is_first_step = True

    def begin_tree(self, visible_TT: torch.Tensor) -> None:
        """Prepare for a decode step over a tree: layers leave the states as they are, and keep what `commit` needs.

        Args:
            visible_TT: bool; [i, j]: node i of the step sees node j.
        """
        self.tree = StepTree.of(visible_TT, self.taps)
        self._trees = {visible_TT.device: self.tree}
        self._stashed = True
        for group in self._groups:
            group.reserve(len(visible_TT))

    def begin_replay(self, num_tokens: int) -> None:
        """Prepare for a captured step: what it keeps for a commit goes to the same memory as when it was recorded.

        Args:
            num_tokens: tokens of the step, padding included.
        """
        self._stashed = True
        for group in self._groups:
            group.reserve(num_tokens)

    def begin_chain(self) -> None:
        """Prepare for a pass whose tokens are all committed, such as prefill: the model's code advances the states."""
        self.tree = None
        self._stashed = False

    def tree_on(self, device: torch.device) -> StepTree:
        """The draft tree of the step on this device, for models whose layers lie on several devices."""
        assert self.tree is not None
        if device not in self._trees:
            self._trees[device] = self.tree.to(device)
        return self._trees[device]

    def clear(self) -> None:
        """Discard all tokens: the states become those before the first token of a sequence."""
        self.begin_chain()
        self._set_first_step(True)
        for started in self.started.values():
            started[0] = False
        for group in self._groups:
            group.last_nCK.zero_()
            group.state_nHRD.zero_()

    def commit(self, token_indices: Sequence[int]) -> None:
        """Advance the states along the accepted tokens of the last step.

        After a pass whose tokens are a chain it does nothing, since the model's own code has advanced the states.

        Args:
            token_indices: indices into the step's tokens: a path that continues the prefix.
        """
        if not self._stashed or not token_indices:
            return
        leads = [*token_indices] == [*range(len(token_indices))]  # as a chain does, and a step that accepts nothing
        for group in self._groups:
            tokens = slice(len(token_indices)) if leads else to_device(token_indices, group.shape.device)
            group.advance(group.stash.of(tokens))
        self._has_advanced()

    def pack(self, token_indices: Sequence[int]) -> list[torch.Tensor]:
        """Pack what the last step kept of these tokens into flat tensors, for the states of other ranks to `append`.

        Args:
            token_indices: indices into the step's tokens: a path that continues the prefix.
        """
        return [
            part.flatten()
            for group in self._groups
            for part in group.stash.of(to_device(token_indices, group.shape.device))
        ]

    def append(self, packed: torch.Tensor, num_tokens: int) -> None:
        """Advance the states along tokens that another rank computed.

        Args:
            packed: what `pack` of the other rank's states returned, joined into one flat tensor.
            num_tokens: number of tokens in it.
        """
        offset = 0
        for group in self._groups:
            parts = []
            for size, like in zip(Stash.sizes(group.shape, group.layers, num_tokens), group.stash, strict=True):
                end = offset + math.prod(size)
                parts.append(packed[offset:end].view(size).to(like))  # of its dtype, on its device
                offset = end
            group.advance(Stash(*parts))
        self._has_advanced()

    def nbytes(self) -> int:
        """Bytes of memory that the states take, and the tensors in which steps keep what commits need."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for group in self._groups:
            yield from (group.last_nCK, group.state_nHRD)
            for stash in group.stashes.values():
                yield from stash

    def _has_advanced(self) -> None:
        for started in self.started.values():
            started[0] = True
        if self._is_first_step:
            self._set_first_step(False)

    def _set_first_step(self, value: bool) -> None:
        """Note whether the next step is the text's first, whose root, the prompt's last token, counts as prompt."""
        self._is_first_step = value
        for group in self._groups:
            group.first_step.fill_(value)
