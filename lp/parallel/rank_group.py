"""RankGroup: a group of ranks, and the collectives by which they exchange messages.

With one rank every collective is the identity. `ProcessRankGroup.answered` decides what is done if a rank is lost.
R: ranks of the group; P: int64s that a rank sends.
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

PATIENCE = timedelta(days=365)  # time-out of a message that waits without a limit
WATCHDOG_S = 60.0  # seconds after the time-out at which torch ends the process; our own waits name the lost rank before


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that exchange messages; this base class is a group of a single rank.

    Attributes:
        rank: this rank's number in the group.
        size: R, number of ranks in the group.
        names: names of the ranks for error messages; if empty, ranks are called by their numbers.
        step_sizes: a stack with one entry for each generation under way on this rank, the innermost last: the size of a
            step's message, in int64s. All groups of this rank share it.
    """

    rank: int = 0
    size: int = 1
    names: tuple[str, ...] = ()
    step_sizes: list[int] = field(default_factory=list, repr=False, compare=False)

    def name_of(self, rank: int) -> str:
        """Name of a rank of the group for error messages, such as "5 (lp 2, tp 1)".

        This is rank 5 of the job, in copy 2 of the model, with part 1 of that copy (tensor parallelism), all from 0.
        Without tensor parallelism the name is only the number.
        """
        return self.names[rank] if self.names else str(rank)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        """Gather every rank's message: int64 (P,) on each rank -> (R, P) on the host of each."""
        return message[None].cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Send the tensor of rank `source` to the other ranks, and return it on every rank.

        Args:
            tensor: the tensor to send; on other ranks, a tensor of equal shape and dtype that receives it.
            source: number of the sending rank in the group.
        """
        return tensor

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        """Gather messages between decode steps (`lp.parallel.agreement`) from all ranks, without keeping a GPU busy.

        No generation may be under way.

        Args:
            call: what this rank is doing, for error messages.
            message: int64 (agreement.SIZE,), on the host.
            patient: wait for the other ranks without a time limit.

        Returns:
            The messages of all ranks, int64 (R, agreement.SIZE), on the host.
        """
        return self.all_gather(message)

    def broadcast_body(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send rank 0's tensor to the others, which receive it in their own `tensor` on the host.

        A message before it has told the others its size.
        """
        return self.broadcast(tensor, 0)

    @contextlib.contextmanager
    def stepping(self, size: int) -> Iterator[None]:
        """A `with` block around the steps of a generation, in which all messages are sent in pieces of `size` int64s.

        So a rank that is in another call by mistake still meets the ranks that are in a step in a collective of one
        size, and the error can be found.

        Args:
            size: int64s in a step's message.
        """
        self.step_sizes.append(size)
        try:
            yield
        finally:
            self.step_sizes.pop()

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds collectives may wait for other ranks, for collectives that begin from now on."""

    @property
    def lost(self) -> bool:
        """Whether another rank was lost, so that work on this rank's device may never end."""
        return False

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has done all work recorded before an event.

        Raises:
            RankLost: the GPU was not done in time, as it waits for a rank; the message names the ranks that do not
                answer.
        """
        event.synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, and wait for the copy.

        Raises:
            RankLost: the GPU was not done in time, see `wait_for`.
        """
        return tensor.cpu()

    def close(self) -> None:
        """Drop the process groups of torch.distributed, if there are any; this object can't be used afterwards."""


@dataclass(frozen=True)
class ProcessRankGroup(RankGroup):
    """A group of ranks that are processes, over process groups of torch.distributed.

    Attributes:
        device: device on which this rank computes.
        backend: backend of `group`: "nccl" or "gloo".
        group: process group for the messages of decode steps.
        messages: process group, by gloo on the host, for messages between steps: waiting there keeps no GPU busy. It
            is separate because messages of different sizes that meet in one group would abort the process.
        home: this rank's number in the whole job, and the job's number of ranks.
        waits: waits for this rank's GPU with a time limit; shared by all groups of this rank.
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
        """A `with` block around a collective that deals with lost ranks if the collective fails.

        1. A roll call finds the ranks that do not answer.
        2. If a GPU may hang on them, its collectives are aborted, and the process ends soon in any case.
        3. RankLost is raised; its message names these ranks.

        Out-of-memory errors, and RanksParted, are passed on as they are.

        Raises:
            RankLost: the collective has failed.
        """
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
        """The tensor where the backend can send it: gloo gathers on the host alone, NCCL on the device alone."""
        return tensor.contiguous().to("cpu" if self.backend == "gloo" else self.device)
