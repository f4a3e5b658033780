"""Command-line keys and config arguments that were removed, each with what to write instead, for error messages."""

from __future__ import annotations

from typing import Any, Self

from lp.errors import UserError

_SWITCHES = (
    "prompt_ngrams",
    "prompt_logits",
    "output_ngrams",
    "window_ngrams",
    "position_guesses",
    "num_logits",
    "renoise",
    "learn",
    "window_noise",
    "warmup_steps",
    "kv_sync",
)
# What to write instead, by key of an app. Keys of _SWITCHES were also arguments of configs, without "decoder.".
REMOVED = {
    **{
        f"decoder.{name}": f"it is for ablations, in Python: lp.LookaheadConfig(ablation=lp.Ablation({name}=...))"
        for name in _SWITCHES
    },
    "decoder.window_size": "write W=...",
    "decoder.ngram_size": "write N=...",
    "decoder.guess_set_size": "write G=...",
    "decoder.pool_scope": "write pool.scope=...",
    "decoder.pool_mib": "write pool.mib=...",
    "decoder.pool_file": "write pool.file=...",
    "decoder.pool_model_ngrams": "write pool.model_ngrams=...",
    "decoder.max_spec_offset": "in Python: lp.SuffixConfig(max_spec_offset=...)",
    "decoder.adaptive": "choose decoder=lookahead_auto for true, decoder=lookahead for false",
    "sampling.seed": "write seed=...",
    "W_per_rank": "with decoder=lookahead_auto W is each rank's; else write W=<ranks x W of a rank>",
    "G_per_rank": "with decoder=lookahead_auto G is each rank's; else write G=<ranks x G of a rank>",
    "measure_step_times": (
        "delete the file of step times, which the first line of a run names; in Python: "
        "lp.LookaheadDecoder(model, step_times='measure')"
    ),
    "model.attn_implementation": "write attention=sdpa, or another; in Python: lp.load(attn_implementation=...)",
    "parallel.setup_timeout_s": (
        "ranks may compile and capture for half an hour, or for parallel.timeout_s where that is more; in Python: "
        "lp.ParallelContext.from_env(setup_timeout_s=...)"
    ),
    "parallel=": "leave it out: its one choice was default, and its keys are parallel.KEY=... as before",
    "show_prompt": "with output=text stdout has the text alone; the end of the prompt goes to stderr then",
    "nodes": "set NNODES, NODE_RANK, RDZV_ENDPOINT and NPROC in the environment",
    **{
        f"nodes.{name}": f"set {variable} in the environment"
        for name, variable in (
            ("count", "NNODES"),
            ("rank", "NODE_RANK"),
            ("nproc", "NPROC"),
            ("endpoint", "RDZV_ENDPOINT"),
        )
    },
}


def removal(key: str) -> str | None:
    """The error message for a removed command-line key, which says what to write instead; None for any other key.

    Args:
        key: the key, such as "decoder.window_size".
    """
    return f"{key} is gone; {REMOVED[key]}" if key in REMOVED else None


class RefusesRemoved:
    """Base class of the decoders' configs: a removed argument raises an error that says what to write instead.

    Raises:
        UserError: names the argument and the remedy.
    """

    __slots__ = ()

    def __new__(cls, **given: Any) -> Self:
        known = getattr(cls, "__dataclass_fields__", {})
        for name in given:
            if name in _SWITCHES and name not in known:
                raise UserError(f"{name} is gone; {REMOVED[f'decoder.{name}']}")
        return super().__new__(cls)
