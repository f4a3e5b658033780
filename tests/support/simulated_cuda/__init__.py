"""A simulated CUDA device on CPU memory, for a torch without CUDA: values are real, and CUDA's rules are kept.

Finds faults that only a GPU would show: tensors of different devices in one operation, hidden synchronisations, what a
CUDA graph bakes in, memory that only a capture filled, host tensors in NCCL's collectives.

    with simulated_cuda() as gpu:
        decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"))
        decoder.generate(prompt, 40)
        print(gpu.events.table())

What it does not show: speed, rounding of GPU kernels, races between streams (all work is one queue), memory limits,
what torch.compile makes of a step. `torch.cuda.is_available()` stays False, so that nothing caches it.
"""

from tests.support.simulated_cuda.events import LAUNCH, PAGEABLE, SYNC, Events
from tests.support.simulated_cuda.install import on_host, simulated_cuda, why_not
from tests.support.simulated_cuda.ranks import run_on_gpus
from tests.support.simulated_cuda.simulation import CudaTensor, DeviceError, SimulatedCuda

__all__ = [
    "LAUNCH",
    "PAGEABLE",
    "SYNC",
    "CudaTensor",
    "DeviceError",
    "Events",
    "SimulatedCuda",
    "on_host",
    "run_on_gpus",
    "simulated_cuda",
    "why_not",
]
