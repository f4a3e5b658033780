"""LoRA adapters that a server loads beside its model; a request names one of them in its field `model`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lp.commands import install_command
from lp.errors import UserError
from lp.models.adapters import NAME, check_text_adapter
from lp.models.loader import without_report
from lp.optional import is_installed

# Of init_lora_weights: others change the model's own weights.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
FILES = ("adapter_config.json", "adapter_model.safetensors")  # of an adapter's folder, as PEFT saves it


def adapter_folders(given: object) -> dict[str, str]:
    """Check the type of the server's setting `adapters`, and return it as a dict.

    Args:
        given: value of the setting: a mapping of adapter names to folders, such as {"sql": "/models/sql"}, or None.

    Returns:
        Folder of each adapter, by the adapter's name; {} for None.

    Raises:
        ValueError: `given` is neither None nor a mapping of strings to strings.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise UserError(f"adapters is {given!r}; give a folder by name, as in adapters='{{sql: /models/sql}}', or null")
    return dict(given)


def check_adapters(folders: Mapping[str, str], others: frozenset[str]) -> None:
    """Check the folders of LoRA adapters before the model is loaded, so that a mistake shows at once.

    Args:
        folders: folder of each adapter, by the adapter's name.
        others: names by which clients ask for the model itself; no adapter may have one of them.

    Raises:
        ValueError: peft is not installed; a name is the model's, or not up to 64 ASCII letters, digits, "_" and "-"; a
            folder lacks a file that PEFT saves, or its adapter_config.json is no JSON; or an adapter was made with an
            init_lora_weights that changes the model's own weights, such as "pissa".
    """
    if folders and not is_installed("peft"):
        raise UserError(f"adapters needs peft; install the extra: {install_command('adapters')}")
    for name, folder in folders.items():
        if not NAME.fullmatch(name) or name in others:
            taken = (
                "is the model's own name" if name in others else "is no name of up to 64 letters, digits, '_' and '-'"
            )
            raise UserError(f"adapters has {name!r}, which {taken}; give another")
        for file in FILES:
            if not Path(folder, file).is_file():
                raise UserError(
                    f"adapters.{name} is {folder!r}, which has no {file}; give a folder that PEFT has saved"
                )
        start = _config(name, folder).get("init_lora_weights")
        if start not in PLAIN_STARTS:
            raise UserError(
                f"adapters.{name} has init_lora_weights={start!r}, which changes the model's own weights, of all "
                "texts; save it as plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
            )


def _config(name: str, folder: str) -> dict[str, Any]:
    """What the folder's adapter_config.json says."""
    try:
        config = json.loads(Path(folder, FILES[0]).read_bytes())
    except ValueError as error:
        raise UserError(
            f"adapters.{name} is {folder!r}, whose {FILES[0]} is no JSON ({error}); save it again"
        ) from None
    return config if isinstance(config, dict) else {}


def load_adapters(model: PreTrainedModel, folders: Mapping[str, str]) -> None:
    """Load LoRA adapters into the served model, all of them switched off; each request turns on its own one.

    Args:
        model: the loaded model, changed in place.
        folders: folder of each adapter, by the adapter's name.

    Raises:
        ValueError: the model has an adapter already; an adapter has the name of one of the model's modules; peft can't
            load an adapter, or its weights do not fit the model; or an adapter can't be applied to single requests
            (`check_text_adapter`).
    """
    if folders and getattr(model, "peft_config", None):
        raise UserError(
            "adapters is given, and the model is an adapter's folder itself; name the model that it is of, and give "
            "this folder by adapters, too"
        )
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    for name, folder in folders.items():
        if name in parts:
            raise UserError(f"adapters has {name!r}, which is a part of the model's names of layers; give another name")
        try:
            with without_report():  # which names all other adapters' weights as missing
                info = model.load_adapter(folder, adapter_name=name)
        except Exception as error:  # nothing of ours runs in there
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"adapters.{name} ({folder}) can't be loaded into this model: {line.strip()}") from error
        absent = getattr(info, "missing_keys", ())  # other adapters' too
        missing = {key for key in absent if f".{name}." in key}
        wrong = sorted({*missing, *getattr(info, "unexpected_keys", ())})
        if wrong:
            raise UserError(
                f"adapters.{name} ({folder}) is of another model: {wrong[0]} (of {len(wrong)}) does not belong together"
            )
        check_text_adapter(model, name)
    if folders:
        model.disable_adapters()
