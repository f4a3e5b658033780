"""The simulated GPU itself: CUDA's rules of devices, synchronisation, pinned memory and graphs.

A rule that it lacks would let a fault of that kind through all tests that run on it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.simulated_cuda import (
    LAUNCH,
    PAGEABLE,
    SYNC,
    CudaTensor,
    DeviceError,
    SimulatedCuda,
    guard,
    simulated_cuda,
)
from tests.support.simulated_cuda import why_not as why_no_simulation
from tests.support.simulated_cuda.flash import flash_attention_forward

CPU_VALUES = torch.arange(6.0)


def on_gpu(tensor: torch.Tensor = CPU_VALUES) -> torch.Tensor:
    return tensor.to("cuda")


def captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of some work, and the memory that it leaves its result in."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = work()
    return graph, out


def test_nothing_stays_behind() -> None:
    """A test that follows in the same process must find a torch without CUDA, as it was."""
    if reason := why_no_simulation():
        pytest.skip(reason)
    before = dict(vars(torch.cuda)), torch._C._only_lift_cpu_tensors(), guard._slots()[guard._CUDA]
    with simulated_cuda():
        tensor = on_gpu()
        assert tensor.is_cuda and not torch.cuda.is_available()
    now = dict(vars(torch.cuda)), torch._C._only_lift_cpu_tensors(), guard._slots()[guard._CUDA]
    assert now == before
    assert not torch.__future__.get_overwrite_module_params_on_conversion()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2, device="cuda")
    with pytest.raises(DeviceError, match="outside of the simulation"):
        tensor + 1


def test_a_model_moves_as_it_does_to_a_gpu(gpu: SimulatedCuda) -> None:
    """Tests say `.to("cuda")`: a weight that stayed behind would be computed with, unseen."""
    layer = torch.nn.Linear(3, 2).to("cuda")
    assert {parameter.device for parameter in layer.parameters()} == {torch.device("cuda", 0)}
    out = layer(torch.ones(1, 3, device="cuda"))
    assert isinstance(out, CudaTensor) and out.device == torch.device("cuda", 0)
    assert torch.equal(out.cpu(), torch.nn.functional.linear(torch.ones(1, 3), layer.weight.cpu(), layer.bias.cpu()))


@pytest.mark.parametrize(
    "work",
    [
        lambda a, b: a + b,
        lambda a, b: a.add_(b),
        lambda a, b: b.add_(a),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.index_select(0, b.long()),
        lambda a, b: a.gather(0, b.long()),
        lambda a, b: a @ b,
        lambda a, b: torch.where(a > 1, a, b),
        lambda a, b: a.index_put_((on_gpu(torch.tensor([1, 2])),), b[:2]),
        lambda a, b: a.index_copy_(0, b.long(), a),
        lambda a, b: torch.nn.functional.embedding(b.long(), a[:, None]),
        lambda a, b: b[a.long()],
        lambda a, b: torch.zeros(()).add_(a[0]),
        lambda a, b: torch.cat([a, b[:1].squeeze()[None]]),
        lambda a, b: a + a.to("cuda:1"),
    ],
)
def test_tensors_of_two_devices_are_refused(gpu: SimulatedCuda, work: Callable[..., object]) -> None:
    """On a CPU every tensor is at hand."""
    with (
        torch.inference_mode(),
        pytest.raises(DeviceError, match=r"same device.*two devices, cuda:"),
    ):
        work(on_gpu(), CPU_VALUES.clone())


@pytest.mark.parametrize(
    "work",
    [
        lambda a: a + torch.tensor(2.0),
        lambda a: a * 2,
        lambda a: torch.tensor(2.0) * a,
        lambda a: torch.where(a > 1, a, torch.tensor(0.0)),
        lambda a: a.masked_fill(a > 1, torch.tensor(7.0)),
        lambda a: a.lerp(a + 1, torch.tensor(0.5)),
        lambda a: a.index_put_((a.new_zeros(1, dtype=torch.long),), torch.tensor(3.0)),
        lambda a: a.new_zeros(3, device="cpu"),
    ],
)
def test_numbers_on_the_host_are_taken(gpu: SimulatedCuda, work: Callable[..., torch.Tensor]) -> None:
    """Kernels take a CPU tensor without dimensions as a number: a rule too strict would refuse what a GPU runs."""
    before = gpu.events.total(SYNC)
    values = on_gpu()
    copies = gpu.events.total(SYNC) - before
    with torch.inference_mode():
        out = work(values)
    assert gpu.events.total(SYNC) - before == copies
    assert torch.equal(out.cpu(), work(CPU_VALUES.clone()))


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda a: a[0].item(),
    "int": lambda a: int(a[0]),
    "bool": lambda a: bool(a[0] > 0),
    "tolist": lambda a: a.tolist(),
    "to the host": lambda a: a.cpu(),
    "into the host": lambda a: torch.empty(6).copy_(a),
    "nonzero": lambda a: a.nonzero(),
    "where": lambda a: torch.where(a > 1),
    "mask": lambda a: a[a > 1],
    "several by mask": lambda a: a.__setitem__(a > 1, a[2:] * 2),
    "one of the device by mask": lambda a: a.__setitem__(a > 1, a[0]),
    "masked_fill of the device": lambda a: a.masked_fill(a > 1, a[0]),
    "index_fill of the device": lambda a: a.index_fill_(0, torch.zeros(1, dtype=torch.long, device=a.device), a[0]),
    "masked_select": lambda a: a.masked_select(a > 1),
    "unique": lambda a: a.unique(),
    "equal": lambda a: torch.equal(a, a),
    "allclose": lambda a: torch.allclose(a, a),
    "repeats": lambda a: a.repeat_interleave(a.long()),
    "new tensor": lambda a: torch.tensor([1.0], device=a.device),
    "from the host": lambda a: a.copy_(CPU_VALUES),
    "host index": lambda a: a[torch.tensor([0, 1])],
    "synchronize": lambda a: torch.cuda.synchronize(),
    "stream": lambda a: torch.cuda.current_stream().synchronize(),
    "event": lambda a: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("how", WAITING)
def test_waiting_is_counted_and_no_graph_takes_it(gpu: SimulatedCuda, how: str) -> None:
    """A hidden synchronisation costs a step its overlap, and a capture its graph."""
    values = on_gpu()
    gpu.events.clear()
    with torch.inference_mode():
        WAITING[how](values)
        assert gpu.events.total(SYNC) == 1, gpu.events.table()
        with pytest.raises(RuntimeError, match="failed due to a previous error during capture") as error:
            captured(lambda: WAITING[how](values))  # type: ignore[arg-type, return-value]
    assert "not permitted when stream is capturing" in str(error.value.__context__)


KERNELS: list[Callable[[torch.Tensor], object]] = [
    lambda a: a.sum(),
    lambda a: a.masked_fill_(a > 1, 0.0),
    lambda a: a.__setitem__(a > 1, 0.0),
    lambda a: a.__setitem__(0, a[1]),
    lambda a: a[torch.zeros(1, dtype=torch.long, device="cuda")],
    lambda a: torch.arange(4, device=a.device),
    lambda a: torch.zeros(4, dtype=torch.bool, device=a.device),
    lambda a: a.topk(2),
    lambda a: a[2:4].copy_(a[:2]),
    lambda a: a.to(torch.float64),
]


@pytest.mark.parametrize("work", KERNELS)
def test_kernels_do_not_wait(gpu: SimulatedCuda, work: Callable[..., object]) -> None:
    """A count that is too high hides the one that is added."""
    values = on_gpu()
    gpu.events.clear()
    with torch.inference_mode():
        work(values)
        assert (gpu.events.total(SYNC), gpu.events.total(PAGEABLE)) == (0, 0)
        assert gpu.events.total(LAUNCH) >= 1


def test_views_are_no_kernels_and_share_memory(gpu: SimulatedCuda) -> None:
    """A view that were a copy would lose what is written through it."""
    values = on_gpu(torch.zeros(2, 3))
    gpu.events.clear()
    with torch.inference_mode():
        view = values.T[1:].unsqueeze(0).transpose(1, 2)[0].flatten(0, 0)
        assert not gpu.events
        view[0, 1] = 5.0
    assert values.tolist() == [[0, 0, 5], [0, 0, 0]]


def test_pinned_memory_is_known(gpu: SimulatedCuda) -> None:
    """Only a copy from pinned memory that the host does not wait for is free."""
    pinned = torch.zeros(4, pin_memory=True)
    target = torch.zeros(4, device="cuda")
    gpu.events.clear()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and CPU_VALUES.pin_memory().is_pinned()
    assert not CPU_VALUES.is_pinned() and not target.is_pinned()
    target.copy_(pinned, non_blocking=True)
    assert (gpu.events.total(SYNC), gpu.events.total(PAGEABLE), gpu.events.total(LAUNCH)) == (0, 0, 1)
    target.copy_(pinned)
    assert (gpu.events.total(SYNC), gpu.events.total(PAGEABLE)) == (1, 0)
    target.copy_(torch.ones(4), non_blocking=True)
    assert (gpu.events.total(SYNC), gpu.events.total(PAGEABLE)) == (1, 1)


def test_pinned_memory_is_not_changed_under_a_copy(gpu: SimulatedCuda) -> None:
    """The device copies when it comes to it: by then the next step's inputs may lie there."""
    pinned = torch.zeros(4, pin_memory=True)
    target = torch.zeros(4, device="cuda")
    target.copy_(pinned, non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    done.synchronize()
    pinned.fill_(1.0)
    target.copy_(pinned, non_blocking=True)
    pinned.fill_(2.0)
    with pytest.raises(RuntimeError, match="pinned memory was changed before the copy from it"):
        target.sum().item()


def test_a_copy_to_the_host_is_there_when_it_was_waited_for(gpu: SimulatedCuda) -> None:
    """What is read earlier is whatever lay in the host's memory."""
    early = on_gpu().to("cpu", non_blocking=True)
    pinned = torch.zeros(6, dtype=torch.long, pin_memory=True)
    pinned.copy_(on_gpu().long(), non_blocking=True)
    assert pinned[0] > 1 << 40
    pinned.copy_(on_gpu().long(), non_blocking=True)
    later = on_gpu().to("cpu", non_blocking=True)
    assert later.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(later, CPU_VALUES) and torch.equal(early, CPU_VALUES) and torch.equal(pinned, CPU_VALUES.long())


def test_a_graph_repeats_on_the_same_memory(gpu: SimulatedCuda) -> None:
    """What it reads and writes is memory, not tensors; what Python knew is baked in."""
    values = on_gpu()
    total = torch.zeros(1, device="cuda")
    number = 2
    scalar = torch.tensor(10.0)
    graph, out = captured(lambda: total.add_(values.sum() * number) + scalar)
    assert out.isnan().all() and total.tolist() == [0]  # nothing ran
    number, _ = 7, scalar.fill_(0.0)
    gpu.events.clear()
    graph.replay()
    graph.replay()
    assert gpu.events.total(LAUNCH) == 2 and not gpu.events.total(SYNC)
    assert (total.tolist(), out.tolist()) == ([60], [70])
    values.copy_(on_gpu(torch.ones(6)))
    graph.replay()
    assert (total.tolist(), out.tolist()) == ([72], [82])


def test_a_graph_copies_pinned_memory_as_it_is_then(gpu: SimulatedCuda) -> None:
    """A capture of a copy holds the address, as it does for memory of the device."""
    pinned = torch.zeros(2, pin_memory=True)
    target = torch.zeros(2, device="cuda")
    graph, out = captured(lambda: target.copy_(pinned, non_blocking=True) * 2)
    pinned.fill_(3.0)
    graph.replay()
    assert out.tolist() == [6, 6]
    graph.replay()
    pinned.fill_(4.0)
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        out.tolist()


def test_a_graph_does_not_keep_its_inputs(gpu: SimulatedCuda) -> None:
    """CUDA's allocator gives memory that Python has dropped to the next tensor, graph or not."""
    inputs = [on_gpu()]
    graph, out = captured(lambda: inputs[0] * 2)
    graph.replay()
    assert out.tolist() == (CPU_VALUES * 2).tolist()
    inputs.clear()
    with pytest.raises(DeviceError, match="memory that was freed"):
        graph.replay()


def test_new_memory_holds_anything(gpu: SimulatedCuda) -> None:
    """An allocation that happens to hold zeros on a CPU does not on a GPU."""
    assert torch.empty(3, device="cuda").isnan().all()
    assert on_gpu().new_empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.long, device="cuda").min() > 1 << 40


