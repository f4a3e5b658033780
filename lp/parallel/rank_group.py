"""RankGroup: ranks that exchange messages on the host, and the collectives they do it with.

With one rank every collective is the identity. R: ranks of the group, P: int64s a rank sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from lp.config import DEFAULT_TIMEOUT_S
from lp.errors import RankLost, RanksParted
from lp.parallel.device_waits import DeviceWaits
from lp.parallel.lost_ranks import announce, roll_call
from lp.parallel.rendezvous import set_timeout

PATIENCE = timedelta(days=365)
WATCHDOG_S = 60.0  # beyond the time-out: until then a wait of ours names who is lost, then torch ends the process


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange messages; this base class is a rank by itself.

    Attributes:
        rank: this rank's number in the group.
        size: R, how many ranks the group has.
        names: what error messages call the ranks; empty: their numbers.
        step_sizes: int64s of a step's message, one entry for every generation under way on this rank, the innermost
            last. The groups of a rank share the list.
    """

    rank: int = 0
    size: int = 1
    names: tuple[str, ...] = ()
    step_sizes: list[int] = field(default_factory=list, repr=False, compare=False)

    def name_of(self, rank: int) -> str:
        """What error messages call a rank."""
        return self.names[rank] if self.names else str(rank)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        """Every rank's int64 message: (P,) on each rank -> (R, P), on the host."""
        return message[None].cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's tensor, in place on the others."""
        return tensor

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        """Every rank's message of `lp.parallel.agreement`, which between generations are all of one size.

        Args:
            call: what this rank is doing.
            message: (agreement.SIZE,) int64, on the host.
            patient: wait for rank 0 however long it takes.

        Returns:
            (R, agreement.SIZE), on the host.
        """
        return self.all_gather(message)

    def broadcast_body(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, whose size all ranks know from a message before it, on the host."""
        return self.broadcast(tensor, 0)

    @contextlib.contextmanager
    def stepping(self, size: int) -> Iterator[None]:
        """While steps send `size` int64s, all messages come in pieces of that size: other ranks may be in a step."""
        self.step_sizes.append(size)
        try:
            yield
        finally:
            self.step_sizes.pop()

    def set_timeout(self, seconds: float) -> None:
        """How long collectives that begin from now on may wait for other ranks."""

    @property
    def lost(self) -> bool:
        """Whether the device may wait for a rank that is gone."""
        return False

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for the work of the device before an event.

        Raises:
            RankLost: it was not done in time; names the ranks that do not answer.
        """
        event.synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the host, by one wait.

        Raises:
            RankLost: as `wait_for`.
        """
        return tensor.cpu()

    def close(self) -> None:
        """Let go of the process groups, if there are any."""


@dataclass(frozen=True)
class ProcessRankGroup(RankGroup):
    """Ranks that are processes of torch.distributed.

    Attributes:
        device: where this rank computes.
        backend: what carries `group`: "nccl" or "gloo".
        group: the process group of steps.
        messages: the gloo group of messages between steps, on the host, where waiting keeps no GPU busy. A message and
            a step's message, which differ in size, would abort the process where they meet in one group.
        home: this rank's number and the number of ranks in the whole job.
        waits: the waits of this rank for its device, which its groups share.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    messages: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    home: tuple[int, int] = (0, 1)
    waits: DeviceWaits = field(default_factory=lambda: DeviceWaits(DEFAULT_TIMEOUT_S), repr=False, compare=False)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        message = self._carried(message)
        gathered = message.new_empty(self.size, len(message))
        # torch 2.13 renames the call; older versions know the other name alone.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.answered():
            gather(gathered.view(-1), message, group=self.group)
            return self.waits.on_host(gathered)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        carried = self._carried(tensor)
        with self.answered():
            dist.broadcast(carried.view(torch.uint8), group=self.group, group_src=source)
            if carried.is_cuda and not tensor.is_cuda:
                carried = self.waits.on_host(carried)
            return tensor.copy_(carried)

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        assert self.messages is not None
        gathered = [torch.empty_like(message) for _ in range(self.size)]
        options = dist.distributed_c10d.AllgatherOptions()
        if patient:
            options.timeout = PATIENCE
        with self.answered():
            announce(self.home[0], call)
            self.messages.allgather([gathered], [message], options).wait()
        return torch.stack(gathered)

    def broadcast_body(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.answered():
            dist.broadcast(tensor, group=self.messages, group_src=0)
        return tensor

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Within it, the error of a collective that fails names the ranks that do not answer a roll call."""
        try:
            yield
        except (torch.OutOfMemoryError, RanksParted):
            raise
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            answers = roll_call(*self.home)
            if self.waits.given_up or self.backend == "nccl":
                self.waits.abandon()
            raise RankLost(
                f"{answers}, so rank {self.home[0]} stops ({reason}); see the last "
                "lines of that rank; parallel.timeout_s is how long a rank is waited for"
            ) from error

    @property
    def lost(self) -> bool:
        return self.waits.given_up

    def wait_for(self, event: torch.cuda.Event) -> None:
        with self.answered():
            self.waits.until(event)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.answered():
            return self.waits.on_host(tensor)

    def set_timeout(self, seconds: float) -> None:
        assert self.group is not None and self.messages is not None
        self.waits.timeout_s = seconds
        set_timeout(seconds + WATCHDOG_S if self.backend == "nccl" else seconds, self.group)
        set_timeout(seconds, self.messages)

    def close(self) -> None:
        object.__setattr__(self, "group", None)  # or the groups' threads would go on
        object.__setattr__(self, "messages", None)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gloo gathers on the host alone, and ranks that share a GPU have no other; NCCL on the device alone."""
        return tensor.contiguous().to("cpu" if self.backend == "gloo" else self.device)
