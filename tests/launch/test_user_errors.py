"""User errors: exit code 2 and one line that names the value or key and the remedy; bugs keep their traceback."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hydra.errors import MissingConfigException

import launch.generate
import launch.profile
import launch.running.once
import launch.scaling
import launch.tune
import lp
from launch.running import hydra_app
from launch.running.errors import EXTRAS, explain, reported
from launch.running.once import print_once
from launch.running.session import journal_path
from lp.checks import check_int
from lp.commands import install_command
from tests.conftest import ROOT
from tests.support.apps import CONTEXT, Ran, save_tiny_model

Launch = Callable[..., Ran]

BAD = {
    "W=abc": "W: Value 'abc'",
    "W=3.5": "W: Value '3.5'",
    "W=true": "W: Value 'True'",
    "W=-1": r"window_size (W) is -1; it must be an integer in [0, ",
    "W=5000": "window_size (W) is 5000",
    "W=4096 N=64": "a step of W=4096, N=64, G=",
    "N=1": "ngram_size (N) is 1; it must be an integer in [2, ",
    "N=x": "N: Value 'x'",
    "G=-2": "guess_set_size (G) is -2",
    "G=[1]": "G: Value '[1]'",
    "decoder.draft_depth=0": "draft_depth is 0",
    "max_new_tokens=0": "max_new_tokens is 0; it must be an integer >= 1",
    "limit=0": "limit is 0",
    "repeats=0": "repeats is 0",
    "compare=true pool.history=x": "pool.history is 'x', which would have the texts of compare=true from their first",
    "compare=true pool.scope=session": "pool.scope is 'session', which would have the texts of compare=true",
    "stream=maybe": "stream: Value 'maybe'",
    "output=xml": "output: Invalid value 'xml', expected one of [table, text, json]",
    "windw=3": "unknown config key 'windw'; known here: model, decoder",
    "x=1": "journal, verbose; a text to continue is given as --prompt 'x=1'",
    "a.b=1": "unknown config key 'a'; known here: model, decoder",
    "x=f(1": "characters twice, as in x='\"def f(x):\"'; a text to continue is given as --prompt 'x=f(1'",
    "temperature=0.8": "'temperature'; did you mean 'sampling.temperature', with sampling=sample? known here: model",
    "+top_p=0.8": "'top_p'; did you mean 'sampling.top_p', with sampling=sample? known here: model",
    "sampling=sample top_p=0.8": "unknown config key 'top_p'; did you mean 'sampling.top_p'? known here: model",
    "dtype=float64": "unknown config key 'dtype'; did you mean 'model.dtype'? known here: model",
    "device=cpu": "unknown config key 'device'; did you mean 'model.device'? known here: model",
    "draft_depth=2": "unknown config key 'draft_depth'; did you mean 'decoder.draft_depth'? known here: model",
    "name=x": "unknown config key 'name'; did you mean 'model.name' or 'attention.name' or 'task.name'? known here",
    "+windw=3": "unknown config key 'windw'; known here: model, decoder",
    "decoder.depth=3": "unknown config key 'decoder.depth'; did you mean 'decoder.draft_depth'? known here: name",
    "+decoder.depth=3": "unknown config key 'decoder.depth'; did you mean 'decoder.draft_depth'? known here: name",
    "modle=demo": "unknown config key 'modle'; did you mean 'model'? known here: model, decoder",
    "max_tokens=3": "did you mean 'max_new_tokens'?",
    "decoder=lokahead": "did you mean 'decoder=lookahead'?",
    "task=human_eval": "did you mean 'task=humaneval'?",
    "model=none": "Could not find 'model/none' Available options in 'model': codellama_13b",
    "model=codellama_7b": "codellama_7b is a shape without weights, for lp profile; model=hf takes a model",
    "model=hf": "model.name is missing; give model.name=...",
    "attention=none": "Available options in 'attention': auto by_position eager flash flex sdpa",
    "attention.capture=none": "attention.capture is 'none'; it must be one of auto, off, graph, compile",
    "attention.name=none": "attention.name is 'none'; it must be one of auto, sdpa, eager, flash, flex",
    "sampling.name=hot": "sampling.name is 'hot'; choose with sampling=<one of greedy, sample>",
    "sampling=hot": "Available options in 'sampling': greedy sample",
    "sampling.temperature=1": "unknown config key 'sampling.temperature'; known here: name; sampling=sample has",
    "sampling=sample sampling.temperature=-1": "temperature is -1.0; it must be 0, which is greedy, or a number >=",
    "sampling=sample sampling.top_k=1.5": "sampling.top_k: Value '1.5'",
    "sampling=sample sampling.heat=1": "unknown config key 'sampling.heat'; known here: name, temperature",
    "sampling=sample sampling.verifier=x": "verifier is 'x'; it must be one of ['coupled', 'rejection']",
    "seed=-1": "seed is -1; it must be an integer in [0, 9223372036854775807]; or seed=null",
    "stop_strings=x": "stop_strings takes a list, as in stop_strings='[",
    "stop_strings=['']": "stop_strings has an empty string",
    "decoder.name=none": "decoder.name is 'none'",
    "decoder.name=prompt_lookup": "choose with decoder=prompt_lookup",
    "decoder.name=plain": "decoder.name is 'plain' with the settings of decoder=lookahead_auto; choose with decoder=",
    "decoder=prompt_lookup decoder.name=lookahead": "choose with decoder=lookahead\n",
    "decoder=plain decoder.name=lookahead": "choose with decoder=lookahead\n",
    "decoder=lookahead decoder.name=lookahead_auto": "choose with decoder=lookahead_auto\n",
    "sampling.name=sample": "sampling.name is 'sample' with the settings of sampling=greedy; choose with sampling=sam",
    "sampling=sample sampling.name=greedy": "choose with sampling=greedy\n",
    "model.dtype=int3": "dtype is 'int3'; it must be one of",
    "model.device=toaster": "model.device is 'toaster'; it must be auto, cpu",
    "model.device=meta": "torch cannot compute on device 'meta'",
    "model.device=cuda:99": "torch cannot compute on device 'cuda:99'",
    "prompt=": "the prompt is empty",
    "prompt=f(x": "cannot read the override 'prompt=f(x'; give the text as it is: --prompt TEXT, or prompt_file=FILE",
    "prompt=a,b": "or give the text as it is: --prompt TEXT",
    "model.name=f(x": "cannot read the override 'model.name=f(x'; quote",
    "prompt_file=none.txt": "prompt_file none.txt does not exist",
    "task=humaneval task.path=none.jsonl": "task humaneval has no file none.jsonl; set LP_DATA",
    "task=showcase task.ids=[builtin/06_merge_sort]": "did you mean 'builtin/06_merge_sorted'?",
    "task.ids=[]": "task.ids is [], which leaves no prompt; name at least one, or task.ids=null for all",
    "prompt=a prompt_file=b": "prompt and prompt_file are both given",
    "model.name=./none": "model folder './none' does not exist",
}


def _assert_user_error(ran: Ran, message: str) -> None:
    assert ran.code == 2
    assert ran.err.startswith("error: ") and message in ran.err
    assert ran.err.count("\n") == 1 and "Traceback" not in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_setting_is_one_line_and_exit_code_2(launch_generate: Launch, overrides: str) -> None:
    """Hydra's own way is a traceback or several lines, and exit code 1."""
    _assert_user_error(launch_generate(*overrides.split(" ")), BAD[overrides])