def test_the_flash_kernel_is_attention() -> None:
    """Its simulation stands for it in every test of the GPU's flash path: grouped heads, a length as data, pages."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 16).bfloat16() for tokens, heads in ((3, 4), (512, 2), (512, 2)))
    bounds = torch.arange(2, dtype=torch.int32)
    used = torch.tensor([5], dtype=torch.int32)

    def flash(*states: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attention_forward(*states, bounds * 3, bounds * 512, 3, 512, 0.0, False, False, **options)

    out, lse, *_ = flash(q, k, v, seqused_k=used)
    shown = [x[None].transpose(1, 2).float() for x in (q, k[:5], v[:5])]
    expected = torch.nn.functional.scaled_dot_product_attention(*shown, enable_gqa=True)[0].transpose(0, 1)
    assert torch.allclose(out.float(), expected, atol=2e-2) and lse.shape == (4, 3)
    pages = torch.tensor([[1, 0]], dtype=torch.int32)
    swapped = [torch.cat([x[256:], x[:256]]).view(2, 256, 2, 16) for x in (k, v)]
    paged, *_ = flash(q, *swapped, seqused_k=used, block_table=pages)
    assert torch.equal(paged, out)
    nothing, lse, *_ = flash(q, k, v, seqused_k=used * 0)
    assert not nothing.any() and (lse == torch.inf).all()
    with pytest.raises(RuntimeError, match="takes float16 and bfloat16"):
        flash(q.float(), k.float(), v.float())
