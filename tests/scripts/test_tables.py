"""scripts/tables.py: the list, the options, and the tables that are made in seconds."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import lp
from launch.bench import machine
from lp.draft.share import step_tokens
from lp.errors import UserError
from scripts import studies
from scripts.studies import (
    accept_probs,
    docstring,
    given_times,
    grammar,
    main,
    prediction,
    shares,
    shares_compression,
    study_of,
    table_names,
)
from scripts.studies.harness import Method, Result, Row, Study, Table, grouped, option, spread, total
from scripts.studies.parts.replay import load_texts
from scripts.studies.places import PLACES
from tests.conftest import ROOT


@pytest.mark.parametrize("name", table_names())
def test_a_table_is_one_module(name: str) -> None:
    """A module without its parts would fail only when someone needs the table."""
    assert study_of(name).parser(name, docstring(name)).format_help()
    assert docstring(name).splitlines()[0].endswith(".")
    assert f"tables {name}" in docstring(name) or f"tables.py {name}" in docstring(name)


def test_a_new_table_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list must need no edit."""
    (tmp_path / "toy.py").write_text('"""A toy."""\n')
    for name in ("__init__", "__main__", "harness", "places"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(studies, "FOLDER", tmp_path)
    assert table_names() == ["toy"] and docstring("toy") == "A toy."


def test_the_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in table_names())


COMMAND = re.compile(r"scripts[/.]tables(?:\.py)? (\w+)((?:[^`\n\\]|\\\n)*)")


