"""Lay out the weights of linear layers in memory so that matrix products read them fastest.

On a GPU linear layers that have a common input are merged: one product computes all of them. On a CPU each weight is
stored transposed: with few tokens the matrix library reads it up to 1.5 times as fast (docs/experiments/step-time.md).

The layers' own weights become views of that memory, so no weight is stored twice. If a weight is changed in place,
products use its new values. The layers work as before: on their own, copied, trained, saved by transformers or torch.
Code that needs contiguous tensors, such as safetensors' own `save_file`, needs `restore` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

_LOCK = Lock()  # ranks that are threads share a model


def is_mergeable(linears: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one dtype on one device, whose weights may be moved in memory."""
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
        and not parameter.is_inference()  # autograd refuses to have its data replaced
        and not (parameter.device.type == "cpu" and parameter.is_shared())  # other processes hold the same memory
    )


def laid_out(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Move the weights of linear layers that have a common input to memory from which products read them fastest.

    Args:
        parameters: weights, or biases, of layers that pass `is_mergeable`; equal in shape but for the number of rows.

    Returns:
        On a GPU one tensor with the rows of all parameters, on a CPU one tensor for each parameter. The parameters
        become views of these tensors.
    """
    with _LOCK, torch.inference_mode(False), torch.no_grad():  # the model may be trained later
        if parameters[0].device.type == "cpu":
            return [_transposed(parameter) for parameter in parameters]
        return [_merged(parameters)]


def _transposed(parameter: nn.Parameter) -> torch.Tensor:
    if not parameter.t().is_contiguous():
        parameter.data = parameter.data.t().contiguous().t()
    return parameter.data


def _merged(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    first = parameters[0]
    if not _is_merged(parameters):
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([*map(len, parameters)]), strict=True):
            parameter.data = view
    rows = sum(map(len, parameters))
    return first.data.as_strided((rows, *first.shape[1:]), first.stride())


def _is_merged(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each parameter starts where the one before it ends, in the same storage."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    starts = [parameter.storage_offset() for parameter in parameters]
    contiguous = all(parameter.is_contiguous() for parameter in parameters)
    return contiguous and len(storages) == 1 and starts[1:] == ends[:-1]


def restore(model: nn.Module) -> None:
    """Give each weight of a model contiguous memory of its own again, which undoes what `laid_out` did."""
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        for parameter in model.parameters():
            shared = parameter.untyped_storage().nbytes() > parameter.nbytes
            if _is_plain(parameter) and (shared or not parameter.is_contiguous()):
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
