"""Measure which tokens a model finds likely after contexts of 1 to 3 tokens, averaged over texts that it writes.

The result becomes a file for `lp.draft.pool.model_ngrams`, from which draft tokens are proposed. Observations are kept
on disk after each unit of work, so that an interrupted run continues where it stopped.

V: vocabulary size; K: logits kept for a context; B: texts in a batch; n: observations, each after one context.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.draft.pool.model_ngrams import Contexts
from lp.draft.pool.tables import MAX_LOGITS_ORDER
from lp.errors import UserError
from lp.models.digests import weights_checksum
from lp.models.loader import vocabulary_size
from lp.models.releases import cache_in, cache_keyword
from lp.models.vocabulary import embedded_tokens
from lp.sampling.top_logits import TopLogits, pack_again
from lp.waits import Wait, waiting

NUM_LOGITS = 8  # K
OBSERVED = 32  # probabilities kept of an observation; of their means K are kept
BATCH = 64  # B
WIDER = 4  # so many times B texts of one new token fit into a pass
TEXT_TOKENS = 256  # longest text that the model writes
TEMPERATURE = 0.9  # at which it writes
NO_TOKEN = -1  # in a context, where the text had no token yet


class Observed(NamedTuple):
    """The likeliest next tokens of a model after some contexts of one length, with their probabilities.

    Attributes:
        contexts: int64 (n, length), tokens of n contexts, the newest last; NO_TOKEN where the text was shorter.
        tokens: int64 (n, OBSERVED), the likeliest tokens after each context.
        probs: float32 (n, OBSERVED), their probabilities.
    """

    contexts: np.ndarray  # int64 (n, length), the newest token last; NO_TOKEN where the text had not so many
    tokens: np.ndarray  # int64 (n, OBSERVED): the likeliest
    probs: np.ndarray  # float32 (n, OBSERVED)


def measure_ngrams(
    model: PreTrainedModel,
    beginnings: Sequence[Sequence[int]],
    num_tokens: int,
    max_contexts: int,
    num_logits: int = NUM_LOGITS,
    batch: int = BATCH,
    seed: int = 0,
    folder: Path | None = None,
) -> list[Contexts]:
    """Measure a model's likeliest next tokens after every token, and after the longer contexts that come most often.

    Every token of the vocabulary is tried once after each beginning. The model also writes texts, which start with a
    beginning and one token of the vocabulary; no token starts a second text until all have started one.

    Args:
        model: the model, on its device.
        beginnings: token ids that a text can begin with so that anything may follow; no two are equal.
        num_tokens: about how many tokens the model writes; 0: it writes none, and only contexts of one token are
            measured.
        max_contexts: most contexts of each length above 1.
        num_logits: K, how many tokens to keep for each context.
        batch: B, how many texts the model writes at a time.
        seed: seed for sampling the texts that the model writes.
        folder: where to keep observations; a later call with equal arguments continues from them. None: in memory only.

    Returns:
        For each length of 1, 2 and 3 tokens, the contexts with their K best next tokens and their logits. Lengths for
        which nothing was observed are left out.

    Raises:
        ValueError: the folder was written by a call with other arguments.
    """
    size = vocabulary_size(model)
    texts, text_tokens = _texts_written(num_tokens, batch)
    asked = {
        "model": model.config.to_json_string(),
        "dtype": str(model.dtype),
        "weights": weights_checksum(model) if folder else None,
        "beginnings": [list(beginning) for beginning in beginnings],
        "tokens": num_tokens,
        "batch": batch,
        "seed": seed,
    }
    singles = Observations(size * len(beginnings), folder and folder / "tokens", asked)
    writes = Observations(texts * text_tokens, folder and folder / "texts", asked)
    total = len(singles.probs) + len(writes.probs)
    with waiting("measuring what the model says", total, "tokens") as wait:
        wait.done = wait.first = singles.count + writes.count
        singles.take(_single_tokens(model, beginnings, batch, wait))
        writes.take(_written(model, beginnings, num_tokens, batch, seed, wait))
    single, written = singles.all(), writes.all()
    with waiting("averaging"):
        found = [_means([_of_length(single, 1), _of_length(written, 1)], size, size, num_logits)]
        for length in range(2, MAX_LOGITS_ORDER + 1):
            if len((observed := _of_length(written, length)).contexts):
                found.append(_means([observed], size, max_contexts, num_logits))
    return found


Unit = Callable[[], Iterator[Observed]]  # of work, which is done as a whole or not at all


class Observations:
    """Collects observed next-token probabilities in arrays of their final size, on disk if a run may be interrupted.

    Many small arrays instead would lie between the model's blocks of memory and keep them from being reused.

    Args:
        most: most observations that there may be.
        folder: where the arrays are kept, so that another process can continue; None: in memory.
        asked: all that the observations depend on, such as the model's config and the seed.

    Attributes:
        count: number of observations so far.
        units: number of units of work that are done.

    Raises:
        ValueError: the folder has observations that were made with another `asked`.
    """

    def __init__(self, most: int, folder: Path | None, asked: dict[str, Any]) -> None:
        self.count = self.units = 0
        self._asked = asked
        self._state = folder and folder / "state.json"
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        if self._state and self._state.is_file():
            state = json.loads(self._state.read_text(encoding="utf-8"))
            if state["asked"] != asked:
                what = "has what was measured of another model or with other options"
                raise UserError(f"{str(folder)!r} {what}; remove it, or write to another file")
            self.count, self.units = state["count"], state["units"]
        self.contexts = self._array(folder, "contexts", np.int64, (most, MAX_LOGITS_ORDER))
        self.tokens = self._array(folder, "tokens", np.int64, (most, OBSERVED))
        self.probs = self._array(folder, "probs", np.float32, (most, OBSERVED))

    def _array(self, folder: Path | None, name: str, dtype: type, shape: tuple[int, int]) -> np.ndarray:
        if folder is None or not shape[0]:  # no file is mapped that is empty
            return np.zeros(shape, dtype)
        path = folder / name
        return np.memmap(path, dtype, "r+" if path.exists() else "w+", shape=shape)

    def take(self, units: Iterator[Unit]) -> None:
        """Do the units of work that are not done yet, and keep their observations.

        Args:
            units: all units of work, in the same order at each call; those that are done already are skipped.
        """
        for number, unit in enumerate(units):
            if number < self.units:
                continue
            end = self.count
            for each in unit():
                begin, end = end, end + len(each.contexts)
                self.contexts[begin:end] = NO_TOKEN
                self.contexts[begin:end, MAX_LOGITS_ORDER - each.contexts.shape[1] :] = each.contexts
                self.tokens[begin:end, : each.tokens.shape[1]] = each.tokens
                self.probs[begin:end, : each.probs.shape[1]] = each.probs
            self.count, self.units = end, number + 1
            self._write()

    def _write(self) -> None:
        if self._state:
            part = self._state.with_suffix(f".{os.getpid()}.part")
            state = {"asked": self._asked, "count": self.count, "units": self.units}
            part.write_text(json.dumps(state), encoding="utf-8")
            part.replace(self._state)

    def all(self) -> Observed:
        """Return all observations so far, without copying the arrays."""
        return Observed(self.contexts[: self.count], self.tokens[: self.count], self.probs[: self.count])


def _texts_written(num_tokens: int, batch: int) -> tuple[int, int]:
    """How many texts the model writes, and of how many tokens at most."""
    text_tokens = min(TEXT_TOKENS, max(1, num_tokens // batch))
    return -(-num_tokens // (batch * text_tokens)) * batch, text_tokens


def _single_tokens(
    model: PreTrainedModel, beginnings: Sequence[Sequence[int]], batch: int, wait: Wait
) -> Iterator[Unit]:
    """Every token of the vocabulary after each beginning, whose keys and values are computed once."""
    device = model.get_input_embeddings().weight.device
    caches: dict[int, Any] = {}  # of the beginnings, made when a unit needs them

    @torch.inference_mode()
    def unit(tokens: torch.Tensor, index: int) -> Iterator[Observed]:
        if index not in caches:
            caches[index] = _cache_of(model, beginnings[index])
        if caches[index] is None:
            output = model(input_ids=_texts(beginnings[index], tokens, model), use_cache=False, logits_to_keep=1)
        else:
            cache = copy.deepcopy(caches[index])
            cache.batch_repeat_interleave(len(tokens))
            ids = _texts((), tokens, model)
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
        yield _observed(tokens[:, None], output.logits[:, -1])
        wait.done += len(tokens)

    for tokens in torch.arange(vocabulary_size(model), device=device).split(WIDER * batch):
        for index in range(len(beginnings)):
            yield partial(unit, tokens, index)


@torch.inference_mode()
def _cache_of(model: PreTrainedModel, beginning: Sequence[int]) -> Any:
    """The cache after a beginning; None where it cannot be given to several texts, as with recurrent states."""
    ids = torch.tensor([list(beginning)], dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    if not ids.numel():
        return None
    cache = cache_in(model(input_ids=ids, use_cache=True, logits_to_keep=1))
    layers = getattr(cache, "layers", None)
    shared = layers and all(hasattr(layer, "batch_repeat_interleave") for layer in layers)
    return cache if shared else None


def _written(
    model: PreTrainedModel, beginnings: Sequence[Sequence[int]], num_tokens: int, batch: int, seed: int, wait: Wait
) -> Iterator[Unit]:
    """What the model said at every position of texts that it writes, after the last tokens before it."""
    device = model.get_input_embeddings().weight.device
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ends = torch.tensor([] if eos is None else eos, dtype=torch.int64, device=device).reshape(-1)
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(vocabulary_size(model), generator=generator, device=device)
    texts, text_tokens = _texts_written(num_tokens, batch)

    @torch.inference_mode()
    def unit(number: int) -> Iterator[Observed]:
        generator.manual_seed(seed + 1 + number)  # as it would be if the units before were done by another process
        first = torch.arange(number * batch, (number + 1) * batch, device=device) % len(order)
        ids = _texts(beginnings[number % len(beginnings)], order[first], model)
        goes_on = torch.ones(batch, dtype=torch.bool, device=device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(text_tokens):
            logits = output.logits[:, -1].float()
            yield _observed(ids[goes_on, -MAX_LOGITS_ORDER:], logits[goes_on])
            wait.done += batch
            new = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            goes_on &= ~torch.isin(new[:, 0], ends)
            if not goes_on.any():
                break
            ids = torch.cat([ids, new], 1)
            inputs = new.clamp(max=embedded_tokens(model) - 1)
            cache = {cache_keyword(model): cache_in(output)}
            output = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **cache)

    for number in range(texts // batch):
        yield partial(unit, number)


def _texts(beginning: Sequence[int], tokens: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The beginning with each of these tokens after it, int64 (B, length); ids without an embedding become the last."""
    before = torch.tensor(list(beginning), dtype=torch.int64, device=tokens.device).expand(len(tokens), -1)
    return torch.cat([before, tokens[:, None].clamp(max=embedded_tokens(model) - 1)], 1)


