"""Configuration of decoding: frozen dataclasses that check themselves. Knows no hydra.

`window_size` W, `ngram_size` N and `guess_set_size` G are the paper's (arXiv 2402.02057, section 3).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lp.checks import check_choice, check_count, check_kind, check_switches, set_field
from lp.errors import UserError
from lp.removed_keys import RefusesRemoved

DEFAULT_TIMEOUT_S = 120.0  # for which ranks wait for each other
DEFAULT_SETUP_TIMEOUT_S = 1800.0  # the same while they compile and capture, which may take minutes on one of them
MAX_STEP_TOKENS = 8192  # of a rank: a step's mask has their square
MAX_CORPORA = 4  # of a pool
MAX_SHARED_TOKENS = 1 << 16  # of a fixed step, which ranks divide
# W, N and G where they are not given. W and G of an adaptive step are bounds of each rank: 200 tokens, about as many as
# share one reading of the weights on a GPU, by its FLOPs for each byte that it reads.
FIXED_SHAPE = {"window_size": 16, "ngram_size": 2, "guess_set_size": 104}
ADAPTIVE_SHAPE = FIXED_SHAPE | {"guess_set_size": 184}


class KVSync(StrEnum):
    """How a rank gets the KV of accepted tokens that another rank computed."""

    RECOMPUTE = "recompute"
    BROADCAST = "broadcast"


class PoolScope(StrEnum):
    """How long the pool remembers."""

    REQUEST = "request"
    SESSION = "session"


class Capture(StrEnum):
    """Whether a step's shape is fixed and its kernels replayed: `auto` is a CUDA graph on a GPU and off elsewhere."""

    AUTO = "auto"
    OFF = "off"
    GRAPH = "graph"
    COMPILE = "compile"


class Exact(StrEnum):
    """What lookahead leaves as plain decoding has it: `tokens`, but for what rounding decides, or all bits of logits.

    `auto` is `tokens` so far.
    """

    AUTO = "auto"
    TOKENS = "tokens"
    BITWISE = "bitwise"


class KVDtype(StrEnum):
    """What a cache holds keys and values as: `auto` is the model's dtype; the others are one byte a value, with a scale
    for each head and token.
    """

    AUTO = "auto"
    INT8 = "int8"
    FP8 = "fp8"

    @classmethod
    def of(cls, value: str) -> KVDtype:
        """The one of this name.

        Raises:
            ValueError: there is none.
        """
        if value not in list(cls):
            raise UserError(f"kv_dtype is {value!r}; it must be one of {', '.join(cls)}")
        return cls(value)


