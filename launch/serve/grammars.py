"""Grammars of requests, compiled when the first one comes."""

from __future__ import annotations

import threading

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError
from lp.sampling.grammar import Grammar
from lp.sampling.grammar_compiler import GrammarCompiler

KINDS = ("json_schema", "regex", "ebnf")
MOST_CHARACTERS = 32768  # compiling is bounded otherwise, too: this bounds what is read before


class Grammars:
    """Compiles grammars; from any thread.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: how many tokens the LM head has.
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
            ValueError: it is too large, has what is not taken, or llguidance is not installed.
        """
        if len(text) > MOST_CHARACTERS:
            raise UserError(
                f"{kind} has {len(text)} characters, of at most {MOST_CHARACTERS}; ask for less of the form"
            )
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._vocabulary)
            compiler = self._compiler
        grammar: Grammar = getattr(compiler, kind)(text)
        return grammar
