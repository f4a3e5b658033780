"""A journal: a file of JSON lines with the tokens generated so far, so that a restarted process continues after them.

    {"text": "1f0c...", "seed": 7, "kept": 0}     a text begins, or continues after its first `kept` tokens
    {"t": [312, 9]}                               the tokens of one decode step
    {"end": "length"}                             the text has ended, and why

A text is a prompt and the tokens that are generated after it. Its name is a digest of everything that its tokens
depend on: model, prompt and settings. A line belongs to the text that was named last; in a batch, whose texts share
steps, a line names its text with "of". Rank 0 writes the file and reads it for all ranks. Each line is one write,
which outlives the process but not a crash of the machine (there is no fsync).
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from lp.checks import check_callback, check_int
from lp.config import KVDtype
from lp.digest import text_digest
from lp.engine.batch import OnBatchTokens, calls_of_batch, generate_together
from lp.engine.decoder import Decoder
from lp.engine.engine import MAX_SEQUENCES
from lp.engine.inputs import Prompt, check_sampling, check_seed, eos_ids, listed_criteria, listed_processors, prompt_ids
from lp.engine.interrupts import Interrupted
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.digests import model_digests
from lp.models.recurrent_layers import limits_prompt
from lp.models.rope import rope_boundary
from lp.parallel.agreement import exchange, shared_seed
from lp.parallel.context import ParallelContext
from lp.sampling.generation_config import AUTO, NONE
from lp.sampling.params import SamplingParams, Verifier
from lp.sampling.processors import plain_settings

HEX = re.compile(rb"[0-9a-f]")
# How the three kinds of lines begin, with a 0 for each character that may be a hexadecimal digit; and all characters
# that a line may have.
STARTS = tuple(HEX.sub(b"0", start) for start in (b'{"text":"0123456789abcdef","seed":', b'{"t":[', b'{"end":"'))
IN_LINES = re.compile(rb'[a-z0-9_{}\[\]":,]*')
NAMED = ("input_ids", "max_new_tokens", "sampling", "on_tokens")  # arguments of a call that are not options
OF_ALL_TOKENS = ("output_scores", "output_logits")  # refused: the file has no logits of earlier tokens
OBJECTS = ("logits_processor", "stopping_criteria")  # whose settings are their attributes


@dataclass
class Record:
    """What a journal's file has of one generated text.

    Attributes:
        seed: seed that the text is sampled with; None for a greedy text.
        tokens: ids of the tokens generated so far.
        end: finish reason; None while the text has not ended.
    """

    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass
class _Text:
    """A text that this process generates or completes.

    Attributes:
        name: the text's name in the file, a digest.
        record: the part of the text that the file has.
        done: ids of the generated tokens that are taken from the file.
        call: keyword arguments of `Decoder.generate` for the rest of the text.
    """

    name: str
    record: Record
    done: list[int]
    call: dict[str, Any]

    def whole(self) -> GenerationOutput:
        """The output of a text that the file has to its end."""
        return GenerationOutput(list(self.done), self.record.end or "", [], resumed=len(self.done))


class Journal:
    """Generates by a decoder, and keeps the tokens in a file; after a restart, the same call continues after them.

    The whole text is that of an undisturbed run; it must be greedy or sampled with coupled noise (not by rejection).
    The file finds a text by all settings of the call. Of logits processors and criteria it compares classes and those
    attributes that are plain values or arrays: if two calls differ only in other attributes, such as a function, use
    two journals.

    Args:
        path: the file, which is created if missing, else read and appended to. Only one process at a time may open it.
        context: the ranks of the job.
        fixed_weights: True promises that models' weights don't change while the journal is open, so that the digest of
            the weights is computed once and not for each call.

    Raises:
        ValueError: the file cannot be read or written, is no journal, or is open in another process.
    """

    def __init__(self, path: str | Path, context: ParallelContext, fixed_weights: bool = False) -> None:
        self.path, self.context = Path(path), context
        self._fixed_weights = fixed_weights
        self._models: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # an id may be that of one before
        self._file: FileIO | None = None
        self._named = ""  # name of the text that lines without "of" belong to now
        content = context.share_text(self._opened() if context.is_main else None, "opening a journal")
        assert content is not None
        records = json.loads(content)
        if "error" in records:  # on every rank, or the others would wait for rank 0
            raise UserError(records["error"])
        self.records = {name: Record(**record) for name, record in records.items()}

    @property
    def seed(self) -> int | None:
        """Seed of the first sampled text in the file, so that further texts can get it too; None if none is sampled."""
        return next((record.seed for record in self.records.values() if record.seed is not None), None)

    def generate(
        self,
        decoder: Decoder,
        ids: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        *,
        on_tokens: OnTokens | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Call `decoder.generate`, or only for the rest of the text if the file has its first tokens.

        `on_tokens` gets the tokens of the file in one call, as step 0. An unfinished text is generated from its
        beginning if the model can't resume a text exactly (`resumable`).

        Args:
            decoder, ids, max_new_tokens, sampling, on_tokens, options: see `Decoder.generate`. If no seed is given for
                a sampled text, its seed in the file is used, or else a random one.

        Returns:
            The output of the whole text. `resumed` says how many tokens came from the file; steps and times are those
            of the other tokens.

        Raises:
            Interrupted: as in `Decoder.generate`, with the whole text so far; the same call later continues after it.
            ValueError: as in `Decoder.generate`. It is also raised for rejection sampling, whose draws can't be
                repeated, for a grammar, which can't begin within a text, and for scores or logits, which the file does
                not have.
        """
        call = {**options, "input_ids": ids, "max_new_tokens": max_new_tokens, "sampling": sampling}
        text = self._begin(decoder, self._model_name(decoder.model), {**call, "on_tokens": on_tokens})
        if text.record.end:
            return text.whole()
        try:
            output = decoder.generate(**text.call)
        except Interrupted as error:
            self._ended(text, error.output)
            raise
        return self._ended(text, output)

    def generate_batch(
        self,
        decoder: StepDecoder,
        inputs: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 256,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        on_tokens: OnBatchTokens | None = None,
        max_sequences: int = MAX_SEQUENCES,
        **options: Any,
    ) -> list[GenerationOutput]:
        """Call `decoder.generate_batch` for those parts of the texts that the file does not have.

        Args:
            decoder, inputs, max_new_tokens, sampling, on_tokens, max_sequences, options: see
                `BatchDecoder.generate_batch`, with seeds as in `generate` here.

        Returns:
            The outputs of the whole texts, in the order of the prompts; see `generate`.

        Raises:
            Interrupted: as in `BatchDecoder.generate_batch`, with the whole texts so far.
            ValueError: as in `generate`.
        """
        calls = calls_of_batch(inputs, max_new_tokens, sampling, on_tokens, options)
        model = self._model_name(decoder.model)
        texts = [self._begin(decoder, model, call) for call in calls]
        left = [text for text in texts if not text.record.end]
        ended = {id(text): text.whole() for text in texts if text.record.end}
        try:
            outputs = generate_together(decoder, [text.call for text in left], max_sequences)
        except Interrupted as error:
            for text, output in zip(left, error.outputs, strict=True):
                ended[id(text)] = self._ended(text, output)
            error.outputs = [ended[id(text)] for text in texts]
            error.finished = [output for output in error.outputs if not output.could_go_on]
            raise
        ended |= {id(text): self._ended(text, output) for text, output in zip(left, outputs, strict=True)}
        return [ended[id(text)] for text in texts]

    def _model_name(self, model: PreTrainedModel) -> str:
        name = self._models.get(model) or model_name(model, self.context)
        if self._fixed_weights:
            self._models[model] = name
        return name

    def _begin(self, decoder: Decoder, model: str, call: dict[str, Any]) -> _Text:
        """Check a call, and find which part of its text is in the file and which is left to generate.

        Args:
            decoder: decoder that generates the text.
            model: name of the decoder's model, from `model_name`.
            call: keyword arguments of `decoder.generate`.
        """
        sampling: SamplingParams | None = call["sampling"]
        check_sampling(sampling)
        check_seed(call.get("seed"))
        on_tokens: OnTokens | None = call.get("on_tokens")
        check_callback("on_tokens", on_tokens, "a function of (new tokens, step), or None")
        if call.get("grammar") is not None:
            raise UserError("a journal can't go on under a grammar, which begins with the text; leave one of them out")
        if asked := [name for name in OF_ALL_TOKENS if call.get(name)]:
            raise UserError(f"{asked[0]} is on, and a journal keeps tokens alone; leave one of them out")
        if sampling is not None and sampling.verifier is Verifier.REJECTION:
            raise UserError("a journal can't go on with verifier 'rejection', which draws anew; use 'coupled'")
        ids = prompt_ids(decoder.model, call["input_ids"])
        new = check_int("max_new_tokens", call["max_new_tokens"], 1, math.inf, "ask for at least one token")
        # Which may be iterators, and are read twice.
        call["logits_processor"] = listed_processors(call.get("logits_processor"))
        call["stopping_criteria"] = listed_criteria(call.get("stopping_criteria"))
        call["eos_token_id"] = sorted(eos_ids(decoder.model, call.get("eos_token_id")))
        checkpoint = decoder.checkpoint(call.pop("generation_config", None))
        options = {key: call[key] for key in call if key not in NAMED}
        if said := checkpoint.said(sampling):
            options["generation_config"] = said
        if decoder.kv_dtype is not KVDtype.AUTO:
            options["kv_dtype"] = str(decoder.kv_dtype)
        name = _text_name(model, ids, new, sampling, options)
        record = self.records.setdefault(name, Record())
        sampled = checkpoint.samples if sampling is None else not sampling.greedy
        given = sampling.seed if sampling is not None and sampling.seed is not None else call.get("seed")
        if sampled and given is None and record.seed is None:
            record.seed = shared_seed(self.context.ranks, "drawing the seed of a journal's text")
        record.seed = None if not sampled else record.seed if given is None else given
        if sampling is not None:
            sampling = replace(sampling, seed=record.seed)
        # The last token comes again, and with it what may have ended the text.
        done = record.tokens if record.end else record.tokens[:-1]
        if not (record.end or resumable(decoder.model)):
            done = []
        if done and on_tokens:
            on_tokens(list(done), 0)
        if not record.end:
            self._write({"text": name, "seed": record.seed, "kept": len(done)})
            self._named = name
            record.tokens = list(done)

        def write_tokens(tokens: list[int], step: int) -> None:
            self._write_of(name, {"t": tokens})
            if self.context.alone:  # among ranks, an error may come on one of them a step before the others
                record.tokens += tokens
            if on_tokens:
                on_tokens(tokens, step)

        callback = write_tokens if self.context.is_main else on_tokens
        left = {"input_ids": [*ids, *done], "max_new_tokens": new - len(done), "sampling": sampling}
        left |= {"generation_config": AUTO if said else NONE, "seed": record.seed}
        left["continued"] = call.get("continued", 0) + len(done)
        return _Text(name, record, list(done), {**call, **left, "on_tokens": callback})

    def _ended(self, text: _Text, output: GenerationOutput) -> GenerationOutput:
        """Put the tokens of the file in front of an output's, and write the end of the text if it has ended."""
        output.tokens, output.resumed = [*text.done, *output.tokens], len(text.done)
        text.record.tokens = list(output.tokens)
        if not output.could_go_on:
            text.record.end = output.finish_reason
            self._write_of(text.name, {"end": text.record.end})
        return output

    def _opened(self) -> str:
        """Open and lock the file; return its records as JSON for all ranks, or {"error": why it can't be used}.

        A last line that was cut off is removed, so that the file ends with a whole line.
        """
        try:
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - for as long as the run lasts
            if not _locked(self._file):  # lines of two processes would be taken for each other's
                reason = "is being written by another run; wait for it, or give another path"
                return json.dumps({"error": f"journal {self.path} {reason}"})
            self._file.seek(0)
            *lines, cut = self._file.readall().split(b"\n") if self.path.is_file() else [b""]
            if not _begins_line(cut):
                raise UserError("ends with what no journal has")
            records = _read(lines)
            if cut:  # the last line was not written completely; removed only now that the file is known for a journal
                self._file.truncate(self._file.tell() - len(cut))
            return json.dumps({name: asdict(record) for name, record in records.items()})
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); give a path in a folder that exists and is yours"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            reason = "is no journal of lp; give another path, or delete it"
        return json.dumps({"error": f"journal {self.path} {reason}"})

    def _write_of(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to the file, with the text's name if the last line was another text's."""
        self._write(line if name == self._named else {**line, "of": name})
        self._named = name

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            written = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            if self._file.write(written) < len(written):  # the next line must not follow half a one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk must not cost the text
            warnings.warn(f"journal {self.path} is not written any more ({error.strerror})", stacklevel=2)
            self._file = None


def model_name(model: PreTrainedModel, context: ParallelContext) -> str:
    """Name a model by digests of its config and weights, so that a journal continues texts only with the same model.

    All ranks call it together, and get the same name. The name does not depend on the number of ranks, unless tensor
    parallelism divides the model: then each rank digests its own part.

    Args:
        model: this rank's model, or its part of the model.
        context: the ranks of the job.
    """
    digests = exchange(context.ranks, "naming a model", [*model_digests(model).values()]).tolist()
    return json.dumps(sorted({tuple(each) for each in digests}))


def _text_name(
    model: str, ids: Sequence[int], new: int, sampling: SamplingParams | None, options: dict[str, Any]
) -> str:
    """The name of a text: a digest of the model and of the call, without W, N, G and ranks, which change no token."""
    settings = [plain_settings(vars(each)) for key in OBJECTS for each in options[key]]
    asked = sorted((key, repr(plain_settings(value))) for key, value in options.items())
    return f"{text_digest(repr((model, list(ids), new, sampling and asdict(sampling), settings, asked))):016x}"


def resumable(model: PreTrainedModel) -> bool:
    """Whether a model can resume a text exactly, if the tokens generated so far are given as the end of the prompt.

    It can't if it computes prompt tokens otherwise than generated ones: if rotary frequencies depend on the length of
    the text, or if recurrent layers take a prompt in parts of a certain size.
    """
    return not (rope_boundary(model.config.get_text_config()) or limits_prompt(model))


def _locked(file: FileIO) -> bool:
    """Lock the file for this process; False: another process has the lock.

    Unlike `lp.file_locks.lock`, this lets one process open a journal twice, as a notebook's cell that runs again does.
    The lock is lost as soon as any code of this process closes the file, even through another handle.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # some file systems have no locks
    return True


def _begins_line(cut: bytes) -> bool:
    """Whether bytes can be the beginning of a journal's line, so that a file of somebody else is left alone."""
    masked = HEX.sub(b"0", cut)
    begins = any(start.startswith(masked[: len(start)]) for start in STARTS)
    return begins and IN_LINES.fullmatch(cut) is not None


def _read(lines: Sequence[bytes]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    record = Record()
    for line in map(json.loads, lines):
        if "text" in line:
            record = records.setdefault(line["text"], Record())
            record.seed = line["seed"]
            del record.tokens[line["kept"] :]
            continue
        if "of" in line:
            record = records[line["of"]]
        if "t" in line:
            record.tokens += line["t"]
        else:
            record.end = line["end"]
    return records
