"""Agreement between ranks outside of decode steps: they compare digests, settings or outcomes by an all-gather.

In each call (something that all ranks do together, such as making a decoder), a rank sends one message of fixed size,
int64, tagged with the call's name:

    [TAG, name, words, padding]

So ranks that are in different calls by mistake still meet in one collective of one size: each sees what the others are
doing, and raises an error that says so. R: ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp.errors import CallsDiffer, UserError
from lp.parallel.lost_ranks import differing
from lp.parallel.rank_group import RankGroup

TAG = -0x6C702D63616C6C  # negative: messages of decode steps begin with a digest, which never is
NAME = 7  # int64s of the call's name
HEAD = 1 + NAME
SIZE = 64  # int64s of a message


class Outcome(NamedTuple):
    """The outcome, on one rank, of work that ranks do together, such as recording CUDA graphs.

    Attributes:
        collectives: number of collectives that the rank has started.
        cause: message of the error with which the rank failed; empty if it did not fail.
    """

    collectives: int = 0
    cause: str = ""


def exchange(ranks: RankGroup, call: str, words: Sequence[int] = (), patient: bool = False) -> torch.Tensor:
    """Gather some numbers from every rank; all ranks of the group call it together.

    Args:
        ranks: the ranks that take part.
        call: what this rank is doing, as in "making a LookaheadDecoder", to detect ranks that do something else. Only
            the first 56 bytes of its UTF-8 are compared.
        words: this rank's int64 numbers, as many on every rank, at most SIZE - HEAD.
        patient: wait for the other ranks without a time limit, as for what a person types at rank 0.

    Returns:
        The numbers of all ranks, one row per rank: int64 (R, len(words)), on the host.

    Raises:
        CallsDiffer: another rank is doing something else; the message names what each rank is doing.
        RankLost: a rank does not answer.
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
    """Tell every rank how common work, such as recording CUDA graphs, has ended on each rank.

    The messages go between hosts, since GPUs may still be blocked by the work.

    Args:
        ranks, call: see `exchange`.
        mine: how the work has ended on this rank; a long error message in it is cut off.

    Returns:
        One outcome for each rank, in the order of the ranks.

    Raises:
        CallsDiffer, RankLost: see `exchange`.
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
    """Make the message of a call: int64 (SIZE,)."""
    assert len(words) <= SIZE - HEAD, f"{call} compares {len(words)} int64s; a message has room for {SIZE - HEAD}"
    name = np.frombuffer(call.encode()[: 8 * NAME].ljust(8 * NAME, b"\0"), dtype="<i8").tolist()
    return torch.tensor([TAG, *name, *words] + [0] * (SIZE - HEAD - len(words)))


def check_calls(gathered: np.ndarray) -> None:
    """Raise an error unless all ranks are in the same call, as the messages that they have sent tell.

    Args:
        gathered: int64 (R, at least 1): row r is the beginning of rank r's message, which is one of this module or one
            of a decode step.

    Raises:
        CallsDiffer: the ranks are in different calls; the message names what each rank is doing.
    """
    names = [_name(message) for message in gathered]
    if len({*names}) > 1:
        raise CallsDiffer(differing(names))


def _name(message: np.ndarray) -> str:
    if message[0] != TAG:
        return "in a step of generate"
    return message[1:HEAD].astype("<i8").tobytes().rstrip(b"\0").decode(errors="replace")


def check_same(ranks: RankGroup, call: str, items: Mapping[str, int]) -> None:
    """Raise an error on every rank if a setting or file that must be equal differs between ranks.

    Args:
        ranks, call: see `exchange`.
        items: int64 digests of settings and files that must be equal, by the name that the error shows; the names are
            the same on all ranks.

    Raises:
        ValueError: a digest differs; the message names the first such item and the ranks that differ from rank 0.
        CallsDiffer: another rank is in another call.
    """
    gathered = exchange(ranks, call, list(items.values()))  # (R, items)
    for column, item in enumerate(items):
        other = (gathered[:, column] != gathered[0, column]).nonzero().flatten().tolist()
        if other:
            odd = ", ".join(map(ranks.name_of, other))
            first = ranks.name_of(0)
            raise UserError(f"the {item} of rank {odd} differs from rank {first}'s; give every rank the same {item}")


def shared_seed(ranks: RankGroup, call: str, wanted: bool = True) -> int:
    """Give all ranks one random seed, which rank 0 draws from torch's generator.

    Args:
        ranks, call: see `exchange`.
        wanted: whether this rank needs a seed. All ranks take part anyway. If rank 0 needs none, no seed is drawn, and
            the result is 0 on all ranks.
    """
    seed = int(torch.randint(2**63 - 1, (1,))) if wanted else 0
    return int(exchange(ranks, call, [seed])[0])