@pytest.mark.parametrize(
    ("plugin", "extra"), [("launcher/joblib", "sweeps"), ("sweeper/optuna", "sweeps"), ("launcher/ray", "sweeps-ray")]
)
def test_a_plugin_that_is_missing(plugin: str, extra: str) -> None:
    """It ended with "Could not find 'hydra/launcher/joblib'", from which nobody learns what to install."""
    error = MissingConfigException(f"Could not find 'hydra/{plugin}'", f"hydra/{plugin}", ["basic"])
    said = f"hydra/{plugin} is a plug-in of Hydra that is not installed; install the extra: {install_command(extra)}"
    assert explain(error) == said


def test_every_plugin_of_an_experiment_has_its_extra() -> None:
    """A new experiment's plug-in would be missing without a remedy."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "conf" / "experiment").glob("*.yaml")]
    found = re.findall(r"override /(hydra/\w+): (\w+)", "\n".join(texts))
    assert len(found) == 4 and {"/".join(each) for each in found} <= EXTRAS.keys()


def test_an_experiment_of_another_app(launch_generate: Launch, tmp_path: Path) -> None:
    """It ended with "ConfigKeyError": one of the apps that have the key is meant; a key that none has is a typo."""
    said = "experiment=demo_sweep is of another app: it sets methods, which this one does not have; start lp benchmark "
    _assert_user_error(launch_generate("experiment=demo_sweep", "prompt=x"), said)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmethod: [plain]\n")
    ran = launch_generate("--config-dir", str(tmp_path), "experiment=mine")
    assert ran.code == 2 and "another app" not in ran.err and "'method'" in ran.err


def test_a_secret_is_not_shown_as_a_text(launch_generate: Launch) -> None:
    """The remedy for a text shows the whole argument, and lp generate has no api_key that would be known as one."""
    ran = launch_generate("api_key=hush")
    assert ran.code == 2 and "unknown config key 'api_key'" in ran.err and "hush" not in ran.err


def test_runs_that_begin_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They shared a folder, and one that ended removed it while the other one made it: "File exists"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LP_RUN_DIR", raising=False)
    folders = []
    for number in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        folders.append(Path(hydra_app._run_dir("outputs/now")).resolve())
    first, second = folders
    (second / "0").mkdir(parents=True)
    first.mkdir()
    for each in (first, second / "0"):
        hydra_app._remove_if_empty(each)
    assert [*tmp_path.rglob("*")] == [tmp_path / "outputs"], "where a third run may be making its folder"


def test_no_restart_repeats_rejection_sampling(
    launch_generate: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A journal that was asked for is refused before the model is loaded; that none is kept otherwise is said."""
    rejection = ("sampling=sample", "sampling.verifier=rejection")
    ran = launch_generate(*rejection, f"journal={tmp_path}/j", "model.name=./none")
    _assert_user_error(ran, "journal is given with verifier 'rejection'; use sampling.verifier=coupled")
    monkeypatch.setenv("LP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    config: Any = SimpleNamespace(journal=None, json_schema=None)
    assert journal_path(config, lp.SamplingParams(verifier="rejection")) is None
    assert capfd.readouterr().err == "no journal: rejection sampling draws anew, so a restart begins texts anew\n"
    assert journal_path(config, None) == tmp_path / "journal.jsonl"
    config.json_schema = "schema.json"
    assert journal_path(config, None) is None
    assert capfd.readouterr().err.startswith("no journal: a json_schema begins with the text")


def test_a_bad_schema_is_refused_before_the_model(launch_generate: Launch, tmp_path: Path) -> None:
    """Weights take minutes; a journal would go on in the middle of a text that the schema begins."""
    schema = tmp_path / "schema.json"
    _assert_user_error(launch_generate(f"json_schema={schema}", "model.name=./none"), "json_schema")
    schema.write_text("{")
    _assert_user_error(
        launch_generate(f"json_schema={schema}", "model.name=./none"), f"json_schema {schema} is no JSON"
    )
    schema.write_text("{}")
    asked = (f"json_schema={schema}", f"journal={tmp_path / 'j'}", "model.name=./none")
    if importlib.util.find_spec("llguidance"):
        _assert_user_error(launch_generate(*asked), "journal is given with json_schema")


def test_a_bad_journal_is_refused_before_the_model(launch_generate: Launch) -> None:
    """Weights take minutes."""
    _assert_user_error(launch_generate("journal=/none/j", "model.name=./none"), "journal /none/j cannot be written")


def test_what_the_other_apps_cannot_use(start_app: Callable[..., Ran]) -> None:
    """They check before they load, as launch.generate does."""
    ran = start_app(launch.tune.tune, "tune", "attention.capture=none", "model.name=./none")
    _assert_user_error(ran, "attention.capture is 'none'; it must be one of auto")
    asked = ("ranks=[]", "project=true", "projected_ranks=[]", "model.name=./none")
    _assert_user_error(start_app(launch.scaling.scaling, "scaling", *asked), "projected_ranks is empty with project=")
    for asked, said in (
        (("methods=[lookahead,plain]",), ", which methods=['lookahead', 'plain'] does not run; add it to methods"),
        (("methods=[lookahead_auto@1]", "project=true"), " with project=true, which projects decoder=lookahead; leave"),
    ):
        ran = start_app(launch.scaling.scaling, "scaling", "decoder=lookahead_auto", *asked, "model.name=./none")
        _assert_user_error(ran, f"decoder is 'lookahead_auto'{said}")
    ran = start_app(launch.profile.profile_model, "profile", "parallel.tp=2", "model.name=./none")
    _assert_user_error(ran, "parallel.tp is 2, but lp profile measures models that are whole on every rank")
    ran = start_app(launch.scaling.scaling, "scaling", "decoder=plain", "decoder.name=lookahead", "project=true")
    _assert_user_error(ran, "choose with decoder=lookahead\n")
    for seconds in ("inf", "-1"):  # waited for other nodes with no end, or a traceback
        ran = start_app(launch.scaling.scaling, "scaling", f"parallel.timeout_s={seconds}", "model.name=./none")
        _assert_user_error(ran, f"timeout_s is {float(seconds)}; it must be a number in [1, 86400]")


def test_a_prompt_longer_than_the_context(launch_generate: Launch, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("x = 1\n" * CONTEXT)
    ran = launch_generate("model=hf", f"model.name={tiny_folder}", f"prompt_file={file}")
    _assert_user_error(ran, f"the model's context {CONTEXT}")


def test_a_tokenizer_larger_than_the_model(launch_generate: Launch, tmp_path: Path) -> None:
    """Ids beyond the embedding would fail deep inside a kernel."""
    folder = save_tiny_model(tmp_path, vocab_size=100)
    _assert_user_error(launch_generate("model=hf", f"model.name={folder}"), "the model embeds 100 tokens")


def test_bugs_keep_their_traceback(launch_generate: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError that is not raised as a UserError is no message for a user."""
    monkeypatch.setattr(launch.generate, "open_session", lambda config: int("not a number"))
    with pytest.raises(ValueError, match="invalid literal"):
        launch_generate()


def test_a_missing_file_of_ours_is_a_bug(launch_generate: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra runs the app: what the app cannot open is not the run's folder."""
    monkeypatch.setattr(launch.generate, "open_session", lambda config: Path("/none/there").read_text())
    with pytest.raises(FileNotFoundError):
        launch_generate()


def test_other_ranks_say_who_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model may be missing on one node alone, where rank 0 sees nothing wrong."""
    monkeypatch.setattr(launch.running.once, "RANK_0_FIRST_S", 0.05)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit, match="2"), reported():
        check_int("W", -1, 0, 9, "try 3")
    assert capsys.readouterr().err == "[rank 3] error: W is -1; it must be an integer in [0, 9]; try 3\n"


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store that torchrun keeps, and what it tells its ranks of it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.running.once, "RANK_0_FIRST_S", 0.05)
    yield
    del store


@pytest.mark.usefixtures("agent_store")
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_ranks_print_an_error_once_in_any_order(
    ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine rank 0 may come last, or torchrun end the others late."""
    for _ in range(2):  # two jobs of a sweep: each has its error
        for rank in ranks:
            monkeypatch.setenv("RANK", str(rank))
            with pytest.raises(SystemExit, match="2"), reported():
                check_int("W", -1, 0, 9, "try 3")
        name = f"[rank {ranks[0]}] " * (ranks[0] > 0)
        assert capsys.readouterr().err == f"{name}error: W is -1; it must be an integer in [0, 9]; try 3\n"


@pytest.mark.usefixtures("agent_store")
def test_a_rank_waits_for_one_that_is_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the others once a rank has ended: one that is still printing would print nothing."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            begun.set()
            assert go_on.wait(60)
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", stderr := Slow())
    ranks = [threading.Thread(target=print_once, args=("error: no such file",), daemon=True) for _ in range(2)]
    monkeypatch.setenv("RANK", "0")
    ranks[0].start()
    assert begun.wait(60)
    monkeypatch.setenv("RANK", "1")
    ranks[1].start()
    ranks[1].join(0.5)
    assert ranks[1].is_alive()
    go_on.set()
    for rank in ranks:
        rank.join(60)
    assert stderr.getvalue() == "error: no such file\n"


def test_ctrl_c_is_exit_code_130(launch_generate: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.generate, "open_session", interrupted)
    assert launch_generate().code == 130


def test_explain_joins_lines() -> None:
    assert explain(ValueError("one\n  two")) == "one two"


def test_every_value_error_of_ours_is_a_user_error() -> None:
    """A plain ValueError would reach the user with a traceback, as a bug does."""
    plain = "raise " + "ValueError("
    files = [path for folder in ("lp", "launch") for path in (ROOT / folder).rglob("*.py")]
    assert not [path.name for path in files if plain in path.read_text(encoding="utf-8")]
    assert issubclass(lp.UserError, ValueError)