def test_commands_in_the_docs_name_tables() -> None:
    """A renamed table leaves commands behind that nobody can run."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "README.md"]
    named = {name for page in pages for name, _ in COMMAND.findall(page.read_text())}
    assert named and named <= {*table_names()}


def test_commands_of_docs_and_studies_have_options_that_are_there() -> None:
    """A renamed option leaves commands behind that end in an error; those without options may be mere names."""
    texts = [page.read_text() for page in (ROOT / "docs").rglob("*.md")] + [*map(docstring, table_names())]
    matches = [match for text in texts for match in COMMAND.findall(text)]
    found = [(name, shlex.split(words.replace("\\\n", " "), comments=True)) for name, words in matches]
    commands = [(name, words) for name, words in found if words and words != ["W", "N", "G"]]
    assert len(commands) > 50
    for name, words in commands:
        study_of(name).parser(name, docstring(name)).parse_args(words)


@pytest.mark.parametrize("name", table_names())
def test_a_study_has_a_place_that_names_it(name: str) -> None:
    """One that no page uses would be kept for nobody; a page that has moved would send its reader nowhere."""
    text = (ROOT / PLACES[name]).read_text()
    assert f"tables {name}" in text or f"tables.py {name}" in text


def test_user_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for args, message in (
        (["nothing"], "invalid choice: 'nothing'"),
        (["methods", str(tmp_path / "none.jsonl")], "no task is given; give --tasks"),
        (["link"], "one rank has no other to gather from"),
        (["shares_compression", "--window", "9", "--budget", "8"], "--budget 8 has no room for --window 9"),
        (["batches", "--prompt-tokens", "9999"], "0 prompts have 9999 tokens, but --texts is 8; give a larger --task"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(args)
        assert message in capsys.readouterr().err


def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    """As the docs have it: without an installed package, options behind the name are the table's."""
    command = [sys.executable, str(ROOT / "scripts" / "tables.py"), "shares", "5", "4", "2", "--ranks", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| level 1 |  | 0 | (0) | (1) | (1) | (1) |  |" in done.stdout and "| 1 | 3 | 11 | 1 |" in done.stdout


def test_shares_are_those_of_a_fixed_budget() -> None:
    """The page's table, by hand: 120 tokens on one rank; on more, B is rounded up, and a column needs W + N - 2."""
    lines = {line.split(" | ")[0]: line for line in shares.table(15, 5, 15).splitlines()}
    assert lines["| 1"] == f"| 1 | 120 | 15 | {8 * (8 + 120 * 17):,} | 120 |"
    assert lines["| 2"] == f"| 2 | 61 | 0, 15 | {8 * (8 + 61 * 17):,} | 122 |"
    assert lines["| 64"].startswith("| 64 | 18 | 0 (56 ranks), 1, 4, ") and lines["| 64"].endswith(" | 1152 |")
    assert shares.table(16, 2, 104, 0).splitlines()[2] == f"| 1 | 120 | 16 | {8 * (8 + 120):,} | 120 |"


@pytest.mark.parametrize(("window", "ranks", "budget"), [(0, 1, 1), (0, 8, 64), (4, 3, 7), (7, 3, 7), (1, 5, 2)])
def test_every_rank_gets_exactly_the_budget(window: int, ranks: int, budget: int) -> None:
    """S of another number of tokens would be compared."""
    assert step_tokens(shares_compression.fixed_config(window, ranks, budget), ranks) == budget


def test_sets_are_compared_one_by_one_and_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a set and one of all, by temperature; ranks write the text of one rank, within their budget."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"def {name}(a):\n    return"}) + "\n")
    args = ["--data", str(tmp_path), "--sets", "first,second", "--temperatures", "0,0.8", "--max-new-tokens", "8"]
    main(["shares_compression", *args, "--ranks", "2", "--budget", "6", "--window", "2"])
    printed = capsys.readouterr().out
    assert "| set | prompts | S of 2 ranks x 6 tokens | S of one rank x 12 | ratio |" in printed
    lines = [
        line[2:-2].split(" | ") for line in printed.splitlines() if line.startswith(("| first", "| second", "| all"))
    ]
    assert [(name, count) for name, count, *_ in lines] == [("first", "1"), ("second", "1"), ("all sets", "2")] * 2
    for _, _, many, one, ratio, largest, differing in lines:
        assert float(ratio) == pytest.approx(float(many) / float(one), abs=1e-3)
        assert float(largest) <= 6 and differing == "0"
    for each in json.loads(printed.splitlines()[-1])["results"]:
        assert 0 < each["tokens"] <= 8 and each["most_tokens"] <= {"ranks": 6, "one": 12}[each["method"]]


def test_edits_sum_up_to_their_part() -> None:
    """A prediction with fewer edits than the table says would look better than it is."""
    tokens = list(range(240))
    changed = prediction.edited(tokens, 0.1, 8, random.Random(0))
    edits = [
        edit for edit in SequenceMatcher(None, tokens, changed, autojunk=False).get_opcodes() if edit[0] != "equal"
    ]
    assert sum(max(end - start, new_end - new) for _, start, end, new, new_end in edits) in range(20, 28)
    assert changed == prediction.edited(tokens, 0.1, 8, random.Random(0)) and len(changed) == len(tokens)


def test_predictions_are_compared_over_all_steps() -> None:
    """The mean of S would weigh a text that needs few steps as much as one that needs many."""
    none = [prediction.Measured(2.0, 4.0, 0.0), prediction.Measured(8.0, 1.0, 0.0)]
    right = [prediction.Measured(10.0, 1.0, 0.9), prediction.Measured(10.0, 0.5, 0.7)]
    found = prediction.summary(right, none)
    assert found["compression"] == pytest.approx(10) and found["ratio"] == pytest.approx(10 / 3.2)
    assert (
        found["least_ratio"] == 5 and median(found["time_ratios"]) == 0.375 and found["accepted"] == pytest.approx(0.8)
    )
    assert prediction.summary(right[1:], none[1:])["least_ratio"] is None


SHORT = ["--limit", "1", "--max-new-tokens", "6"]


@pytest.mark.parametrize(
    ("args", "heads"),
    [
        (["ablations", "warmup", *SHORT], "| variant | S | tokens a step | tokens | steps |"),
        (["journal_cost", *SHORT], "| steps | a step, ms | a line, us | lines of step time |"),
        (["long_run", "--tokens", "30"], "| tokens | steps | S | ms a step | of it host | resident MiB |"),
        (["attention_speed", "--prefix", "16", "--num-tokens", "5", "--rounds", "1"], "| cached tokens | sdpa, ms |"),
        (["first_token", "--prompt-tokens", "30", "--seen", "20", "--prompts", "1"], "| tokens | of them seen |"),
        (
            ["batches", "--texts", "2", "--prompt-tokens", "8", "--rounds", "1", *SHORT[2:]],
            "| texts | T | S | lookahead",
        ),
        (["prediction", "--temperatures", "0.8", "--rounds", "1", *SHORT], "| T | prediction | S | x none |"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_tables_of_a_model(args: list[str], heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prints its table and ends with one JSON line."""
    main(args)
    printed = capsys.readouterr().out
    assert heads in printed and json.loads(printed.splitlines()[-1])


def test_tables_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are written once, and the tables go on from their file of results."""
    prompts, texts, results = (tmp_path / name for name in ("tiny.jsonl", "texts.jsonl", "results.jsonl"))
    prompts.write_text(json.dumps({"task_id": "0", "prompt": "def f(a):\n    return"}) + "\n")
    write = ["texts", str(texts), "--task", str(prompts), "--temperatures", "0", "--max-new-tokens", "6"]
    main(write)
    before = texts.read_bytes()
    main(write)
    assert texts.read_bytes() == before and len(load_texts(texts)) == 1

    pool = ["pool", str(texts), str(results), "--num-tokens", "8", "--max-new-tokens", "6", "--temperatures", "0"]
    for _ in range(2):
        main([*pool, "--only", "lookahead 8"])
    assert len(results.read_text().splitlines()) == 1
    result = json.loads(results.read_text())
    assert result["steps"] < result["num_tokens"] <= 8 * result["steps"], "of all steps, not the setting"
    a_step = f"{result['tokens'] / result['steps']:.2f} @{result['num_tokens'] / result['steps']:.0f}"
    assert f"| lookahead 8 | {a_step} |" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"  # figures of another model, or of steps of another size, passed for this run's
    for name, value in (("model", "/other"), ("most_tokens", 9), ("max_new_tokens", 5)):
        line = json.loads(results.read_text()) | {name: value, "steps": 1}
        other.write_text(json.dumps(line) + "\n")
        main(["pool", str(texts), str(other), *pool[3:], "--only", "lookahead 8"])
        assert len(other.read_text().splitlines()) == 2, name
    assert "| method | tiny, T = 0 | host, us |" in capsys.readouterr().out

    main(["accept_probs", str(texts), "--num-tokens", "8", "--max-new-tokens", "6"])
    assert "| draft tokens | predicted | accepted | noise |" in capsys.readouterr().out
    main(["pool_session", str(texts), "--task", "tiny", "--past", "0", "--temperatures", "0", "--num-tokens", "8"])
    assert "| past requests | 0 |" in capsys.readouterr().out


def test_few_draft_tokens_do_not_look_like_wrong_probabilities() -> None:
    """A share of 25 tokens, off by a sixth, was taken for a fault of the probabilities."""
    of_few, of_many = ([(0.5, index % 3 < 2) for index in range(count)] for count in (25, 2500))
    (few,), (many,) = accept_probs.deciles(of_few), accept_probs.deciles(of_many)
    assert few.accepted == pytest.approx(0.68) and few.noise == pytest.approx(2 * (0.25 / 25) ** 0.5)
    assert not few.is_off and many.is_off and many.noise == pytest.approx(few.noise / 10)
    assert [decile.tokens for decile in accept_probs.deciles([(0.05, False), (1.0, True), (0.95, True)])] == [1, 2]


def test_tables_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of methods and of the scaling law go on from their files, and take no results of other settings."""
    prompts = tmp_path / "tiny.jsonl"
    prompts.write_text(json.dumps({"task_id": "0", "prompt": "def f(a):\n    return"}) + "\n")
    args = ["methods", str(tmp_path / "methods.jsonl"), "--tasks", str(prompts), "--temperatures", "0"]
    main([*args, "--only", "plain", "--max-new-tokens", "4"])
    assert "| method | tiny |" in capsys.readouterr().out
    # Everything is done already, by another model or with other lengths: its figures passed for this run's.
    same = ["--only", "plain", "--max-new-tokens", "4", "--seconds", "0"]
    for other in (
        [*same, "--model", "/other"],
        [*same, "--max-new-tokens", "64"],
        [*same, "--fixed", "4,2,8,8"],
        same[2:],
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*args, *other])
        assert "has no results of these settings, and none were measured" in capsys.readouterr().err
    main([*args, *same])
    assert capsys.readouterr().out.count("| method | tiny |") == 1
    given = ["given_times", "--tasks", str(prompts), "--max-new-tokens", "4", "--fixed", "0,2,3,3"]
    main([*given, "--clock", "1:1", "8:2", "--temperatures", "0"])
    printed = capsys.readouterr().out
    assert "| set | T | method | S | tokens a step | plain steps | x plain | least |" in printed
    assert [line.split(" | ")[2] for line in printed.splitlines() if line.startswith("| tiny |")] == [
        "adaptive",
        "W=0 N=2 G=3 depth=3",
    ]
    args = ["scaling_law", str(tmp_path / "law.jsonl"), str(tmp_path / "law.png"), "--task", str(prompts)]
    for _ in range(2):
        main([*args, "--ngrams", "3", "--widths", "1", "2", "--guesses", "4", "--max-new-tokens", "4"])
    assert len((tmp_path / "law.jsonl").read_text().splitlines()) == 3 and (tmp_path / "law.png").exists()
    assert "ours G=4" in capsys.readouterr().out


def test_steps_by_a_given_clock() -> None:
    """A plain step counts as one, one that drafts by its tokens: its own seconds are those of another machine."""
    times = given_times.step_times(["1:2", "5:4"], 1.5)
    assert (times.num_tokens, times.seconds, times.plain_s) == ((1, 5), (2.0, 4.0), 1.5)
    assert given_times.step_times(["1:2"], None).plain_s == 2.0
    steps = [
        lp.StepStats(num_tokens, 0, 0, 9.0, 9.0, 9.0, 0, idle=idle)
        for num_tokens, idle in ((1, True), (1, False), (3, False))
    ]
    assert given_times.taken_s(steps, times) == 1.5 + 2 + 3
    for wrong in (["2:1"], ["1"], ["1:x"], []):
        with pytest.raises(UserError, match="--clock"):
            given_times.step_times(wrong, None)
    for setting, message in (
        ("7,5,7", "--fixed has '7,5,7'; give W,N,G,depth"),
        ("7,5,7,x", "--fixed"),
        ("7,0,7,1", "N"),
    ):
        with pytest.raises(UserError, match=message):
            given_times.fixed_config(setting)


def test_a_table_of_grammars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of tokens that are not those of plain decoding under the grammar are refused."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    args = ["grammar", "--tasks", "2", "--max-new-tokens", "24", "--budget", "16", "--temperatures", "0,0.8"]
    main(args)
    out = capsys.readouterr().out
    by_method = grouped(json.loads(out.splitlines()[-1])["results"], "method")
    assert [each["temperature"] for each in by_method["with"]] == [0.0, 0.0, 0.8, 0.8]
    tokens, steps = (total(by_method["with"], name) for name in ("tokens", "steps"))
    assert total(by_method["masks alone"], "tokens") == tokens > steps > 0
    lines = [line.split(" | ") for line in out.splitlines() if line.startswith(("| 0 |", "| 0.8 |"))]
    assert len(lines) == 2 and sum(int(line[7]) for line in lines) <= tokens
    honest = lp.LookaheadDecoder.generate

    def wrong(self: lp.LookaheadDecoder, *args: Any, **options: Any) -> lp.GenerationOutput:
        output = honest(self, *args, **options)
        output.tokens[5] += 1
        return output

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", wrong)
    with pytest.raises(RuntimeError, match="'with' differs from plain decoding at new token 5"):
        main(args)


def test_the_steps_to_a_token_within_a_step() -> None:
    """A step of four tokens, of which two are counted, is half a step."""
    assert [grammar.steps_to([0, 3, 1], tokens) for tokens in (0, 1, 3, 5, 6, 7)] == [0, 1, 1.5, 2, 2.5, 3]


def test_one_measurement_does_not_look_like_a_fact() -> None:
    """A median of one, printed alone, was taken for what the next run shows too."""
    assert spread([2.0], 2, " x") == "2.00 x (measured once)"
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"


def test_a_table_of_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its times are those of what else ran."""
    for load, said in ((9.0, True), (0.5, False)):
        monkeypatch.setattr(machine, "load_average", lambda load=load: load)
        main(["shares", "5", "4", "2", "--ranks", "2"])
        assert ("the machine looked busy" in capsys.readouterr().err) == said


@dataclass(kw_only=True)
class Toy(Study):
    """Two methods on two rows, which note their calls; the third call stops the run once."""

    base: int = option(1)
    spans: list[float] = option([0.5])
    names: list[str] = option([])
    is_quick: bool = option(False)
    rounds: int = option(2)
    SHARED = ("base",)
    WARM_UP = 1
    stops_at: int = 99

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def rows(self) -> Iterable[Row]:
        return [Row({"row": row}, 10 * row) for row in (0, 1)]

    def methods(self) -> Mapping[str, Method]:
        return {name: partial(self.call, name) for name in ("first", "second")}

    def call(self, name: str, row: Row) -> Result:
        self.calls.append((name, row.key["row"]))
        if len(self.calls) == self.stops_at:
            raise KeyboardInterrupt
        return {"value": self.base + row.item}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        yield Table(
            ("method", "sum"), [(name, str(total(of, "value"))) for name, of in grouped(results, "method").items()]
        )


def test_methods_take_turns_behind_their_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    """One that always came first, or was measured alone for a while, had another machine than the others."""
    study = Toy()
    study.run()
    row = [("first", "second"), ("first", "second"), ("second", "first")]  # the warm-up, and two rounds
    other = [("second", "first"), ("second", "first"), ("first", "second")]
    assert study.calls == [(name, 0) for pair in row for name in pair] + [(name, 1) for pair in other for name in pair]
    printed = capsys.readouterr().out
    assert "| first | 24 |\n| second | 24 |" in printed
    found = json.loads(printed.splitlines()[-1])
    assert found["study"] == "test_tables" and found["settings"]["base"] == 1 and len(found["results"]) == 8
    assert all(each["seconds"] > 0 for each in found["results"])


def test_what_a_stopped_run_measured_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hours of measuring were lost to an interrupt, or to a line that it cut."""
    file = tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Toy(results=file, stops_at=6).run()
    assert len(file.read_text().splitlines()) == 3
    with file.open("a") as opened:
        opened.write('{"row": 0, "meth')
    study = Toy(results=file)
    study.run()
    assert len(study.calls) == 1 + 1 + 6 and len(file.read_text().splitlines()) == 8
    done = Toy(results=file)
    done.run()
    assert not done.calls and capsys.readouterr().out.count("| first | 24 |") == 2
    other = Toy(results=file, base=2)
    other.run()
    assert len(other.calls) == 12 and "| first | 28 |" in capsys.readouterr().out


def test_without_time_a_study_prints_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is to end in time must not measure one more row, nor call nothing a result."""
    with pytest.raises(lp.UserError, match="has no results of these settings"):
        Toy(results=tmp_path / "none.jsonl", seconds=0).run()
    file = tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Toy(results=file, stops_at=7).run()
    study = Toy(results=file, seconds=0)
    study.run()
    said = capsys.readouterr()
    assert not study.calls and "1 of 2 rows are left" in said.err and "| first | 2 |" in said.out


def test_a_study_writes_its_part_of_a_page(tmp_path: Path) -> None:
    """The rest of a page is a person's; a page without the part would get nothing, and nobody would know."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- test_tables -->\nold\n<!-- end of test_tables -->\nafter\n")
    Toy(page=page).run()
    text = page.read_text()
    assert text.startswith("before\n<!-- test_tables -->\nbase 1, ") and "| first | 24 |" in text
    assert text.endswith("<!-- end of test_tables -->\nafter\n") and "old" not in text
    page.write_text("nothing")
    with pytest.raises(lp.UserError, match="between which the tables would be; add them"):
        Toy(page=page).run()
    assert page.read_text() == "nothing"


def test_arguments_come_in_the_order_of_the_study() -> None:
    """A field of the base that a study declares again kept its place: texts were written over by results."""
    given = study_of("pool").parser("pool", "").parse_args(["texts.jsonl", "results.jsonl"])
    assert (str(given.texts), str(given.results)) == ("texts.jsonl", "results.jsonl")


def test_options_are_the_fields_of_a_study() -> None:
    """Several numbers may have commas, as the pages write them; a name may have a comma of its own."""
    parser = Toy.parser("toy", "")
    given = vars(parser.parse_args(["--spans", "1,2.5", "3", "--names", "a, b", "c", "--is-quick", "--base", "4"]))
    study = Toy(**given)
    assert (study.spans, study.names, study.is_quick, study.base) == ([1.0, 2.5, 3.0], ["a, b", "c"], True, 4)
    assert vars(parser.parse_args([])) == {}, "what is not given is the field's own default"
    assert "--figure" not in parser.format_help() and "--results" in parser.format_help()
