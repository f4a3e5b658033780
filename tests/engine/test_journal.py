"""A text that was cut off goes on from its journal and ends as it would have, whatever the last process left."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import lp
from lp.engine import journal as journal_module
from lp.engine.journal import Journal
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from tests.support.apps import Ran
from tests.support.pools import drawn_switches
from tests.support.switches import lookahead_config
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import VOCABULARY, drawn_text, plain_greedy, tiny_model

ALONE = ParallelContext()
SAMPLING = lp.SamplingParams(temperature=0.8, seed=11)


class Killed(BaseException):
    """Stands for the end of the process."""


def _killed_after(steps: int) -> Callable[[list[int], int], None]:
    def on_tokens(tokens: list[int], step: int) -> None:
        if step >= steps:
            raise Killed

    return on_tokens


def _started(path: Path, ranks: int, model: Any, config: Any, steps: int, asked: dict[str, Any]) -> Any:
    """What every rank returned, None where it was killed after so many steps, and what it streamed."""
    streamed: list[list[int]] = [[] for _ in range(ranks)]

    def body(context: ParallelContext) -> lp.GenerationOutput | None:
        def on_tokens(tokens: list[int], step: int) -> None:
            streamed[context.rank].extend(tokens)
            if step >= steps:
                raise Killed

        try:
            return Journal(path, context).generate(
                lp.LookaheadDecoder(model, config, context), on_tokens=on_tokens, **asked
            )
        except Killed:
            return None

    return list(zip(run_lockstep(ranks, body), streamed, strict=True))


def test_restarts_give_the_undisturbed_text(tmp_path: Path, cases: Callable[[int, int], range]) -> None:
    """Greedy and sampled, killed again and again at drawn steps, with lines cut off, on one rank or several."""
    for case in cases(3, 200):
        rng = random.Random(f"journal-{case}")
        model, path = tiny_model(seed=case), tmp_path / f"{case}.jsonl"
        asked: dict[str, Any] = {"max_new_tokens": 40, "sampling": rng.choice([None, SAMPLING])}
        asked["eos_token_id"] = rng.choice([None, rng.randrange(VOCABULARY)])
        ids = drawn_text(rng, rng.randint(1, 30))
        undisturbed = lp.AutoregressiveDecoder(model).generate(ids, **asked)
        for steps in [*(rng.randint(0, 6) for _ in range(3)), 10**6]:  # each start with a shape and ranks of its own
            shape = {"window_size": rng.randint(0, 6), "ngram_size": 3, "guess_set_size": rng.randint(0, 6)}
            config = lookahead_config(**shape, **drawn_switches(rng))
            ended = _started(path, rng.randint(1, 2), model, config, steps, asked | {"ids": ids})
            if rng.random() < 0.5 and ended[0][0] is None:
                whole = path.read_bytes()
                path.write_bytes(whole[: rng.randint(0, len(whole))])  # the last writes did not get through
        for output, streamed in ended:
            assert output.tokens == streamed == undisturbed.tokens, f"case {case}"
            assert output.finish_reason == undisturbed.finish_reason
            made = sum(step.accepted + 1 for step in output.step_stats)
            assert made >= len(output.tokens) - output.resumed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_seed_of_none_is_kept(tmp_path: Path, ranks: int) -> None:
    """A seed drawn anew after the restart would glue two texts together."""
    model, ids, open_seed = tiny_model(), [1, 2, 3], lp.SamplingParams(temperature=1.0)

    def once(steps: int) -> lp.GenerationOutput | None:
        asked = {"ids": ids, "max_new_tokens": 40, "sampling": open_seed}
        output: lp.GenerationOutput | None = _started(tmp_path / "j", ranks, model, None, steps, asked)[0][0]
        return output

    assert once(3) is None
    output = once(10**6)
    assert output is not None and output.resumed > 0
    seed = Journal(tmp_path / "j", ALONE).seed
    again = lp.AutoregressiveDecoder(model).generate(ids, 40, lp.SamplingParams(temperature=1.0, seed=seed))
    assert output.tokens == again.tokens


def test_a_finished_text_is_not_run_again(tmp_path: Path) -> None:
    """Hours of finished prompts must not be repeated for the one that was cut off."""
    model, ids = tiny_model(), [1, 2, 3]
    decoder = lp.LookaheadDecoder(model)
    first = Journal(tmp_path / "j", ALONE).generate(decoder, ids, 20)
    streamed: list[int] = []
    again = Journal(tmp_path / "j", ALONE).generate(decoder, ids, 20, on_tokens=lambda t, s: streamed.extend(t))
    assert (again.tokens, again.finish_reason, again.steps, again.compression) == (first.tokens, "length", 0, 0.0)
    assert streamed == first.tokens


def test_a_text_killed_before_its_end_was_written_ends_there(tmp_path: Path) -> None:
    """Its last token is in the file and what that token ended is not: a text that went on would be longer."""
    decoder, path = lp.LookaheadDecoder(tiny_model()), tmp_path / "j"
    eos = decoder.generate([1, 2, 3], 20).tokens[7]
    first = Journal(path, ALONE).generate(decoder, [1, 2, 3], 20, eos_token_id=eos)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    again = Journal(path, ALONE).generate(decoder, [1, 2, 3], 20, eos_token_id=eos)
    assert (again.tokens, again.finish_reason) == (first.tokens, "eos") and again.steps == 1


DIFFERENCES: dict[str, dict[str, Any]] = {
    "prompt": {"ids": [1, 2, 4]},
    "length": {"new": 21},
    "sampling": {"sampling": SAMPLING},
    "end": {"eos_token_id": 9},
    "weights": {"model": 1},
    "kv_dtype": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_another_text_begins_anew(tmp_path: Path, what: str) -> None:
    """A text that goes on from another's tokens is no text of this model."""
    for given in ({}, DIFFERENCES[what]):
        asked: dict[str, Any] = {"ids": [1, 2, 3], "new": 20, "sampling": None, "model": 0} | given
        model = tiny_model(seed=asked.pop("model"))
        kv_dtype = asked.pop("kv_dtype", "auto")
        plain = lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype).generate(
            asked["ids"], asked["new"], asked["sampling"], eos_token_id=asked.get("eos_token_id")
        )
        journal = Journal(tmp_path / "j", ALONE)
        ids, new, sampling = (asked.pop(name) for name in ("ids", "new", "sampling"))
        output = journal.generate(lp.LookaheadDecoder(model, kv_dtype=kv_dtype), ids, new, sampling, **asked)
        assert (output.tokens, output.resumed) == (plain.tokens, 0)


