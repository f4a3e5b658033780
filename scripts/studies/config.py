"""The page of every key of every app, as `launch.keys` has them, which it writes.

python scripts/tables.py config
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.apps import APPS
from launch.config.schema import POOL_KEYS, SHAPE_KEYS, TaskSchema, decoder_choices, register
from launch.data.shapes import SHAPES
from launch.keys import Key, app_keys, choices, config_keys, schema_keys, summary
from launch.running.hydra_app import CONF, register_resolvers
from lp.config import LookaheadConfig
from lp.errors import UserError
from lp.sampling.params import SamplingParams

from .harness import Command, option
from .places import PLACES

SHARED = {
    "Apps that show texts": ("generate", "chat"),
    "Apps that answer requests": ("serve", "batch"),
    "Apps that measure methods": ("benchmark", "scaling"),
}
PAGE = CONF.parent / PLACES["config"]
HEAD = """# Configuration

Every key of every app, with its type, its default and what it does. `python scripts/tables.py config` writes this page
from the code; a test fails while the two differ.

- `lp APP key=value` sets a key, as in `lp generate W=7 pool.scope=session`; from a clone `bash torchrun.sh launch.APP`.
- `lp APP --help` lists the keys of an app as they are here; `lp APP --cfg job` prints all of them with their values.
- `-m key=1,2,3` runs one job for each value. `experiment=NAME` takes a file of settings from `conf/experiment/`.
- A value with special characters is quoted twice: `stop_strings='["\\n\\n"]'`. A prompt needs only the shell's quotes:
  `lp generate "def f(a):"`, `lp benchmark --prompt "def f(a):"`.
- In Python the decoders' keys are the fields of `lp.LookaheadConfig` and its peers, with the defaults below; so are
  W, N, G (`window_size`, `ngram_size`, `guess_set_size`) and the pool's (`pool_mib`, ...).
"""


def page() -> str:
    """The whole page."""
    register()
    register_resolvers()
    keys = {app: [key for key in app_keys(app) if not key.name.startswith("task.")] for app in APPS}
    common = [key for key in keys["generate"] if all(key in others for others in keys.values())]
    prompted = [app for app, entry in APPS.items() if entry.prompts]
    prompts = [key for key in keys["generate"] if key not in common and all(key in keys[app] for app in prompted)]
    parts = [HEAD, "## All apps\n", table(common), groups()]
    parts += ["## Apps that continue prompts\n", f"lp {', lp '.join(prompted)}.\n", table(prompts)]
    of_task = [*schema_keys(TaskSchema, vars(TaskSchema()), "task.")]
    parts += ["### task=\n", f"{summary(TaskSchema)}.\n", table(of_task)]
    above = {app: common + (prompts if entry.prompts else []) for app, entry in APPS.items()}
    for title, apps in SHARED.items():
        shared = [key for key in keys[apps[0]] if all(key in keys[app] and key not in above[app] for app in apps)]
        parts += [f"## {title}\n", f"lp {', lp '.join(apps)}.\n", table(shared)]
        for app in apps:
            above[app] = above[app] + shared
    for app, entry in APPS.items():
        own = [key for key in keys[app] if key not in above[app]]
        parts += [f"## lp {app}\n", f"{entry.summary[0].upper()}{entry.summary[1:]}.\n", table(own)]
    names_by_config: dict[type, list[str]] = {LookaheadConfig: []}  # it comes first
    for name, choice in decoder_choices().items():
        names_by_config.setdefault(choice.config, []).append(name)
    for config, names in names_by_config.items():
        title = " and ".join(f"decoder={name}" for name in names)
        parts += [
            f"## {title}\n",
            f"{summary(config)}.{of_app(names[0])}\n",
            table(config_keys(config, "decoder", names)),
        ]
    sampling = table(config_keys(SamplingParams, "sampling", ["sample"]))
    parts += ["## decoder=plain\n", "Plain decoding, one token a step, on the engine of the others. It has no keys.\n"]
    oracle = "Plain decoding that shares no code with the others, which tokens are compared with. It has no keys.\n"
    parts += ["## decoder=autoregressive\n", oracle]
    return "\n".join([*parts, "## sampling=sample\n", f"{summary(SamplingParams)}.\n", sampling])


def of_app(decoder: str) -> str:
    """Which keys of the app a decoder takes, as a sentence; nothing where it takes none."""
    choice = decoder_choices()[decoder]
    taken = [key for field, key in SHAPE_KEYS.items() if choice.has(field)]
    taken += ["pool.*"] if any(choice.has(field) for field in POOL_KEYS) else []
    return f" It takes {', '.join(f'`{key}`' for key in taken)}." if taken else ""


def table(keys: Sequence[Key]) -> str:
    """The keys as a table."""
    lines = [f"| `{key.name}` | {key.kind} | {key.default} | {key.text} |" for key in keys]
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *lines, ""])


def groups() -> str:
    """The choices of every config group."""
    names = ("model", "decoder", "attention", "sampling", "task", "experiment")
    lines = [
        "### Groups\n",
        "A group is a set of keys that is chosen by name, as in `model=llama31_8b`.\n",
        "| group | choices |",
        "|---|---|",
        *(f"| `{group}=` | {', '.join(f'`{name}`' for name in choices(group))} |" for group in names),
        "",
        f"Of the models, {', '.join(f'`{name}`' for name in SHAPES)} are shapes without weights, for `lp profile`.",
        "",
    ]
    return "\n".join(lines)


@dataclass(kw_only=True)
class Config(Command):
    """Writes the page, or compares it."""

    check: bool = option(False, "write nothing; an error if the page differs")

    def run(self) -> None:
        text = page()
        if not self.check:
            PAGE.write_text(text, encoding="utf-8")
        elif PAGE.read_text(encoding="utf-8") != text:
            raise UserError(f"{PLACES['config']} is not up to date; run python scripts/tables.py config")
