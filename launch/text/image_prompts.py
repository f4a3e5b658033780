"""Prompts with images: messages in a model's chat template, and tensors that its processor makes of the images."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoProcessor, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from lp.commands import install_command
from lp.errors import UserError
from lp.models.loader import hub_answers, model_source
from lp.models.prompt_images import EXACT

from .chat_tokens import HiddenTokens, LiteralCopy

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDERS = ("image_token", "boi_token", "video_token", "audio_token")  # attributes of processors and tokenizers
TOKENS = ("input_ids", "attention_mask")  # of a processor's output: the rest is images
PROBE = "x7q5x"


class ImagePrompt(NamedTuple):
    """A prompt that may have images, in the form that decoders take.

    Attributes:
        tokens: token ids, including the images' placeholders.
        inputs: tensors for the images, by the names of `generate`'s arguments, such as "pixel_values".
    """

    tokens: list[int]
    inputs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ImagePrompts:
    """Makes prompts with images for one model, or says why the model takes no images.

    Args:
        tokenizer: the model's tokenizer.
        dtype: the model's dtype, to which the images' tensors are converted.
        processor: the model's image processor; None: there is none, and images are refused.
        why_not: error message if there is no processor, with the reason and a remedy.
        one_at_a_time: a lock that threads hold while they decode a prompt's images and make the prompt, as many large
            images at once would fill the memory.
    """

    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype = torch.float32
    processor: Any = None
    why_not: str = "this model takes text alone; leave the image out"
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
    ) -> ImagePrompts:
        """Load a checkpoint's image processor, and return an object that makes prompts with it.

        If lp does not support the model's images, or the processor can't be loaded, the object refuses images.

        Args:
            name: the checkpoint, as the user gave it.
            model: the loaded model.
            tokenizer: the loaded tokenizer; if it has no chat template, it gets the processor's.
            trust_remote_code: whether to run code that comes with the checkpoint.
        """
        if model.config.model_type not in EXACT:
            return cls(tokenizer=tokenizer)
        place = model_source(name).place
        offline = not Path(place).is_dir() and not hub_answers()
        try:
            processor = AutoProcessor.from_pretrained(
                place, trust_remote_code=trust_remote_code, local_files_only=offline
            )
        except Exception as error:  # nothing of ours runs in there
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            line = line.partition(". ")[0].rstrip(".")
            remedy = "put its processor (preprocessor_config.json) beside the weights, or leave the image out"
            if isinstance(error, ImportError):
                remedy = (
                    f"install it; {install_command('images')} brings pillow, torchvision has to be of torch's build"
                )
            return cls(tokenizer=tokenizer, why_not=f"images of this model can't be read: {line}; {remedy}")
        tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
        return cls(tokenizer=tokenizer, dtype=model.dtype, processor=processor)

    def check(self) -> None:
        """Refuse images if the model takes none.

        Raises:
            ValueError: the model takes no images; the message has the reason and a remedy.
        """
        if self.processor is None:
            raise UserError(self.why_not)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image],
        literal: LiteralCopy | None = None,
        /,
        **given: Any,
    ) -> ImagePrompt:
        """Make the prompt for messages with images, up to where the answer begins.

        The result is that of the processor's own `apply_chat_template`, except that special tokens and image
        placeholders in the messages' texts are encoded as plain text.

        Args:
            messages: messages of a chat, in which a part {"type": "image"} stands for the next image.
            images: the messages' images, in order.
            literal: the tokenizer's copy for plain text, needed if several threads encode; None: the tokenizer itself
                is used.
            given: more arguments for `apply_chat_template`.

        Raises:
            ValueError: the model takes no images, or its processor refuses these.
            Exception: the template refuses the messages.
        """
        self.check()
        template = self.processor.chat_template or self.tokenizer.chat_template
        hidden = HiddenTokens(self.tokenizer, literal, self._placeholders())
        text = self.tokenizer.apply_chat_template(
            hidden.hide(for_template(self.tokenizer, messages, template)),
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            **hidden.hide(given),
        )
        begins = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        processor = self.processor
        if hidden.any:
            processor = copy.copy(processor)
            processor.tokenizer = _Hiding(self.tokenizer, hidden)
        try:
            made = processor(text=[text], images=[*images], add_special_tokens=not begins, return_tensors="pt")
        except UserError:
            raise
        except Exception as error:  # nothing of ours runs in there
            what = "a text with a special token beside images; leave the token out" if hidden.any else "the images"
            raise UserError(f"the model's processor refuses {what}: {str(error).partition(chr(10))[0]}") from error
        inputs = {name: self._cast(torch.as_tensor(value)) for name, value in made.items() if name not in TOKENS}
        return ImagePrompt(made["input_ids"][0].tolist(), inputs)

    def _placeholders(self) -> list[str]:
        """Texts that the processor takes for the place of an image, whether or not they are special tokens."""
        owners = (self.processor, self.tokenizer)
        found = (getattr(owner, name, None) for owner in owners for name in PLACEHOLDERS)
        return [str(token) for token in found if token is not None]

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def for_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], template: str | None = None
) -> list[dict[str, Any]]:
    """Convert messages to the form that a chat template can print, as some templates only print lists of parts.

    Args:
        tokenizer: the tokenizer that applies the template.
        messages: messages whose content is a text or a list of parts.
        template: the chat template; None: the tokenizer's own.

    Returns:
        Copies of the messages. If the template prints no plain texts, each text has become a list of one part.
    """
    probe = [{"role": "user", "content": PROBE}]
    try:
        takes_texts = PROBE in str(tokenizer.apply_chat_template(probe, chat_template=template, tokenize=False))
    except Exception:  # what a template does with a text where it expects parts
        takes_texts = False
    if takes_texts:
        return [{**message} for message in messages]
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else {**message}
        for message in messages
    ]


class _Hiding:
    """A stand-in for a processor's tokenizer that encodes a text in which users' special tokens are hidden.

    Args:
        tokenizer: the model's tokenizer.
        hidden: has hidden the tokens, and encodes them as plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: HiddenTokens) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Sequence[str], add_special_tokens: bool = True, **options: Any) -> BatchEncoding:
        begin = list(self._tokenizer("")["input_ids"]) if add_special_tokens else []
        ids = [begin + self._hidden.encode(each) for each in text]
        return BatchEncoding({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]})
