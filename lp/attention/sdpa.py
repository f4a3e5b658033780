"""transformers' own scaled dot-product attention of torch, with a mask over all keys: the reference."""

from __future__ import annotations

from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend, score_obstacle
from lp.attention.registry import register_attention


@register_attention("sdpa")
class Sdpa(AttentionBackend):
    """torch's `scaled_dot_product_attention` by way of transformers; runs everywhere."""

    implementation = "sdpa"
    loadable = True
    omits_trivial_masks = True

    def unfit(self, model: PreTrainedModel) -> str | None:
        return score_obstacle(model, self.name)
