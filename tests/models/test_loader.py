"""Loading: whatever is wrong with a checkpoint is one ValueError that names the file or the weight."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import lp
from lp.models.digests import model_digests
from lp.models.loader import cast_on, load
from lp.models.support import check_supported
from tests.conftest import some_of
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import tiny_config, tiny_model

WEIGHTS = "model.safetensors"
Change = Callable[[Path], object]


def _config(**fields: Any) -> Change:
    """Change fields of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _truncated(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def _without(pattern: str) -> Change:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def _sharded_without_shards(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MEMORY = """
import sys, threading, lp

def anonymous_mib():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) / 1024

def watch():
    while not done.wait(0.002):
        peaks.append(anonymous_mib())

lp.load("demo")  # imports, threads
done, peaks, before = threading.Event(), [], anonymous_mib()
watching = threading.Thread(target=watch, daemon=True)
watching.start()
model = lp.load(sys.argv[1], sys.argv[2]).model
done.set()
watching.join()
print(max([*peaks, anonymous_mib()]) - before, str(model.dtype))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def wide_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint in bfloat16 that is large beside what a process takes otherwise, and the MiB of its weights."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    vocabulary = tf.AutoConfig.from_pretrained(folder).vocab_size  # its tokenizer's
    model = tiny_model(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=vocabulary, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    return folder, (folder / WEIGHTS).stat().st_size / MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read as Linux has it")
@pytest.mark.parametrize(("dtype", "most"), some_of([("bfloat16", 0.1), ("auto", 0.1), ("float32", 2.2)], 1))
def test_a_load_takes_the_memory_of_its_weights(wide_folder: tuple[Path, float], dtype: str, most: float) -> None:
    """Ranks of a host load at once. In its own dtype a checkpoint stays mapped, its pages shared by all of them; in
    float32 each rank holds twice the size of one in bfloat16, and no more.
    """
    folder, size = wide_folder
    assert size > 100
    command = [sys.executable, "-c", MEMORY, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    taken, loaded = done.stdout.split()
    assert float(taken) <= most * size and loaded == f"torch.{'float32' if dtype == 'float32' else 'bfloat16'}"


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mistral_sliding", "phi3", "qwen2"])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_cast_on_a_device_is_loaded_in_that_dtype(arch: str, stored: str, dtype: str, tmp_path: Path) -> None:
    """Rotary frequencies that were cast along would be other ones, and tied weights that part take twice the memory."""
    tiny_model(arch, dtype=getattr(torch, stored)).save_pretrained(tmp_path)
    wanted = getattr(torch, dtype)
    expected = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert str(model.dtype) == f"torch.{stored}" and cast_on("cpu", model, wanted)
    for mine, theirs in ((model.parameters, expected.parameters), (model.buffers, expected.buffers)):
        pairs = list(zip(mine(), theirs(), strict=True))
        assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
    assert model.dtype == wanted and model.config.to_dict() == expected.config.to_dict()
    heads = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, expected)]
    assert heads[0] == heads[1]


def test_buffers_that_follow_the_dtype_are_computed_in_it(tmp_path: Path) -> None:
    """Gemma's embedding scale is rounded where the model is made: a cast one is another number."""
    tiny_model("gemma3", dtype=torch.float32).save_pretrained(tmp_path)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert not cast_on("cpu", model, torch.bfloat16) and model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_gpu_casts_its_own_weights(
    dtype: str, tiny_folder: Path, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were they cast on the host, every rank of it would hold all of them there first."""
    asked: list[object] = []
    from_pretrained = tf.AutoModelForCausalLM.from_pretrained

    def recorded(*args: object, **options: Any) -> Any:
        asked.append(options["dtype"])
        return from_pretrained(*args, **options)

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", recorded)
    model = load(tiny_folder, dtype, "cuda").model
    assert asked == ["auto"] and model.dtype == getattr(torch, dtype) and model.device.type == "cuda"
    load(tiny_folder, dtype, "cpu")
    assert asked[1:] == [getattr(torch, dtype)]


DAMAGED: dict[str, tuple[Change, str]] = {
    "weights cut short": (_truncated(WEIGHTS, -100), "model.safetensors is damaged or incomplete"),
    "not safetensors": (lambda folder: (folder / WEIGHTS).write_text("hello" * 99), "is damaged or incomplete"),
    "a tensor missing": (_without_a_tensor, r"weights have no model.layers.1.mlp.up_proj.weight \(of 1 missing\); use"),
    "shards missing": (_sharded_without_shards, "cannot load .*model-00001-of-00002"),
    "no config": (_without("config.json"), "cannot read a model config"),
    "an unknown type": (_config(model_type="nonesuch"), "cannot read a model config .*nonesuch"),
    "a cut header": (_truncated(WEIGHTS, 100), "model.safetensors is damaged or incomplete"),
    "an empty file": (_truncated(WEIGHTS, 0), "model.safetensors is damaged or incomplete"),
    "no weights": (_without(WEIGHTS), "no file named model.safetensors"),
    "other shapes": (_config(hidden_size=64), r"config.json makes lm_head.weight \(4096, 64\), .* have \(4096, 32\)"),
    "too few layers": (_config(num_hidden_layers=3), r"have no model.layers.2.input_layernorm.weight \(of 9 missing\)"),
    "no tokenizer": (_without("tokenizer*"), "cannot load the tokenizer of .*tokenizer.json"),
    "a cut tokenizer": (_truncated("tokenizer.json", 50), "cannot load the tokenizer of"),
    "an empty tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot load the tokenizer of"),
    "a config of another type": (_config(hidden_size="x"), "model config .*'hidden_size'.* expected int, got str"),
    "an impossible config": (_config(num_attention_heads=5), r"model config .*not a multiple of .* heads \(5\)"),
    "a cut config": (_truncated("config.json", 20), "config.json' is not a valid JSON file"),
    "an encoder": (_config(model_type="vit"), "is a 'vit' model, which is not a causal LM"),
    "an encoder-decoder": (_config(model_type="t5", is_encoder_decoder=True), "'t5'"),
    "bloom": (_config(model_type="bloom"), "'bloom' uses alibi"),
    "mpt": (_config(model_type="mpt"), "'mpt' uses alibi"),
    "gpt_neo": (
        _config(model_type="gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]]),
        r"'gpt_neo' has layers of kind .* \(its window is counted in cache slots\); supported are",
    ),
    "rwkv": (_config(model_type="rwkv"), "'rwkv' keeps a recurrent state"),
    "mamba": (_config(model_type="mamba"), "'mamba' has Mamba-1 layers"),
    "hybrid": (_config(model_type="jamba"), "'jamba' has Mamba-1 layers"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_bad_checkpoint_is_named(fault: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Every library raises its own kind of error, of several lines or without the file's name; or just warns."""
    change, message = DAMAGED[fault]
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value) or "model type" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", [2, 3])
def test_a_missing_attention_package_is_named(version: int, tiny_folder: Path) -> None:
    """transformers raises ImportError, which would end an app with a traceback."""
    package = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ValueError, match=rf"cannot load .*FlashAttention{version} .*; install it, or choose attn_impl"):
        load(tiny_folder, attn_implementation=f"flash_attention_{version}")


def test_a_missing_quantisation_package_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    """The remedy is in transformers' message: it must reach the user."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    _config(quantization_config={"quant_method": "gptq", "bits": 4})(folder)
    if importlib.util.find_spec("optimum"):
        pytest.skip("optimum is installed")
    with pytest.raises(ValueError, match=r"cannot load .*optimum"):
        load(folder)


def test_unused_weights_are_reported_in_one_line(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A config with fewer layers than the checkpoint loads, and gives another model than the user thinks."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    _config(num_hidden_layers=1)(folder)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert [record.getMessage() for record in caplog.records if "LOAD REPORT" in record.getMessage()] == []
    assert "9 weights are not used by this model, among them model.layers.1.input_layernorm.weight" in caplog.text


@pytest.mark.parametrize("arch", ["t5", "bloom", "falcon_alibi", "mpt", "rwkv", "mamba"])
def test_refused_by_name(arch: str) -> None:
    """A user must read which model type it is, and why."""
    config = tiny_config(arch)
    with pytest.raises(ValueError, match=f"model type '{config.model_type}'"):
        check_supported(config)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client tries five times with pauses, half a minute, before it says that there is no network."""
    requests: list[str] = []

    class NoNetwork:
        def head(self, url: str, timeout: float) -> None:
            requests.append(url)
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which is said of whoever runs the tests
    monkeypatch.setattr("huggingface_hub.utils.get_session", NoNetwork)
    with pytest.raises(lp.UserError, match=r"'nobody/nothing': it is no folder here.* the hub cannot be reached; give"):
        load("nobody/nothing")
    assert len(requests) == 1


def _checksum(weights: torch.Tensor) -> int:
    model: Any = SimpleNamespace(state_dict=lambda: {"w": weights}, config=tiny_config("llama"))
    return model_digests(model)["weights' checksum"]


@pytest.mark.parametrize("at", [0, 65520, 131041, 199_999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_checksum_sees_every_word(dtype: torch.dtype, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 65521st had no weight, and words so far apart had the same one; of float64 it did not see the sign."""
    digests = list[int]()
    for place, value in ((at, 0), (at, 1), (at, -1), (at, 2), (at - 65521, 1)):
        weights = torch.zeros(200_000, dtype=dtype)
        weights[place] = value
        digests.append(_checksum(weights))
    assert len({*digests}) == 5
    monkeypatch.setattr("lp.models.digests.CPU_PIECE", 77_777)
    assert _checksum(weights) == digests[-1], "whatever a device takes at a time"


@pytest.mark.parametrize("count", [1, 2, 1 << 17])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.float32, torch.bfloat16])
def test_the_checksum_sees_the_sign_of_all_weights(dtype: torch.dtype, count: int) -> None:
    for weights in (torch.ones(count, dtype=dtype), torch.randn(count, dtype=dtype)):
        assert _checksum(weights) != _checksum(-weights)
        assert count == 1 or (weights == weights[0]).all() or _checksum(weights) != _checksum(weights.flip(0))


def test_weights_that_are_not_in_memory_are_named() -> None:
    """Those that accelerate has offloaded."""
    with pytest.raises(lp.UserError, match="weights are not in memory, but offloaded"):
        _checksum(torch.empty(3, device="meta"))


def test_a_folder_below_the_home_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands the ~ of model.name=~/folder; transformers took it for a name of the hub."""
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    assert load(f"~/{tiny_folder.name}").model.config.vocab_size == load(tiny_folder).model.config.vocab_size
    with pytest.raises(lp.UserError, match="model folder '~nobody-is-called-so/x' does not exist"):
        load("~nobody-is-called-so/x")
    with pytest.raises(lp.UserError, match="'5'"):
        load(5)  # type: ignore[arg-type]
