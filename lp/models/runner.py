"""ModelRunner: forward passes of one model over the tokens of prompts and decode steps.

T: step tokens, L: cached tokens (the prefix), V: vocabulary size. `c` is the last token of the sequence so far. Its KV
is not cached yet: the next step begins with this token.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend, ForestView, StepView
from lp.attention.masks import StepMasks, named_kinds
from lp.attention.registry import AUTO, backends_to_try, set_attention
from lp.config import Capture, Exact, KVDtype
from lp.errors import UserError
from lp.models.adapters import AdapterRows
from lp.models.captured_step import BUCKETS, CapturedStep
from lp.models.captured_steps import CapturedSteps, capture_mode
from lp.models.forest_cache import ForestCache, Stretch
from lp.models.fused import FusedModel, fuse, model_state
from lp.models.graph_recorder import CaptureFailed
from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache
from lp.models.latents import expand_latents_by_sequence
from lp.models.model_lock import lock_of
from lp.models.model_view import ModelView
from lp.models.new_cache import new_cache
from lp.models.probe import check_tree_mask
from lp.models.prompt_images import PromptImages
from lp.models.quantisation import inexact_quantisation
from lp.models.query_scales import scaled_by_position
from lp.models.recurrent_layers import recurrent_shapes, tree_forward
from lp.models.releases import cache_keyword
from lp.models.rope import rope_boundary
from lp.models.sharded_layers import head_of, replica_of, sum_in_rank_order
from lp.models.support import check_supported
from lp.models.tree_pass import TreePass
from lp.models.weight_layout import restore
from lp.to_device import to_device
from lp.waits import waiting

logger = logging.getLogger(__name__)
_KEPT = "_lp_runners"  # attribute of the model: its runners


class _Kept(dict[tuple[Any, ...], "ModelRunner"]):
    """The runners of a model, by their settings. A copy of the model has none: they are of other weights."""

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()  # so that a saved model can be loaded without this package


def runner_of(
    model: PreTrainedModel,
    attention: str = AUTO,
    capture: Capture = Capture.AUTO,
    exact: Exact = Exact.TOKENS,
    kv_dtype: KVDtype = KVDtype.AUTO,
) -> ModelRunner:
    """Get the model's runner with these settings, made at the first call; decoders share it and its captured steps.

    Args:
        model: the causal LM.
        attention: "auto", or the name of an attention backend.
        capture: whether and how decode steps are captured, which means recorded once and then replayed.
        exact: whether the runner must give a token the same bits in every pass: BITWISE if so. Each value has a runner
            of its own.
        kv_dtype: dtype in which caches store keys and values; AUTO: the model's own.

    Raises:
        ValueError: the model or a setting is one that `ModelRunner` refuses.
    """
    with lock_of(model):
        kept = vars(model).get(_KEPT)
        if not isinstance(kept, _Kept):
            kept = vars(model)[_KEPT] = _Kept()
        weights = (model.dtype, model.get_input_embeddings().weight.device)
        for key in [key for key in kept if key[-2:] != weights]:
            _free(kept.pop(key))
        key = (attention, capture, exact, kv_dtype, model.config._attn_implementation, *weights)
        if key not in kept:
            same_bits = exact is Exact.BITWISE
            kept[key] = ModelRunner(model, attention, capture, same_bits=same_bits, kv_dtype=kv_dtype)
        return kept[key]


def release(model: PreTrainedModel) -> None:
    """Free all memory that this package holds for a model, and lay out its weights in memory as they were before.

    This covers captured steps, their KV cache, and weights in another layout. The next decoder makes them anew. Without
    this call they are freed together with the model, when Python's cycle collector next runs.
    """
    with lock_of(model):
        for runner in vars(model).pop(_KEPT, _Kept()).values():
            _free(runner)
        restore(model)


def _free(runner: ModelRunner) -> None:
    if runner.captured:
        runner.captured.release()


class ModelRunner:
    """Runs prefill and decode steps of one model: tree-shaped forward passes over a preallocated KV cache.

    Args:
        model: any causal LM of transformers that honours a 4-D mask; other threads may use it. It is not changed,
            except that its weights may move in memory.
        attention: "auto", or the name of an attention backend.
        capture: whether and how steps are captured: padded to a few fixed sizes, whose kernels are recorded once and
            then replayed.
        probe: whether to check, before the first use, that the model honours a tree mask, by running it on a few
            tokens.
        fused: whether steps run fused layers, where all parts of the model's layers are known (see `lp.models.fused`).
        same_bits: whether a token must get the same bits in every pass: captured steps then run no kernels that round
            differently, and ranks that divide the model add up in the order of their numbers.
        kv_dtype: dtype in which caches store keys and values; AUTO: the model's own.

    Attributes:
        original: the model as it was given.
        model: the runner's own view of the model, with the same weights and with the chosen attention backend.
        network: the module that passes call: `model`, or fused layers over its weights.
        backend: the attention backend that "auto" or the caller chose.
        captured: runs captured steps; None: steps are not captured.
        widths: numbers of tokens that passes are padded to, ascending, for equal bits (`lp.models.bitwise`); empty:
            passes are not padded.
        asked_threads: torch's number of threads when `widths` were found; 0: none were asked for.
        step_times: measured step times, which decoders share, by all that they depend on (`lp.engine.step_timing`).
        exact: False for a quantised model whose kernels let tokens of a step change each other's results; a warning
            says so.

    Raises:
        ValueError: an architecture or attention that takes no tree mask; a `kv_dtype` for a model without attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str = AUTO,
        capture: Capture = Capture.AUTO,
        probe: bool = True,
        fused: bool = True,
        same_bits: bool = False,
        kv_dtype: KVDtype = KVDtype.AUTO,
    ) -> None:
        check_supported(model.config)
        self.kv_dtype = kv_dtype
        self._adapters = AdapterRows()
        self._view = ModelView(model, self._forward_of)
        self.original = model
        self.model = self._view.model
        self.config = self.model.config.get_text_config()
        inexact = None if same_bits else inexact_quantisation(model)  # bitwise refuses
        self.exact = inexact is None
        if inexact and probe:
            warnings.warn(f"tokens may differ from plain decoding's: {inexact}", stacklevel=2)
        self.boundary = rope_boundary(self.config)
        self._lock = threading.Lock()
        self.widths: tuple[int, ...] = ()
        self._ask_widths: Callable[[ModelRunner], tuple[int, ...]] | None = None
        self.asked_threads = 0  # torch's threads when widths were found
        self.step_times: dict[str, Any] = {}
        self._known: dict[StatesKind, int] = {}  # see StaticKVCache
        self._knows_all = False  # a whole pass has run
        self._last_cache: weakref.ref[StaticKVCache] | None = None  # of the last pass, where rotary frequencies grow
        self.captured: CapturedSteps | None = None
        self._mode: Capture | None = None  # how steps are captured; None: they are not
        self._may_fuse = fused
        self._same_bits = same_bits
        self._choose_backend(backends_to_try(self.model, attention), probe)
        if kv_dtype is not KVDtype.AUTO and not self.masks.kinds:
            raise UserError(
                f"kv_dtype is {str(kv_dtype)!r}, but {type(model).__name__} has no attention, and so no keys and "
                "values to store; leave it out"
            )
        self._fallback = capture is Capture.AUTO
        if mode := capture_mode(capture, model, self.boundary is not None, self.backend):
            with waiting("trying whether steps can be captured"):
                self._capture_steps(mode, probe)

    @property
    def fused(self) -> bool:
        """Whether steps run fused layers (`lp.models.fused`), not the model's own."""
        return self.network is not self.model

    @property
    def beside_host(self) -> bool:
        """Whether the model's device computes while the host does something else, as a GPU does."""
        return bool(self.device.type != "cpu")

    @property
    def takes_forests(self) -> bool:
        """Whether one forward pass may have draft trees of several sequences.

        It may not where layers keep the recurrent state of one sequence, or where rotary frequencies depend on the
        largest position of the pass.
        """
        return not self.recurrent and self.boundary is None

    @property
    def attention(self) -> str:
        """Name of the attention backend, such as "sdpa"."""
        return self.backend.name

    def _forward_of(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        """What replaces the forward of a module in the view; None: nothing."""
        return tree_forward(module) or scaled_by_position(module) or self._adapters.forward_of(module)

    def _choose_backend(self, backends: Sequence[AttentionBackend], probe: bool) -> None:
        """Take the first backend that the model honours a tree mask with; a warning says why not an earlier one."""
        refusals = []
        for backend in backends:
            try:
                set_attention(self.model, backend)
                self.backend = backend
                self._take_up_weights()
                if probe:
                    with waiting(f"asking the model whether it honours a tree mask under {backend.name}"):
                        self._probe()
                break
            except ValueError as error:
                if backend is backends[-1]:
                    raise
                refusals.append(str(error))
                self._known.clear()  # of a pass that may have ended after the first layer
        self._knows_all = bool(self._known)
        if refusals:
            warnings.warn(f"attention is {self.attention}: {'; '.join(refusals)}", stacklevel=2)
        if probe:  # else it is asked about a few layers of another runner's model
            logger.info(
                "attention is %s, layers are %s", self.attention, "fused" if self.fused else "transformers' own"
            )

    def _take_up_weights(self) -> None:
        """Fuse the layers of the model as it is now, and build masks for its weights."""
        self.device = self.model.get_input_embeddings().weight.device
        self.masks = StepMasks(self.config, self.model.dtype, self.device, self.backend)
        self.recurrent = recurrent_shapes(self.model, named_kinds(self.config))
        self._cache_keyword = cache_keyword(self.model)
        if self._same_bits:
            sum_in_rank_order(self.model)
        expand_latents_by_sequence(self.model, self._same_bits)
        with waiting("fusing the layers"):
            fused = fuse(self.model) if self._may_fuse else None
        self.network: PreTrainedModel | FusedModel = fused or self.model
        self._state = model_state(self.model)

    def over(self, model: PreTrainedModel, fused: bool = True) -> ModelRunner:
        """Make a runner with these settings for another model, such as an excerpt of this one, to test or time it.

        The new runner does not check that the model honours a tree mask, and its caches do not quantise keys and
        values.

        Args:
            model: the other model.
            fused: whether the new runner may run fused layers; it does if this runner does.
        """
        name, fused = self.backend.name, fused and self.fused
        runner = type(self)(model, name, Capture.OFF, probe=False, fused=fused, same_bits=self._same_bits)
        if self.captured:
            runner.captured = runner._captured_steps(Capture.OFF)
        return runner

    def _probe(self) -> None:
        """Check that steps honour a tree mask; fused layers that do not are given up, if the model's own do.

        Raises:
            ValueError: the model's own layers do not honour it.
        """
        try:
            check_tree_mask(self)
        except ValueError as error:
            if not self.fused:
                raise
            self.network = self.model
            self._known.clear()  # as above
            check_tree_mask(self)
            self._may_fuse = False
            logger.warning("layers are not fused: %s", error)

    def _capture_steps(self, mode: Capture, probe: bool) -> None:
        """Set up captured steps, if the model can write to given cache slots; a warning or an error says why not."""
        try:
            self.captured = self._captured_steps(Capture.OFF)
            if probe:
                check_tree_mask(self)
            self.captured = self._captured_steps(mode)
            self._mode = mode
        except ValueError as error:
            if not self._fallback:
                raise UserError(f"captured steps: {error}; or choose capture=off") from error
            logger.warning("steps are not captured: %s", error)
            self.captured = None

    def follow(self) -> None:
        """Take notice of changes to the model since the last call: other weights, dtype, device, adapters or config.

        It is called once for each sequence, before the sequence's cache is allocated.

        Raises:
            ValueError: the config has become one for which tree-shaped steps can't be exact.
        """
        check_supported(self.original.config)
        changed = self._follow_weights() or torch.get_num_threads() != self.asked_threads
        if self._ask_widths and replica_of(self.model).any_rank([changed], self.device)[0]:
            self._find_widths()

    def keep_widths(self, ask: Callable[[ModelRunner], tuple[int, ...]]) -> None:
        """Pad passes to certain numbers of tokens (`widths`) from now on, for `exact="bitwise"`.

        The widths are found by trying the model out: now, and again whenever its weights or torch's number of threads
        have changed.

        Args:
            ask: tries out a runner and returns the widths; see `lp.models.equal_widths`.
        """
        if self._ask_widths is None:
            self._ask_widths = ask
            self._find_widths()

    def _find_widths(self) -> None:
        if self._ask_widths:
            self.asked_threads = 0  # where asking fails, the next text asks again
            self.widths = self._ask_widths(self)
            self.asked_threads = torch.get_num_threads()
            if self.captured:
                self.captured.buckets = self.widths

    def _follow_weights(self) -> bool:
        """Take notice of changes to the model's weights, modules or config; returns whether there were any."""
        with self._lock:
            if self._view.follow():
                self.model = self._view.model
                self.config = self.model.config.get_text_config()
                set_attention(self.model, self.backend)
                self.boundary = rope_boundary(self.config)
            elif model_state(self.model) == self._state:
                return False
            before, weights = self.captured, (self.masks.dtype, self.device)
            self._take_up_weights()
            if (self.masks.dtype, self.device) != weights:
                self._known, self._knows_all = {}, False
            self.captured = self._captured_steps(self._mode) if self._mode and not self.boundary else None
            if before and not before.reserved:  # else its text still has it
                before.release()  # its graphs and it hold each other
        return True

    def _captured_steps(self, mode: Capture) -> CapturedSteps:
        replica = replica_of(self.model)
        how = self._cache_keyword, self.widths or BUCKETS, not self._same_bits, self.kv_dtype
        return CapturedSteps(self.network, self.masks, mode, self._known, self.recurrent, replica, *how)

    def new_cache(self, capacity: int) -> StaticKVCache:
        """Get an empty cache for one sequence: that of captured steps, if no other sequence has it, else a new one.

        Args:
            capacity: the least number of cache slots; the prefix and the tokens of a step must fit into it together.
        """
        if self.captured and not self.captured.reserved:
            _ = self.known_kinds  # else buffers would be made by a guess
            with contextlib.suppress(CacheTooLarge):  # which has padding: a smaller one may fit
                return self.captured.empty_cache(capacity)
        return self.cache_without_buffers(capacity)

    def cache_without_buffers(self, capacity: int, deferred: bool = False) -> StaticKVCache:
        """Make an empty cache for one sequence, without memory as yet.

        A pool gives it slots, or it allocates memory of its own in its first pass.

        Args:
            capacity: number of cache slots.
            deferred: whether moves that bring accepted tokens side by side are left to the next captured step.
        """
        layers = self.config.num_hidden_layers
        return new_cache(layers, capacity, False, deferred, self._known, self.recurrent, self.kv_dtype)

    def forget_kinds(self) -> None:
        """Forget how many key and value tensors the model has, since this copy of a runner is to run fewer layers.

        The runner that was copied keeps its own count.
        """
        self._known, self._knows_all = {}, False

    @property
    def known_kinds(self) -> dict[StatesKind, int]:
        """How many key and value tensors of each kind (size, dtype, device) all layers have, to allocate KV caches by.

        The first call runs a pass of one token to find out.
        """
        if not self._knows_all:
            known = self._known
            with torch.inference_mode():
                self.prefill([0], self.cache_without_buffers(self.padded(1)), 1)
            self._knows_all = self._known is known  # else another thread has found other weights meanwhile
        return dict(self._known)

    @contextmanager
    def borrowed_cache(self, capacity: int) -> Iterator[StaticKVCache]:
        """Context manager that gives an empty cache for one generation, which no other generation gets meanwhile.

        Args:
            capacity: the least number of cache slots.
        """
        with self._lock:
            cache = self.new_cache(capacity)
            captured = self.captured if self.captures(cache) else None
            if captured:
                captured.reserved = True
        try:
            yield cache
        except torch.OutOfMemoryError:
            if captured:
                captured.settle()
                captured.release()
            raise
        finally:
            if captured:
                captured.reserved = False
                captured.settle()
                if captured is not self.captured:
                    captured.release()

    def captures(self, cache: StaticKVCache) -> bool:
        """Whether decode steps over this cache run as captured steps, which are recorded once and then replayed."""
        return self.captured is not None and cache is self.captured.cache

    def prefill(
        self,
        tokens: Sequence[int],
        cache: StaticKVCache,
        chunk: int,
        on_logits: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Cache the KV of a prompt in passes of at most `chunk` tokens, so that no mask is larger than chunk x prompt.

        Args:
            tokens: token ids of the prompt without its last token, which the first decode step computes.
            cache: an empty cache.
            chunk: most tokens of a pass.
            on_logits: called with the logits of every pass, (tokens of the pass, V), or this rank's part of the
                vocabulary if ranks divide the model. None: the LM head computes as few logits as it can.
        """
        end = len(tokens)
        start = 0
        while start < end:
            count = self.prompt_chunk(end - start, chunk)
            tree = self.prompt_pass(tokens, end, start, count, cache, count if on_logits else 0)
            logits = self.forward_trees([tree])
            if on_logits:
                on_logits(*logits.each())
            cache.commit(range(count))
            start += count

    def read_images(self, prompt: Sequence[int], images: PromptImages, cache: StaticKVCache) -> None:
        """Cache a prompt up to its last image token, by one pass of the model as it was given, with its own attention.

        Args:
            prompt: token ids of the prompt.
            images: the prompt's images.
            cache: an empty cache.
        """
        cache.flush()
        cache.begin(None)
        self.original(**images.first_pass(self.original, prompt, cache))
        cache.commit(range(images.end))

    def padded(self, num_tokens: int) -> int:
        """How many tokens, padding included, are computed in a pass that is asked for so many tokens."""
        if not self.widths:
            return num_tokens
        return next(width for width in self.widths if width >= num_tokens)

    @property
    def most_padding(self) -> int:
        """The most padding tokens that a pass can have; caches need as many slots more."""
        return max((next_ - width - 1 for width, next_ in itertools.pairwise((0, *self.widths))), default=0)

    def prompt_chunk(self, left: int, chunk: int) -> int:
        """How many tokens of a prompt the next pass is to cache.

        Args:
            left: tokens of the prompt that are not cached yet.
            chunk: about how many tokens a pass should have.
        """
        if self.widths:
            chunk = min(chunk, self.widths[-1])
        if not self.recurrent:
            return min(left, chunk)
        count = min(left, max(chunk, 3))  # one token after others may be computed otherwise: see limits_prompt
        return count - 1 if left - count == 1 else count

    def prompt_pass(
        self, tokens: Sequence[int], end: int, start: int, count: int, cache: StaticKVCache, num_logits: int = 0
    ) -> TreePass:
        """Make the pass that caches some tokens of a prompt, after the tokens that are cached already.

        Where rotary frequencies depend on the largest position, the pass has one more token at position `end`. So every
        chunk of the prompt gets the frequencies that one pass over the whole prompt would have.

        Args:
            tokens: token ids of the prompt.
            end: position of the prompt's last token, whose KV the first decode step computes.
            start: position of the first token that the pass caches.
            count: number of tokens that the pass caches.
            cache: holds the tokens before `start`, and gets the new ones.
            num_logits: number of the new tokens whose logits are computed: the last of them.
        """
        anchor = [end] if self.boundary and end >= self.boundary.length else []
        own = [*tokens[start : start + count], *tokens[: len(anchor)]]
        positions = [*range(start, start + count), *anchor]
        logits_indices = range(count - num_logits, count)
        return TreePass(own, positions, range(-1, len(own) - 1), cache, logits_indices, not anchor)

    def _forget_growth(self, cache: StaticKVCache) -> None:
        """Let a model with dynamic rotary scaling forget its longest text so far, before a pass of another text.

        Args:
            cache: the cache of the next pass, by which texts are told apart.
        """
        assert self.boundary is not None
        if not self.boundary.grows:
            return
        last, self._last_cache = self._last_cache, weakref.ref(cache)
        if not cache.length or last is None or last() is not cache:
            self._computed([TreePass([0], [0], [-1], cache, (0,))])

    def cross(self, text: Sequence[int], cache: StaticKVCache, chunk: int) -> None:
        """Cache a sequence up to its last token, before its first step past the rotary boundary, like plain decoding.

        At this length rotary frequencies change (`RopeBoundary`). Usually only the tokens that are not cached yet are
        computed, under the old frequencies. For models whose plain decoding computes the whole cache anew, all tokens
        are computed, under the new frequencies.

        Args:
            text: token ids of prompt and generated tokens.
            cache: the sequence's cache.
            chunk: most tokens of a pass.
        """
        assert self.boundary is not None
        if self.boundary.refills:
            cache.clear()
            self.prefill(text[:-1], cache, chunk)
        elif count := len(text) - 1 - cache.length:
            tokens, positions = text[cache.length : -1], range(cache.length, len(text) - 1)
            self.forward_trees([TreePass(tokens, positions, range(-1, count - 1), cache, (0,), chain=True)])
            cache.commit(range(count))

    def staged(self, tree: TreePass) -> CapturedStep | None:
        """Prepare the captured step that computes this pass, with its inputs written; None: the pass runs uncaptured.

        Args:
            tree: the sequence's tokens, and which of them each one sees.
        """
        if not self.captures(tree.cache) or tree.adapter is not None:
            return None
        assert self.captured
        if not self.captured.fits(len(tree.tokens)):
            return None
        try:
            return self.captured.staged(tree)
        except CaptureFailed as error:
            self._give_up_capturing(error)
            return None

    def captured_steps(self, num_tokens: int, cache: StaticKVCache) -> list[CapturedStep]:
        """Capture steps of all sizes up to the one that fits so many tokens, so that none is captured while decoding.

        Args:
            num_tokens: tokens of the largest step.
            cache: the sequence's cache, still empty.

        Returns:
            The captured steps; an empty list where steps over this cache are not captured.
        """
        if not self.captures(cache):
            return []
        assert self.captured
        try:
            return self.captured.steps_up_to(num_tokens)
        except CaptureFailed as error:
            self._give_up_capturing(error)
            return []

    def _give_up_capturing(self, error: CaptureFailed) -> None:
        if not self._fallback:
            raise error
        logger.warning("steps run uncaptured: %s", error)
        self.captured = None

    def forward(
        self,
        tokens: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        visible: np.ndarray,
        cache: StaticKVCache,
        logits_indices: Sequence[int],
        capture: bool = True,
        chain: bool = False,
        whole: bool = True,
    ) -> torch.Tensor:
        """Run one pass of a sequence: return logits of some of its tokens, and write the KV of all, uncommitted.

        Args:
            tokens, positions: (T,), token ids, and their positions in the sequence.
            visible: bool (T, T); [i, j]: token i sees token j of the pass, besides the whole prefix.
            cache: holds the prefix, and gets the KV.
            logits_indices: indices of the tokens whose logits are computed; only these go through the LM head.
            capture: whether the pass may run as a captured step, as decode steps do, since there are many of them.
            chain: whether each token sees all tokens before it, and all tokens will be committed.
            whole: whether the logits must cover the whole vocabulary. False: where ranks divide the model, they may
                cover only this rank's part.

        Returns:
            Logits (len(logits_indices), V), valid until the next step.
        """
        tree = TreePass(tokens, positions, _parents_of(visible), cache, logits_indices, chain)
        if capture and (step := self.staged(tree)):
            assert self.captured
            return self._whole(self.captured.run_unread(step)[: len(logits_indices)], whole)
        if self.boundary:
            self._forget_growth(cache)
        logits = self._computed([tree], None if self.widths else visible)
        return self._whole(logits[: max(len(logits_indices), 1)], whole)

    def forward_trees(self, trees: Sequence[TreePass], capture: bool = False) -> PassLogits:
        """Run one pass over the trees of one or more sequences; each sequence's KV goes to its own cache, uncommitted.

        Where ranks divide the model, the logits cover only this rank's part of the vocabulary.

        Args:
            trees: the tokens of each sequence, at least one; exactly one, unless the model `takes_forests`.
            capture: whether the pass may run as a captured step, as decode steps do; for one sequence only.

        Returns:
            Logits of the tokens at each tree's `logits_indices`, in the order of the trees.
        """
        counts = [len(tree.logits_indices) for tree in trees]
        if capture and self.captured and (step := self.staged(trees[0])):
            return PassLogits(step.run(), counts, step)
        if self.widths:
            passes = _within(trees, self.widths[-1])
            rows = [self._computed(part)[: sum(len(tree.logits_indices) for tree in part)] for part in passes]
            return PassLogits(torch.cat(rows), counts)
        if self.boundary:
            self._forget_growth(trees[0].cache)  # such a model takes one sequence a pass
        return PassLogits(self._computed(trees), counts)

    def forward_prompt(self, tree: TreePass) -> PassLogits:
        """Run a pass over a chunk of one prompt, as a captured step once chunks of about its size have come often.

        Args:
            tree: the chunk, from `prompt_pass`, with the cache of captured steps.
        """
        assert self.captured
        if self.captured.takes_prompt(len(tree.tokens)) and (step := self.staged(tree)):
            return PassLogits(self.captured.run_unread(step), [len(tree.logits_indices)])
        return self.forward_trees([tree])

    def _computed(self, trees: Sequence[TreePass], visible: np.ndarray | None = None) -> torch.Tensor:
        """Run a pass uncaptured: the logits (n, V) of all sequences, the first sequence's first; at least one row.

        Args:
            trees: one for each sequence.
            visible: bool (T, T), which tokens of a single sequence see which, where that is no tree; None: by `trees`.
        """
        if self.widths:
            num_tokens = sum(len(tree.tokens) for tree in trees)
            trees = [*trees[:-1], trees[-1].padded(self.padded(num_tokens) - num_tokens)]
        sizes = [len(tree.tokens) for tree in trees]
        starts = [*itertools.accumulate(sizes, initial=0)]
        tokens, positions = _joined([tree.tokens for tree in trees]), _joined([tree.positions for tree in trees])
        rotary = positions
        if any(tree.rotary_offset for tree in trees):
            rotary = np.add(positions, np.repeat([tree.rotary_offset for tree in trees], sizes))
        numbers_3T = to_device(np.array([tokens, positions, rotary], np.int64), self.device)
        ids_1T, positions_1T, rotary_1T = numbers_3T.split(1)
        views = []
        for tree, own_positions in zip(trees, positions_1T[0].split(sizes), strict=True):
            cache = tree.cache
            cache.flush()
            seen = to_device(tree.visible() if visible is None else visible, self.device)
            cache.begin(None if tree.chain else seen)
            views.append(StepView(seen, own_positions, cache.length, None, None, self.masks.dtype))
        indices = [start + index for start, tree in zip(starts, trees, strict=False) for index in tree.logits_indices]
        # A number: those of all tokens, which need no gathering. For the last ones, too, a number would do; but Gemma 4
        # then drops the others before it applies the mask, which has no parts after that. A model gives at least one.
        indices += [0] * (self.padded(len(indices) or 1) - len(indices))
        slices_masks = len(trees) > 1 and bool(getattr(self.config, "num_kv_shared_layers", None))
        keeps_all = indices == [*range(starts[-1])] and not slices_masks
        logits_to_keep = len(indices) if keeps_all else to_device(indices, self.device)
        with self._adapters.of(trees, self.device):
            output = self.network(
                input_ids=ids_1T,
                position_ids=rotary_1T,
                attention_mask=self.masks.build(views[0] if len(views) == 1 else ForestView(views)),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_keyword: self._cache_of(trees, starts)},
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _cache_of(self, trees: Sequence[TreePass], starts: Sequence[int]) -> StaticKVCache | ForestCache:
        """The cache that a pass hands to the model: a single sequence's own, or one that joins those of several."""
        if len(trees) == 1:
            return trees[0].cache
        stretches = [Stretch(*ends, tree.cache) for ends, tree in zip(itertools.pairwise(starts), trees, strict=True)]
        return ForestCache(stretches, self.config.num_hidden_layers, self.backend.takes_parts, self.device)

    def _whole(self, logits: torch.Tensor, whole: bool) -> torch.Tensor:
        head = head_of(self.model) if whole else None
        return head.whole(logits) if head else logits


class PassLogits(NamedTuple):
    """The logits of one forward pass over one or more sequences.

    Attributes:
        rows: (at least n, V): the n rows of V logits that were asked for, the first sequence's first; then padding.
        counts: number of rows of every sequence; they add up to n.
        step: the captured step that computed the rows, and overwrites them when it runs again; None: the pass was not a
            captured step.
    """

    rows: torch.Tensor
    counts: list[int]
    step: CapturedStep | None = None

    def each(self) -> list[torch.Tensor]:
        """Split the logits by sequence: a tensor (number of its rows, V) for each."""
        return list(self.rows[: sum(self.counts)].split(self.counts))


def _within(trees: Sequence[TreePass], most: int) -> list[list[TreePass]]:
    """Divide the trees of one pass among several, in their order, each of at most so many tokens."""
    passes: list[list[TreePass]] = []
    left = 0
    for tree in trees:
        if not passes or left < len(tree.tokens):
            passes.append([])
            left = most
        passes[-1].append(tree)
        left -= len(tree.tokens)
    return passes


def _joined(rows: Sequence[Sequence[int] | np.ndarray]) -> Sequence[int] | np.ndarray:
    """Join all of them into one; a single one is returned as it is."""
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _parents_of(visible: np.ndarray) -> np.ndarray:
    """The parent of each token of a tree: the last one before it that it sees; -1 for none."""
    tokens = np.arange(len(visible))
    parents: np.ndarray = np.where(visible & (tokens < tokens[:, None]), tokens, -1).max(1)
    return parents