@pytest.mark.parametrize("batch", [False, True])
def test_weights_that_change_while_a_journal_is_open(tmp_path: Path, batch: bool) -> None:
    """It gave the text of the weights before."""
    model = tiny_model()
    decoder, journal = lp.LookaheadDecoder(model), Journal(tmp_path / "j", ALONE)
    texts = []
    for _ in range(2):
        if batch:
            (output,) = journal.generate_batch(decoder, [[1, 2, 3]], 12)
        else:
            output = journal.generate(decoder, [1, 2, 3], 12)
        assert (output.tokens, output.resumed) == (plain_greedy(model, [1, 2, 3], 12), 0)
        texts.append(output.tokens)
        model.lm_head.weight.data.neg_()
    assert texts[0] != texts[1]


def test_weights_that_are_said_to_stay_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = tiny_model(), list[Any]()
    digests = journal_module.model_digests
    monkeypatch.setattr(journal_module, "model_digests", lambda model: (read.append(model), digests(model))[1])
    for fixed, times in ((True, 1), (False, 3)):
        journal = Journal(tmp_path / f"{fixed}", ALONE, fixed_weights=fixed)
        for ids in ([1], [2], [3]):
            assert journal.generate(lp.LookaheadDecoder(model), ids, 3).tokens == plain_greedy(model, ids, 3)
        assert len(read) == times
        read.clear()


