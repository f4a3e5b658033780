"""Keys of clients, each with a name: what is kept of a client's texts is used for that client's alone."""

from __future__ import annotations

from pathlib import Path

from lp.engine.decoder import OWNER
from lp.errors import UserError


def read_keys(path: str | None, api_key: str | None = None) -> dict[str, str]:
    """The keys of a file with a line NAME KEY for each client, by name; lines that begin with # are left out.

    Args:
        path: the file; None: there is none.
        api_key: the key without a name.

    Raises:
        ValueError: it can't be read, or a line is something else; names the line, and never a key.
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
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = words[0]
        if len(words) != 2 or not OWNER.fullmatch(name):
            raise UserError(
                f"line {number} of {path} is not NAME KEY; give a name of up to 64 ASCII letters, digits, '_' and '-', "
                "a space, and the key"
            )
        if name in keys or words[1] in [*keys.values(), api_key]:
            raise UserError(f"line {number} of {path} has a name or a key that is there already; give each once")
        keys[name] = words[1]
    if not keys:
        raise UserError(f"{path} has no key; give a line NAME KEY for each client, or api_keys=null")
    return keys
