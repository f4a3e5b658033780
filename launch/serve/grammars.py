"""Grammars of requests, compiled when the first one comes."""

from __future__ import annotations

import json
import threading
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError
from lp.sampling.grammar import Grammar
from lp.sampling.grammar_compiler import GrammarCompiler

KINDS = ("json_schema", "regex", "ebnf")
# Compiling takes time that grows with the third power of both: seconds at these limits, minutes at ten times as much.
MOST_CHARACTERS = 32768
MOST_LEVELS = 64


class Grammars:
    """Compiles grammars; from any thread.

    Args:
        tokenizer: of the model.
        vocabulary: of the LM head.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
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
        return grammar


def check_size(kind: str, text: str) -> None:
    """Refuse what would take minutes to compile.

    Raises:
        ValueError: the limit.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{kind} has {len(text)} characters, of at most {MOST_CHARACTERS}; ask for less of the form")
    if kind == "json_schema" and (levels := _levels(json.loads(text))) > MOST_LEVELS:
        raise UserError(f"{kind} is nested {levels} levels deep, of at most {MOST_LEVELS}; name parts in $defs")


def _levels(value: Any) -> int:
    """How deep objects and lists are nested."""
    levels = 0
    inner = [value]
    while inner := [each for each in inner if isinstance(each, dict | list)]:
        levels += 1
        inner = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    return levels
