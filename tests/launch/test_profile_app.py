"""launch.profile from its arguments to its tables, its line of JSON and its picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.apps import Ran

SMALL = ("prefix=24", "tokens=[1,3]", "rounds=1", "max_new_tokens=4")
SHAPE = ("model=codellama_34b", "model.dtype=float32", "shape.layers=2", "shape.divide=64", "W=4", "N=3", "G=3")


def test_a_shape_in_tables(launch_profile: Callable[..., Ran], tmp_path: Path) -> None:
    """All that the app promises, on a CPU."""
    ran = launch_profile(*SHAPE, *SMALL)
    assert (ran.code, ran.err) == (0, "")
    for said in ("Forward pass", "A step of rank 0 of 1: ", "LM head", "transformers generate", "random weights"):
        assert said in ran.out
    assert [path.name for path in tmp_path.rglob("*.png")] == ["profile.png"]


def test_a_line_of_json(launch_profile: Callable[..., Ran], tmp_path: Path) -> None:
    """Scripts read the last line and nothing else."""
    ran = launch_profile(*SHAPE, *SMALL, "output=json", "R=3", "rank=1", "plot=false")
    (line,) = ran.out.splitlines()
    found = json.loads(line)
    assert (found["model"], found["layers"], found["R"], found["rank"], found["random"]) == (
        "codellama_34b",
        2,
        3,
        1,
        True,
    )
    assert [point["num_tokens"] for point in found["step_times"]] == [1, 3]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["speeds"] == {} and found["picture"] is None  # three ranks are not one text's speed
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs"]


def test_a_model_with_weights(launch_profile: Callable[..., Ran], tiny_folder: Path) -> None:
    """Its prefix is real text; the decoder and the sampling are the user's."""
    chosen = ("decoder=prompt_lookup", "sampling=sample", "output=json", "plot=false")
    found = json.loads(launch_profile("model=hf", f"model.name={tiny_folder}", *SMALL, *chosen).out)
    assert (found["decoder"], found["random"], found["W"], found["speeds"]) == ("prompt_lookup", False, 0, {})


def test_no_matplotlib_costs_the_picture_alone(
    launch_profile: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may bring torch and transformers and little else."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "launch.bench.plots", raising=False)  # another test may have imported it
    ran = launch_profile(*SHAPE, *SMALL, "compare=false")
    assert ran.code == 0 and "no picture: matplotlib is not installed" in ran.out


BAD = {
    "R=4 rank=4": "rank is 4; it must be an integer in [0, 3]",
    "rank=1": "rank is 1; it must be an integer in [0, 0]",
    "R=0": "R is 0",
    "prefix=0": "prefix is 0",
    "prefix=2040": "the model's context is 2048",
    "tokens=[]": "tokens is empty",
    "tokens=[1,0]": "tokens is 0",
    "rounds=0": "rounds is 0",
    "max_new_tokens=1": "max_new_tokens is 1; it must be an integer >= 2",
    "shape.layers=2": "shape.layers and shape.divide scale a shape, not demo",
    "model=codellama_8b": "Could not find 'model/codellama_8b' Available options in 'model': codellama_13b",
    "model=codellama_7b shape.layers=99": "shape.layers is 99; it must be an integer in [1, 32]",
    "model=codellama_7b model.dtype=auto": "dtype is 'auto'",
    "decoder=plain": "decoder.name is 'plain', which runs no lookahead steps",
    "decoder=autoregressive": "decoder.name is 'autoregressive', which runs no lookahead steps",
    "shape.width=2": "unknown config key 'shape.width'; known here: layers, divide",
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_setting_is_one_line(launch_profile: Callable[..., Ran], overrides: str) -> None:
    """Before anything is measured, and no traceback."""
    ran = launch_profile(*overrides.split(" "))
    assert ran.code == 2 and BAD[overrides] in ran.err
    assert ran.err.count("\n") == 1 and ran.err.startswith("error: ") and ran.out == ""


def test_a_model_larger_than_memory(launch_profile: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, caches and what is copied, before a byte of them is made."""
    monkeypatch.setattr("lp.models.memory.free_bytes", lambda device: 10**9)
    ran = launch_profile("model=llama2_70b")
    assert ran.code == 2 and "GiB needed, 953.7 MiB free" in ran.err


def test_torchrun_names_the_rank(launch_profile: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for another rank than it runs, the app must not say that it measured that one."""
    import launch.profile
    from lp.parallel.context import ParallelContext

    monkeypatch.setattr(launch.profile, "open_context", lambda config: ParallelContext(rank=1, world_size=2))
    ran = launch_profile("R=4")
    assert ran.code == 2 and "torchrun runs rank 1 of 2" in ran.err
