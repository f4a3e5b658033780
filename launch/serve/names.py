"""What clients may call the model."""

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
    """The names that clients may call the model by.

    Attributes:
        shown: name that answers give.
        listed: names that /v1/models has, the shown one first.
        known: all that clients may give.
        any: whether clients may give any other name, too.
    """

    shown: str
    listed: tuple[str, ...]
    known: frozenset[str]
    any: bool = False

    @classmethod
    def of(cls, model: str, served: Sequence[str] = ()) -> ModelNames:
        """The names that a model is served under.

        Args:
            model: a folder or a hub name; the last part of it is shown, of a snapshot in the hub's cache the hub name.
            served: names in place of these; "*" is any name.
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
        """Whether clients may call the model so."""
        return self.any or name in self.known


def served_names(given: object) -> list[str]:
    """The names of the key served_name: none, one, or several.

    Raises:
        ValueError: something else.
    """
    names = [given] if isinstance(given, str) else given
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"served_name is {given!r}; give a name, several as in served_name='[a,b]', or '*' for any")
    return names
