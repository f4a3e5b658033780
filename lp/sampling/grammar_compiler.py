"""Grammars by xgrammar (extra `grammar`): JSON schemas, regular expressions, EBNF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lp.checks import check_int, check_kind
from lp.errors import UserError
from lp.optional import is_installed
from lp.sampling.grammar import Matcher
from lp.sampling.grammar_bounds import check_ebnf, ebnf_is_bounded, regex_is_bounded, schema_is_bounded

CACHE_BYTES = 1 << 28  # of compiled grammars that are remembered
MOST_SPELLED = 1024  # characters of a forced text: no step has room for the tokens of more
MOST_SPELLINGS = 4096  # that are remembered: schemas force few, but a regular expression may force any number


class GrammarCompiler:
    """Makes grammars for one model.

    Args:
        tokenizer: of the model.
        vocabulary: V, of the LM head.

    Raises:
        ValueError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        if not is_installed("xgrammar"):
            raise UserError("a grammar needs xgrammar; install the extra: pip install '.[grammar]'")
        import xgrammar

        check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "the model's, as lp.load(...).tokenizer")
        vocabulary = check_int("vocabulary", vocabulary, 1, 2**31 - 1, "give model.config.vocab_size")
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)
        self._spelling = Spelling(tokenizer, info.decoded_vocab)

    def json_schema(self, schema: Mapping[str, Any] | str | bool) -> XGrammar:
        """JSON that follows a schema, with a space behind commas and colons and no other white space.

        A small model that may write any writes nothing else.

        Raises:
            ValueError: it is no schema.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise UserError(f"json_schema is no JSON ({error}); mend it") from error
        return self._compiled(
            "json_schema",
            text,
            lambda: self._compiler.compile_json_schema(text, any_whitespace=False),
            schema_is_bounded(text),
        )

    def json(self) -> XGrammar:
        """Any JSON."""
        return self._compiled("json", "", self._compiler.compile_builtin_json_grammar, True)

    def regex(self, pattern: str) -> XGrammar:
        """What a regular expression matches.

        Raises:
            ValueError: it is none.
        """
        check_kind("regex", pattern, str, "a regular expression as a string")
        return self._compiled(
            "regex", pattern, lambda: self._compiler.compile_regex(pattern), regex_is_bounded(pattern)
        )

    def ebnf(self, rules: str) -> XGrammar:
        """What follows rules in EBNF (GBNF), from `root` on.

        Raises:
            ValueError: they are none, or xgrammar would end the process.
        """
        check_kind("ebnf", rules, str, "rules as a string")
        check_ebnf(rules)
        return self._compiled("ebnf", rules, lambda: self._compiler.compile_grammar(rules), ebnf_is_bounded(rules))

    def _compiled(self, kind: str, text: str, compile: Callable[[], Any], bounded: bool) -> XGrammar:
        try:
            return XGrammar(compile(), f"{kind} {text}", self._spelling if bounded else None)
        except Exception as error:  # xgrammar raises several types of its own
            raise UserError(f"{kind} is not one that xgrammar takes ({error}); mend it") from error


class Spelling:
    """The tokens that are likely to spell a text within another one.

    Args:
        tokenizer: of the model.
        vocabulary: the bytes of every token; empty of those that stand for none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tokens_of: dict[str, list[int]] = {}

    def tokens(self, text: str) -> list[int]:
        """The tokens of its beginning; none where the tokenizer takes the text apart differently."""
        text = text[:MOST_SPELLED]
        if text not in self._tokens_of:
            if len(self._tokens_of) == MOST_SPELLINGS:
                self._tokens_of.clear()
            # Some tokenizers put a space before a text, but not behind a line's end.
            self._tokens_of[text] = self._behind("", text) or self._behind("\n", text)
        return self._tokens_of[text]

    def _behind(self, context: str, text: str) -> list[int]:
        tokens = list(self._tokenizer(context + text, add_special_tokens=False, verbose=False)["input_ids"])
        while tokens and b"".join(self._vocabulary[token] for token in tokens) != text.encode():
            del tokens[0]
        return tokens


class XGrammar:
    """A compiled grammar.

    Args:
        compiled: by xgrammar.
        text: what it was made from.
        spelling: of forced characters; None where none are looked for, since they may be without end.
    """

    def __init__(self, compiled: Any, text: str, spelling: Spelling | None) -> None:
        self.text = text
        self._compiled = compiled
        self._spelling = spelling

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """At the beginning of a text that one of these tokens ends."""
        import xgrammar

        return _Matcher(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=[*eos]), self._spelling)


class _Matcher:
    def __init__(self, matcher: Any, spelling: Spelling | None) -> None:
        self._matcher = matcher
        self._spelling = spelling

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    def allowed(self, mask: torch.Tensor) -> None:
        self._matcher.fill_next_token_bitmask(mask[None], 0)

    def forced(self) -> list[int]:
        if self._spelling is None or self.ended:
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the text ends within a character, and only bytes follow
            return []
        return self._spelling.tokens(text) if text else []
