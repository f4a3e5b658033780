"""Text is a function of the tokens: however they come, as the tokenizers library and a UTF-8 decoder have it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from launch.text.decoder_steps import BYTE_OF, decoder_steps
from launch.text.detokenizer import Detokenizer, Vocabulary, decoded
from lp.models.loader import DEMO_MODEL
from tests.support.tokenizers_of import BYTES, DECODERS, drawn_decoder, drawn_tokens, tokenizer_with

BYTE_TOKENS = {name: byte for byte, name in enumerate(BYTES)}


HOLDS_BACK = ["albert", "bytes-strip", "ctc", "strip-text-end", "word-ends"]
HOLDS_BACK += ["replace-bytes", "replace-text", "replace-regex-text"]


def in_steps(vocabulary: Vocabulary, prompt: Sequence[int], tokens: Sequence[int], sizes: Sequence[int]) -> str:
    """The text of tokens that come in steps of these sizes."""
    detokenizer, text, left = Detokenizer(vocabulary, prompt), "", [*tokens]
    for size in itertools.cycle(sizes):
        if not left:
            return text + detokenizer.flush()
        text += detokenizer.push(left[:size])
        left = left[size:]
    return text


def reference(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    """The library's text, where bytes that are no character are those of the character that stands for such.

    The library itself gives up whole runs of bytes for one that does not fit.
    """
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = [tokenizer.convert_ids_to_tokens(token) for token in tokens if token not in special]
    if "ByteFallback" in repr(tokenizer.backend_tokenizer.decoder):
        whole: list[str] = []
        for is_byte, run in itertools.groupby(names, BYTE_TOKENS.__contains__):
            if not is_byte:
                whole += run
                continue
            data = bytes(BYTE_TOKENS[name] for name in run)
            whole += [BYTES[byte] for byte in data.decode(errors="replace").encode()]
        names = whole
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def check(tokenizer: PreTrainedTokenizerFast, generator: random.Random, runs: int) -> None:
    """Drawn tokens in drawn steps."""
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.steps() is not None, "decodes whole texts"
    for _ in range(runs):
        tokens = drawn_tokens(tokenizer, generator)
        if all(vocabulary.special(token) for token in tokens):
            continue  # the library's Strip fails where there is no text
        right = reference(tokenizer, tokens)
        splits = [[1], [len(tokens)], [generator.randint(1, 4) for _ in range(3)]]
        for sizes in splits:
            found = in_steps(vocabulary, [], tokens, sizes)
            assert found == right, (tokenizer.convert_ids_to_tokens(tokens), sizes)


@pytest.mark.parametrize("kind", DECODERS)
def test_one_by_one_is_all_at_once(kind: str) -> None:
    """A text that ended within a character lost the whole ones before it, by how many tokens came in one step."""
    check(tokenizer_with(DECODERS[kind]), random.Random(kind), 100)


@pytest.mark.subset(16)
@pytest.mark.parametrize("seed", range(40))
def test_sequences_of_decoders(seed: int) -> None:
    generator = random.Random(seed)
    check(tokenizer_with(drawn_decoder(generator)), generator, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_one_by_one_is_all_at_once_in_many_runs(kind: str) -> None:
    check(tokenizer_with(DECODERS[kind]), random.Random("many " + kind), 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_many_sequences_of_decoders(seed: int) -> None:
    generator = random.Random(seed)
    check(tokenizer_with(drawn_decoder(generator)), generator, 40)


@pytest.mark.parametrize("kind", ["byte-level", "llama-2", "gemma", "metaspace", "word-piece", "none"])
def test_behind_a_prompt_a_text_goes_on(kind: str) -> None:
    """Prompt and text together are the text of all tokens, also behind long prompts, which are not decoded whole."""
    tokenizer, generator = tokenizer_with(DECODERS[kind]), random.Random(kind)
    vocabulary = Vocabulary(tokenizer)
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("\u2581the", "a", "ing", "##ing", BYTES[0x41])]
    for length in (0, 1, 5, 33, 100):
        for _ in range(20):
            prompt = [*generator.choices(words, k=length)]
            tokens = drawn_tokens(tokenizer, generator)
            text = in_steps(vocabulary, prompt, tokens, [generator.randint(1, 3)])
            assert decoded(tokenizer, prompt) + text == decoded(tokenizer, [*prompt, *tokens])


@pytest.mark.parametrize(("data", "text"), [("😀😀".encode()[:6], "😀\ufffd"), ("한글".encode()[:5], "한\ufffd")])
def test_whole_characters_are_kept_before_half_a_one(data: bytes, text: str) -> None:
    tokenizer = tokenizer_with(DECODERS["llama-2"])
    tokens = [tokenizer.convert_tokens_to_ids(BYTES[byte]) for byte in data]
    for size in range(1, len(tokens) + 1):
        assert in_steps(Vocabulary(tokenizer), [], tokens, [size]) == text


def test_the_byte_alphabet_is_the_one_of_gpt_2() -> None:
    assert dict(map(reversed, bytes_to_unicode().items())) == BYTE_OF


@pytest.mark.parametrize("kind", DECODERS)
def test_a_token_has_one_name_and_its_bytes(kind: str) -> None:
    """In a text that goes on, the bytes of a token are what it adds; a space at its start stays."""
    tokenizer = tokenizer_with(DECODERS[kind])
    vocabulary = Vocabulary(tokenizer)
    for token in range(len(tokenizer)):
        name = vocabulary.name(token)
        if vocabulary.special(token):
            assert name == tokenizer.convert_ids_to_tokens(token)
            continue
        data = vocabulary.data(token)
        assert data is not None
        text = data.decode(errors="surrogateescape")
        assert name == text if text.isprintable() else name.startswith("bytes:") or not name.isprintable()
        if kind not in HOLDS_BACK:
            detokenizer = Detokenizer(vocabulary, [tokenizer.convert_tokens_to_ids("b")])
            assert detokenizer.add(token).data == data, tokenizer.convert_ids_to_tokens(token)


def test_names_of_llama_2() -> None:
    tokenizer = tokenizer_with(DECODERS["llama-2"])
    vocabulary = Vocabulary(tokenizer)
    names = {
        "\u2581the": " the",
        "the": "the",
        "<0xE6>": "bytes:\\xe6",
        "<0x0A>": "\n",
        "</s>": "</s>",
        "\u2581": " ",
        "\u6f22": "\u6f22",
        "  ": "  ",
    }
    assert {piece: vocabulary.name(tokenizer.convert_tokens_to_ids(piece)) for piece in names} == names


def test_special_tokens_are_text_where_they_are_asked_for() -> None:
    tokenizer = tokenizer_with(DECODERS["llama-2"])
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "\u2581the", "<file_sep>", "a")]
    assert decoded(tokenizer, ids) == "thea"
    assert decoded(tokenizer, ids, special=True) == tokenizer.decode(ids) == "<s> the<file_sep>a"


class Whole(PreTrainedTokenizerFast):
    """A tokenizer with a decoding of its own."""

    def _decode(self, *args: object, **given: object) -> str:
        return super()._decode(*args, **given).replace("b", "B")


def test_a_tokenizer_that_decodes_in_its_own_way() -> None:
    """Only whole texts of it can be decoded: the steps they come in change nothing, nor does a long text."""
    of_steps = tokenizer_with(DECODERS["byte-level"])
    tokenizer = Whole(tokenizer_object=of_steps.backend_tokenizer, eos_token="</s>")
    assert decoder_steps(tokenizer) is None
    generator, vocabulary = random.Random(5), Vocabulary(tokenizer)
    for _ in range(50):
        tokens = [token for _ in range(10) for token in drawn_tokens(tokenizer, generator)]
        right = str(tokenizer.decode(tokens, skip_special_tokens=True))
        assert {in_steps(vocabulary, [], tokens, [size]) for size in (1, 2, 7, 400)} == {right}
    assert vocabulary.name(tokenizer.convert_tokens_to_ids("b")) == "B"
    half = tokenizer.convert_tokens_to_ids({byte: name for name, byte in BYTE_OF.items()}[0xE6])
    assert vocabulary.name(half) == f"token_id:{half}"


@pytest.fixture(scope="module")
def demo() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_the_demo_models_tokens(demo: PreTrainedTokenizerBase) -> None:
    generator, vocabulary = random.Random(3), Vocabulary(demo)
    for _ in range(200):
        tokens = [generator.randrange(len(demo)) for _ in range(30)]
        right = str(demo.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        assert {in_steps(vocabulary, [], tokens, [size]) for size in (1, 3, 30)} == {right}
