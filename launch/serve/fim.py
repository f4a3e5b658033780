"""Fill-in-the-middle: prompts from which a model writes the text between a given prefix and a given suffix.

Model families have different special tokens for this. The families below are recognized by the tokens in the
vocabulary. Sources: the model cards and tokenizers of CodeLlama, StarCoder, StarCoder2, DeepSeek-Coder, Qwen2.5-Coder,
CodeGemma and Codestral; for pieces of other files, the repository formats in their papers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FimFormat:
    """A model family's fill-in-the-middle format: the special tokens around a file's gap, and their order.

    Args:
        prefix: token before the text that precedes the gap, such as "<|fim_prefix|>".
        suffix: token before the text that follows the gap.
        middle: token at the prompt's end, after which the model writes the filling. None: the prompt ends with the
            prefix, which the model continues.
        suffix_first: whether the prompt has the suffix before the prefix.
        file: token that begins another file, given before the file with the gap; the other file's name, a line end and
            its text follow. None: other files are given as plain text.
        ends: tokens that end the filling, besides the model's EOS.
        glue: a character that is put before a text to encode it, and whose tokens are then dropped. It keeps tokenizers
            from adding a space to the text, as some do before every text. None: the tokenizer adds no space.
    """

    prefix: str
    suffix: str
    middle: str | None = None
    suffix_first: bool = False
    file: str | None = None
    ends: tuple[str, ...] = ()
    glue: str | None = None

    @property
    def tokens(self) -> list[str]:
        """Special tokens that a vocabulary must have for this format: `prefix`, `suffix`, and `middle` if it is set."""
        return [token for token in (self.prefix, self.suffix, self.middle) if token is not None]

    def texts(self, prompt: str) -> tuple[str, str] | None:
        """Split a prompt that a client has written in this format itself, such as "<PRE> before <SUF>after <MID>".

        Args:
            prompt: the prompt as text. If a token begins with "▁", as CodeLlama's do, the text has a space in its
                place.

        Returns:
            The text before the gap and the text after it; None if the prompt is not in this format.
        """
        front, behind, end = (re.sub("^▁", " ", token or "") for token in (self.prefix, self.suffix, self.middle))
        first, second = (behind, front) if self.suffix_first else (front, behind)
        start = first.strip()
        if not (prompt.startswith(start) and prompt.endswith(end) and len(prompt) >= len(start) + len(end)):
            return None
        inner = prompt[len(start) : len(prompt) - len(end)]
        if self.glue and second in inner.removeprefix(" "):
            inner = inner.removeprefix(" ")
        one, found, other = inner.rpartition(second)
        if not found:
            return None
        return (other, one) if self.suffix_first else (one, other)


# In this order: CodeGemma's three tokens are Qwen's too.
FAMILIES = {
    "codellama": FimFormat(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",), glue="☺"),
    "deepseek-coder": FimFormat(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"),
    "codegemma": FimFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_separator|>",
        ends=("<|file_separator|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ),
    "qwen2.5-coder": FimFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_sep|>",
        ends=("<|endoftext|>", "<|file_sep|>", "<|repo_name|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_pad|>"),
    ),
    "starcoder": FimFormat(
        prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>", ends=("<|endoftext|>", "<file_sep>")
    ),
    "santacoder": FimFormat(prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>"),
    "codestral": FimFormat(prefix="[PREFIX]", suffix="[SUFFIX]", suffix_first=True),
}
FILE_TOKEN = {"codegemma": "<|file_separator|>"}  # a family that its gap's tokens do not tell from another


@dataclass(frozen=True)
class Extra:
    """A piece of another file, put into a fill-in-the-middle prompt before the file with the gap.

    Args:
        name: the file's name.
        text: the piece.
    """

    name: str
    text: str


class FimPrompts:
    """Builds fill-in-the-middle prompts for one model, whose continuation of such a prompt is the text for the gap.

    Args:
        tokenizer: the model's tokenizer.
        format: the special tokens of the model's family, and their order.

    Attributes:
        ends: ids of the format's tokens that end a filling.

    Raises:
        ValueError: the vocabulary lacks a special token that the format needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: FimFormat) -> None:
        vocabulary = tokenizer.get_vocab()
        for token in format.tokens:
            if token not in vocabulary:
                raise UserError(
                    f"fim names the token {token!r}, which the model's vocabulary lacks; name one of its own, or leave "
                    "fim out"
                )
        self.format = format
        self._tokenizer = tokenizer
        self._ids = vocabulary
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        known = {token for token in (*format.tokens, *format.ends, format.file) if token in vocabulary}
        longest_first = sorted(filter(None, added | known), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)))
        self.ends = [vocabulary[token] for token in format.ends if token in vocabulary]

    def prompt(
        self, prefix: str, suffix: str, room: int | None, extras: Sequence[Extra] = ()
    ) -> tuple[list[int], bool]:
        """Build the prompt for one gap, and cut it if it would be too long.

        Args:
            prefix: text of the file before the gap.
            suffix: text of the file after the gap.
            room: most tokens that the prompt may have; None: no limit. If the texts are too long, the prefix keeps its
                end, and the suffix its beginning. The suffix gets a quarter of the room, or more if the prefix is
                short. Other files get what the prefix and the suffix leave, and keep their end.
            extras: pieces of other files, the most relevant one last.

        Returns:
            Token ids of the prompt, and whether anything was cut.
        """
        format = self.format
        before, after = self._encode(prefix), self._encode(suffix, format.glue)
        others = [token for extra in extras for token in self._extra(extra)]
        start = [self._tokenizer.bos_token_id] if self._adds_bos else []
        cut = False
        if room is not None:
            left = max(room - len(format.tokens) - len(start), 2)
            for_suffix = min(len(after), max(left // 4, left - len(before)))
            for_prefix = min(len(before), left - for_suffix)
            for_others = left - for_prefix - for_suffix
            cut = len(after) > for_suffix or len(before) > for_prefix or len(others) > for_others
            after = after[:for_suffix]
            before = before[len(before) - for_prefix :]
            others = others[max(len(others) - for_others, 0) :] if for_others > 0 else []
        front = [self._ids[format.prefix], *before]
        behind = [self._ids[format.suffix], *after]
        gap = [*behind, *front] if format.suffix_first else [*front, *behind]
        middle = [] if format.middle is None else [self._ids[format.middle]]
        return [*start, *others, *gap, *middle], cut

    def is_gap(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt asks to fill a gap: it has all special tokens of the format.

        Args:
            prompt: token ids of the prompt.
        """
        return {self._ids[token] for token in self.format.tokens} <= set(prompt)

    def ends_of(self, prompt: Sequence[int]) -> list[int]:
        """Find the tokens that must end the text generated for a prompt, besides the model's EOS.

        Clients that write the fill-in-the-middle markers, such as `<|fim_prefix|>`, into the prompt themselves seldom
        give stop strings. Without any, the model might write "<|file_sep|>" after the filling, and continue with
        another file.

        Args:
            prompt: token ids of the prompt.

        Returns:
            Token ids of the format's `ends` if the prompt asks to fill a gap, else an empty list.
        """
        return self.ends if self.is_gap(prompt) else []

    @property
    def _adds_bos(self) -> bool:
        bos = self._tokenizer.bos_token_id
        return bos is not None and list(self._tokenizer("x")["input_ids"])[:1] == [bos]

    def _extra(self, extra: Extra) -> list[int]:
        if self.format.file is not None and self.format.file in self._ids:
            return [self._ids[self.format.file], *self._encode(f"{extra.name}\n{extra.text}\n")]
        return self._encode(f"{extra.text}\n\n")

    def _encode(self, text: str, glue: str | None = None) -> list[int]:
        """Token ids of a file's text; a special token's name in it is text, as its letters are encoded in two parts."""
        starts = [0, *(match.start() + 1 for match in self._names.finditer(text)), len(text)]
        first, *others = (text[start:end] for start, end in itertools.pairwise(starts))
        return self._encode_part(first, glue) + [
            id for part in others for id in self._encode_part(part, self.format.glue)
        ]

    def _encode_part(self, text: str, glue: str | None) -> list[int]:
        if glue is None:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        alone, glued = self._encode_part(glue, None), self._encode_part(glue + text, None)
        return glued[len(alone) :] if glued[: len(alone)] == alone else self._encode_part(text, None)


def fim_format(tokenizer: PreTrainedTokenizerBase, given: FimFormat | None) -> FimFormat | None:
    """Choose the fill-in-the-middle format for a model.

    Args:
        tokenizer: the model's tokenizer.
        given: a format from the user's settings, which is returned as it is; None: recognize a known model family by
            its tokens.

    Returns:
        The format; None if the vocabulary has no known family's tokens, so that the model can't fill gaps.
    """
    if given is not None:
        return given
    vocabulary = tokenizer.get_vocab()
    for name, family in FAMILIES.items():
        own = FILE_TOKEN.get(name)
        if all(token in vocabulary for token in family.tokens) and (own is None or own in vocabulary):
            return family
    return None


def lacking_family(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Recognize a fill-in-the-middle prompt for another model family, whose tokens this model would read as plain text.

    Args:
        prompt: the client's prompt, as text.
        tokenizer: the model's tokenizer.

    Returns:
        Name of the other family, such as "codellama"; None if the prompt is in no family's format, or the vocabulary
        has that family's tokens.
    """
    written = [name for name, family in FAMILIES.items() if family.texts(prompt) is not None]
    vocabulary = tokenizer.get_vocab() if written else {}  # made anew, in tens of milliseconds
    return next((name for name in written if not all(token in vocabulary for token in FAMILIES[name].tokens)), None)


def given_format(values: dict[str, object]) -> FimFormat | None:
    """Build a fill-in-the-middle format from the user's settings `fim.*`.

    Args:
        values: settings by name, without "fim."; names that are no fields of FimFormat are ignored, and None, [] and
            False count as not set.

    Returns:
        The format; None if nothing is set.

    Raises:
        ValueError: something is set, but the prefix token or the suffix token is not.
    """
    known = {item.name for item in fields(FimFormat)}
    chosen = {name: value for name, value in values.items() if name in known and value not in (None, [], False)}
    if not chosen:
        return None
    for name in ("prefix", "suffix"):
        if name not in chosen:
            raise UserError(f"fim.{name} is not given, but fim.{next(iter(chosen))} is; give the model's {name} token")
    if isinstance(ends := chosen.get("ends"), list):
        chosen["ends"] = tuple(ends)
    return FimFormat(**chosen)  # type: ignore[arg-type]
