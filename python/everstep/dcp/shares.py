"""Distributes what several ranks hold in common (plain tensors and objects under DDP): each is
saved by one of them, in shares of equal size. Rank 0's number for the checkpoint travels with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence

import torch.distributed as dist

from .._internal import CheckpointError
from ..worker import in_group
from . import notices
from .pieces import Piece
from .stores import PATIENCE, Number, require_same

#: Where rank 0 announces the number of a save, and each rank the highest one in its memory.
_NUMBER, _HELD = "number", "held"

_saves = itertools.count()
#: The last distribution: the digest of what all ranks held, and this rank's share.
_last: tuple[str, list[str]] | None = None


def deal(held: list[dict[str, int]]) -> list[list[str]]:
    """Returns names for each rank, from the names and lengths that each holds: every name once,
    long ones first, to the rank with the fewest bytes."""
    holders: dict[str, list[int]] = {}
    length: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name, size in names.items():
            holders.setdefault(name, []).append(rank)
            length[name] = size
    loads, shares = [0] * len(held), [[] for _ in held]  # type: tuple[list[int], list[list[str]]]
    for name in sorted(holders, key=lambda n: (-length[n], n)):
        rank = min(holders[name], key=lambda r: (loads[r], r))
        loads[rank] += length[name]
        shares[rank].append(name)
    return shares


class Exchange:
    """One exchange among all ranks, each of which must create it, then call :meth:`deal` or
    :meth:`fail`, and after that :meth:`copied`, or :meth:`fail` again."""

    def __init__(self) -> None:
        # Before anything can fail on one rank: all ranks must count alike.
        self._key = str(next(_saves)) if in_group() else None
        self._dealt = False

    def fail(self, error: Exception) -> None:
        """Reports to all ranks that this one cannot take part."""
        if self._key is not None:
            text = notices.in_one_line(error)
            self._set("copied", text)
            if not self._dealt:
                self._set("digest", json.dumps({"error": text}))

    def deal(
        self, pieces: Sequence[Piece], number: Number | None, fixed: int | None, held: int
    ) -> tuple[list[Piece], Number]:
        """Returns those of this rank's pieces that it saves, and the number of the checkpoint: rank
        0's, which the others give as ``None``, but higher than what any rank has in its memory
        (``held``). ``fixed`` is the step that this rank's path names.

        Raises:
            CheckpointError: on all ranks, when one has failed, or their paths name several steps.
        """
        if self._key is None:
            assert number is not None
            return list(pieces), number if fixed is not None else number.above(held)
        alike = {p.name: p.bytes for p in pieces if p.tensor is None or tuple(p.tensor.shape) == p.shape}
        names, number = self._share(alike, number, fixed, held)
        mine = set(names)
        return [p for p in pieces if p.name not in alike or p.name in mine], number

    def _share(
        self, alike: dict[str, int], number: Number | None, fixed: int | None, held: int
    ) -> tuple[list[str], Number]:
        global _last
        names = json.dumps(alike, sort_keys=True)
        digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
        said = {"digest": digest, "number": None if number is None else str(number), "fixed": fixed, "held": held}
        self._set("digest", json.dumps(said))
        self._dealt = True
        ranks = [json.loads(text) for text in notices.of_all(f"{self._key}/digest")]
        for rank, found in enumerate(ranks):
            if "error" in found:
                raise _uncopied(rank, found["error"])
        require_same({r["fixed"] for r in ranks})
        agreed = Number.parse(ranks[0]["number"])
        if fixed is None:
            agreed = agreed.above(max(r["held"] for r in ranks))
        together = hashlib.blake2b("".join(r["digest"] for r in ranks).encode(), digest_size=16).hexdigest()
        if _last is None or _last[0] != together:
            self._set("names", names)
            _last = (
                together,
                deal([json.loads(text) for text in notices.of_all(f"{self._key}/names")])[dist.get_rank()],
            )
        return _last[1], agreed

    def copied(self) -> None:
        """Reports to all ranks that this one has copied its state."""
        if self._key is not None:
            self._set("copied", "")

    def await_copies(self) -> None:
        """Waits until all ranks have copied their state. Only then does any of them begin DCP's
        collectives: those of a rank that has failed would never begin.

        Raises:
            CheckpointError: on those ranks, when one has failed.
        """
        if self._key is None:
            return
        for rank in range(dist.get_world_size()):
            # It may itself wait for a slot of memory.
            wrong = notices.wait(f"{self._key}/copied/{rank}", 2 * PATIENCE)
            if wrong is None:
                raise CheckpointError(f"rank {rank} has not copied its state within two hours")
            if wrong:
                raise _uncopied(rank, wrong)

    def _set(self, what: str, text: str) -> None:
        notices.put(f"{self._key}/{what}/{dist.get_rank()}", text)


def _uncopied(rank: int, why: str) -> CheckpointError:
    return CheckpointError(f"rank {rank} could not copy its state: {why}")


def announce_held(step: int) -> None:
    """Announces the highest number in this rank's memory, before its plan reaches rank 0."""
    if in_group():
        notices.put(f"{_HELD}/{dist.get_rank()}", str(step))


def held_by_all() -> int:
    """Returns the highest number in the memory of any rank, once all plans have reached rank 0."""
    return max(map(int, notices.of_all(_HELD))) if in_group() else 0


def announce(number: Number) -> None:
    """Sets the number of the save that all ranks plan, on rank 0, before they receive their plans:
    by then, each finds it, whatever failed on it in earlier saves."""
    if in_group():
        notices.put(_NUMBER, str(number))


def announced() -> Number:
    """Returns the number of the save whose plan this rank has received."""
    return Number.parse(notices.get(_NUMBER))
