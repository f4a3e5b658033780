"""The simulated device of one thread: runs operations on CPU memory, by CUDA's rules, and counts what they ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.copies import Copies
from tests.support.simulated_cuda.events import LAUNCH, PAGEABLE, SYNC, Events, line_of_lp
from tests.support.simulated_cuda.memory import Block, address, blocks, is_pinned, pin, poison
from tests.support.simulated_cuda.operators import (
    ALLOCATES,
    FILLS,
    INDEXES,
    KERNELS,
    WAITS,
    WAITS_FOR_SIZE,
    Operator,
    operator,
)

if TYPE_CHECKING:
    from tests.support.simulated_cuda.graphs import Recording

CPU = torch.device("cpu")
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
SEQUENCES = (tuple, list)  # made once: `tuple | list` would be made at each of a million calls
PINS = ("is_pinned", "_pin_memory", "pin_memory")
EXPLICIT = ("Event.", "Stream.", "cuda.", "capture of a graph")  # waiting that the sync debug mode does not see
_here = (
    threading.local()
)  # .simulations: those that this thread has entered, the innermost last, and how torch was before


class DeviceError(RuntimeError):
    """CUDA would have refused this operation; the simulation does so in its place."""


class HostHangs(BaseException):
    """The host would wait for ever: no error, which the code under test might handle."""


class Hang:
    """What the device waits for, and all that was asked of it since.

    Attributes:
        ended: somebody has ended it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.ended = False

    def refuse(self) -> None:
        """The host waits for it, without a limit.

        Raises:
            HostHangs: it would wait for ever.
        """
        if not self.ended:
            raise HostHangs(f"the host waits for ever: {self.reason}")


class CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU.

    Attributes:
        raw: its values, on the CPU; views share memory as they would on the GPU.
        block: the allocation that it lies in.
    """

    raw: torch.Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device: torch.device, block: Block | None = None) -> CudaTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        tensor.raw = raw
        if block is None:
            at = address(raw)
            block = blocks.get(at)
            if block is None:
                block = blocks[at] = Block(line_of_lp())
        tensor.block = block
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return simulation().handle(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Waits, as any copy to the host does."""
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.raw}, device={str(self.device)!r})"


def simulation() -> SimulatedCuda:
    """The innermost one that this thread has entered."""
    entered = getattr(_here, "simulations", [])
    if not entered:
        raise DeviceError("a simulated CUDA tensor is used outside of the simulation")
    return entered[-1][0]


