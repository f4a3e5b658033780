"""What every decoder shares: the signature of `generate`, its result, and its checks."""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from lp.checks import check_int, flat_list
from lp.decoding.inputs import Eos, Prompt, eos_ids, prompt_ids
from lp.decoding.params import SamplingParams
from lp.decoding.sampling import Chooser
from lp.decoding.scores import KeepingChooser
from lp.decoding.signals import DeferredSignals, Interrupted
from lp.decoding.stopping import Stopping
from lp.distributed import ParallelContext
from lp.models.loader import context_limit
from lp.models.rope import RopeBoundary, rope_boundary
from lp.models.support import check_adapter

OnTokens = Callable[[list[int], int], None]


class Clock:
    """Splits time: `lap()` returns the seconds since the last lap and adds them to a name's share."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.shares: dict[str, float] = {}

    def lap(self, name: str = "") -> float:
        now = time.perf_counter()
        took, self.last = now - self.last, now
        self.shares[name] = self.shares.get(name, 0.0) + took
        return took


class StepStats(NamedTuple):
    """One decode step on this rank.

    Attributes:
        slots: rows this rank computed.
        candidates: candidate rows of the whole step, beyond the window's.
        accepted: accepted tokens, without the bonus.
        forward_s, exchange_s, host_s: seconds in the model, in the collectives, and in everything else.
        learn_s: of host_s, what the candidate source and the window took to learn from the step.
        columns: of the window.
        idle: nothing was guessed and nothing learned: the budget left the step plain.
    """

    slots: int
    candidates: int
    accepted: int
    forward_s: float
    exchange_s: float
    host_s: float
    learn_s: float = 0.0
    columns: int = 0
    idle: bool = False

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward_s + self.exchange_s + self.host_s

    @classmethod
    def of(cls, clock: Clock, slots: int, candidates: int, accepted: int, columns: int, idle: bool) -> StepStats:
        """The stats of a step whose laps were named forward, exchange, host and learn."""
        share = clock.shares.get
        forward_s, exchange_s, learn_s = share("forward", 0.0), share("exchange", 0.0), share("learn", 0.0)
        host_s = share("host", 0.0) + learn_s
        return cls(slots, candidates, accepted, forward_s, exchange_s, host_s, learn_s, columns, idle)


@dataclass
class GenerationOutput:
    """What one `generate` call gave.

    Attributes:
        tokens: the new tokens, EOS included when it ended there.
        finish_reason: "eos", "length", "stop_string", "criteria" or "context"; "interrupted" in `Interrupted.output`.
        step_stats: one entry a decode step.
        prefill_s, decode_s: seconds before the first decode step, and from there on.
        cache_bytes: bytes of the preallocated KV cache (0 where the decoder has none).
        logits, scores: (tokens, V), of the rows that chose the tokens, if asked for.
        resumed: first tokens that no step of this call made: a journal had them.
    """

    tokens: list[int]
    finish_reason: str
    step_stats: list[StepStats] = field(repr=False)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    logits: torch.Tensor | None = field(default=None, repr=False)
    scores: torch.Tensor | None = field(default=None, repr=False)
    resumed: int = 0

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.step_stats)

    @property
    def compression(self) -> float:
        """S: generated tokens a decode step."""
        return (len(self.tokens) - self.resumed) / self.steps if self.steps else 0.0

    @property
    def mean_slots(self) -> float:
        """Mean rows a step on this rank."""
        return statistics.fmean(s.slots for s in self.step_stats) if self.step_stats else 0.0


@dataclass
class Request:
    """A checked `generate` call.

    Attributes:
        prompt: token ids.
        limit: positions below it may be used: none behind it chooses a token that fits the context and was asked for.
        max_new_tokens, chooser, stopping, on_tokens, prefill_chunk: as given.
        signals: SIGINT and SIGTERM, deferred to the end of a step.
        boundary: where the model's rotary frequencies change; None if nowhere.
    """

    prompt: list[int]
    max_new_tokens: int
    limit: int
    chooser: Chooser
    stopping: Stopping
    on_tokens: OnTokens | None
    prefill_chunk: int
    signals: DeferredSignals
    boundary: RopeBoundary | None

    def limit_at(self, position: int) -> int:
        """Positions below it may be used by a step whose `c` is at `position`."""
        return self.boundary.limit(position, self.limit) if self.boundary else self.limit

    def crosses(self, position: int) -> bool:
        """Whether `position` is generated, and the first one past the rotary boundary."""
        return self.boundary is not None and position == self.boundary.length and position >= len(self.prompt)


class Decoder(ABC):
    """Turns a prompt into tokens; every decoder gives the tokens of plain decoding.

    Args:
        model: an HF causal LM, loaded and on its device.
        context: the ranks to share a step with; None is this process alone.
    """

    def __init__(self, model: PreTrainedModel, context: ParallelContext | None = None) -> None:
        check_adapter(model)
        self.model, self.context = model, context or ParallelContext(device=model.device)

    def generate(
        self,
        input_ids: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        *,
        logits_processor: Iterable[LogitsProcessor] = (),
        eos_token_id: Eos | None = None,
        stop_strings: Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Iterable[StoppingCriteria] = (),
        on_tokens: OnTokens | None = None,
        prefill_chunk: int = 512,
        padding: Sequence[int] = (),
        sequence: int = 0,
        output_scores: bool = False,
        output_logits: bool = False,
    ) -> GenerationOutput:
        """Generate from one prompt.

        Args:
            input_ids: the prompt, (L,) or (1, L): a list, a numpy array or a tensor of integers.
            max_new_tokens: most tokens to add.
            sampling: temperature, warpers and seed; None is greedy.
            logits_processor: transformers' processors, applied before the warpers of `sampling`.
            padding: left padding of the prompt, which processors and criteria see and the model does not.
            sequence: index of this sequence in a batch, which sampled noise depends on.
            eos_token_id: one or several; None takes the model's, an empty tuple none.
            stop_strings: end after the token that completes one of them; needs `tokenizer`.
            stopping_criteria: transformers' criteria, asked after every token, without scores. Among ranks that share
                steps, rank 0's word counts; plain decoding, which shares none, asks each rank's own.
            on_tokens: called once a step with (new tokens, step) before the next one starts; among ranks that share
                steps, where there are criteria, on rank 0 alone.
            prefill_chunk: prompt rows a forward pass.
            output_scores: return the processed logits of every token, warpers included, noise not; on one rank.
            output_logits: return the model's own; on one rank.

        Returns:
            GenerationOutput.

        Raises:
            Interrupted: a KeyboardInterrupt with what was generated; SIGINT or SIGTERM came to some rank, and the step
                is finished. A second one acts at once, as it would without this call.
            ValueError: a prompt that is empty, too long or not of this vocabulary, or a value out of range.
        """
        prompt = prompt_ids(self.model, input_ids)
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1, math.inf, "ask for at least one token")
        prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1, math.inf, "try 512")
        sequence = check_int("sequence", sequence, 0, 2**63 - 1, "number the sequences of a batch from 0")
        padding = [check_int("padding", token, 0, math.inf, "give token ids") for token in flat_list(padding)]
        wanted = [name for name, asked in (("scores", output_scores), ("logits", output_logits)) if asked]
        if wanted and self.context.world_size > 1:
            raise ValueError(
                f"output_{wanted[0]} is on among {self.context.world_size} ranks, of which each has only the rows that "
                "it computed; leave it out, or generate on one rank"
            )
        context = context_limit(self.model)
        stopping = Stopping.build(
            eos_ids(self.model, eos_token_id),
            max_new_tokens,
            None if context is None else context - len(prompt),
            [*padding, *prompt],
            stop_strings,
            tokenizer,
            stopping_criteria,
            self.model.device,
        )
        seeded, rank = self._seeded(sampling), self.context.rank
        chooser = (KeepingChooser if wanted else Chooser).build(
            seeded, logits_processor, padding, sequence, rank, self.reach, self.guess_noise, self.model
        )
        if isinstance(chooser, KeepingChooser):
            chooser.kept = {name: [] for name in wanted}
        with torch.inference_mode(), DeferredSignals() as signals:
            limit = len(prompt) + min(max_new_tokens, stopping.room or max_new_tokens) - 1
            boundary = rope_boundary(self.model.config.get_text_config())
            output = self._decode(
                Request(prompt, max_new_tokens, limit, chooser, stopping, on_tokens, prefill_chunk, signals, boundary)
            )
        if isinstance(chooser, KeepingChooser):
            output.logits, output.scores = (chooser.stacked(name, len(output.tokens)) for name in ("logits", "scores"))
        if output.finish_reason == "interrupted" or signals.received:  # which may come in the step that ends the text
            raise Interrupted(output, signals.received)
        return output

    @property
    def reach(self) -> int:
        """Positions a step may span, from the last generated token on."""
        return 1

    @property
    def guess_noise(self) -> bool:
        """Whether rows that verify nothing guess under the sampler's noise."""
        return True

    def _seeded(self, sampling: SamplingParams | None) -> SamplingParams | None:
        """With a seed of None, rank 0 draws one from torch's generator for all; ranks that need none gather too."""
        wanted = sampling is not None and sampling.seed is None
        drawn = torch.randint(2**63 - 1, (1,)) if wanted else torch.zeros(1, dtype=torch.int64)
        seed = int(self.context.all_gather(drawn.to(self.context.device))[0])
        return replace(sampling, seed=seed) if sampling is not None and wanted else sampling

    @abstractmethod
    def _decode(self, request: Request) -> GenerationOutput: ...
