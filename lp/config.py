"""Configuration of decoding: frozen dataclasses that check themselves. Knows no hydra.

`window_size` W, `ngram_size` N and `guess_set_size` G are the paper's (arXiv 2402.02057, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from lp.checks import check_choice, check_count, check_real, set_field

MAX_STEP_TOKENS = 8192  # of a step: its mask has their square


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """The shape of a lookahead step, or with `adaptive` the bounds of it.

    Args:
        window_size: W, columns of the window; 0 leaves only candidates.
        ngram_size: N, tokens of an n-gram; the window has N - 1 rows.
        guess_set_size: G; candidates get G x (N - 1) rows a step, 0 verifies none.
        candidate_depth: longest candidate path in tokens, beyond N - 1 by chaining n-grams; None is the paper's N - 1.
        prompt_ngrams: the prompt's n-grams enter the pool before the first step.
        prompt_logits: with prompt_ngrams, the logits of the prompt's rows enter it too; they pass the LM head for it,
            which `adaptive` finds too dear.
        output_ngrams: the n-grams of accepted text enter the pool.
        window_ngrams: the window's n-grams enter the pool.
        position_guesses: what rows read is remembered for its position.
        recycled: K, logits kept of every row that is read, to guess again from; 0 keeps none.
        renoise: under sampling recycled logits guess under the noise of the position they guess for.
        learn: the weights of the pool's sources follow what turns out true.
        pool_scope: "session" keeps the pool from one call of a decoder to its next; what a prompt's tokens are does
            not change, which candidates they get does.
        pool_mib: most memory of the pool, MiB; the oldest makes room.
        pool_file: with "session", a safetensors file to begin with, if it exists, and to keep up to date.
        window_noise: under sampling the window iterates under the sampler's own noise; False guesses greedily.
        warmup_steps: first steps that verify nothing and read no n-gram, as the reference code's N - 1; for ablations.
        kv_sync: how ranks get each other's accepted KV.
        adaptive: W and G are bounds, within which every step takes what pays on this machine.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    window_size: int = 16
    ngram_size: int = 2
    guess_set_size: int = 104
    candidate_depth: int | None = 96
    prompt_ngrams: bool = True
    prompt_logits: bool = True
    output_ngrams: bool = True
    window_ngrams: bool = True
    position_guesses: bool = True
    recycled: int = 16
    renoise: bool = True
    learn: bool = True
    pool_scope: PoolScope = PoolScope.REQUEST
    pool_mib: int = 16
    pool_file: str | None = None
    window_noise: bool = True
    warmup_steps: int = 0
    kv_sync: KVSync = KVSync.RECOMPUTE
    adaptive: bool = False

    def __post_init__(self) -> None:
        check_count(self, "window_size", 0, 4096, "try W=16, or 0 for no window", "W")
        check_count(self, "ngram_size", 2, 64, "try N=2", "N")
        check_count(self, "guess_set_size", 0, 4096, "try G=104, or 0 for no candidates", "G")
        if self.candidate_depth is not None:
            check_count(self, "candidate_depth", 1, 1024, "leave it null for N - 1")
        if (self.window_size + self.guess_set_size) * (self.ngram_size - 1) > MAX_STEP_TOKENS:
            shape = f"W={self.window_size}, N={self.ngram_size}, G={self.guess_set_size}"
            raise ValueError(
                f"a step of {shape} has (W + G) x (N - 1) rows, more than {MAX_STEP_TOKENS}; lower one of them"
            )
        check_count(self, "recycled", 0, 32, "try 16, or 0 for none", "K")
        check_count(self, "pool_mib", 1, 1 << 16, "try 16, or 128 for a session")
        check_choice(self, "pool_scope", PoolScope)
        if self.pool_file is not None and self.pool_scope is not PoolScope.SESSION:
            raise ValueError(
                f"pool_file is {self.pool_file!r}, but the pool is made anew for every call; add pool_scope=session"
            )
        check_count(self, "warmup_steps", 0, math.inf, "leave it 0")
        check_choice(self, "kv_sync", KVSync)

    def shape(self) -> LookaheadConfig:
        """The step it takes, which is what it says; the peers' configs make one of their own settings."""
        return self

    @property
    def draft_budget(self) -> int:
        """Candidate rows a step may take."""
        return self.guess_set_size * (self.ngram_size - 1)

    @property
    def depth(self) -> int:
        """Longest candidate path, in tokens."""
        return self.candidate_depth or self.ngram_size - 1


