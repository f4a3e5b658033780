"""Grammars of requests, compiled when the first one comes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lp.errors import UserError
from lp.sampling.grammar import Grammar, Matcher
from lp.sampling.grammar_bounds import is_followed_quickly
from lp.sampling.grammar_compiler import GrammarCompiler

KINDS = ("json_schema", "regex", "ebnf")
# Compiling takes time that grows with the third power of both: seconds at these limits, minutes at ten times as much.
MOST_CHARACTERS = 32768
MOST_LEVELS = 64
MOST_RULES = 400
MOST_COUNTED = 64  # properties of objects that have bounds of how many: time grows with the fourth power of an object's
# Of this thread's own time, so that a busy machine ends no text; hundreds of times what a usual schema takes.
LONGEST_MASK_S = 0.25


class Grammars:
    """Compiles grammars; from any thread.

    Args:
        tokenizer: of the model.
        vocabulary: of the LM head.
        ends_slow: a text fails whose grammar takes so long that all others wait for it. Not among ranks, each of which
            would decide by its own clock.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends_slow: bool = True) -> None:
        self._ends_slow = ends_slow
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None  # making one reads the whole vocabulary

    def grammar(self, kind: str, text: str) -> Grammar:
        """The grammar; compiled once, as the compiler remembers them. One that takes long keeps no other waiting.

        Args:
            kind: one of KINDS.
            text: the schema, the pattern or the rules.

        Raises:
            ValueError: it is too large, xgrammar does not take it, or is not installed.
        """
        check_size(kind, text)
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._vocabulary)
            compiler = self._compiler
        grammar: Grammar = getattr(compiler, kind)(text)
        return Watched(grammar) if self._ends_slow else grammar


class Watched:
    """A grammar, and a matcher of it, that a text can follow in time.

    Args:
        grammar: that.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.text = grammar.text
        self._grammar = grammar

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """At the beginning of a text that one of these tokens ends."""
        return _WatchedMatcher(self._grammar.matcher(eos))


class _WatchedMatcher:
    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.accept = matcher.accept
        self.rollback = matcher.rollback

    @property
    def ended(self) -> bool:
        return self._matcher.ended

    def allowed(self, mask: torch.Tensor) -> None:
        """As of the matcher.

        Raises:
            ValueError: it took too long.
        """
        with _in_time("which tokens may follow"):
            self._matcher.allowed(mask)

    def forced(self) -> list[int]:
        """As of the matcher.

        Raises:
            ValueError: it took too long.
        """
        with _in_time("which tokens must follow"):
            return self._matcher.forced()


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    began = time.thread_time()
    yield
    if (taken := time.thread_time() - began) > LONGEST_MASK_S:
        raise UserError(
            f"the grammar took {taken:.2f} s to say {what}, of at most {LONGEST_MASK_S:g}; write it with fewer repeats"
        )


def check_size(kind: str, text: str) -> None:
    """Refuse what would take minutes to compile, or to follow.

    Raises:
        ValueError: the limit.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{kind} has {len(text)} characters, of at most {MOST_CHARACTERS}; ask for less of the form")
    if kind == "json_schema":
        _check_schema(json.loads(text))
    if kind == "ebnf" and (rules := text.count("::=")) > MOST_RULES:
        raise UserError(f"{kind} has {rules} rules, of at most {MOST_RULES}; write it with fewer")
    if not is_followed_quickly(kind, text):
        raise UserError(f"{kind} has counts and loops within counts, which take long to follow; write it with fewer")


def _check_schema(schema: Any) -> None:
    levels = counted = 0
    inner = [schema]
    while inner := [each for each in inner if isinstance(each, dict | list)]:
        levels += 1
        for each in inner:
            if isinstance(each, dict) and {"minProperties", "maxProperties"} & each.keys():
                counted += len(properties) if isinstance(properties := each.get("properties"), dict) else 0
        inner = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    if levels > MOST_LEVELS:
        raise UserError(f"json_schema is nested {levels} levels deep, of at most {MOST_LEVELS}; name parts in $defs")
    if counted > MOST_COUNTED:
        raise UserError(
            f"json_schema has {counted} properties in objects with minProperties or maxProperties, of at most "
            f"{MOST_COUNTED}; leave these out, or name fewer"
        )
