"""The machine of a run: the device's name, the memory that the run took, and whether other work disturbed its times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what Linux takes as: forget the peak of the resident memory
# Cores that others may keep busy before times are doubted: as many as on a machine at rest, and a share of all.
OTHERS, OTHERS_OF_CORES = 0.5, 0.02


def device_name(device: torch.device) -> str:
    """A device's name for tables: a GPU's product name, else "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


class PeakMemory:
    """Measures a method's peak memory: of torch's tensors on a GPU, of the whole process (resident) on a CPU.

    Resident memory includes the model and everything that Python has loaded. The figure for a GPU leaves out the CUDA
    context.

    Args:
        device: the device on which the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        """Begin a new measurement of the peak.

        Where the system cannot reset its counter, `bytes` gives the peak since the process began.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return

    def bytes(self) -> int:
        """Peak memory in bytes since `restart`; 0 where the system does not report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        except (OSError, ValueError):
            return 0
        return int(line.split()[1]) << 10


def load_average() -> float | None:
    """Processes that ran or waited for a core, mean of the last minute; None where the system does not report it."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def machine_now(device: torch.device, world_size: int) -> dict[str, Any]:
    """Describe the machine in figures, from which `remarks` says later whether a record's times can be trusted.

    Args:
        device: the device on which the model is.
        world_size: how many ranks there are on all machines together.

    Returns:
        Figures by name: "cores" is the number of CPU cores, "load" the load average, "ranks" the number of ranks on
        this machine, "threads" the CPU threads of each rank, and "gpus" the number of GPUs, 0 for a model on a CPU.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return {
        "cores": os.cpu_count() or 1,
        "load": load_average(),
        "ranks": int(local) if local.isdecimal() else world_size,
        "threads": torch.get_num_threads(),
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
    }


def remarks(records: Sequence[dict[str, Any]]) -> list[str]:
    """Warnings to print below a table: other work kept the machine busy, or ranks shared cores or GPUs.

    The list is empty if all is well.

    Args:
        records: a benchmark's records; their field "machine" comes from `machine_now`. Records without it are skipped.
    """
    machines = [record["machine"] for record in records if record.get("machine")]
    lines = []
    others = [each["load"] - each["ranks"] * each["threads"] for each in machines if each["load"] is not None]
    cores = max((each["cores"] for each in machines), default=0)
    if others and median(others) > OTHERS + OTHERS_OF_CORES * cores:
        lines.append(
            f"the machine looked busy: a load average of {median(others):.1f} on {cores} cores beside this run; "
            "do not trust its times"
        )
    shared = sorted({(each["ranks"], each["gpus"], each["cores"]) for each in machines})
    for ranks, gpus, cores in shared:
        if ranks > (gpus or cores):
            what = f"{gpus} GPUs" if gpus else f"{cores} cores"
            lines.append(f"{ranks} ranks shared {what}, so they waited for each other; S holds, times do not")
    return lines