class SimulatedCuda(TorchDispatchMode):
    """Runs and counts what one thread asks of its GPU, within the object's `with` block.

    Args:
        index: number of the thread's current device, the 0 of "cuda:0".

    Attributes:
        events: counts of what was asked for.
        recording: operations of the graph that is being captured; None when none is.
        hang: what the device waits for, or has waited for last.
        stream, default_stream: the thread's current and default stream; None until one is asked for.
        sync_debug_mode: one for all threads: 0 lets the host wait, 2 makes waiting within an operation an error.
    """

    sync_debug_mode = 0

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.events = Events()
        self.copies = Copies()
        self.recording: Recording | None = None
        self.hang: Hang | None = None
        self.stream: Any = None
        self.default_stream: Any = None

    def __enter__(self) -> SimulatedCuda:
        if not hasattr(_here, "simulations"):
            _here.simulations = []
        _here.simulations.append((self, torch._C._only_lift_cpu_tensors()))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies where it is seen
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        _, lifts = _here.simulations.pop()
        torch._C._set_only_lift_cpu_tensors(lifts)
        super().__exit__(*failure)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what skips it takes longer than most operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(func, args, kwargs or {})

    def wait(self, what: str, count: int | None = None) -> None:
        """Note that the host waits for the device, and refuse it where CUDA would.

        Args:
            what: name of the operation that makes the host wait.
            count: number of copies that are over then, those before an event; None: all that were asked for.
        """
        self.refuse_in_capture(what)
        if self.sync_debug_mode and not what.startswith(EXPLICIT):
            raise RuntimeError(f"called a synchronizing CUDA operation ({what} at {line_of_lp()})")
        if self.hang and count is None:
            self.hang.refuse()
        self.events.note(SYNC, what)
        self.copies.finish(count)

    def launched(self, what: str) -> None:
        """Note that a kernel was put into the device's queue; while a graph is captured nothing is."""
        if self.recording is None:
            self.events.note(LAUNCH, what)

    def refuse_in_capture(self, what: str) -> None:
        """A graph records what the device does; what the host does with it can't be recorded."""
        if self.recording is not None:
            self.recording.valid = False
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what} at {line_of_lp()})"
            )

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation of torch as CUDA would, or refuse it."""
        device = self._device_asked_for(args, kwargs)
        tensors = _tensors(args, [])
        if kwargs:
            _tensors(kwargs.values(), tensors)
        on_cuda = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        for_cuda = device is not None and device.type == "cuda"
        if not on_cuda and not for_cuda and func._opname not in PINS:  # first, as two operations of three
            return self._on_host(func, args, kwargs)
        op = operator(func)
        if op.composite and (on_cuda or for_cuda):  # inference mode hands them over whole
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)  # torch's own, not what Python knows to trace it
        if op.view and on_cuda and len(tensors) == 1:  # every third operation, and nothing to refuse
            return self._view(func, args, kwargs, on_cuda[0])
        if op.name == "_to_copy" and (on_cuda or for_cuda):
            return self._moved(func, args[0], device or args[0].device, kwargs)
        if op.name == "copy_" and on_cuda:
            return self._copied(func, args[0], args[1], bool(kwargs.get("non_blocking") or args[2:] == (True,)))
        if op.name in PINS:
            return self._pinning(op, args[0])
        self._check_devices(func, op, tensors, on_cuda, args, kwargs)
        if op.name in WAITS or (op.name in WAITS_FOR_SIZE and kwargs.get(WAITS_FOR_SIZE[op.name]) is None):
            self.wait(op.name)
        if op.name in FILLS and isinstance(kwargs.get("value", args[-1]), CudaTensor):
            self.wait(op.name)
        if op.name in INDEXES:
            self._check_indices(op, args)
        target = device or on_cuda[0].device
        if target.type == "cpu":  # such as new_zeros(device="cpu"): the CUDA tensor lends its dtype
            return func(*_unwrapped(args), **_unwrapped(kwargs))
        return self._launch(func, op, args, kwargs, target)

    def _device_asked_for(self, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
        found = kwargs.get("device")
        if found is None:
            for arg in args:
                if isinstance(arg, torch.device):
                    found = arg
        if found is not None and (found.type == "meta" or (found.type, found.index) == ("cuda", None)):
            return torch.device("cuda", self.index)  # "cuda" becomes "meta" where torch asks the lent guard
        return found

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return pin(func(*args, **kwargs | {"pin_memory": False}))

    def _pinning(self, op: Operator, tensor: torch.Tensor) -> Any:
        on_host = not isinstance(tensor, CudaTensor)
        if op.name == "is_pinned":
            return on_host and is_pinned(tensor)
        if not on_host:
            raise DeviceError("cannot pin 'torch.cuda' tensors, only dense CPU tensors can be pinned")
        return pin(tensor.clone())

    def _check_devices(
        self,
        func: Any,
        op: Operator,
        tensors: list[torch.Tensor],
        on_cuda: list[CudaTensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Refuse tensors of different devices; pointwise kernels take CPU tensors without dimensions."""
        devices = {tensor.device for tensor in on_cuda}
        others = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        if op.name in INDEXES:
            devices.add(args[0].device)
            values = args[2:3]
            others = [value for value in values if not isinstance(value, CudaTensor) and value.dim()]
        elif op.takes_scalars:
            written = op.targets(args, kwargs)
            others = [tensor for tensor in others if tensor.dim() or any(tensor is target for target in written)]
        devices |= {tensor.device for tensor in others}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices), reverse=True))
            raise DeviceError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{names}! ({func} at {line_of_lp()})"
            )

    def _check_indices(self, op: Operator, args: Any) -> None:
        """Note what indices cost: a mask is turned into numbers, which the host waits for; host indices are copied."""
        indices = [index for index in args[1] if index is not None]
        # A number on the host takes a mask as masked_fill does.
        fills = op.name != "index" and len(indices) == 1 and args[2].numel() == 1 and args[2].is_cpu
        for index in indices:
            if not isinstance(index, CudaTensor):
                self._note_copy_from_host(index, non_blocking=False)
            if index.dtype in (torch.bool, torch.uint8) and not fills:
                self.wait("index by a mask")

    def _moved(self, func: Any, source: torch.Tensor, target: torch.device, kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor's copy with another device or dtype, as `.to` makes it."""
        non_blocking = bool(kwargs.get("non_blocking"))
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        if isinstance(source, CudaTensor) and target.type == "cuda":
            kwargs["device"] = target
            return self._launch(func, operator(func), (source,), kwargs, target)
        dtype = kwargs.get("dtype") or source.dtype
        copied: torch.Tensor
        if isinstance(source, CudaTensor):
            copied = torch.empty_like(source.raw, dtype=dtype)
            if non_blocking:
                pin(copied)  # as torch does, or the copy would not be asynchronous
        else:
            copied = CudaTensor(torch.empty_like(source, dtype=dtype), target)
        self._transfer(copied, source, non_blocking)
        return copied

    def _copied(self, func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`target.copy_(source)`, of which at least one is on a GPU."""
        if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
            return self._launch(func, operator(func), (target, source), {}, target.device)
        self._transfer(target, source, non_blocking)
        return target

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """A copy between the host and a GPU."""
        if isinstance(target, CudaTensor):
            self._note_copy_from_host(source, non_blocking)
            if non_blocking and is_pinned(source):
                self.run(self._start_to_device, (target, source), {}, [target])
            else:
                target.raw.copy_(source)
            return
        assert isinstance(source, CudaTensor)
        if non_blocking and is_pinned(target):
            self.launched("copy to the host")
            self.run(self._start_to_host, (target, source), {}, [])
        else:
            self.wait("copy to the host")
            self.launched("copy to the host")
            target.copy_(source.raw)

    def _start_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.to_device(target, source)

    def _start_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.to_host(target, source)

    def _note_copy_from_host(self, source: torch.Tensor, non_blocking: bool) -> None:
        pageable = not is_pinned(source)
        name = "copy from pageable memory" if pageable else "copy from pinned memory"
        if not non_blocking:
            self.wait(name)
        if pageable:
            self.refuse_in_capture(name)
            self.events.note(PAGEABLE, name)
        self.launched(name)

    def _launch(self, func: Any, op: Operator, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Run a kernel, or make a view of one of several tensors."""
        if op.view:
            return self._view(func, args, kwargs, _tensors(args, [])[0])
        if op.launches:
            self.launched(op.name)
        if "device" in kwargs:
            kwargs = kwargs | {"device": CPU}
        kwargs.pop("pin_memory", None)
        targets = op.targets(args, kwargs)
        out = self.run(KERNELS.get(op.name, func), args, kwargs, targets, fresh=op.fresh)
        for target in targets:
            assert isinstance(target, CudaTensor)
            if target.raw.shape != target.shape or target.raw.stride() != target.stride():
                raise NotImplementedError(f"{func} changes a tensor's shape in place, which is not simulated")
        if targets and not op.fresh:
            return targets[0] if len(func._schema.returns) == 1 else tuple(targets) if func._schema.returns else None
        if op.name in ALLOCATES:
            poison(out)
        return self._wrapped(out, device)

    def _view(self, func: Any, args: Any, kwargs: dict[str, Any], base: Any) -> Any:
        """A view of a tensor, or several: of the same memory."""
        with torch._C._InferenceMode(base.is_inference()):  # a view of a normal tensor is one, wherever it is made
            return self._wrapped(func(*_unwrapped(args), **_unwrapped(kwargs)), base.device, base.block)

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, targets: list[Any], fresh: bool = False) -> Any:
        """Call with the values of these tensors, and record the call while a graph is captured.

        Args:
            call: does the operation, on host tensors.
            args, kwargs: its arguments, among them CUDA tensors.
            targets: tensors that it writes to, which a capture sets back.
            fresh: whether what it returns is new memory.
        """
        if self.recording is None:
            return call(*_unwrapped(args), **_unwrapped(kwargs))
        return self.recording.run(call, args, kwargs, targets, fresh)

    def _wrapped(self, out: Any, device: torch.device, block: Block | None = None) -> Any:
        if isinstance(out, torch.Tensor):
            return CudaTensor(out, device, block)
        if isinstance(out, SEQUENCES):
            return type(out)(self._wrapped(item, device, block) for item in out)
        return out


def _tensors(values: Iterable[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Add all tensors among the arguments of an operation to those found."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, SEQUENCES):
            _tensors(value, found)
    return found


def _unwrapped(value: Any) -> Any:
    """An operation's arguments with each CUDA tensor replaced by its values on the host, to run it there."""
    if isinstance(value, CudaTensor):
        return value.raw
    if isinstance(value, SEQUENCES):
        return type(value)([_unwrapped(item) for item in value])
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()} if value else value
    return value
