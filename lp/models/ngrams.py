"""What a model says behind contexts of 1 to 3 tokens, averaged over texts that it writes.

It becomes a file of `lp.draft.pool.model_ngrams`.

V: vocabulary; K: logits of a context; B: texts of a batch; n: observations, of one context each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.draft.pool.model_ngrams import Contexts
from lp.draft.pool.tables import MAX_LOGITS_ORDER
from lp.models.loader import vocabulary_size
from lp.models.releases import cache_in, cache_keyword
from lp.models.vocabulary import embedded_tokens
from lp.sampling.top_logits import TopLogits, pack_again

NUM_LOGITS = 8  # K
OBSERVED = 32  # probabilities of an observation, of which K of their means remain
BATCH = 64  # B
TEXT_TOKENS = 256  # of a text that the model writes
TEMPERATURE = 0.9  # at which it writes
NO_TOKEN = -1


class Observed(NamedTuple):
    """What the model said behind some contexts of the same length."""

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
) -> list[Contexts]:
    """The best logits behind every token, and behind the longer contexts that came most often.

    Every token of the vocabulary is seen once behind each beginning. The texts that the model writes begin with one of
    them and a token of the vocabulary, each token once until all were.

    Args:
        model: on its device.
        beginnings: tokens to begin a text with, alike in nothing but that anything may follow them.
        num_tokens: that the model writes, about; 0: none, and there are contexts of one token alone.
        max_contexts: of every length above 1.
        num_logits: K.
        batch: B.
        seed: of what the model writes.

    Returns:
        The contexts of 1, 2, 3 tokens.
    """
    size = vocabulary_size(model)
    single = _together(_single_tokens(model, beginnings, batch), size * len(beginnings))
    written = _together(_written(model, beginnings, num_tokens, batch, seed), _most_written(num_tokens, batch))
    found = [_means([_of_length(single, 1), _of_length(written, 1)], size, size, num_logits)]
    for length in range(2, MAX_LOGITS_ORDER + 1):
        if len((observed := _of_length(written, length)).contexts):
            found.append(_means([observed], size, max_contexts, num_logits))
    return found


def _together(batches: Iterator[Observed], most: int) -> Observed:
    """All in one, of `most` or fewer: many small arrays would keep the memory of a model's large ones between them."""
    contexts = np.full((most, MAX_LOGITS_ORDER), NO_TOKEN, np.int64)
    tokens, probs = np.zeros((most, OBSERVED), np.int64), np.zeros((most, OBSERVED), np.float32)
    end = 0
    for each in batches:
        begin, end = end, end + len(each.contexts)
        contexts[begin:end, MAX_LOGITS_ORDER - each.contexts.shape[1] :] = each.contexts
        tokens[begin:end, : each.tokens.shape[1]] = each.tokens
        probs[begin:end, : each.probs.shape[1]] = each.probs
    return Observed(contexts[:end], tokens[:end], probs[:end])


def _most_written(num_tokens: int, batch: int) -> int:
    """Observations of `_written`, at most."""
    return -(-num_tokens // (batch * _text_tokens(num_tokens, batch))) * batch * _text_tokens(num_tokens, batch)


def _text_tokens(num_tokens: int, batch: int) -> int:
    """Tokens of a text that the model writes, at most."""
    return min(TEXT_TOKENS, max(1, num_tokens // batch))


@torch.inference_mode()
def _single_tokens(model: PreTrainedModel, beginnings: Sequence[Sequence[int]], batch: int) -> Iterator[Observed]:
    """Every token of the vocabulary behind each beginning."""
    device = model.get_input_embeddings().weight.device
    for tokens in torch.arange(vocabulary_size(model), device=device).split(batch):
        for beginning in beginnings:
            ids = _texts(beginning, tokens, model)
            yield _observed(tokens[:, None], model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1])


@torch.inference_mode()
def _written(
    model: PreTrainedModel, beginnings: Sequence[Sequence[int]], num_tokens: int, batch: int, seed: int
) -> Iterator[Observed]:
    """What the model said at every position of texts that it writes, behind the last tokens that there were."""
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator(device).manual_seed(seed)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ends = torch.tensor([] if eos is None else eos, dtype=torch.int64, device=device).reshape(-1)
    order = torch.randperm(vocabulary_size(model), generator=generator, device=device)
    text_tokens = _text_tokens(num_tokens, batch)
    for number in range(-(-num_tokens // (batch * text_tokens))):
        first = torch.arange(number * batch, (number + 1) * batch, device=device) % len(order)
        ids = _texts(beginnings[number % len(beginnings)], order[first], model)
        goes_on = torch.ones(batch, dtype=torch.bool, device=device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(text_tokens):
            logits = output.logits[:, -1].float()
            yield _observed(ids[goes_on, -MAX_LOGITS_ORDER:], logits[goes_on])
            new = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            goes_on &= ~torch.isin(new[:, 0], ends)
            if not goes_on.any():
                break
            ids = torch.cat([ids, new], 1)
            inputs = new.clamp(max=embedded_tokens(model) - 1)
            cache = {cache_keyword(model): cache_in(output)}
            output = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **cache)


def _texts(beginning: Sequence[int], tokens: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The beginning with each of the tokens behind it, those that the model has an embedding of; int64 (B, length)."""
    before = torch.tensor(list(beginning), dtype=torch.int64, device=tokens.device).expand(len(tokens), -1)
    return torch.cat([before, tokens[:, None].clamp(max=embedded_tokens(model) - 1)], 1)


def _observed(contexts: torch.Tensor, logits: torch.Tensor) -> Observed:
    top = logits.float().softmax(-1).topk(min(OBSERVED, logits.shape[-1]))
    return Observed(contexts.cpu().numpy(), top.indices.cpu().numpy(), top.values.cpu().numpy())


def _of_length(observed: Observed, length: int) -> Observed:
    """The same behind the last `length` tokens alone, where there are so many."""
    contexts = observed.contexts[:, -length:]
    there = contexts[:, 0] != NO_TOKEN
    return Observed(contexts[there], observed.tokens[there], observed.probs[there])


def _means(observed: Sequence[Observed], vocabulary: int, max_contexts: int, num_logits: int) -> Contexts:
    """Of the contexts that came most often the logits of their mean probabilities, the most frequent first."""
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
