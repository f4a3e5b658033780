"""GGUF files: loaded as folders are, and refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import lp
from launch.bench.to_gguf import write_gguf
from tests.support.tiny_models import tiny_model

gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the package gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")


def test_a_file_is_found_by_its_name_or_its_folder(tmp_path: Path) -> None:
    """A file, the only one of a folder, several, none."""
    from lp.models.loader import model_source

    (tmp_path / "one.gguf").touch()
    for name in (tmp_path / "one.gguf", tmp_path):
        found = model_source(name)
        assert (found.place, found.options) == (str(tmp_path), {"gguf_file": "one.gguf"})
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ValueError, match=r"2 GGUF files \(one.gguf, two.gguf\); name one"):
        model_source(tmp_path)
    with pytest.raises(ValueError, match=r"three.gguf' does not exist"):
        model_source(tmp_path / "three.gguf")
    (tmp_path / "config.json").touch()  # a folder of weights that has GGUF files beside them
    assert model_source(tmp_path).options == {}


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    """Cut short, or something else with that name."""
    write_gguf(tiny_model(), str(tmp_path / "whole.gguf"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    for name, data in (("cut.gguf", whole[: len(whole) // 2]), ("other.gguf", b"no weights"), ("empty.gguf", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=name) as error:
            lp.load(tmp_path / name)
        assert "\n" not in str(error.value)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    """A file of an architecture that transformers has no mapping for is refused by the architecture's name."""
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "nosucharch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="nosucharch"):
        lp.load(tmp_path / "x.gguf")


@pytest.mark.slow
def test_a_real_file_gives_the_tokens_of_its_folder(tmp_path: Path) -> None:
    """The 4-bit file of scripts/real_model.sh and what was converted from it; saved again, it is a folder like any."""
    folder = os.environ.get("LP_REAL_MODEL")
    if not folder:
        pytest.skip("needs a real model: bash scripts/real_model.sh, then set LP_REAL_MODEL to its folder")
    if not (files := [*Path(folder).glob("*.gguf")]):
        pytest.skip("the folder has no file that it was converted from; bash scripts/real_model.sh leaves it there")
    model, tokenizer = lp.load(files[0])
    other, other_tokenizer = lp.load(folder)
    for name, weight in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    prompt = tokenizer("def quicksort(a):")["input_ids"]
    assert prompt == other_tokenizer("def quicksort(a):")["input_ids"]
    assert tokenizer.chat_template == other_tokenizer.chat_template
    config = lp.LookaheadConfig(window_size=7, ngram_size=3, guess_set_size=7)
    tokens = [lp.LookaheadDecoder(each, config).generate(prompt, 24).tokens for each in (model, other)]
    assert tokens[0] == tokens[1]
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
