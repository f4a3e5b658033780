"""How much memory a device has free, and numbers of bytes as text, such as "12.3 GiB"."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where the system does not report it.

    On a GPU this is what the driver has free, plus what torch's allocator holds without using it. On Linux it is what
    processes may take without swapping, including page cache that the kernel would give back.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def format_bytes(count: int) -> str:
    """A number of bytes as text, such as "12.3 GiB": one decimal, in the largest of GiB, MiB and KiB that fits.

    A number below 1 KiB is given in KiB, too.
    """
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
