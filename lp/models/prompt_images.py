"""Images and videos in a prompt: the processor's inputs for them, and the model's own first pass over them.

An image token holds an image's place in the prompt. The prompt up to its last image token is computed in one pass of
the model as `generate` runs it, with its own mask (Gemma 3 sees both ways within an image) and its own positions
(Qwen-VL's have three axes). After that token positions count on one by one, but differ from the tokens' places in the
cache by a constant.

L: tokens of the prompt.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lp.errors import UserError
from lp.models.releases import cache_keyword

# Model types whose texts with images were found equal to those of transformers' `generate`.
EXACT = {
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
}
# Model types whose texts with videos were found equal, too.
EXACT_WITH_VIDEOS = {"qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
# What `forward` takes that is no image: lp gives it, or it belongs to training.
NOT_INPUTS = {"inputs_embeds", "position_ids", "labels", "use_cache", "logits_to_keep", "past_key_values", "cache"}
HANDED_OVER = {"attention_mask", "position_ids"}  # given along with images, but not images themselves
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # (1, L): not 0 where a token holds an image's place
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")  # of a config
KEY_BITS = 31  # bits of a key that replaces an image's token id: keys are negative int32s
NUM_KEYS = 4


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images and videos of one prompt, as the model's forward takes them.

    Attributes:
        inputs: arguments of the model's `forward` besides token ids, by name, such as "pixel_values".
        is_image: bool (L,), True for the tokens that hold an image's place.
        positions: positions of the prompt's L tokens as the model counts them, (1, L) or (axes, 1, L); None: a token's
            position is its place in the prompt.
    """

    inputs: Mapping[str, Any]
    is_image: np.ndarray
    positions: torch.Tensor | None

    @classmethod
    def of(cls, model: PreTrainedModel, prompt: Sequence[int], given: Mapping[str, Any]) -> PromptImages | None:
        """Read the images of a prompt from a processor's output; None where the prompt is text alone.

        Args:
            model: the model that takes the images.
            prompt: L token ids.
            given: fields of the processor's output besides the token ids. Instead of some of them, transformers'
                `generate` may hand over `position_ids` and encoded images. An attention mask of ones counts as absent.

        Raises:
            TypeError: a field has a name that the model's `forward` does not take.
            ValueError: a model that is not known to be exact with images, a mask with zeros, positions of a prompt
                without images that are not 0, 1, 2 and so on, a prompt without image tokens, or an image at its very
                end.
        """
        _check_mask(given.get("attention_mask"), len(prompt))
        inputs = inputs_of_images(given)
        if unknown := names_not_taken(model, inputs):
            raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
        if not inputs:
            _check_positions(given.get("position_ids"), len(prompt))
            return None
        if (kind := model.config.model_type) not in EXACT:
            raise UserError(
                f"model type {kind!r} is not known to be exact with {', '.join(sorted(inputs))}; "
                f"{', '.join(sorted(EXACT))} are: use generate as it is, or leave the images out"
            )
        _check_inputs(inputs, kind)
        types = {name: np.ravel(_array(inputs[name])) for name in TOKEN_TYPES if name in inputs}
        for name, kinds in types.items():
            if len(kinds) != len(prompt):
                raise UserError(f"{name} has {len(kinds)} values for a prompt of {len(prompt)} tokens; give one each")
        is_image = _image_places(model.config, prompt, list(types.values()))
        if not is_image.any():
            raise UserError(
                f"{', '.join(sorted(inputs))} are given, and no token of the prompt holds an image's place; "
                "build both with the model's processor"
            )
        if is_image[-1]:
            raise UserError("the prompt ends with an image; put some text after it, such as the chat template's")
        positions = given.get("position_ids")
        return cls(inputs, is_image, _positions(model, prompt, inputs) if positions is None else positions)

    @property
    def end(self) -> int:
        """Number of the prompt's tokens up to and including its last image token.

        The model computes these tokens in a first pass of its own.
        """
        return int(np.flatnonzero(self.is_image)[-1]) + 1

    @cached_property
    def rotary_offset(self) -> int:
        """The position of a token after the images, minus its place in the sequence, such as -240."""
        if self.positions is None:
            return 0
        last: torch.Tensor = self.positions.flatten(0, -2)[-1, -1]  # the first axis may be the place, for masks
        return int(last) - (len(self.is_image) - 1)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that tell the images of this prompt from other images, by their content, places and positions."""
        hasher = hashlib.blake2b(digest_size=16)
        own = {name: value for name, value in self.inputs.items() if name not in TOKEN_TYPES}  # as long as the prompt
        places = self.is_image[: self.end].tobytes()
        positions = None if self.positions is None else self.positions[..., : self.end]
        for part in (places, *_parts(positions), *_parts(own)):
            if isinstance(part, bytes):
                hasher.update(part)
            else:
                hasher.update(f"{part.dtype} {part.shape}".encode())
                hasher.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return hasher.digest()

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Replace image tokens by negative keys made from the images' content, to find a cached prefix by.

        Other images have the same token ids. With these keys a prompt does not reuse a prefix that was computed for
        other images.

        Args:
            tokens: token ids of a sequence that begins with the prompt, or the first tokens of such a sequence.
        """
        words = int.from_bytes(self.digest, "little")
        keys = [-1 - (words >> KEY_BITS * index & (1 << KEY_BITS) - 1) for index in range(NUM_KEYS)]
        keyed = np.array(tokens, np.int64)
        places = np.flatnonzero(self.is_image[: len(keyed)])
        keyed[places] = np.resize(keys, len(places))
        found: list[int] = keyed.tolist()
        return found

    def first_pass(self, model: PreTrainedModel, prompt: Sequence[int], cache: Cache) -> dict[str, Any]:
        """Arguments of the model's forward for its pass over the prompt up to the last image token, images included.

        Args:
            model: the model as `generate` runs it.
            prompt: L token ids.
            cache: an empty cache, which the pass fills.
        """
        end = self.end
        inputs = _on(self.inputs, model.device)  # not before: a text may wait for long
        whole = {name: value for name, value in inputs.items() if name not in TOKEN_TYPES}
        types = {name: inputs[name][..., :end] for name in TOKEN_TYPES if name in inputs}
        if self.positions is not None:
            types["position_ids"] = self.positions[..., :end]
        ids = torch.tensor([prompt[:end]], device=model.device)
        keyword = cache_keyword(model)
        arguments = model.prepare_inputs_for_generation(
            ids, use_cache=True, is_first_iteration=True, logits_to_keep=1, **{keyword: cache}, **types, **whole
        )
        return {**arguments, keyword: cache}


