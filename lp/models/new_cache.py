"""Choose the class of KV cache that a model needs."""

from __future__ import annotations

from collections.abc import Mapping

from lp.config import KVDtype
from lp.models.kv_cache import StatesKind, StaticKVCache
from lp.models.recurrent_states import RecurrentShape


def new_cache(
    num_layers: int,
    capacity: int,
    zeroed: bool = False,
    deferred: bool = False,
    known: dict[StatesKind, int] | None = None,
    shapes: Mapping[int, RecurrentShape] | None = None,
    kv_dtype: KVDtype = KVDtype.AUTO,
) -> StaticKVCache:
    """Make an empty cache for one sequence: with recurrent states if the model has recurrent layers, else for KV alone.

    Args:
        num_layers: decoder layers of the model.
        capacity: number of cache slots, one for each token.
        zeroed: whether slots that were never written hold zeros.
        deferred: whether moves that bring accepted tokens side by side are left to the next captured step.
        known: how many key and value tensors of each kind (size, dtype, device) all layers have, see `StaticKVCache`.
        shapes: shape of the recurrent state, by index of the recurrent layer; None or empty: no layer is recurrent.
        kv_dtype: dtype in which slots store keys and values; AUTO: the model's own.
    """
    if not shapes:
        return StaticKVCache(num_layers, capacity, zeroed, deferred, known, kv_dtype)
    from lp.models.hybrid_cache import HybridCache  # older releases of transformers lack what it is made of

    return HybridCache(shapes, num_layers, capacity, zeroed, deferred, known, kv_dtype)
