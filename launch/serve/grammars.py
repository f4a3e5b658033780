"""Grammars of requests, compiled when the first one comes."""

from __future__ import annotations

import threading
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp.sampling.grammar import Grammar
from lp.sampling.grammar_compiler import GrammarCompiler

KINDS = ("json", "json_schema", "regex", "ebnf")


class Grammars:
    """Compiles grammars; from any thread.

    Args:
        tokenizer: of the model.
        vocabulary: of the LM head.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None  # making one reads the whole vocabulary

    def grammar(self, kind: str, text: str) -> Grammar:
        """The grammar; compiled once, as the compiler remembers them.

        Args:
            kind: one of KINDS.
            text: the schema, the pattern or the rules; empty for any JSON.

        Raises:
            ValueError: xgrammar does not take it, or is not installed.
        """
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._vocabulary)
            compiler: Any = self._compiler
            return compiler.json() if kind == "json" else getattr(compiler, kind)(text)
