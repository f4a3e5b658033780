"""`lp APP --help`: the keys of an app, each with its default and one line of explanation."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields

from lp.errors import UserError
from lp.sampling.params import SamplingParams

from .apps import APPS
from .config.arguments import closest
from .config.schema import Common, decoder_choices, register
from .keys import Key, app_keys, choices, config_keys
from .running.hydra_app import register_resolvers

WIDTH = 100  # a line that is longer is hard to read
GROUPS = ("model", "decoder", "attention", "sampling", "task", "experiment")


def app_help(app: str, overrides: Sequence[str]) -> str:
    """The text that `lp APP --help` prints: options, config keys with their defaults, and config groups.

    Args:
        app: a key of APPS.
        overrides: the other arguments; `decoder=NAME` among them chooses the decoder whose keys are listed.

    Raises:
        UserError: there is no decoder of that name.
    """
    register()
    register_resolvers()
    columns = min(shutil.get_terminal_size((80, 24)).columns, WIDTH)
    prompted = APPS[app].prompts
    text = " [TEXT]" if app == "generate" else "".join(f" {key.upper()}" for key in APPS[app].files)
    keys = app_keys(app)
    shared = {item.name for item in fields(Common)}
    own = [key for key in keys if key.name.split(".")[0] not in shared]
    own.sort(key=lambda key: key.name.startswith("task."))  # which few set
    common = [key for key in keys if key.name.split(".")[0] in shared]
    decoder = chosen_decoder(overrides)
    groups = [(f"{group}=", ", ".join(choices(group))) for group in GROUPS if prompted or group != "task"]
    parts = [
        (f"lp {app}: {APPS[app].summary}", ""),
        (f"usage: lp {app}{text} [KEY=VALUE ...] [OPTION]", ""),
        ("options:", _entries([*(_PROMPT if prompted else []), *_OPTIONS], columns)),
        (f"keys of lp {app}, with their defaults:", _keys(own, columns)),
        ("keys of all apps:", _keys(common, columns)),
        ("groups, sets of keys that are chosen by name:", _entries(groups, columns)),
    ]
    if decoder in decoder_choices():
        keys = config_keys(decoder_choices()[decoder].config, "decoder", [decoder])
        parts.append((f"keys of decoder={decoder} (decoder=NAME --help has another's):", _keys(keys, columns)))
    sampling = config_keys(SamplingParams, "sampling", ["sample"])
    parts.append(("keys of sampling=sample:", _keys(sampling, columns)))
    return "\n\n".join(f"{textwrap.fill(title, columns)}\n{entries}".rstrip() for title, entries in parts)


_PROMPT = [("--prompt TEXT", "the text to continue, as it is; - for standard input")]
_OPTIONS = [
    ("--cfg job", "print every key with its value, and do nothing"),
    ("-m KEY=1,2,3", "run one job for each value"),
    ("--hydra-help", "Hydra's own options"),
]


def chosen_decoder(overrides: Sequence[str]) -> str:
    """Name of the decoder whose keys `--help` lists: the last `decoder=NAME` of the overrides, else lookahead_auto.

    Args:
        overrides: the arguments of the app.

    Raises:
        UserError: there is no decoder of that name.
    """
    named = [each.removeprefix("decoder=") for each in overrides if each.startswith("decoder=")]
    name = named[-1] if named else "lookahead_auto"
    if name not in choices("decoder"):
        raise UserError(f"there is no decoder {name!r}{closest(name, choices('decoder'))}")
    return name


def _keys(keys: Iterable[Key], columns: int) -> str:
    entries = [(f"{key.name}={_bare(key.default)}", f"{_bare(key.text)} ({_bare(key.kind)})") for key in keys]
    return _entries(entries, columns)


def _bare(text: str) -> str:
    """A text without Markdown's backquotes and escaped bars."""
    return text.replace("`", "").replace("\\|", "|")


def _entries(entries: Iterable[tuple[str, str]], columns: int) -> str:
    """Pairs of name and text, each name on a line and its text indented below: readable at 60 columns and at 100."""
    wrapped = textwrap.TextWrapper(columns, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    named = textwrap.TextWrapper(columns, initial_indent="  ", subsequent_indent=" " * 4, break_on_hyphens=False)
    lines = []
    for name, text in entries:
        lines += [*named.wrap(name), *wrapped.wrap(text)]
    return "\n".join(lines)
