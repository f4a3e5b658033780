"""Every config key of every app with its type, default and explanation, for `--help` and docs/reference/config.md.

A key is a field of a config dataclass. Its explanation is the field's entry under Args in the docstring of that
dataclass, or of the nearest base class that has an entry. A key without an explanation is an error.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from lp.errors import UserError

from .config.schema import LinkSchema
from .running.hydra_app import CONF

GROUPS = ("decoder", "sampling")  # groups whose keys depend on the choice: sections of their own


class Key(NamedTuple):
    """A config key as `--help` and the page of keys show it.

    Attributes:
        name: path of the key, as in "model.dtype".
        kind: its type as users know it, as in "int or null".
        default: its default as YAML writes it, in backquotes; empty where a value must be given.
        text: one line that explains it, in Markdown.
    """

    name: str
    kind: str
    default: str
    text: str


def choices(group: str) -> list[str]:
    """Names that a config group offers, sorted: choices("sampling") has "greedy" and "sample".

    Args:
        group: a group's name, as in "decoder" or "model".
    """
    stored = ConfigStore.instance().repo.get(group, {})
    names = {path.stem for path in (CONF / group).glob("*.yaml")} | {name.removesuffix(".yaml") for name in stored}
    return sorted(names)


def app_keys(app: str) -> list[Key]:
    """All config keys of an app, in the order of its config; without the groups `decoder` and `sampling`.

    The keys of those two depend on the choice that is made: `config_keys` lists them.

    Args:
        app: a key of APPS.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(app)
    schema = OmegaConf.get_type(config)
    assert schema is not None
    return list(schema_keys(schema, OmegaConf.to_container(config, resolve=False), ""))


def schema_keys(schema: Any, values: Any, prefix: str) -> Iterator[Key]:
    """List the keys of a config dataclass in the order of its fields; nested dataclasses give dotted names.

    Args:
        schema: the dataclass.
        values: the composed config as nested dicts, from which the defaults come.
        prefix: put before every name: "" at the top, "model." for the keys of a nested `model`.

    Raises:
        UserError: a key has no explanation in the docstrings.
    """
    hints = typing.get_type_hints(schema)
    texts = docstring_entries(schema)
    for item in dataclasses.fields(schema):
        name = prefix + item.name
        hint = hints[item.name]
        if name in GROUPS:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from schema_keys(hint, values[item.name], f"{name}.")
        elif hint == dict[str, LinkSchema]:
            links = ", ".join(f"`{link}`" for link in values[item.name])
            yield Key(name, "links by name", links, one_line(texts[item.name]))
            yield from schema_keys(LinkSchema, vars(LinkSchema()), f"{name}.NAME.")
        else:
            if item.name not in texts:
                raise UserError(f"{name} of {schema.__name__} has no text; write one under Args of its docstring")
            yield Key(name, kind_of(hint), shown(values.get(item.name)), one_line(texts[item.name]))


def config_keys(config: type, group: str, names: Sequence[str]) -> list[Key]:
    """List the keys of one config dataclass that several choices of a group use, as lookahead and lookahead_auto do.

    Args:
        config: the dataclass, whose docstring explains the keys.
        group: the config group, as in "decoder".
        names: choices of the group; where their defaults differ, a key shows all of them.
    """
    texts = docstring_entries(config)
    hints = typing.get_type_hints(config)
    keys = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = [compose("generate", [f"{group}={name}"])[group] for name in names]
    nodes: list[Any] = [OmegaConf.to_container(node) for node in chosen]
    for item in dataclasses.fields(config):
        if item.name not in typing.cast(dict, nodes[0]):
            continue
        defaults = dict.fromkeys(shown(node[item.name]) for node in nodes)
        keys.append(
            Key(f"{group}.{item.name}", kind_of(hints[item.name]), ", ".join(defaults), one_line(texts[item.name]))
        )
    return keys


def docstring_entries(cls: type) -> dict[str, str]:
    """Explanations of a class' fields: the entries under `Args:` in its docstring and in those of its bases, by field.

    An entry of the class itself wins over one of a base.

    Args:
        cls: a dataclass.
    """
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        entries |= _entries(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
    return entries


def _entries(doc: str) -> dict[str, str]:
    if "Args:\n" not in doc:
        return {}
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in doc.split("Args:\n")[1].split("\n\n")[0].splitlines():
        match = re.match(r" {4}(\w[\w, ]*): (.*)", line)
        if match:
            names = match[1].split(", ")
            entries |= dict.fromkeys(names, match[2])
        else:
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def summary(cls: type) -> str:
    """The first paragraph of a config dataclass' docstring on one line, which says what the config is for."""
    return one_line((inspect.getdoc(cls) or "").split("\n\n")[0])


def kind_of(hint: Any) -> str:
    """A type hint in words for users: `int | None` gives "int or null", a list[str] "list of text"."""
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if part is type(None) else kind_of(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {kind_of(typing.get_args(hint)[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f"`{member.value}`" for member in hint)
    return {"str": "text", "bool": "true or false", "Any": "any"}.get(hint.__name__, hint.__name__)


def shown(value: Any) -> str:
    """A default as YAML writes it, in backquotes: `true`, `null`, `[1, 2]`; empty where the user must give a value."""
    if value == MISSING:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"`{'null' if value is None else value}`"


def one_line(text: str) -> str:
    """A text made fit for a cell of a Markdown table: one line, bars escaped, capitalised, no final point."""
    text = " ".join(text.split()).replace("|", "\\|").rstrip(".")
    return text[0].upper() + text[1:] if re.match(r"[a-z]+ ", text) else text
