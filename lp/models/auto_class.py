"""The class of transformers that a checkpoint is loaded by: with what reads images, where lp is exact with them."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lp.models.prompt_images import EXACT


def auto_class_of(config: Any) -> Any:
    """AutoModelForImageTextToText for a model that takes images, unless its checkpoint is of the text model alone.

    Args:
        config: the checkpoint's config.
    """
    names = getattr(config, "architectures", None) or ()
    of_text = bool(names) and all(name.endswith("ForCausalLM") for name in names)
    takes_images = config.model_type in EXACT and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if takes_images and not of_text else AutoModelForCausalLM
