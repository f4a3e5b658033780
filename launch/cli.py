"""The command `lp`: one entry point over the apps.

    lp generate "def fibonacci(n):"      # an app, then a text or Hydra's overrides
    lp                                   # the list of apps

From a clone that is not installed, `python -m lp generate` and `bash torchrun.sh launch.generate` are the same. An
app's module, and torch with it, is imported when its first job runs: `--help` and `--cfg` need neither. Tools take
options instead of a config, and run in one process.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from packaging.version import Version

import lp
from lp.compile_cache import complete, imported_too_early
from lp.errors import UserError
from lp.waits import waiting

from . import PACKAGE
from .apps import APPS, TOOLS, App
from .config.arguments import closest, overrides_first, take_files, take_prompt
from .running.wait_line import waits_shown

# Options of Hydra with which no job runs.
SHOWS_ONLY = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc", "--version"}


def main(args: Sequence[str] | None = None) -> None:
    """Run the app or tool that the first argument names, or print usage or version.

    Args:
        args: the command line without the program's name, as in ["generate", "def f(x):"]; None takes sys.argv.

    Raises:
        SystemExit: exit code 2 after a user error; launch/running/errors.py lists the other codes.
    """
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print(usage())
    elif args[0] == "--version":
        print(f"lp {lp.__version__}")
    elif args[0] in APPS:
        start(args[0], args[1:])
    elif args[0] in TOOLS:
        run_tool(args[0], args[1:])
    else:
        print(f"error: there is no app {args[0]!r}{closest(args[0], [*APPS, *TOOLS])}\n\n{usage()}", file=sys.stderr)
        raise SystemExit(2)


def usage() -> str:
    """The text of `lp --help`: the apps and tools, with one line about each."""
    summaries = {name: app.summary for name, app in APPS.items()} | TOOLS
    apps = "\n".join(f"  {name:<10} {summary}" for name, summary in summaries.items())
    return (
        f"usage: lp APP [KEY=VALUE ...]\n\napps:\n{apps}\n\n"
        "lp APP --help lists the keys of an app; lp --version prints the version."
    )


def run_tool(name: str, args: Sequence[str]) -> None:
    """Parse a tool's options and run it in this process, as for `lp doctor MODEL`.

    Args:
        name: a key of TOOLS; the tool's module in launch/ has this name.
        args: the arguments after the name.

    Raises:
        SystemExit: the exit code, where the tool fails or the options are wrong.
    """
    atexit.register(end_soon)
    with waits_shown():
        with _importing("torch and transformers"):
            from .running.errors import reported

            tool = import_module(f"{PACKAGE}.{name}")
        parser = argparse.ArgumentParser(
            prog=f"lp {name}", description=tool.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        tool.add_arguments(parser)
        with reported():
            tool.run(parser.parse_args(args))


def start(name: str, args: Sequence[str]) -> None:
    """Run an app as `lp NAME ...` does: answer `--help`, compile lp's numba functions where that pays, and start Hydra.

    Args:
        name: a key of APPS.
        args: the arguments after the name.

    Raises:
        SystemExit: the exit code, where the app fails.
    """
    atexit.register(end_soon)
    with waits_shown():
        _start(name, args)


def _start(name: str, args: Sequence[str]) -> None:
    app = APPS[name]
    starting = contextlib.ExitStack()
    starting.enter_context(_importing("Hydra"))
    from .running.errors import names_key, reported

    def task(config: Any) -> float | None:
        with _importing("torch and transformers"):
            module = import_module(f"{PACKAGE}.{name}")
        return getattr(module, app.function)(config)

    with reported(), starting:  # its line is erased before an error is reported
        overrides = own_arguments(name, args)
        options = [each.partition("=")[0] for each in overrides if each.startswith("-")]
        if any(map(names_key, options)):  # argparse would show its value
            raise UserError("the API key is not given as an option; give it in the environment, as LP_API_KEY")
        if "--help" in options or "-h" in options:
            from .help import app_help

            text = app_help(name, overrides)
            starting.close()
            print(text)
            return
        if needs_compiled(app, overrides):
            _compile(args)
        from .running.hydra_app import run  # imports lp's functions, which are compiled by now
    sys.argv = [f"lp {name}", *overrides_first(overrides)]  # where Hydra reads them
    run(task, name)


@contextlib.contextmanager
def _importing(what: str) -> Iterator[None]:
    """Tell the user what is being imported, and keep Python's garbage collector away from it.

    An import of torch makes about a million objects that live until the process ends. The collector would walk through
    them several times meanwhile, for a sixth of the time until the first text.
    """
    collects, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        with waiting(f"importing {what}"):
            yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if collects:
            gc.enable()


def end_soon() -> None:
    """Keep Python's garbage collector away from what was imported when the process ends: it would take seconds.

    Not where Triton 3.9 or newer is imported, which then prints a list of its objects that were not collected.
    """
    triton = sys.modules.get("triton")
    if triton is None or Version(triton.__version__) < Version("3.9"):
        gc.freeze()
    else:
        gc.unfreeze()


def own_arguments(name: str, args: Sequence[str]) -> list[str]:
    """Translate an app's arguments into Hydra overrides: a prompt moves to the environment, bare file names get keys.

    Args:
        name: the app, a key of APPS.
        args: the arguments after the name, as in ["in.jsonl", "out.jsonl", "W=4"].

    Returns:
        Overrides and options for Hydra, as in ["input='in.jsonl'", "out='out.jsonl'", "W=4"].

    Raises:
        UserError: more than one prompt, or too many files.
    """
    app = APPS[name]
    return take_prompt(args, positional=name == "generate") if app.prompts else take_files(args, app.files)


def needs_compiled(app: App, overrides: Sequence[str]) -> bool:
    """Whether lp's numba functions must be compiled before this run starts, since it measures or serves.

    This is decided from the command line alone, before Hydra has read the config. Runs that only show help or the
    config need no compiled functions.

    Args:
        app: the app that is started.
        overrides: Hydra's overrides and options, without a prompt.
    """
    if SHOWS_ONLY & {each.partition("=")[0] for each in overrides}:
        return False
    given = {key.lstrip("+"): value for key, _, value in (each.partition("=") for each in overrides)}
    return app.measures or "experiment" in given or given.get("compare", "false").lower() != "false"


def _compile(args: Sequence[str]) -> None:
    """Compile lp's numba functions unless they are compiled; once after an install this takes about a minute."""
    with waiting("compiling functions, once after an install: about a minute"):
        complete()
    # `python -m launch.benchmark` has imported them before: begin again, unless the prompt came from stdin, which has
    # ended.
    if imported_too_early() and not {"-", "--prompt=-"} & {*args}:
        with contextlib.suppress(OSError):  # such as too long a prompt in the environment: they go on as Python
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
