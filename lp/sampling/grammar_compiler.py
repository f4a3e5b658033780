"""Compiles JSON schemas, regular expressions and EBNF with llguidance (extra `grammar`) into masks of allowed tokens.

llguidance limits its work by counting it and not by a clock, so all ranks come to the same result.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lp.checks import check_int, check_kind
from lp.commands import install_command
from lp.errors import UserError
from lp.optional import is_installed
from lp.sampling.ebnf import ebnf_to_lark
from lp.sampling.grammar import WORD, GrammarError, Matcher
from lp.sampling.language_checks import byte_tokenizer
from lp.sampling.lark import Lark
from lp.sampling.regex_syntax import Node, lengths, raw, terminal, whole
from lp.sampling.schema_grammar import schema_to_lark
from lp.sampling.unique_items import UniqueMatcher, Words

MOST_COMPILED = 64  # grammars that are remembered
# A state is 1 to 2 kB; so many items take half a second at worst, with 49,152 tokens.
LIMITS = {"max_lexer_states": 50_000, "step_max_items": 10_000, "initial_lexer_fuel": 500_000, "verbose_errors": False}
MOST_FORCED = 4096  # characters that must follow: of more none are looked for, as every node of a tree would
MOST_DRAFTED = 256  # tokens that must follow: no step has room for more


class GrammarCompiler:
    """Compiles grammars for a model's generated text, and caches the most recently used ones.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: V, the number of tokens that the LM head scores.

    Raises:
        ValueError: llguidance is not installed, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        if not is_installed("llguidance"):
            raise UserError(f"a grammar needs llguidance; install the extra: {install_command('grammar')}")
        check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "the model's, as lp.load(...).tokenizer")
        vocabulary = check_int("vocabulary", vocabulary, 1, 2**31 - 1, "give model.config.vocab_size")
        self._vocabulary = vocabulary
        self._tokens = _tokens_of(tokenizer, vocabulary)
        self._compiled: OrderedDict[str, LLGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Mapping[str, Any] | str | bool) -> LLGrammar:
        """Make a grammar of the JSON values that a schema allows, written with one space after each comma and colon.

        No other white space is allowed, as a small model that may write white space anywhere may never stop doing so.

        Args:
            schema: a JSON schema, as a dict or as JSON text; True allows any JSON value.

        Raises:
            ValueError: the argument is no JSON schema, or has a keyword that can't be enforced exactly; the message
                names the keyword's place.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise UserError(f"json_schema is no JSON ({error}); mend it") from error
        return self._grammar("json_schema", text, lambda: schema_to_lark(text))

    def json(self) -> LLGrammar:
        """Make a grammar that allows any JSON value."""
        return self.json_schema(True)

    def regex(self, pattern: str) -> LLGrammar:
        """Make a grammar of the texts that a regular expression matches as a whole.

        Args:
            pattern: the regular expression, in the syntax of `lp.sampling.regex_syntax`: ECMA-262 with some limits.

        Raises:
            ValueError: the pattern is no regular expression, or has unsupported syntax.
        """
        check_kind("regex", pattern, str, "a regular expression as a string")
        return self._grammar("regex", pattern, lambda: _regex_to_lark(whole(pattern)))

    def ebnf(self, rules: str) -> LLGrammar:
        """Make a grammar from rules in EBNF, as llama.cpp's GBNF writes them.

        Args:
            rules: the rules, in the syntax of `lp.sampling.ebnf`. A text begins with the rule `root`.

        Raises:
            ValueError: the rules have an error or unsupported syntax.
        """
        check_kind("ebnf", rules, str, "rules as a string")
        return self._grammar("ebnf", rules, lambda: ebnf_to_lark(rules))

    def _grammar(self, kind: str, text: str, to_lark: Callable[[], Lark]) -> LLGrammar:
        key = f"{kind} {text}"
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        try:
            grammar = LLGrammar(self._tokens, self._vocabulary, to_lark(), key)
        except UserError as error:
            raise UserError(f"{kind} is not taken: {error}") from error
        except RecursionError:
            raise UserError(f"{kind} is not taken: it is nested too deep; write it with fewer levels") from None
        with self._lock:
            self._compiled[key] = grammar
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return grammar


def _regex_to_lark(node: Node) -> Lark:
    return Lark(f"start: T\nT: {terminal(node, raw)}", lengths(node)[0])


def _tokens_of(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Any:
    """llguidance's form of the vocabulary.

    Raises:
        ValueError: llguidance does not know how the tokenizer writes bytes.
    """
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"a grammar needs a fast tokenizer that writes bytes, which this one is not ({error})"
        ) from error


class _DeadEndError(GrammarError):
    """Raised where a grammar goes on with what the model has no token for."""


class LLGrammar:
    """A grammar compiled by llguidance, which makes a new matcher for each text that must follow it.

    Args:
        tokens: llguidance's form of the model's tokenizer.
        vocabulary: V, the number of tokens that the LM head scores.
        lark: the grammar in Lark syntax. If it can force very long texts, matchers propose no forced tokens as drafts.
        text: what the grammar was made from, such as "regex [a-z]+"; ranks compare it to check that they use one
            grammar.

    Raises:
        ValueError: the grammar is too large, or the model has no tokens for any text that follows it.
    """

    def __init__(self, tokens: Any, vocabulary: int, lark: Lark, text: str) -> None:
        self.text = text
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._forces = lark.longest <= MOST_FORCED
        options = "" if self._forces else '%llguidance {"no_forcing": true}\n'
        self._start = _started(tokens, options + lark.text)
        self._marked = _started(byte_tokenizer(), lark.marked) if lark.marked else None
        self._words = _words_of(tokens, vocabulary) if lark.marked else None
        if not self._start.is_accepting():
            mask = torch.zeros(-(-vocabulary // WORD), dtype=torch.int32)
            try:
                self.matcher([]).allowed(mask)
            except _DeadEndError:
                mask.zero_()
            if not mask.any():
                raise UserError("no text follows it that the model can write; mend it")

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Make a matcher that stands at the beginning of a text.

        Args:
            eos: ids of the EOS tokens; they are allowed wherever the grammar lets the text end.
        """
        matcher = _Matcher(self._start.deep_copy(), eos, [*self._tokens.eos_tokens], self._vocabulary, self._forces)
        if self._marked is None or self._words is None:
            return matcher
        return UniqueMatcher(matcher, self._marked.deep_copy(), self._words)