class _Ends(StoppingCriteria):
    """Once the text has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_criteria_are_part_of_the_question(tmp_path: Path) -> None:
    """A text that another criterion of the same class ended is not this one; an iterator of them counts once read."""
    decoder = lp.LookaheadDecoder(tiny_model())
    for length in (8, 12, 12):
        output = Journal(tmp_path / "j", ALONE).generate(decoder, [1, 2], 20, stopping_criteria=iter([_Ends(length)]))
        assert (len(output.tokens), output.finish_reason) == (length - 2, "criteria")
    assert output.resumed == 10


def test_models_with_a_rotary_boundary_begin_anew(tmp_path: Path) -> None:
    """Their frequencies depend on where the prompt ended: the same tokens as a prompt are not the same text."""
    model, ids = tiny_model("llama_longrope"), drawn_text(random.Random(1), 40)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 30)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=3, guess_set_size=2))
    with pytest.raises(Killed):
        Journal(tmp_path / "j", ALONE).generate(decoder, ids, 30, on_tokens=_killed_after(1))
    output = Journal(tmp_path / "j", ALONE).generate(decoder, ids, 30)
    assert (output.tokens, output.resumed) == (plain.tokens, 0)
    assert Journal(tmp_path / "j", ALONE).generate(decoder, ids, 30).tokens == plain.tokens


def test_ranks_that_divide_a_model_go_on(tmp_path: Path) -> None:
    """Each has other weights: a text that each named by its own would be known to rank 0 alone."""
    model, config = tiny_model(), lp.LookaheadConfig(window_size=2, ngram_size=3, guess_set_size=2)
    expected = lp.AutoregressiveDecoder(model).generate([1, 2, 3], 20).tokens

    def started(world: int, steps: int) -> list[tuple[list[int], int] | None]:
        def body(context: ParallelContext) -> tuple[list[int], int] | None:
            decoder = lp.LookaheadDecoder(divide(copy.deepcopy(model), context.replica), config, context)
            try:
                output = Journal(tmp_path / "j", context).generate(
                    decoder, [1, 2, 3], 20, on_tokens=_killed_after(steps)
                )
            except Killed:
                return None
            return output.tokens, output.resumed

        return run_lockstep(world, body, tp=2)

    assert started(2, 3) == [None, None]
    outputs = started(4, 10**6)
    assert outputs[0] is not None and outputs[0][1] > 0
    assert outputs == [(expected, outputs[0][1])] * 4


def test_the_model_s_own_end_is_part_of_the_question(tmp_path: Path) -> None:
    """It is no part of the weights: a text without it would be given where one that it ends is asked for."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model)
    whole = Journal(tmp_path / "j", ALONE).generate(decoder, [1, 2, 3], 20).tokens
    model.generation_config.eos_token_id = whole[7]
    output = Journal(tmp_path / "j", ALONE).generate(decoder, [1, 2, 3], 20)
    assert output.tokens == decoder.generate([1, 2, 3], 20).tokens == whole[: whole.index(whole[7]) + 1]


def test_the_same_journal_goes_on_after_an_error(tmp_path: Path) -> None:
    """A device that is full, or a callback that fails, must not cost what the file has."""
    decoder = lp.LookaheadDecoder(tiny_model())
    journal = Journal(tmp_path / "j", ALONE)
    with pytest.raises(Killed):
        journal.generate(decoder, [1, 2, 3], 40, on_tokens=_killed_after(3))
    output = journal.generate(decoder, [1, 2, 3], 40)
    assert output.tokens == decoder.generate([1, 2, 3], 40).tokens and output.resumed > 0
    output.tokens.clear()  # the caller's
    assert len(journal.generate(decoder, [1, 2, 3], 40).tokens) == 40


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_scores_are_refused(tmp_path: Path, name: str) -> None:
    """They would be of the tokens behind the restart, and be taken for those of the first."""
    with pytest.raises(ValueError, match=f"{name} is on, and a journal keeps tokens alone"):
        Journal(tmp_path / "j", ALONE).generate(lp.LookaheadDecoder(tiny_model()), [1], 3, **{name: True})


def test_a_journal_of_another_process_is_refused(tmp_path: Path) -> None:
    """Lines of two processes in turn would be tokens of texts that neither generated."""
    path = tmp_path / "j"
    script = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    with subprocess.Popen([sys.executable, "-c", script, path], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(ValueError, match="is being written by another run; wait for it, or give another path"):
            Journal(path, ALONE)
        other.communicate(b"\n")
    assert Journal(path, ALONE).records == {}, "it has ended"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json\n", "is no journal"),
        ('{"x": 1}\n', "is no journal"),
        ("[1]\n", "is no journal"),
        ("[" * 100_000 + "\n", "is no journal"),
        ("a letter without a last line end", "is no journal"),
        ('{"a": "JSON file"}', "is no journal"),
        ('{"text":"my only copy of a document"}', "is no journal"),
        ('{"text":"0123456789abcdef and on"}', "is no journal"),
        ('{"end":"of the world"}', "is no journal"),
        ('{"t":[0.5]}', "is no journal"),
        ("two lines\nof something else", "is no journal"),
        ('two lines\n{"t":[1', "is no journal"),
        (None, "written"),
    ],
)
def test_a_bad_journal_is_refused_on_every_rank(tmp_path: Path, ranks: int, text: str | None, message: str) -> None:
    """Rank 0 alone reads it, and the others would wait for what it read; a wrong path must cost no file."""
    path = tmp_path / "j"
    if text is None:
        path = tmp_path / "none" / "j"
    else:
        path.write_text(text)
    said: list[str] = []

    def body(context: ParallelContext) -> None:
        with pytest.raises(ValueError, match=message) as error:
            Journal(path, context)
        said.append(str(error.value))

    run_lockstep(ranks, body)
    assert len(said) == ranks and all(str(path) in line for line in said)
    assert text is None or path.read_text() == text, "what is no journal is somebody's file"