_RESOLVED: Any = None  # the default of a field that __post_init__ fills in


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Parts of lookahead decoding, each of which can be switched off: to measure what it is worth, not to decode with.

    Args:
        prompt_ngrams: the prompt's n-grams enter the pool before the first step.
        prompt_logits: with prompt_ngrams, the top-k logits of the prompt enter it too; they pass the LM head for it,
            which takes longer than it saves where steps are adaptive, and is left out there.
        output_ngrams: the n-grams of accepted text enter the pool.
        window_ngrams: the window's n-grams enter the pool.
        position_guesses: tokens that nodes sample are remembered for their position.
        num_logits: K, logits stored of every sampled node, to guess again from; 0 stores none.
        renoise: under sampling, stored logits guess under the noise of the position they guess for.
        learn: the weights of the pool's kinds of memory follow the text.
        window_noise: under sampling, the window iterates under the sampler's own noise; False guesses greedily.
        warmup_steps: first steps that verify nothing and read no n-gram, as the reference code's N - 1.
        kv_sync: how ranks get each other's accepted KV.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    prompt_ngrams: bool = True
    prompt_logits: bool = True
    output_ngrams: bool = True
    window_ngrams: bool = True
    position_guesses: bool = True
    num_logits: int = 16
    renoise: bool = True
    learn: bool = True
    window_noise: bool = True
    warmup_steps: int = 0
    kv_sync: KVSync = KVSync.RECOMPUTE

    def __post_init__(self) -> None:
        check_switches(self, "prompt_ngrams", "prompt_logits", "output_ngrams", "window_ngrams", "position_guesses")
        check_switches(self, "renoise", "learn", "window_noise")
        check_count(self, "num_logits", 0, 32, "try 16, or 0 for none", "K")
        check_count(self, "warmup_steps", 0, math.inf, "leave it 0")
        check_choice(self, "kv_sync", KVSync)


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig(RefusesRemoved):
    """The shape of a lookahead step, or with `adaptive` the bounds of it, and what the pool may use.

    To give any of W, N and G fixes every step's budget; to give none of them lets every step take what pays on this
    machine. `adaptive` says so explicitly. Both are decided once, when the config is made: `dataclasses.replace` leaves
    `adaptive` as it came out.

    Args:
        window_size: W, columns of the window; 0 leaves only the draft tree. Default 16.
        ngram_size: N, tokens of an n-gram; the window has N - 1 levels. Default 2.
        guess_set_size: G; a step has at most G x (N - 1) draft tokens, 0 verifies none. Default 104; 184 where
            `adaptive`, which makes 200 step tokens a rank.
        draft_depth: longest draft path in tokens, beyond N - 1 by chaining n-grams; None is the paper's N - 1.
        pool_scope: "session" passes the pool from one call of a decoder to its next; what a prompt's tokens are does
            not change, which draft tokens they get does.
        pool_mib: most memory of the pool, MiB; the oldest entries make room.
        pool_file: with "session", a safetensors file to begin with, if it exists, and to write after every call.
        pool_model_ngrams: what the model writes behind 1 to 3 tokens, which votes where the pool has not seen them:
            a file of `lp ngrams`, "auto" for the one beside the model, if it is there, or "off".
        history: a file that texts are added to once they have ended, and made if it isn't there: where the end of a
            later text came in one of them, what followed there is drafted. It holds what was generated, and the end of
            its prompt; None: nothing is kept.
        corpora: files of `lp corpus`, at most 4, looked at again as each text begins: where the end of a text comes in
            one of them too, what followed there is drafted.
        ablation: parts of the method to leave out, for studies of what each is worth.
        adaptive: W and G are bounds of each rank's step, which takes what pays on this machine; None is true if none of
            W, N and G is given. Never None once the config is made.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    window_size: int = _RESOLVED
    ngram_size: int = _RESOLVED
    guess_set_size: int = _RESOLVED
    draft_depth: int | None = 192
    pool_scope: PoolScope = PoolScope.REQUEST
    pool_mib: int = 16
    pool_file: str | None = None
    pool_model_ngrams: str = "auto"
    history: str | None = None
    corpora: Sequence[str] = ()
    ablation: Ablation = Ablation()
    adaptive: bool = _RESOLVED

    def __post_init__(self) -> None:
        missing = [name for name in (*FIXED_SHAPE, "adaptive") if getattr(self, name) is None]
        if "adaptive" in missing:
            missing.remove("adaptive")
            set_field(self, "adaptive", len(missing) == len(FIXED_SHAPE))
        check_switches(self, "adaptive")
        defaults = ADAPTIVE_SHAPE if self.adaptive else FIXED_SHAPE
        for name in missing:
            set_field(self, name, defaults[name])
        most = MAX_STEP_TOKENS if self.adaptive else MAX_SHARED_TOKENS
        check_count(self, "window_size", 0, 4096, "try W=16, or 0 for no window", "W")
        check_count(self, "ngram_size", 2, 64, "try N=2", "N")
        check_count(self, "guess_set_size", 0, most, "try G=104, or 0 for no draft tokens", "G")
        if self.draft_depth is not None:
            check_count(self, "draft_depth", 1, 1024, "leave it null for N - 1")
        if (self.window_size + self.guess_set_size) * (self.ngram_size - 1) > most:
            shape = f"W={self.window_size}, N={self.ngram_size}, G={self.guess_set_size}"
            raise UserError(f"a step of {shape} has (W + G) x (N - 1) tokens, more than {most}; lower one of them")
        check_count(self, "pool_mib", 1, 1 << 16, "try 16, or 128 for a session")
        check_choice(self, "pool_scope", PoolScope)
        check_kind("pool_file", self.pool_file, (str, os.PathLike, type(None)), "a path, or None")
        check_kind("pool_model_ngrams", self.pool_model_ngrams, (str, os.PathLike), "a path, 'auto' or 'off'")
        check_kind("history", self.history, (str, os.PathLike, type(None)), "a path, or None")
        files = [os.path.realpath(path) for path in (self.history, self.pool_file) if path is not None]
        if len({*files}) < len(files):
            raise UserError(f"history and pool_file are both {self.history!r}; give each its own file")
        set_field(self, "corpora", check_corpora(self.corpora))
        if self.pool_file is not None and self.pool_scope is not PoolScope.SESSION:
            raise UserError(f"pool_file is {self.pool_file!r}, but every call has a new pool; add pool_scope=session")
        check_kind("ablation", self.ablation, Ablation, "lp.Ablation, as in lp.Ablation(learn=False)")

    def shape(self) -> LookaheadConfig:
        """The step it takes: itself. Configs of other draft sources make one of their own settings."""
        return self

    @property
    def remembers(self) -> bool:
        """Whether texts leave something for later ones."""
        return self.pool_scope is PoolScope.SESSION or self.history is not None

    @property
    def draft_budget(self) -> int:
        """Draft tokens a step may take."""
        return self.guess_set_size * (self.ngram_size - 1)

    @property
    def depth(self) -> int:
        """Longest draft path, in tokens."""
        return self.draft_depth or self.ngram_size - 1


def check_corpora(given: Any) -> tuple[str, ...]:
    """Paths of corpora, as a config keeps them: it may be compared, and made from a list.

    Raises:
        ValueError: they are no paths, too many, or two have the same path or name.
    """
    remedy = "give a list of files of `lp corpus build`"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise UserError(f"corpora is {given!r}; {remedy}")
    for path in given:
        check_kind("corpora", path, (str, os.PathLike), "a list of paths")
    paths = tuple(str(path) for path in given)
    if len(paths) > MAX_CORPORA or len(set(paths)) < len(paths):
        raise UserError(f"corpora is {list(paths)}; give {MAX_CORPORA} at most, each once")
    if len({*map(corpus_name, paths)}) < len(paths):
        raise UserError(f"corpora is {list(paths)}, of which two have the same name but for the ending; rename one")
    return paths


def corpus_name(path: str) -> str:
    """What requests call the corpus of a file: the file's name without the ending."""
    return Path(path).stem


def chosen_corpora(given: Any, known: Sequence[str]) -> tuple[str, ...] | None:
    """The corpora that a text may look in.

    Args:
        given: their names; None: all.
        known: names of all that there are.

    Raises:
        ValueError: it is no list of names, or names another one.
    """
    if given is None:
        return None
    remedy = f"give names of these: {', '.join(known)}" if known else "leave it out: there are no corpora here"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise UserError(f"corpora is {given!r}; {remedy}")
    for name in given:
        if name not in known:
            raise UserError(f"corpora has {name!r}; {remedy}")
    return tuple(sorted({*given}))


def windowless(num_tokens: int) -> LookaheadConfig:
    """Steps of no window and of so many draft tokens, which may all be one path."""
    return LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=num_tokens, draft_depth=num_tokens)
