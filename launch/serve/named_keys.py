"""API keys with client names: texts that are kept as a source of draft tokens serve only the client they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lp.config import chosen_corpora
from lp.engine.decoder import OWNER
from lp.errors import UserError

CORPORA = "corpora="


@dataclass(frozen=True, slots=True)
class Client:
    """The client that a request comes from, identified by its API key.

    Attributes:
        name: the client's name, under which its texts are kept as a source of draft tokens; empty if its key has no
            name.
        corpora: names of the corpora (files made by `lp corpus`) that the client's draft tokens may come from; None:
            all that the server has.
    """

    name: str = ""
    corpora: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A client's API key, and the corpora (files made by `lp corpus`) that the client's draft tokens may come from.

    Attributes:
        key: the API key.
        corpora: names of the corpora; None: all that the server has.
    """

    key: str
    corpora: tuple[str, ...] | None = None


def read_keys(path: str | None, api_key: str | None = None) -> dict[str, NamedKey]:
    """Read the file of clients' API keys: a line NAME KEY, or NAME KEY corpora=A,B, for each client.

    Lines that begin with # are left out.

    Args:
        path: the file; None: there are no such keys, and the result is empty.
        api_key: the server's key without a name, which no line may repeat.

    Returns:
        Keys by the clients' names.

    Raises:
        ValueError: the file can't be read, or a line has another form; the message has the line's number and no key.
    """
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has other characters than ASCII's"
        raise UserError(
            f"api_keys is {path!r}, which can't be read ({reason}); give a file of lines NAME KEY"
        ) from None
    keys: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, corpora = words[0], [word for word in words[2:] if word.startswith(CORPORA)]
        lacks_key = len(words) < 2 or words[1].startswith(CORPORA)
        if lacks_key or len(words) != 2 + len(corpora) or len(corpora) > 1 or not OWNER.fullmatch(name):
            raise UserError(
                f"line {number} of {path} is not NAME KEY or NAME KEY corpora=A,B; give a name of up to 64 ASCII "
                "letters, digits, '_' and '-', a space, and the key"
            )
        if name in keys or words[1] in [*(named.key for named in keys.values()), api_key]:
            raise UserError(f"line {number} of {path} has a name or a key that is there already; give each once")
        keys[name] = NamedKey(words[1], _listed(corpora[0]) if corpora else None)
    if not keys:
        raise UserError(f"{path} has no key; give a line NAME KEY for each client, or api_keys=null")
    return keys


def check_corpora(path: str | None, known: Sequence[str]) -> None:
    """Check that the server has all corpora that a file of API keys names.

    Args:
        path: the file, as `read_keys` takes it; None: there are no such keys.
        known: names of the server's corpora.

    Raises:
        ValueError: a corpus is unknown; the message names the client, and the corpora that there are.
    """
    for name, named in read_keys(path).items():
        try:
            chosen_corpora(named.corpora, known)
        except UserError as error:
            raise UserError(f"the line of {name!r} in {path}: {error}") from None


def _listed(word: str) -> tuple[str, ...]:
    """The names behind `corpora=`."""
    return tuple(filter(None, word.removeprefix(CORPORA).split(",")))
