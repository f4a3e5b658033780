"""Merged weights: those of several linear layers in one tensor, so that one product computes all of them.

The weights of the layers become views of the merged tensor. Memory does not double, changes of the layers' weights in
place are changes of the merged tensor, and the layers work as before: on their own, saved, copied, trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

_LOCK = Lock()  # ranks that are threads share a model


def is_mergeable(linears: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one dtype on one device, whose weights may move in memory."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    biased = {linear.bias is not None for linear in linears}
    parameters = [p for linear in linears for p in (linear.weight, linear.bias) if p is not None]
    return (
        len(biased) == 1
        and all(_is_plain(parameter) for parameter in parameters)
        and len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
    )


def _is_plain(parameter: Any) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.is_floating_point()
        and parameter.layout is torch.strided
        and parameter.device.type != "meta"
        and parameter.is_contiguous()
        and not parameter.is_inference()  # autograd refuses to have its data replaced
        and not (parameter.device.type == "cpu" and parameter.is_shared())  # other processes hold the same memory
    )


def merged(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The rows of all parameters in one tensor, of which the parameters are views, from now on if not before.

    Args:
        parameters: such as `is_mergeable` has checked, alike but for the number of rows.
    """
    first = parameters[0]
    rows = sum(len(parameter) for parameter in parameters)
    with _LOCK, torch.inference_mode(False), torch.no_grad():  # the model may be trained later
        if not _is_merged(parameters):
            whole = torch.cat([parameter.data for parameter in parameters])
            for parameter, view in zip(parameters, whole.split([*map(len, parameters)]), strict=True):
                parameter.data = view
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())


def _is_merged(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each parameter starts where the one before it ends, in the same storage."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    starts = [parameter.storage_offset() for parameter in parameters]
    return len(storages) == 1 and starts[1:] == ends[:-1]
