"""The lists of apps and tools that the command `lp` has, read by `lp --help` and by `lp NAME`.

An app (`lp generate`) is configured by Hydra and may run on several ranks. A tool (`lp doctor`) takes ordinary options
and runs in one process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class App:
    """An app of the command `lp`, described so that `lp` need not import its module, and torch, before it starts.

    The app's name, its key in APPS, is also the name of its module in launch/ and of its file conf/NAME.yaml.

    Args:
        function: name of the function in the app's module that takes the job's config and runs it.
        summary: one line about the app, for `lp --help`.
        prompts: whether the app continues prompts, so that it takes `--prompt TEXT` and task=NAME.
        measures: whether the app measures speed or runs for long, so that lp's numba functions are compiled before it
            starts.
        files: config keys that take bare arguments in this order: ("input", "out") makes `lp batch A B` mean input=A
            out=B.
    """

    function: str
    summary: str
    prompts: bool = True
    measures: bool = True
    files: tuple[str, ...] = ()


APPS = {
    "generate": App("generate", "continue prompts and show the text", measures=False),
    "chat": App("chat", "talk to a model at a terminal", prompts=False, measures=False),
    "serve": App("serve", "serve a model over the HTTP endpoints that editors and clients call", prompts=False),
    "batch": App(
        "batch", "answer a file of requests, which are those of the endpoints", prompts=False, files=("input", "out")
    ),
    "benchmark": App("benchmark", "measure methods on the prompts of a task"),
    "scaling": App("scaling", "measure or project methods over numbers of ranks"),
    "profile": App("profile_model", "show where the time of a step goes", prompts=False),
    "tune": App("tune", "find the fastest W, N, G on this machine"),
}


TOOLS = {
    "ngrams": "measure what a model writes after 1 to 3 tokens, for the pool",
    "corpus": "make an index of a folder's files, from which the pool drafts",
    "doctor": "say what this machine, and a model on it, can do, and why not",
}
