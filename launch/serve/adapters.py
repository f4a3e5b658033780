"""LoRA adapters that a server has beside its model: each is a model of its own to clients, by its name."""

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
    """Folders of adapters by name, of the key adapters; none for null.

    Raises:
        ValueError: something else.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise UserError(f"adapters is {given!r}; give a folder by name, as in adapters='{{sql: /models/sql}}', or null")
    return dict(given)


def check_adapters(folders: Mapping[str, str], others: frozenset[str]) -> None:
    """Refuse adapters that can't be loaded, before the model is, which takes long.

    Args:
        folders: folder of each adapter, by its name.
        others: names of the model, which no adapter may have.

    Raises:
        ValueError: a name, or what a folder lacks.
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
    """Load adapters into a model, under their names; none is active.

    Args:
        model: gets them.
        folders: folder of each, by its name.

    Raises:
        ValueError: an adapter of another model, or one that texts can't choose; a model with an adapter of its own,
            which its texts would lose.
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
