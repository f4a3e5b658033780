"""The command `lp`: one entry point over the apps.

    lp generate "def fibonacci(n):"      # an app, then a text or Hydra's overrides
    lp                                   # the list of apps

From a clone that is not installed, `python -m lp generate` and `bash torchrun.sh launch.generate` are the same. An
app's module, and torch with it, is imported when its first job runs: `--help` and `--cfg` need neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import lp
from lp.errors import UserError

from .app import run
from .arguments import closest, overrides_first, take_prompt
from .errors import names_key, reported


@dataclass(frozen=True)
class App:
    """One of the apps. Its module, and its file of keys in conf/, have its name.

    Args:
        function: of the module, which takes the config of a job.
        summary: one line for the list of apps.
        prompts: whether it continues prompts, which `--prompt` gives.
    """

    function: str
    summary: str
    prompts: bool = True


APPS = {
    "generate": App("generate", "continue prompts, show the text, and compare with plain decoding"),
    "chat": App("chat", "talk to a model at a terminal", prompts=False),
    "serve": App("serve", "put a model behind the endpoints that editors and clients call", prompts=False),
    "benchmark": App("benchmark", "measure methods on the prompts of a task"),
    "scaling": App("scaling", "measure or project methods over numbers of ranks"),
    "profile": App("profile_model", "show where the time of a step goes", prompts=False),
    "tune": App("tune", "find the fastest W, N, G on this machine"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the app that the first argument names.

    Args:
        args: None takes those of the command line.

    Raises:
        SystemExit: 2 after a user error; launch/errors.py has the other codes.
    """
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print(usage())
    elif args[0] == "--version":
        print(f"lp {lp.__version__}")
    elif args[0] in APPS:
        start(args[0], args[1:])
    else:
        print(f"error: there is no app {args[0]!r}{closest(args[0], APPS)}\n\n{usage()}", file=sys.stderr)
        raise SystemExit(2)


def usage() -> str:
    """The apps with a line each."""
    apps = "\n".join(f"  {name:<10} {app.summary}" for name, app in APPS.items())
    return (
        f"usage: lp APP [KEY=VALUE ...]\n\napps:\n{apps}\n\n"
        "lp APP --help lists the keys of an app; lp --version prints the version."
    )


def start(name: str, args: Sequence[str]) -> None:
    """Run an app with these arguments."""
    app = APPS[name]

    def task(config: Any) -> float | None:
        return getattr(import_module(f".{name}", __package__), app.function)(config)

    with reported():
        overrides = take_prompt(args, positional=name == "generate") if app.prompts else list(args)
        options = [each.partition("=")[0] for each in overrides if each.startswith("-")]
        if any(map(names_key, options)):  # argparse would show its value
            raise UserError("the API key is not given as an option; give it in the environment, as LP_API_KEY")
    sys.argv = [f"lp {name}", *overrides_first(overrides)]  # where Hydra reads them
    run(task, name)


if __name__ == "__main__":
    main()
