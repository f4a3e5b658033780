"""Arguments that are read before Hydra sees them: prompts and files, which need no quoting as Hydra's overrides do.

The prompt goes to the config through the environment variable LP_PROMPT, which conf/ refers to, so that ranks and jobs
that this process launches have it too.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence

from lp.errors import UserError

PROMPT = "LP_PROMPT"
STDIN = "LP_STDIN"  # what launch/torchrun.py has read for its ranks, which have no stdin of their own
OVERRIDE = re.compile(r"(~[\w./@:+-]+$)|([~+]{0,2}[\w./@:-]+=)")
PATHS = ("/", "./", "../")  # with which no key begins: a file may have a = in its name
SHOWN = 60  # characters of a text that a message repeats
OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=|$)")
# Options of Hydra that take a value, which is no text to continue.
WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--info", "-i"),
}


def take_prompt(args: Sequence[str], positional: bool) -> list[str]:
    """Take the prompt out of an app's arguments: `--prompt TEXT`, or a text by itself; `-` is standard input.

    The prompt is put into the environment as LP_PROMPT.

    Args:
        args: the arguments after the app's name.
        positional: whether a text by itself is a prompt. If so, KEY=VALUE still is none, but anything after `--` is
            one.

    Returns:
        The other arguments, which are Hydra's.

    Raises:
        UserError: more than one prompt, none after `--prompt`, or one that begins with - and is no option.
    """
    prompts: list[str] = []
    others: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--prompt":
            if not rest:
                raise UserError("--prompt is the last argument; give the text behind it, or - for standard input")
            prompts.append(rest.pop(0))
        elif arg.startswith("--prompt="):
            prompts.append(arg.removeprefix("--prompt="))
        elif arg in WITH_VALUE:
            others.append(arg)
            others += [rest.pop(0) for _ in rest[:1]]
        elif positional and arg == "--":
            prompts += rest
            rest = []
        elif positional and (arg == "-" or not (arg.startswith("-") or OVERRIDE.match(arg))):
            prompts.append(arg)
        elif positional and arg.startswith("-") and not OPTION.match(arg):
            raise UserError(f"{arg!r} begins with - and is no option; {as_prompt(arg)}")
        else:
            others.append(arg)
    if len(prompts) > 1:
        raise UserError(f"there are {len(prompts)} prompts, {prompts[0]!r} and {prompts[1]!r}; quote a text as one")
    if prompts:
        if any(other.startswith("prompt=") for other in others):
            raise UserError("the prompt is given twice, by itself and as prompt=...; give it once")
        os.environ[PROMPT] = _text(prompts[0])
    return others


def take_files(args: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Turn files that stand by themselves in an app's arguments into overrides: `in.jsonl` into `input='in.jsonl'`.

    Args:
        args: the arguments after the app's name.
        keys: config keys to which the files are assigned, in this order.

    Returns:
        Hydra's arguments.

    Raises:
        UserError: there are more files than keys.
    """
    found: list[str] = []
    files: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg in WITH_VALUE:
            found += [arg, *rest[:1]]
            del rest[:1]
        elif not keys or arg.startswith("-") or (OVERRIDE.match(arg) and not arg.startswith(PATHS)):
            found.append(re.sub("^in=", "input=", arg) if "input" in keys else arg)  # no field can be called `in`
        else:
            files.append(arg)
    given = {each.partition("=")[0] for each in found}
    left = [key for key in keys if key not in given]
    if len(files) > len(left):
        raise UserError(
            f"{files[len(left)]!r} is one file too many; give {' and '.join(keys)}, and settings as KEY=VALUE"
        )
    return [*found, *(f"{key}={quoted(file)}" for key, file in zip(left, files, strict=False))]


def as_prompt(text: str) -> str:
    """The end of a message about an argument that may have been meant as a text to continue: how to give it as one."""
    in_shell = shlex.quote(text)
    if in_shell == text:
        in_shell = f"'{text}'"
    is_short = len(text) <= SHOWN and "\n" not in text
    return f"a text to continue is given as --prompt {in_shell if is_short else 'TEXT'}"


def quoted(text: str) -> str:
    """Put a text into single quotes so that Hydra reads it as one value of an override, whatever characters it has."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    trailing = re.search(r"\\*$", escaped)
    assert trailing
    return f"'{escaped}{trailing[0]}'"


def overrides_first(args: Sequence[str]) -> list[str]:
    """Put an app's overrides before Hydra's options, since argparse refuses overrides on both sides of the options.

    Args:
        args: command line arguments, without a prompt.
    """
    overrides: list[str] = []
    options: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg in WITH_VALUE:
            options += [arg, *rest[:1]]
            del rest[:1]
        else:
            (options if arg.startswith("-") else overrides).append(arg)
    return overrides + options


def read_stdin() -> str:
    """All text of standard input.

    Raises:
        UserError: standard input is closed, or is not text.
    """
    if sys.stdin is None:
        raise UserError("stdin is closed; give the prompt behind --prompt, or in a file: prompt_file=...")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not {error.encoding} text ({error.reason}); write the prompt as UTF-8") from None


def _text(prompt: str) -> str:
    if prompt == "-":
        prompt = os.environ[STDIN] if STDIN in os.environ else read_stdin()
    if "\0" in prompt:
        raise UserError("the prompt has a null character; put the text into a file: prompt_file=...")
    return prompt


def closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: "; did you mean 'pool.scope'?", or "" if no known name is like it.

    Args:
        name: the unknown name that the user wrote.
        known: all names that exist.
        prefix: put before the suggested name.
    """
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix + found[0]!r}?" if found else ""
