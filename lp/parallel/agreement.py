"""What ranks compare between steps: one all-gather of fixed size a call, tagged with the call's name.

    [TAG, name, words, padding]

Ranks that are in different calls still meet in one collective of one size, and each learns what the others are doing.
R: ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp.errors import CallsDiffer, UserError
from lp.parallel.lost_ranks import differing
from lp.parallel.rank_group import RankGroup

TAG = -0x6C702D63616C6C  # no digest, with which the messages of steps begin, is negative
NAME = 7  # int64s of the name
HEAD = 1 + NAME
SIZE = 64  # int64s of a message


class Outcome(NamedTuple):
    """How a rank's part in common work has ended.

    Attributes:
        collectives: how many it has started.
        cause: what it failed with; empty: it did not fail.
    """

    collectives: int = 0
    cause: str = ""


def exchange(ranks: RankGroup, call: str, words: Sequence[int] = (), patient: bool = False) -> torch.Tensor:
    """Every rank's words, by one all-gather.

    Args:
        ranks: who compares.
        call: what this rank is doing, as in "making a LookaheadDecoder"; of its UTF-8, 56 bytes are compared.
        words: int64s, at most SIZE - HEAD.
        patient: wait for rank 0 however long it takes.

    Returns:
        (R, len(words)) int64, on the host.

    Raises:
        CallsDiffer: another rank is in another call; names both.
    """
    if ranks.size == 1:
        return torch.tensor([list(words)], dtype=torch.int64)
    message = _message(call, words)
    size = ranks.step_sizes[-1] if ranks.step_sizes else 0
    if not size:
        gathered = ranks.gather_message(call, message, patient)
        check_calls(gathered.numpy())
    else:  # another rank may be in a step, whose message has this size
        parts = []
        for part in message.split(size):
            parts.append(ranks.all_gather(torch.nn.functional.pad(part, (0, size - len(part)))))
            if len(parts) == 1:
                check_calls(parts[0].numpy())
        gathered = torch.cat(parts, dim=1)
    return gathered[:, HEAD : HEAD + len(words)]


def outcomes(ranks: RankGroup, call: str, mine: Outcome) -> list[Outcome]:
    """How every rank's part has ended, by the group on the host, whatever the devices are at.

    Args:
        ranks, call: see `exchange`; all ranks are in this call.
        mine: how this rank's part has ended; a cause that is too long is cut off.

    Raises:
        CallsDiffer, RankLost: as `exchange`.
    """
    if ranks.size == 1:
        return [mine]
    text = mine.cause.encode()[: 8 * (SIZE - HEAD - 2)]
    packed = np.frombuffer(text.ljust(-(-len(text) // 8) * 8, b"\0"), dtype="<i8").tolist()
    gathered = ranks.gather_message(call, _message(call, [mine.collectives, len(text), *packed]), False).numpy()
    check_calls(gathered)
    found = []
    for collectives, length, *words in gathered[:, HEAD:].tolist():
        cause = np.array(words, dtype="<i8").tobytes()[:length].decode(errors="ignore")
        found.append(Outcome(collectives, cause))
    return found


def _message(call: str, words: Sequence[int]) -> torch.Tensor:
    """A message of a call, (SIZE,) int64."""
    assert len(words) <= SIZE - HEAD, f"{call} compares {len(words)} int64s; a message has room for {SIZE - HEAD}"
    name = np.frombuffer(call.encode()[: 8 * NAME].ljust(8 * NAME, b"\0"), dtype="<i8").tolist()
    return torch.tensor([TAG, *name, *words] + [0] * (SIZE - HEAD - len(words)))


def check_calls(gathered: np.ndarray) -> None:
    """Compare the calls that ranks are in.

    Args:
        gathered: (R, at least 1) what every rank sent: a message of a call, one of a step, or the beginning of either.

    Raises:
        CallsDiffer: names what every rank is doing.
    """
    names = [_name(message) for message in gathered]
    if len({*names}) > 1:
        raise CallsDiffer(differing(names))


def _name(message: np.ndarray) -> str:
    if message[0] != TAG:
        return "in a step of generate"
    return message[1:HEAD].astype("<i8").tobytes().rstrip(b"\0").decode(errors="replace")


def check_same(ranks: RankGroup, call: str, items: Mapping[str, int]) -> None:
    """Compare digests of what all ranks must have alike, and refuse ranks that differ.

    Args:
        ranks, call: arguments of `exchange`.
        items: digests by name; every rank that makes this call has the same names.

        Raises:
            ValueError: names the ranks that differ from rank 0 and the first item that does.
            CallsDiffer: some rank makes another call.
    """
    gathered = exchange(ranks, call, list(items.values()))  # (R, items)
    for column, item in enumerate(items):
        other = (gathered[:, column] != gathered[0, column]).nonzero().flatten().tolist()
        if other:
            odd = ", ".join(map(ranks.name_of, other))
            first = ranks.name_of(0)
            raise UserError(f"the {item} of rank {odd} differs from rank {first}'s; give every rank the same {item}")


def shared_seed(ranks: RankGroup, call: str, wanted: bool = True) -> int:
    """A seed that rank 0 draws from torch's generator for all.

    Args:
        ranks, call: see `exchange`.
        wanted: whether this rank needs one; ranks that need none take part too, and draw none.
    """
    seed = int(torch.randint(2**63 - 1, (1,))) if wanted else 0
    return int(exchange(ranks, call, [seed])[0])
