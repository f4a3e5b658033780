"""The apps and tools of the command `lp`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class App:
    """One of the apps. Its module, and its file of keys in conf/, have its name.

    Args:
        function: name of the function in that module that takes the config of a job.
        summary: one line for the list of apps.
        prompts: whether it continues prompts, which `--prompt` gives.
        measures: whether it needs lp's functions compiled from the start: it measures, or runs for long.
        files: keys of files that may be named without their keys, in this order.
    """

    function: str
    summary: str
    prompts: bool = True
    measures: bool = True
    files: tuple[str, ...] = ()


APPS = {
    "generate": App("generate", "continue prompts and show the text", measures=False),
    "chat": App("chat", "talk to a model at a terminal", prompts=False, measures=False),
    "serve": App("serve", "put a model behind the endpoints that editors and clients call", prompts=False),
    "batch": App(
        "batch", "answer a file of requests, which are those of the endpoints", prompts=False, files=("input", "out")
    ),
    "benchmark": App("benchmark", "measure methods on the prompts of a task"),
    "scaling": App("scaling", "measure or project methods over numbers of ranks"),
    "profile": App("profile_model", "show where the time of a step goes", prompts=False),
    "tune": App("tune", "find the fastest W, N, G on this machine"),
}


TOOLS = {
    "ngrams": "measure what a model writes behind 1 to 3 tokens, for the pool",
    "corpus": "make an index of a folder's files, from which the pool drafts",
    "doctor": "say what this machine, and a model on it, can do, and why not",
}
