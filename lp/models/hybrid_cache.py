"""The cache for models that have recurrent layers: keys and values as in `StaticKVCache`, and recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

from lp.models.kv_cache import CacheTooLarge, PreallocatedLayer, StaticKVCache
from lp.models.recurrent_states import RecurrentShape, RecurrentStates


class _HybridLayer(LinearAttentionLayer, PreallocatedLayer):
    """The KV of a layer, its recurrent state, or both: the model's own code advances the state in place."""

    def __init__(self, extent: Any, states: RecurrentStates, index: int) -> None:
        LinearAttentionLayer.__init__(self, 1)
        PreallocatedLayer.__init__(self, extent)
        state = states.layers[index]
        self.has_previous_state = states.started[index]
        self.conv_states = {0: state.last_CK[None]}
        self.recurrent_states = {0: state.state_HRD[None]}
        self.conv_kernel_size = {0: state.last_CK.shape[1]}
        self.is_conv_states_initialized = {0: True}
        self.is_recurrent_states_initialized = {0: True}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        PreallocatedLayer.lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return PreallocatedLayer.get_max_length(self)

    def reset(self) -> None:
        """The buffers stay; `StaticKVCache.clear` forgets what they hold."""


class HybridCache(StaticKVCache):
    """The keys and values of one sequence and its recurrent states, for models that have recurrent layers.

    Args:
        shapes: shape of the recurrent state, by index of the layer.
        args: positional arguments of `StaticKVCache`.

    Raises:
        CacheTooLarge: the device has no room for the states.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape], *args: Any) -> None:
        super().__init__(*args)
        try:
            self.recurrent = RecurrentStates(shapes)
        except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
            raise CacheTooLarge(sum(shape.nbytes(0) for shape in shapes.values()), 1) from error
        for index in shapes:
            self.layers[index] = _HybridLayer(self._extent, self.recurrent, index)

    def begin(self, visible_TT: torch.Tensor | np.ndarray | None) -> None:
        if visible_TT is None:
            self.recurrent.begin_chain()
        else:
            self.recurrent.begin_tree(torch.as_tensor(visible_TT))

    def begin_replay(self, num_tokens: int) -> None:
        self.recurrent.begin_replay(num_tokens)

    def clear(self) -> None:
        super().clear()
        self.recurrent.clear()

    def commit(self, token_indices: Sequence[int]) -> None:
        super().commit(token_indices)
        self.recurrent.commit(token_indices)

    def pack(self, token_indices: Sequence[int]) -> torch.Tensor:
        """Pack the results of these tokens for other ranks: keys and values, then what recurrent layers kept of them.

        What recurrent layers keep of a step's tokens is what advances their states, so that no rank computes it again.

        Args:
            token_indices: indices into the tokens of the last step.

        Returns:
            One flat tensor, in the widest dtype of its parts, so that nothing is rounded.
        """
        parts = self.recurrent.pack(token_indices)
        device = parts[0].device
        keys_and_values = [super().pack(token_indices).to(device)] if self.buffers else []
        return torch.cat([*keys_and_values, *(part.to(device) for part in parts)])

    def append(self, packed: torch.Tensor, num_tokens: int) -> None:
        kv_elements = sum(buffer[:, :, :1].numel() for buffer in self.buffers) * num_tokens
        super().append(packed[:kv_elements], num_tokens)
        self.recurrent.append(packed[kv_elements:], num_tokens)

    def nbytes(self) -> int:
        return super().nbytes() + self.recurrent.nbytes()
