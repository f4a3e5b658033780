"""Loading a model that ranks divide: the parts of the whole, and no more memory than a part takes."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import lp
from lp.models.loader import load
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from lp.parallel.replica import Replica
from lp.parallel.thread_ranks import run_lockstep
from tests.tiny_models import drawn_text, letters, plain_greedy, tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "qwen3_moe", "gemma3", "llama_yarn"]
IDS = drawn_text(random.Random(1), 12)


def saved(folder: Path, model: tf.PreTrainedModel, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    letters(model.config.vocab_size - 1).save_pretrained(folder)  # some classes add a token of their own
    return folder


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_parts_read_from_files_are_those_of_the_whole_model(arch: str, tmp_path: Path) -> None:
    """Buffers too: no file has rotary frequencies or Gemma's factor of embeddings."""
    model = tiny_model(arch, tie_word_embeddings=arch == "gemma3")
    saved(tmp_path, model, max_shard_size="40KB")
    whole = load(tmp_path, "float64").model
    for rank in range(2):
        context = ParallelContext(replica=Replica(rank, 2))
        loaded = load(tmp_path, "float64", context=context).model
        expected = divide(copy.deepcopy(whole), Replica(rank, 2))
        found = dict(loaded.named_parameters())
        assert found.keys() == dict(expected.named_parameters()).keys()
        for name, weight in expected.named_parameters():
            assert torch.equal(found[name], weight), name
        for name, buffer in expected.named_buffers():
            assert torch.equal(dict(loaded.named_buffers())[name], buffer), name


def test_ranks_decode_what_they_loaded(tmp_path: Path) -> None:
    """`lp.load(name, context=, dtype=)` is all that a program needs."""
    model = tiny_model("llama", tie_word_embeddings=True)
    saved(tmp_path, model)

    def body(context: ParallelContext) -> list[int]:
        loaded = lp.load(tmp_path, context=context, dtype="float64")
        return lp.LookaheadDecoder(loaded.model, lp.LookaheadConfig(adaptive=False), context).generate(IDS, 12).tokens

    assert run_lockstep(4, body, tp=2) == [plain_greedy(model, IDS, 12)] * 4
    assert torch.get_default_dtype() is torch.float32, "transformers sets it while it builds a model, for all threads"


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A weight of another shape would be cut into something."""
    context = ParallelContext(replica=Replica(0, 2))
    saved(tmp_path, tiny_model("llama"))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: torch.zeros(40, 32)}, file, {"format": "pt"})
    with pytest.raises(lp.UserError, match=rf"makes {name} \(48, 32\), the weights have \(40, 32\)"):
        load(tmp_path, "float64", context=context)
    save_file({key: value for key, value in weights.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(lp.UserError, match=f"the weights have no {name}"):
        load(tmp_path, "float64", context=context)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(lp.UserError, match="is damaged or incomplete"):
        load(tmp_path, "float64", context=context)
    file.unlink()
    with pytest.raises(lp.UserError, match=r"it has no model.safetensors"):
        load(tmp_path, "float64", context=context)


MEASURE = """
import json, resource, sys
from lp.models.loader import load
from lp.parallel.context import ParallelContext
from lp.parallel.replica import Replica
import transformers.models.llama.modeling_llama
import torch
torch.zeros(8, 8) @ torch.zeros(8, 8)
def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
before = resident("VmRSS")
model = load(sys.argv[1], "bfloat16", context=ParallelContext(replica=Replica(1, 4))).model
own = sum(each.numel() * each.element_size() for each in model.parameters())
print(json.dumps([before, resident("VmHWM"), own]))
"""


@pytest.mark.slow  # test_loader measures a load by itself
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say what a process holds")
def test_host_memory_of_a_rank(tmp_path: Path) -> None:
    """At most 1.1 x its share and 1 GiB; with files this small the GiB is left at 64 MiB."""
    config = tf.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=32768, tie_word_embeddings=False,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).to(torch.bfloat16)
    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    saved(tmp_path, model)
    del model
    ran = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    before, most, own = json.loads(ran.stdout.splitlines()[-1])
    assert own < 1.01 * whole / 4
    assert most - before < 1.1 * whole / 4 + 64 * 2**20, f"{(most - before) / 2**20:.0f} MiB for {own / 2**20:.0f}"
    print(f"whole {whole / 2**20:.0f} MiB, share {own / 2**20:.0f} MiB, held {(most - before) / 2**20:.0f} MiB")
