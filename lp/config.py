"""Configuration of decoding: frozen dataclasses that check their values when they are made, without Hydra.

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

DEFAULT_TIMEOUT_S = 120.0  # seconds for which ranks wait for each other
DEFAULT_SETUP_TIMEOUT_S = 1800.0  # seconds while ranks compile and capture, which may take one of them minutes
MAX_STEP_TOKENS = 8192  # tokens that one rank may compute in a step: the attention mask has their square
MOST_SHOWN = 80  # characters of a value in a message
MAX_CORPORA = 4  # corpora that a pool may look in
MAX_SHARED_TOKENS = 1 << 16  # tokens of a step with a fixed shape, which ranks divide
# Defaults of W, N and G. With an adaptive config, W and G are bounds for each rank: together 200 tokens a step, about
# as many as a GPU computes in the time in which it reads the weights once.
FIXED_SHAPE = {"window_size": 16, "ngram_size": 2, "guess_set_size": 104}
ADAPTIVE_SHAPE = FIXED_SHAPE | {"guess_set_size": 184}


class KVSync(StrEnum):
    """How a rank gets the KV of accepted tokens that another rank computed; a switch to compare the two ways.

    "recompute": the rank computes those tokens again, along with its next step. "broadcast": the other rank sends the
    KV.
    """

    RECOMPUTE = "recompute"
    BROADCAST = "broadcast"


class PoolScope(StrEnum):
    """How long the n-gram pool remembers: for one text ("request"), or for a decoder's later texts, too ("session")."""

    REQUEST = "request"
    SESSION = "session"


class Capture(StrEnum):
    """How the kernels of a decode step are launched.

    "off": one by one. "graph": as a CUDA graph for a fixed number of tokens, captured once and replayed. "compile": as
    code from torch.compile for fixed numbers of tokens. "auto": "graph" on a GPU where it is possible, else "off".
    """

    AUTO = "auto"
    OFF = "off"
    GRAPH = "graph"
    COMPILE = "compile"


class Exact(StrEnum):
    """How exactly lookahead decoding repeats plain decoding.

    "tokens": the same tokens, except where two logits differ by no more than rounding. "bitwise": the same logits, bit
    for bit, at a cost. "auto": "tokens".
    """

    AUTO = "auto"
    TOKENS = "tokens"
    BITWISE = "bitwise"


class KVDtype(StrEnum):
    """How a KV cache stores keys and values.

    "auto": in the model's dtype. "int8" and "fp8": in one byte a value, with a scale for each head and token.
    """

    AUTO = "auto"
    INT8 = "int8"
    FP8 = "fp8"

    @classmethod
    def of(cls, value: str) -> KVDtype:
        """Convert the name of a dtype, such as "int8", to the enum's member.

        Args:
            value: the name.

        Raises:
            ValueError: there is no such member; names the choices.
        """
        if value not in list(cls):
            raise UserError(f"kv_dtype is {value!r}; it must be one of {', '.join(cls)}")
        return cls(value)


