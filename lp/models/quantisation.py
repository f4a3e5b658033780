"""How a quantised model treats activations: whether a token's result depends on the other tokens in its pass.

How weights are quantised does not matter here, but activations do. Where the tokens of a pass share a scale, a choice
of columns or a kernel, a token's result depends on which other tokens there are, and a decode step has more tokens than
plain decoding. Activations that are rounded token by token do not depend on other tokens. But passes with different
numbers of tokens still differ by rounding, and that can move an activation to the next quantised value.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any


class Activations(Enum):
    """How a quantised model's activations are quantised; the values are words for error messages.

    KEPT: not at all. BY_TOKEN: each token's by itself. TOGETHER: with a scale or a choice that several tokens of a pass
    share. UNKNOWN: lp does not know the method.
    """

    KEPT = "not"
    BY_TOKEN = "each token's by itself"
    TOGETHER = "by what several tokens of a pass have in common"
    UNKNOWN = "perhaps"


# By transformers' name of the method; torchao, compressed-tensors, bitsandbytes and AutoRound go by their settings.
KNOWN = {
    Activations.KEPT: {
        "aqlm", "awq", "eetq", "gguf", "gptq", "higgs", "hqq", "metal", "mxfp4", "quanto", "sinq", "spqr", "vptq",
    },
    Activations.BY_TOKEN: {"bitnet", "fbgemm_fp8", "fp8", "gemma", "mxfp8"},
    Activations.TOGETHER: {"fp_quant", "nvfp4"},
}  # fmt: skip


def quantisation_of(config: Any) -> dict[str, Any] | None:
    """A model's quantisation config as plain data, such as {"quant_method": "gptq", "bits": 4}; None: it has none.

    Args:
        config: the model's config.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None and hasattr(config, "get_text_config"):  # of a model that takes images, too
        quantisation = getattr(config.get_text_config(), "quantization_config", None)
    if quantisation is None:
        return None
    fields = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=_plain))
    method = fields.get("quant_method")
    return plain | {"quant_method": str(getattr(method, "value", method))}


def _plain(value: Any) -> Any:
    return getattr(value, "__dict__", None) or str(value)


def activations_of(fields: dict[str, Any]) -> Activations:
    """Tell from a quantisation config how the model quantises its activations.

    Args:
        fields: the config as plain data, from `quantisation_of`.
    """
    method = fields["quant_method"]
    if method == "torchao":
        return _of_torchao(json.dumps(fields))
    if method == "compressed-tensors":
        return _of_groups(fields.get("config_groups") or fields.get("quantization_config", {}).get("config_groups"))
    if method == "bitsandbytes":
        return Activations.TOGETHER if fields.get("load_in_8bit") else Activations.KEPT
    if method == "auto-round":
        return Activations.KEPT if (fields.get("act_bits") or 16) >= 16 else Activations.UNKNOWN
    return next((kind for kind, methods in KNOWN.items() if method in methods), Activations.UNKNOWN)


def _of_torchao(text: str) -> Activations:
    if "NVFP4" in text or ("DynamicActivation" in text and "PerTensor" in text):
        return Activations.TOGETHER
    return Activations.BY_TOKEN if "Activation" in text else Activations.KEPT


def _of_groups(groups: Any) -> Activations:
    """How compressed-tensors quantises activations, by its groups, each of which is for some layers."""
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        return Activations.UNKNOWN
    rounded = [group[key] for group in groups.values() for key in ACTIVATIONS if group.get(key)]
    if any(each.get("dynamic") is True and each.get("strategy") not in ("token", "group") for each in rounded):
        return Activations.TOGETHER
    return Activations.BY_TOKEN if rounded else Activations.KEPT


ACTIVATIONS = ("input_activations", "output_activations")


def inexact_quantisation(model: Any) -> str | None:
    """Why a quantised model's tokens may differ from plain decoding's by more than rounding; None: they do not."""
    method, kind = _quantised(model)
    return None if kind is Activations.KEPT else _reason(method, kind)


def tokens_share_scales(model: Any) -> str | None:
    """Why a quantised model lets a token's result depend on the other tokens in its pass; None: it does not.

    The tokens of a pass then share a scale or a choice for their activations, or lp does not know whether they do. Such
    a model cannot be decoded with `exact="bitwise"`.
    """
    method, kind = _quantised(model)
    return None if kind in (Activations.KEPT, Activations.BY_TOKEN) else _reason(method, kind)


def _quantised(model: Any) -> tuple[str, Activations]:
    """The method that quantised a model, and how its activations are: torchao's weights say it where no config does."""
    if fields := quantisation_of(model.config):
        return fields["quant_method"], activations_of(fields)
    rounded = [str(each) for each in map(_rounding, model.parameters()) if each is not None]
    if any("PerTensor" in each for each in rounded):
        return "torchao", Activations.TOGETHER
    return "torchao", Activations.BY_TOKEN if rounded else Activations.KEPT


def _rounding(weight: Any) -> Any:
    """How one of torchao's weights quantises the activations that it is multiplied with; None: not at all."""
    return getattr(weight, "act_quant_kwargs", None) or getattr(weight, "activation_quantization", None)


def _reason(method: str, kind: Activations) -> str:
    if kind is Activations.UNKNOWN:
        return f"lp does not know whether {method!r} quantises activations"
    if method == "bitsandbytes":
        return "bitsandbytes int8 picks its outlier columns over all tokens of a forward pass"
    remedy = "; exact='bitwise' has no such differences" if kind is Activations.BY_TOKEN else ""
    return f"{method} quantises activations while it runs, {kind.value}{remedy}"
