"""The names that clients may give in the `model` field of their requests."""

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
    """The names that clients may give in the `model` field of their requests.

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
        """The names that a model is served under, from its path and the key served_name.

        Args:
            model: a folder or a hub name. Without `served`, its last part is shown, such as "Qwen3-8B"; a snapshot in
                the hub's cache shows the hub name, such as "Qwen/Qwen3-8B".
            served: names that replace these, the first one shown; "*" among them lets requests give any name.
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
    """The value of the key served_name as a list of names, which is empty where the key is null.

    Args:
        given: None, a name, or a list of names.

    Raises:
        ValueError: the value is something else, or a name is empty.
    """
    names = [given] if isinstance(given, str) else given
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"served_name is {given!r}; give a name, several as in served_name='[a,b]', or '*' for any")
    return names
