"""ModelRunner: one forward pass over the rows of a step.

T: rows of the step, L: cached rows, V: vocabulary.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention import StepMasks, choices, set_attention
from lp.config import Attention, Capture
from lp.models.captured_steps import CapturedSteps, CaptureFailed, capture_mode
from lp.models.kv_cache import StaticKVCache
from lp.models.probe import check_tree_mask
from lp.models.rope import rope_boundary
from lp.models.support import check_supported, inexact_quantisation
from lp.models.view import ModelView

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs tree-shaped steps of one model against a preallocated cache.

    Args:
        model: any HF causal LM that honours a 4-D mask; it stays as it is, for others may be using it.
        attention: backend.
        capture: whether steps have a few fixed shapes and their kernels are replayed.
        probe: ask the model itself whether it honours the mask, the first time it is used.

    Attributes:
        original: the model as it was given.
        model: the runner's own view of it, with the same weights and the attention that was chosen.
        attention: the backend that `auto` or the caller chose.
        captured: runs captured steps; None where they are not.
        exact: False for a quantised model whose kernels let rows of a step change each other; a warning says so.

    Raises:
        ValueError: an architecture or attention that takes no tree mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Attention = Attention.AUTO,
        capture: Capture = Capture.AUTO,
        probe: bool = True,
    ) -> None:
        check_supported(model.config)
        self._view, self.original = ModelView(model), model
        self.model = self._view.model
        self.device = model.get_input_embeddings().weight.device
        self.config = self.model.config.get_text_config()
        inexact = inexact_quantisation(model.config)
        self.exact = inexact is None
        if inexact:
            warnings.warn(f"tokens may differ from plain decoding's: {inexact}", stacklevel=2)
        self.boundary = rope_boundary(self.config)
        self.captured: CapturedSteps | None = None
        self._settle(attention, probe)
        self._fallback = capture is Capture.AUTO
        if how := capture_mode(capture, model, self.boundary is not None, self.attention):
            self._capture(how, probe)

    def _settle(self, attention: Attention, probe: bool) -> None:
        """Take the first backend that the model honours a tree mask with."""
        tried = choices(self.model, attention)
        for choice in tried:
            try:
                set_attention(self.model, choice)
                self.attention = choice
                self.masks = StepMasks(self.config, self.model.dtype, self.device, choice)
                if probe:
                    check_tree_mask(self)
                break
            except ValueError:
                if choice is tried[-1]:
                    raise
        logger.info("attention is %s", self.attention)

    def _capture(self, how: Capture, probe: bool) -> None:
        """Capture steps, if the model takes rows at places that are data: not every one tells its attention of them."""
        try:
            self.captured = CapturedSteps(self.model, self.masks, Capture.OFF)
            if probe:
                check_tree_mask(self)
            self.captured = CapturedSteps(self.model, self.masks, how)
        except ValueError as error:
            if not self._fallback:
                raise ValueError(f"captured steps: {error}; or choose capture=off") from error
            logger.warning("steps are not captured: %s", error)
            self.captured = None

    def follow(self) -> None:
        """Take up what has been changed on the model since: once a text, before its cache is made."""
        if self._view.follow():
            self.model = self._view.model
            set_attention(self.model, self.attention)
            if self.captured:
                self.captured = CapturedSteps(self.model, self.masks, self.captured.how)

    def new_cache(self, capacity: int) -> StaticKVCache:
        """An empty cache of at least `capacity` rows; with captured steps always the same one, unless it is taken."""
        if self.captured and not self.captured.taken:
            return self.captured.take_cache(capacity)
        return StaticKVCache(self.config.num_hidden_layers, capacity)

    @contextmanager
    def taking(self, cache: StaticKVCache) -> Iterator[None]:
        """Nobody else gets this cache meanwhile."""
        captured = self.captured if self.captured and cache is self.captured.cache else None
        if captured is None:
            yield
            return
        captured.taken = True
        try:
            yield
        except BaseException:
            captured.release()  # a cache that did not fit, or a step that was cut
            raise
        finally:
            captured.taken = False

    def prefill(
        self,
        tokens: Sequence[int],
        cache: StaticKVCache,
        chunk: int,
        read: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Cache the KV of the tokens before `c`, `chunk` rows a pass, so that no mask is larger than chunk x prompt.

        Where frequencies depend on the largest position, every chunk has a row at `c`'s, as if there were one chunk.

        Args:
            read: is given the logits (rows, V) of every pass, if anyone wants them.
        """
        boundary, end = self.boundary, len(tokens)
        if boundary and boundary.grows and not cache.length:
            self._chain([0], [0], cache)  # forget how far an earlier text grew
        anchor = [end] if boundary and end >= boundary.length else []
        for start in range(0, end, chunk):
            part = tokens[start : start + chunk]
            places = [*range(start, start + len(part)), *anchor]
            logits_indices = range(len(part) if read else 1)  # a model gives at least one
            logits = self._chain([*part, *tokens[: len(anchor)]], places, cache, logits_indices)
            if read:
                read(logits)
            cache.commit(range(len(part)))

    def cross(self, text: Sequence[int], cache: StaticKVCache, chunk: int) -> None:
        """Before the first step past the rotary boundary: cache all the text but `c`, as plain decoding would.

        What is missing is computed under the old frequencies, or everything under the new ones.
        """
        assert self.boundary is not None
        if self.boundary.refills:
            cache.length = 0
            self.prefill(text[:-1], cache, chunk)
        elif missing := text[cache.length : -1]:
            self._chain(missing, range(cache.length, len(text) - 1), cache)
            cache.commit(range(len(missing)))

    def _chain(
        self, tokens: Sequence[int], positions: Sequence[int], cache: StaticKVCache, logits_indices: Sequence[int] = (0,)
    ) -> torch.Tensor:
        """Rows in a row, for their KV and the logits of those that are read."""
        visible = np.tri(len(tokens), dtype=bool)
        return self.forward(tokens, positions, visible, cache, logits_indices, capture=False)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray,
        cache: StaticKVCache,
        logits_indices: Sequence[int],
        capture: bool = True,
    ) -> torch.Tensor:
        """Logits of the rows that are read; the rows' KV is written behind the prefix, uncommitted.

        Args:
            tokens, positions: (T,).
            visible: (T, T) bool, which rows of the step each one sees besides the whole prefix.
            cache: holds the prefix.
            logits_indices: rows to read; only these go through the LM head.
            capture: it is a step, of which there will be many.

        Returns:
            (len(logits_indices), V), valid until the next step.
        """
        if capture and self.captured and cache is self.captured.cache and self.captured.fits(len(tokens)):
            try:
                return self.captured.run(tokens, positions, visible, logits_indices)
            except CaptureFailed as error:
                if not self._fallback:
                    raise
                logger.warning("steps run uncaptured: %s", error)
                self.captured = None
        ids_1T, positions_1T = torch.tensor([tokens, positions], device=self.device).split(1)
        mask = self.masks.build(visible, positions_1T[0], cache.length)
        last = len(logits_indices) > 0 and [*logits_indices] == [*range(len(tokens) - len(logits_indices), len(tokens))]  # need no gathering
        output = self.model(
            input_ids=ids_1T,
            position_ids=positions_1T,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=len(logits_indices) if last else torch.tensor(logits_indices, dtype=torch.long, device=self.device),
        )
        return output.logits[0]
