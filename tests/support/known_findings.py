"""What the probe finds of tiny models that are alike, found once a process: most of a decoder's start, which a test of
something else makes again for each of its models. Tests of the probe itself, and of faults in what it runs, leave it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from lp.models import probe
from lp.models.probe import Findings
from lp.models.probe_step import StepRunner
from lp.models.sharded_layers import replica_of
from tests.support.simulated_cuda.simulation import CudaTensor

OWN = ("torch.nn.", "transformers.")  # whose modules are what their config and weights say


@pytest.fixture(scope="session")
def findings() -> dict[Hashable, Findings]:
    """What has been found in this process, by `_likeness`; sound steps alone."""
    return {}


@pytest.fixture
def known_findings(findings: dict[Hashable, Findings], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The probe runs once for models that are alike and run alike; each takes a step as a whole nevertheless."""
    found_anew = probe.probed

    def probed(runner: StepRunner, nodes: Sequence[int] = probe.PLANTED) -> Findings:
        alike = _likeness(runner)
        if alike is None:
            return found_anew(runner, nodes)
        if (alike, *nodes) not in findings:
            found = found_anew(runner, nodes)
            if found.failure is not None:
                return found
            findings[alike, *nodes] = found
        return findings[alike, *nodes]

    with monkeypatch.context() as patch:
        patch.setattr(probe, "probed", probed)
        yield


def _likeness(runner: StepRunner) -> Hashable | None:
    """What findings depend on; None for a model that is more than its config and its weights, or is divided."""
    model = runner.original
    if replica_of(model).size > 1 or not all(map(_plain, model.modules())):
        return None
    how = (type(runner.backend), runner.backend.name, runner.captured is not None, runner.fused, runner.exact)
    code = tuple(type(module).forward for module in model.modules())  # a test may have replaced one
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    attention = model.config._attn_implementation
    return (*how, runner.device.type, model.dtype, vars(runner)["_same_bits"], code, config, attention, _digest(model))


def _plain(module: torch.nn.Module) -> bool:
    """Whether a module is transformers' or torch's as it comes, with weights that a digest reads."""
    own = type(module).__module__.startswith(OWN) and "forward" not in vars(module)
    hooks = bool(module._forward_pre_hooks or module._forward_hooks)
    weights = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return own and not hooks and all(type(each) in (torch.Tensor, torch.nn.Parameter, CudaTensor) for each in weights)


def _digest(model: PreTrainedModel) -> str:
    """A digest of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weights in (*model.named_parameters(), *model.named_buffers()):
        host = weights.raw if isinstance(weights, CudaTensor) else weights.detach()
        digest.update(f"{name} {host.dtype} {tuple(host.shape)}".encode())
        digest.update(host.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
