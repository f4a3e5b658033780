"""LoRA adapters that a server has beside its model: each is a model of its own to clients, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from lp.commands import install_command
from lp.errors import UserError
from lp.models.adapters import NAME, check_choice
from lp.optional import is_installed

FILES = ("adapter_config.json", "adapter_model.safetensors")  # of an adapter's folder, as PEFT saves it


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


def load_adapters(model: PreTrainedModel, folders: Mapping[str, str]) -> None:
    """Load adapters into a model, under their names; none is active.

    Args:
        model: gets them.
        folders: folder of each, by its name.

    Raises:
        ValueError: an adapter of another model, or one that texts can't choose.
    """
    for name, folder in folders.items():
        try:
            info = model.load_adapter(folder, adapter_name=name)
        except Exception as error:  # nothing of ours runs in there
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"adapters.{name} ({folder}) can't be loaded into this model: {line.strip()}") from error
        missing = {
            key for key in getattr(info, "missing_keys", ()) if f".{name}." in key
        }  # it names other adapters' too
        wrong = sorted({*missing, *getattr(info, "unexpected_keys", ())})
        if wrong:
            raise UserError(
                f"adapters.{name} ({folder}) is of another model: {wrong[0]} (of {len(wrong)}) does not belong together"
            )
        check_choice(model, name)
    if folders:
        model.disable_adapters()
