"""Compiles the grammars by which requests constrain the generated text."""

from __future__ import annotations

import threading

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError
from lp.sampling.grammar import Grammar
from lp.sampling.grammar_compiler import GrammarCompiler

KINDS = ("json_schema", "regex", "ebnf")
MOST_CHARACTERS = 32768  # compiling is bounded otherwise, too: this bounds what is read before


class Grammars:
    """Compiles JSON schemas, regular expressions and EBNF rules into grammars that the engine's sampling follows.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: number of tokens that the LM head scores, the size of the logits' last dimension.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None  # making one reads the whole vocabulary

    def grammar(self, kind: str, text: str) -> Grammar:
        """Compile a grammar, or return it from the compiler's cache.

        Any thread may call this; a grammar that takes long to compile does not block other threads.

        Args:
            kind: "json_schema", "regex" or "ebnf".
            text: the grammar's source: a schema as JSON, a regular expression, or rules (GBNF); at most MOST_CHARACTERS
                characters.

        Returns:
            The grammar, for `lp.Engine.submit`.

        Raises:
            ValueError: the text is too large, is wrong, or uses syntax that is not supported; or llguidance is not
                installed.
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
