"""The backend `attention=sdpa`: transformers' own use of torch's fused attention, under a mask over all keys."""

from __future__ import annotations

from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend, score_obstacle
from lp.attention.registry import register_attention


@register_attention("sdpa")
class Sdpa(AttentionBackend):
    """The reference backend: torch's `scaled_dot_product_attention` through transformers; it runs everywhere."""

    implementation = "sdpa"
    loadable = True
    omits_trivial_masks = True

    def unfit(self, model: PreTrainedModel) -> str | None:
        return score_obstacle(model, self.name)
