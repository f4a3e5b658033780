"""Which automatic class of transformers loads a checkpoint: that of causal LMs, or of models that also take images."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lp.models.prompt_images import EXACT


def auto_class(config: Any) -> Any:
    """Choose the automatic class of transformers that loads a checkpoint: for causal LMs, or for images and text.

    A model type that both classes know, such as Qwen 3.5, is loaded with its vision part if the config's
    `architectures` name the class that has it.

    Args:
        config: the checkpoint's config, from AutoConfig.

    Returns:
        AutoModelForCausalLM or AutoModelForImageTextToText.
    """
    if config.model_type not in EXACT or (kind := _class_in(AutoModelForImageTextToText, config)) is None:
        return AutoModelForCausalLM
    named = getattr(config, "architectures", None) or []
    takes_images = kind.__name__ in named or _class_in(AutoModelForCausalLM, config) is None
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def model_class(config: Any) -> type[PreTrainedModel] | None:
    """The class of the model that a checkpoint with this config holds; None: transformers has no causal LM for it."""
    return _class_in(auto_class(config), config)


def _class_in(automatic: Any, config: Any) -> type[PreTrainedModel] | None:
    mapping = automatic._model_mapping
    kind: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return kind