def _windowless(rows: int, kv_sync: KVSync) -> LookaheadConfig:
    """No window, and so many candidate rows, which may all be one path."""
    return LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=rows, candidate_depth=rows, kv_sync=kv_sync)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig:
    """Prompt lookup as transformers has it: copy what followed the last tokens before.

    Args:
        max_matching_ngram: longest run of last tokens to look for; shorter ones are tried after it.
        num_tokens: tokens copied, which is the candidate rows of a step.
        kv_sync: how ranks get each other's accepted KV.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    max_matching_ngram: int = 2
    num_tokens: int = 10
    kv_sync: KVSync = KVSync.RECOMPUTE

    def __post_init__(self) -> None:
        check_count(self, "max_matching_ngram", 1, 64, "try 2")
        check_count(self, "num_tokens", 1, 1024, "try 10")
        check_choice(self, "kv_sync", KVSync)

    def shape(self) -> LookaheadConfig:
        """The step it takes."""
        return _windowless(self.num_tokens, self.kv_sync)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperConfig:
    """The paper's own lookahead: candidates keyed by one token, N - 1 deep, side by side.

    Args:
        window_size, ngram_size, guess_set_size: W, N, G.
        prompt_ngrams: the n-grams of the prompt and of the accepted text enter the pool ("prompt as reference").
        warmup_steps: first steps that verify nothing and read no n-gram, as the reference code's N - 1.
        kv_sync: how ranks get each other's accepted KV.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    prompt_ngrams: bool = True
    warmup_steps: int = 0
    kv_sync: KVSync = KVSync.RECOMPUTE

    def __post_init__(self) -> None:
        shape = self.shape()
        for item in fields(self):
            set_field(self, item.name, getattr(shape, item.name))

    def shape(self) -> LookaheadConfig:
        """The step it takes."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return LookaheadConfig(**own, output_ngrams=self.prompt_ngrams, candidate_depth=None, recycled=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Token recycling (arXiv 2408.08696): a static tree over the successors that every token was last seen with.

    Args:
        successors: kept of every token.
        nodes: of the tree, which is the candidate rows of a step.
        kv_sync: how ranks get each other's accepted KV.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    successors: int = 8
    nodes: int = 80
    kv_sync: KVSync = KVSync.RECOMPUTE

    def __post_init__(self) -> None:
        check_count(self, "successors", 1, 256, "try 8")
        check_count(self, "nodes", 1, 1024, "try 80")
        check_choice(self, "kv_sync", KVSync)

    def shape(self) -> LookaheadConfig:
        """The step it takes."""
        return _windowless(self.nodes, self.kv_sync)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Suffix decoding as arctic-inference has it: continue as the text did behind its last tokens, by frequency.

    Args:
        max_tree_depth: tokens of the longest path in the tree: a match and what follows it.
        max_tokens: most tokens proposed, which is the candidate rows of a step.
        max_spec_factor, max_spec_offset: a match of m tokens may propose max_spec_factor x m + max_spec_offset.
        min_token_prob: a token rarer than this behind the match, by its path's frequency, is not proposed.
        tree: propose a tree, best first; False the likeliest path.
        kv_sync: how ranks get each other's accepted KV.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    max_tree_depth: int = 64
    max_tokens: int = 32
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    tree: bool = False
    kv_sync: KVSync = KVSync.RECOMPUTE

    def __post_init__(self) -> None:
        check_count(self, "max_tree_depth", 2, 4096, "try 64")
        check_count(self, "max_tokens", 1, 1024, "try 32")
        set_field(self, "max_spec_factor", check_real("max_spec_factor", self.max_spec_factor, 0, 1024, "try 1.0"))
        set_field(self, "max_spec_offset", check_real("max_spec_offset", self.max_spec_offset, -1024, 1024, "try 0.0"))
        set_field(self, "min_token_prob", check_real("min_token_prob", self.min_token_prob, 0, 1, "try 0.1"))
        if not isinstance(self.tree, bool):
            raise ValueError(f"tree is {self.tree!r}; it must be true or false; false proposes a path")
        check_choice(self, "kv_sync", KVSync)

    def shape(self) -> LookaheadConfig:
        """The step it takes."""
        return _windowless(self.max_tokens, self.kv_sync)
