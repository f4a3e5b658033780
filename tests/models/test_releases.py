"""Names that differ between releases of transformers, whatever the installed one is."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import lp
from lp.models import support
from lp.models.releases import CACHE_NAMES, cache_in, cache_keyword
from tests.conftest import Processes
from tests.support.tiny_models import tiny_config, tiny_model


class _Wrapper(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Passes everything on."""


def _taking(name: str) -> nn.Module:
    """A model whose forward takes its cache under a name."""
    scope: dict[str, Any] = {}
    exec(f"def forward(self, input_ids, {name}=None, **kwargs): ...", scope)
    return type("Model", (nn.Module,), {"forward": scope["forward"]})()


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_model_takes_its_cache_under_the_name_of_its_class(name: str) -> None:
    """A model's own code, say of a hub, may be older than the installed release."""
    assert cache_keyword(_taking(name)) == name
    given = object()
    others = dict.fromkeys(CACHE_NAMES)
    assert cache_in(others) is None
    assert cache_in(others | {name: given}) is given


def test_a_wrapper_takes_its_cache_under_the_name_of_the_installed_release() -> None:
    """What it passes on is named as transformers' own `generate` names it."""
    assert cache_keyword(_Wrapper()) == cache_keyword(tiny_model("llama"))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_says_nothing_where_no_model_is_quantised(processes: Processes) -> None:
    """Transformers imports it for every model, and with some releases of torch it begins with two warnings."""
    done = processes.run([sys.executable, "-c", "import lp; lp.load"], timeout_s=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arch", ["llama", "gptj", "qwen3_5", "mamba2"])
def test_no_call_takes_a_name_that_is_about_to_go(arch: str) -> None:
    """Transformers warns of such a name, in the middle of the output; and then it is gone."""
    model = tiny_model(arch)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    shape: dict[str, Any] = {"window_size": 3, "ngram_size": 3, "guess_set_size": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        plain = lp.AutoregressiveDecoder(model).generate(ids, 8)
        decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(**shape))
        outputs = [decoder.generate(ids, 8), *decoder.generate_batch([ids, ids], 8)]
        text = model.generate(ids, max_new_tokens=8, custom_generate=lp.generate, **shape)
    assert [output.tokens for output in outputs] == [plain.tokens] * 3
    assert text[0, ids.shape[1] :].tolist() == plain.tokens


@pytest.mark.parametrize("arch", ["qwen3_5", "mamba2", "falcon_h1"])
def test_recurrent_layers_are_refused_where_transformers_is_too_old(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and by the release that does it."""
    monkeypatch.setattr(support, "TRANSFORMERS_KEEPS_STATES", False)
    with pytest.raises(ValueError, match=r"has recurrent layers, which need transformers 5\.21 or newer; 5\."):
        support.check_supported(tiny_config(arch))
    support.check_supported(tiny_config("llama"))