def test_rejection_sampling_is_refused(tmp_path: Path) -> None:
    """Its draws depend on the steps, which a restart changes."""
    sampling = lp.SamplingParams(seed=1, verifier="rejection")
    with pytest.raises(ValueError, match="rejection"):
        Journal(tmp_path / "j", ALONE).generate(lp.LookaheadDecoder(tiny_model()), [1], 3, sampling)


def test_a_grammar_is_refused(tmp_path: Path) -> None:
    """It begins with the text: a restart, whose prompt ends within the text, would begin it again."""
    with pytest.raises(ValueError, match="can't go on under a grammar"):
        Journal(tmp_path / "j", ALONE).generate(lp.LookaheadDecoder(tiny_model()), [1], 3, grammar=object())


def test_a_full_disk_costs_no_text() -> None:
    """The journal is there so that nothing is lost; it must not be what loses it."""
    model = tiny_model()
    with pytest.warns(UserWarning, match="is not written any more .No space left"):
        output = Journal("/dev/full", ALONE).generate(lp.LookaheadDecoder(model), [1, 2], 20)
    assert output.tokens == lp.AutoregressiveDecoder(model).generate([1, 2], 20).tokens


def test_half_a_line_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for a part takes it without an error: with a line behind it, the file would be no journal."""
    journal, decoder = Journal(tmp_path / "j", ALONE), lp.LookaheadDecoder(tiny_model())
    assert journal._file is not None
    raw, writes = journal._file, iter([None, None, 5])

    class Disk:
        def write(self, data: bytes) -> int | None:
            return raw.write(data[: next(writes, None)])

    monkeypatch.setattr(journal, "_file", Disk())
    with pytest.warns(UserWarning, match="is not written any more .No space left"):
        first = journal.generate(decoder, [1, 2], 20)
    assert not (tmp_path / "j").read_bytes().endswith(b"\n")
    again = Journal(tmp_path / "j", ALONE).generate(decoder, [1, 2], 20)
    assert again.tokens == first.tokens and len(first.tokens) == 20


def test_the_app_goes_on_from_its_journal(
    launch_generate: Callable[..., Ran], tiny_folder: Path, tmp_path: Path
) -> None:
    """Two prompts, of which the second is cut off; its figures are of the steps that were made."""
    asked = ["model=hf", f"model.name={tiny_folder}", "limit=2", "max_new_tokens=24", "output=json", "seed=3"]
    asked += ["compare=false", "sampling=sample", "model.dtype=float64", "W=3", "N=3", "G=3"]
    texts = [p["text"] for p in json.loads(launch_generate(*asked).out)["prompts"]]
    journal = tmp_path / "journal.jsonl"
    assert [p["text"] for p in json.loads(launch_generate(*asked, f"journal={journal}").out)["prompts"]] == texts
    lines = journal.read_text().splitlines(keepends=True)
    second = max(number for number, line in enumerate(lines) if "text" in json.loads(line))
    journal.write_text("".join(lines[: second + 4]) + '{"t":[1')
    again = json.loads(launch_generate(*asked, f"journal={journal}").out)
    assert [p["text"] for p in again["prompts"]] == texts
    first, last = (p["shown"] for p in again["prompts"])
    assert (first["resumed"], first["steps"], first["tokens"]) == (24, 0, 24)
    assert 0 < last["resumed"] < 24 and 0 < last["steps"] <= 24 - last["resumed"]
    assert [row["tokens"] for row in again["methods"].values()] == [last["tokens"] - last["resumed"]]