def inputs_of_images(given: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the image inputs from the arguments of a call; empty for a prompt without images.

    Token types that are all 0, as processors give them for text, do not count as images.

    Args:
        given: arguments by name. Attention masks, positions, None and empty mappings are left out of the result.
    """
    named = {name: value for name, value in given.items() if value is not None and name not in HANDED_OVER}
    inputs = {name: value for name, value in named.items() if not (isinstance(value, Mapping) and not value)}
    is_text = all(name in TOKEN_TYPES and not _array(value).any() for name, value in inputs.items())
    return {} if is_text else inputs


def names_not_taken(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[str]:
    """Names of inputs that the model's `forward` does not take, or does not take as image inputs; sorted.

    Args:
        model: the model.
        inputs: arguments by name.
    """
    return sorted(inputs.keys() - (inspect.signature(model.forward).parameters.keys() - NOT_INPUTS))


def _check_inputs(inputs: Mapping[str, Any], kind: str) -> None:
    """Refuse inputs that are no tensors, and media with which the model is not known to be exact.

    Args:
        inputs: what the model is to be given besides the tokens.
        kind: the model's type, such as "gemma3".
    """
    encoded = [name for value in inputs.values() if isinstance(value, Mapping) for name in value]
    with_videos = kind in EXACT_WITH_VIDEOS
    for name in (*inputs, *encoded):
        if any(medium in name for medium in ("audio", "input_features", *(() if with_videos else ("video",)))):
            raise UserError(
                f"{name} is given, and of {kind!r} only images{' and videos' if with_videos else ''} are known to be "
                "exact: use generate as it is, or leave it out"
            )
    for name, value in inputs.items():
        parts = value if isinstance(value, list | tuple) and name not in TOKEN_TYPES else [value]
        if not all(isinstance(part, torch.Tensor | np.ndarray | Mapping) for part in parts):
            raise UserError(f'{name} is a {type(value).__name__}; call the processor with return_tensors="pt"')


def _check_mask(mask: Any, length: int) -> None:
    """Refuse an attention mask that hides a token of a single prompt, or is of another length."""
    if mask is None:
        return
    values = np.ravel(_array(mask))
    if len(values) != length or not values.all():
        raise UserError(
            f"attention_mask has {len(values)} values, of which {int((values != 0).sum())} are not 0, for a prompt of "
            f"{length} tokens; generate takes one prompt without padding: leave the mask out"
        )


def _check_positions(positions: Any, length: int) -> None:
    """Refuse positions of a prompt without images that are not its tokens' places."""
    if positions is not None and np.ravel(_array(positions)).tolist() != [*range(length)]:
        raise UserError(f"position_ids are not 0 to {length - 1}, where lp counts from the first token; leave them out")


def _image_places(config: Any, prompt: Sequence[int], types: Sequence[np.ndarray]) -> np.ndarray:
    """Bool (L,), the tokens that hold an image's place: by the processor's token types, else by their ids."""
    if types:
        places: np.ndarray = np.logical_or.reduce([kinds != 0 for kinds in types])
        return places
    ids = [token for name in PLACEHOLDERS if (token := getattr(config, name, None)) is not None]
    return np.isin(prompt, ids)


def _positions(model: PreTrainedModel, prompt: Sequence[int], inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Positions of the prompt's tokens, as `generate` prepares them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        given = {"input_ids": ids, **_on(inputs, model.device)}
        positions: torch.Tensor = model._prepare_position_ids_for_generation(ids, given)
    return positions


def _parts(value: Any) -> Iterator[torch.Tensor | bytes]:
    """Tensors, names and other values of nested mappings and lists, in an order that their content decides."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value if isinstance(value, torch.Tensor) else repr(value).encode()


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _on(value: Any, device: torch.device) -> Any:
    """A processor's output, or one of its fields, on the model's device."""
    if type(value) is dict:
        return {name: _on(part, device) for name, part in value.items()}
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device)
    return [_on(part, device) for part in value] if isinstance(value, list | tuple) else value