_RESOLVED: Any = None  # default of a field whose value __post_init__ chooses


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Switches for parts of lookahead decoding, to measure what each part is worth; not for normal use.

    The pool is the memory of n-grams and logits that draft tokens come from. By default all parts of the method are on.

    Args:
        prompt_ngrams: put the n-grams of the prompt into the pool before the first step.
        prompt_logits: with prompt_ngrams, put the prompt's top-k logits into the pool too. They cost a pass through the
            LM head: an adaptive config takes those of the last 1,024 tokens, and only where a step of 64 tokens takes
            at most two plain steps, as on a GPU.
        output_ngrams: put the n-grams of the generated text into the pool.
        window_ngrams: put the n-grams of the lookahead window into the pool.
        position_guesses: remember the tokens that a step's nodes (draft tokens and window guesses) sample, as guesses
            for the positions they were sampled for.
        num_logits: K, how many top-k logits of each sampled node the pool stores, to guess other tokens from; 0: none.
        renoise: if the text is sampled, guess from stored logits with the noise that the guessed position will have.
        learn: adapt to the text, by every token, how far the pool trusts each of its kinds of memory.
        window_noise: if the text is sampled, sample the window's guesses under the sampler's noise, too; False:
            greedily.
        warmup_steps: number of first steps that verify no drafts and read no n-grams; the paper's code has N - 1.
        kv_sync: how a rank gets the KV of accepted tokens that another rank computed.

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
    """Settings of lookahead decoding: the size of its steps, and where its draft tokens come from.

    If W, N or G is given, every step has that fixed size. If none is, the config is adaptive: each step takes as many
    tokens as pay on this machine, up to bounds. This is decided once, when the config is made; `dataclasses.replace`
    keeps `adaptive` as it was decided. The pool is the memory of n-grams and logits that draft tokens come from.

    Args:
        window_size: W, columns of the lookahead window; 0: no window, draft tokens alone. Default 16.
        ngram_size: N, tokens of an n-gram; the window has N - 1 levels. Default 2.
        guess_set_size: G; a step has at most G x (N - 1) draft tokens; 0: none. Default 104, or 184 if adaptive, which
            with the window makes at most 200 tokens a step on each rank.
        draft_depth: most draft tokens in a row, which chained n-grams draft; None: N - 1, as in the paper.
        pool_scope: "request": each text begins with an empty pool. "session": it begins with the pool that earlier
            texts of the decoder left; that changes the draft tokens, but no generated token.
        pool_mib: most memory of the pool, MiB; the oldest entries make room for new ones.
        pool_file: with "session", a safetensors file to read the pool from, if it exists, and to write it to after each
            text; None for none.
        pool_model_ngrams: a file of `lp ngrams`, which has the tokens that the model tends to write after 1 to 3 given
            tokens, for drafts where the pool knows nothing. "auto": the file beside the model, if there is one; "off":
            none.
        history: a file that each text is added to when it ends (the generated tokens, and the end of the prompt); it is
            created if missing. Where the newest tokens of a later text occur in the file, the tokens that followed
            there become draft tokens. None: nothing is kept.
        corpora: files of `lp corpus`, at most 4, checked for changes as each text begins. Where the newest
            tokens of a text occur in a corpus, the tokens that follow there become draft tokens.
        ablation: parts of the method to leave out, to measure what each is worth.
        adaptive: whether W and G are bounds of each rank's step, whose size is then chosen by what pays. None: True if
            none of W, N and G is given; once the config is made it is never None.

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
        """The shape of decode steps as a LookaheadConfig: this config itself.

        Configs of other draft sources have this method too, and derive a LookaheadConfig.
        """
        return self

    @property
    def remembers(self) -> bool:
        """Whether draft tokens may come from earlier texts: from a session's n-gram pool, or from a history file."""
        return self.pool_scope is PoolScope.SESSION or self.history is not None

    @property
    def draft_budget(self) -> int:
        """Most draft tokens in a step: G x (N - 1)."""
        return self.guess_set_size * (self.ngram_size - 1)

    @property
    def depth(self) -> int:
        """Most draft tokens in a row, one continuing the other: `draft_depth`, or N - 1 if that is None."""
        return self.draft_depth or self.ngram_size - 1


def check_corpora(given: Any) -> tuple[str, ...]:
    """Check the argument `corpora` of a config (files to draft from), and convert its paths to a tuple of strings.

    Args:
        given: a list or tuple of paths of corpus files.

    Raises:
        ValueError: a value is no path, there are more than 4, or two have the same path or the same name.
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
        raise UserError(f"corpora is {list(paths)}: two have one name, that of the file without the ending; rename one")
    return paths


def corpus_name(path: str) -> str:
    """Name by which requests choose a corpus: its file's name without the ending.

    Args:
        path: path of the file, such as "/data/docs.corpus", whose corpus is "docs".
    """
    return Path(path).stem


def chosen_corpora(given: Any, known: Sequence[str]) -> tuple[str, ...] | None:
    """Check a request's choice of corpora that its draft tokens may come from.

    Args:
        given: names of corpora; None: the request may use all.
        known: names of the decoder's corpora.

    Returns:
        The chosen names, sorted and without repetition; None: all.

    Raises:
        ValueError: the choice is no list of names, or has a name that is not known.
    """
    if given is None:
        return None
    remedy = f"give names of these: {', '.join(known)}" if known else "leave it out: there are no corpora here"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise UserError(f"corpora is {repr(given)[:MOST_SHOWN]}; {remedy}")
    for name in given:
        if name not in known:
            raise UserError(f"corpora has {repr(name)[:MOST_SHOWN]}; {remedy}")
    return tuple(sorted({*given}))


def windowless(num_tokens: int) -> LookaheadConfig:
    """Make the config of steps without a lookahead window, for draft sources that only propose draft tokens.

    Args:
        num_tokens: most draft tokens in a step; all of them may form a single path.
    """
    return LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=num_tokens, draft_depth=num_tokens)
