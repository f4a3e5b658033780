"""Small tokenizers of every kind of decoder that the `tokenizers` library has, and a model with their tokens."""

from __future__ import annotations

import random

import tokenizers as tk
import torch
import transformers as tf
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from launch.text.decoder_steps import BYTE_OF

SPECIAL = ["<s>", "</s>", "<file_sep>"]
ADDED = ["  ", "<tool>", "\u00e9t\u00e9", "<\uff5cend\u2581of\u2581turn\uff5c>"]  # that are text
WORDS = [
    "a",
    "the",
    "\u2581",
    "\u2581\u2581",
    "\u2581the",
    " x",
    "x ",
    "##ing",
    "##",
    "ing",
    "ab</w>",
    "</w>",
    "|",
    ".",
    ",",
    "n't",
]
WORDS += ["\u00e9", "\u6f22", "\U0001f600", "\ufffd", "not", "do", "b", "aa", "ab", " ", "\n", "<0x4>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
METASPACE = decoders.Metaspace("\u2581", "always")
DECODERS = {
    "none": None,
    "byte-level": decoders.ByteLevel(),
    "byte-fallback": decoders.ByteFallback(),
    "llama-2": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": METASPACE,
    "metaspace-first": decoders.Metaspace("\u2581", "first"),
    "metaspace-never": decoders.Metaspace("\u2581", "never"),
    "albert": decoders.Sequence([decoders.ByteFallback(), METASPACE]),
    "fuse": decoders.Fuse(),
    "strip": decoders.Strip(" ", 1, 0),
    "strip-end": decoders.Strip("x", 0, 1),
    "strip-text": decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0)]),
    "strip-text-end": decoders.Sequence([decoders.Fuse(), decoders.Strip("b", 0, 1)]),
    "replace": decoders.Replace("ab", "x"),
    "replace-text": decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("aab", "\u2581"), decoders.Replace("\u2581", "")]
    ),
    "replace-regex": decoders.Replace(tk.Regex("[ab]+"), "y"),
    "replace-regex-text": decoders.Sequence([decoders.ByteFallback(), decoders.Replace(tk.Regex("[ab]+"), "y")]),
    "replace-bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u6f22", "k")]),
    "bytes-strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\u00e9", 1, 0)]),
    "word-piece": decoders.WordPiece("##", True),
    "word-piece-plain": decoders.WordPiece("##", False),
    "word-ends": decoders.BPEDecoder("</w>"),
    "ctc": decoders.CTC("<pad>", "|", True),
}
STEPS = [  # of drawn sequences, behind a step that knows bytes
    decoders.Fuse(),
    METASPACE,
    decoders.Strip(" ", 1, 0),
    decoders.Replace("\u2581", " "),
    decoders.Replace("ab", "ba"),
    decoders.Replace("\u6f22", "a"),
]


def drawn_decoder(generator: random.Random) -> decoders.Decoder:
    """Draw a decoder: a sequence of steps of the kinds that causal language models have."""
    of_bytes: list[list[decoders.Decoder]] = [[], [decoders.ByteLevel()], [decoders.ByteFallback()]]
    first = generator.choice(of_bytes)
    first += [decoders.Replace("\u2581", " ")] * generator.randint(0, 1)
    return decoders.Sequence(
        [*generator.choice([first, first[::-1]]), *generator.choices(STEPS, k=generator.randint(0, 3))]
    )


def drawn_tokens(tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> list[int]:
    """Draw token ids: characters in bytes of both spellings, words, special tokens, and bytes of no character."""
    names = list(BYTE_OF)
    tokens: list[str] = []
    for _ in range(generator.randint(1, 12)):
        match generator.randrange(6):
            case 0:
                data = generator.choice(["\u00e9", "\u6f22", "\U0001f600", "\u2581", "ab", "\n", " "]).encode()
                tokens += [BYTES[byte] for byte in data[: generator.choice([4, 4, 4, 2, 1])]]
            case 1:
                by_byte = {byte: name for name, byte in BYTE_OF.items()}
                data = generator.choice(["\u00e9", "\u6f22", "\U0001f600", " the", "\n"]).encode()
                tokens += [by_byte[byte] for byte in data[: generator.choice([4, 4, 4, 2, 1])]]
            case 2:
                tokens.append(generator.choice([*SPECIAL, *ADDED]))
            case 3:
                tokens.append(generator.choice([*BYTES, *names]))
            case _:
                tokens.append(generator.choice(WORDS))
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def tokenizer_with(decoder: decoders.Decoder | None) -> PreTrainedTokenizerFast:
    """A tokenizer with this decoder; tokens are all words above, bytes in both spellings, special and added ones."""
    pieces = [*BYTES, *BYTE_OF, *WORDS]
    made = tk.Tokenizer(tk.models.WordLevel({piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, "a"))
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens([tk.AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([tk.AddedToken(name, special=False, normalized=False) for name in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def llama_2() -> PreTrainedTokenizerFast:
    """A tokenizer like that of Llama 2 and Mistral 7B: a space before a text, bytes for what has no token, BOS."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("h", "i"), ("\u2581", "hi")]
    words = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", *map(chr, range(33, 127)), *map("".join, merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = tk.Tokenizer(tk.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    normalizers = [tk.normalizers.Prepend("\u2581"), tk.normalizers.Replace(" ", "\u2581")]
    made.normalizer = tk.normalizers.Sequence(normalizers)
    made.decoder = DECODERS["llama-2"]
    made.post_processor = tk.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<file_sep>"])
    made.add_tokens([tk.AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gpt_2() -> PreTrainedTokenizerFast:
    """A token for every byte, as GPT-2's alphabet has them, and an EOS."""
    made = tk.Tokenizer(tk.models.BPE(dict(BYTE_OF), []))
    made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def model_with(tokenizer: PreTrainedTokenizerFast) -> tf.PreTrainedModel:
    """A random model that has a row for every token of the tokenizer."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = tf.AutoModelForCausalLM.from_config(config).double().eval()
    model.generation_config = tf.GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return model