def _started(tokens: Any, lark: str) -> Any:
    """llguidance's matcher at the beginning of a text."""
    import llguidance

    matcher = llguidance.LLMatcher(tokens, lark, limits=llguidance.LLParserLimits(**LIMITS), log_level=0)
    _check(matcher)
    return matcher


@lru_cache(maxsize=4)
def _words_of(tokens: Any, vocabulary: int) -> Words:
    """The bytes of a vocabulary, which are read once."""
    return Words([tokens.decode_bytes([token]) for token in range(min(vocabulary, tokens.vocab_size))])


class _Matcher:
    """A matcher by llguidance, but for EOS tokens: those of a call are not always the tokenizer's, so it handles them.

    Args:
        matcher: llguidance's own, at the beginning of a text.
        eos: token ids that end the text, and are never within it.
        own: token ids that llguidance takes for ends.
        vocabulary: V.
        forces: whether forced tokens are looked for.
    """

    def __init__(self, matcher: Any, eos: Sequence[int], own: Sequence[int], vocabulary: int, forces: bool) -> None:
        self._matcher = matcher
        self._eos = {*eos}
        self._never = {*own} | self._eos
        self._words = -(-vocabulary // WORD)
        self._forces = forces
        self._ended = False

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._eos:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if token in self._never:
            return False
        taken = self._matcher.try_consume_tokens([token])
        _check(self._matcher)
        return bool(taken)

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    @property
    def ended(self) -> bool:
        return self._ended

    def allowed(self, mask: torch.Tensor) -> None:
        mask.zero_()
        if not self._ended and not self._matcher.is_stopped():
            words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
            mask[: self._words] = words[: self._words]
        _check(self._matcher)
        may_end = not self._ended and self._matcher.is_accepting()
        for token in self._never:
            word, bit = divmod(token, WORD)
            if word < self._words:
                flag = 1 << bit if bit < WORD - 1 else -(1 << bit)
                given = int(mask[word])
                mask[word] = given | flag if may_end and token in self._eos else given & ~flag

    def forced(self) -> list[int]:
        if not self._forces or self._ended or self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:MOST_DRAFTED]
        _check(self._matcher)
        return tokens


def _check(matcher: Any) -> None:
    """Raise what llguidance says of a grammar that goes beyond its limits; it is the same on every rank."""
    if matcher.is_error() and matcher.stop_reason() not in ("NoExtension", "NoExtensionBias"):
        error = str(matcher.get_error()).splitlines()[0]
        if error.startswith("NoExtension"):
            raise _DeadEndError("the grammar goes on with what the model has no token for; mend it")
        raise GrammarError(
            f"the grammar is too large or too hard to follow ({error}); write it with fewer repeats and alternatives"
        )