def _observed(contexts: torch.Tensor, logits: torch.Tensor) -> Observed:
    top = logits.float().softmax(-1).topk(min(OBSERVED, logits.shape[-1]))
    return Observed(contexts.cpu().numpy(), top.indices.cpu().numpy(), top.values.cpu().numpy())


def _of_length(observed: Observed, length: int) -> Observed:
    """The observations after the last `length` tokens alone, where there are so many."""
    contexts = observed.contexts[:, -length:]
    there = contexts[:, 0] != NO_TOKEN
    return Observed(contexts[there], observed.tokens[there], observed.probs[there])


def _means(observed: Sequence[Observed], vocabulary: int, max_contexts: int, num_logits: int) -> Contexts:
    """Put observations together: the contexts that came most often, each with its mean probabilities as logits."""
    all_contexts, tokens, probs = (np.concatenate(each) for each in zip(*observed, strict=True))
    contexts, of_context, counts = np.unique(all_contexts, axis=0, return_inverse=True, return_counts=True)
    often = np.argsort(-counts, kind="stable")[:max_contexts]
    place = np.full(len(contexts), -1)
    place[often] = np.arange(len(often))
    place_of = place[of_context.reshape(-1)]
    tokens, probs, place_of = tokens[place_of >= 0], probs[place_of >= 0], place_of[place_of >= 0]
    # Sums by (context, token), then the largest of every context.
    pairs, pair_of = np.unique((place_of[:, None] * vocabulary + tokens).reshape(-1), return_inverse=True)
    sums = np.bincount(pair_of, probs.reshape(-1))
    pair_places = pairs // vocabulary
    best_first = np.lexsort((-sums, pair_places))
    starts = np.searchsorted(pair_places, np.arange(len(often)))
    sizes = np.diff(np.append(starts, len(pairs)))
    rank = np.arange(num_logits)
    chosen = best_first[np.minimum(starts[:, None] + rank, len(pairs) - 1)]  # (contexts, K)
    with np.errstate(divide="ignore"):
        logits = np.log(sums[chosen] / counts[often, None])
    logits[rank >= sizes[:, None]] = -np.inf  # those of the next context
    top = TopLogits((pairs[chosen] % vocabulary).astype(np.int32), logits.astype(np.float32))
    return Contexts(contexts[often], pack_again(top))
