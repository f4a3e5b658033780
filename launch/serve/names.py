"""Names of the served model, in the `model` field of requests and of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lp.errors import UserError

ANY = "*"
# A folder of the hub's cache: models--ORG--NAME/snapshots/COMMIT. Neither part of a hub name has two dashes in a row.
SNAPSHOT = re.compile(r"(?:^|[/\\])models--(?P<name>[^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]*$")


@dataclass(frozen=True)
class ModelNames:
    """The names of a served model: those that requests may give in the field `model`, and those that answers show.

    Attributes:
        shown: name in the `model` field of answers.
        listed: names that /v1/models lists, the shown one first.
        known: all names that requests may give.
        any: whether requests may give any other name, too.
    """

    shown: str
    listed: tuple[str, ...]
    known: frozenset[str]
    any: bool = False

    @classmethod
    def of(cls, model: str, served: Sequence[str] = ()) -> ModelNames:
        """Collect the names of a served model, from its path and from the config key `served_name`.

        Args:
            model: folder or hub name that the model is loaded from. Without `served`, answers show its last part, such
                as "Qwen3-8B"; for a snapshot's folder in the hub's cache they show the hub name, such as
                "Qwen/Qwen3-8B".
            served: names to use instead, the first one for answers; "*" among them lets requests give any name.
        """
        given = list(dict.fromkeys(name for name in served if name != ANY))
        if given:
            return cls(given[0], tuple(given), frozenset(given), ANY in served)
        if snapshot := SNAPSHOT.search(model):
            hub_name = snapshot["name"].replace("--", "/")
            known = {model, hub_name, PurePath(hub_name).name}
            return cls(hub_name, (hub_name,), frozenset(known), ANY in served)
        short = PurePath(model).name or model
        return cls(short, (short,), frozenset({model, short}), ANY in served)

    def has(self, name: str) -> bool:
        """Whether a request may give this name."""
        return self.any or name in self.known


def served_names(given: object) -> list[str]:
    """Check the value of the config key `served_name`, and return it as a list of names.

    Args:
        given: a name, a list of names, or None, which gives an empty list.

    Raises:
        ValueError: the value is something else, or a name is empty.
    """
    names = [given] if isinstance(given, str) else given
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"served_name is {given!r}; give a name, several as in served_name='[a,b]', or '*' for any")
    return names
