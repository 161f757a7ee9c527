"""Distributes what several ranks hold in common (plain tensors and objects under DDP): each is
saved by one of them, in shares of equal size.

Ranks exchange what they hold through torch's store instead of a collective: the thread of the
previous save may be in the middle of one. Rank 0's number for the checkpoint travels with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

from .._internal import CheckpointError
from ..worker import in_group
from .pieces import Piece
from .stores import Number, require_same

#: Limit on the characters of an error that other ranks report.
ERROR_MAX = 1000
#: Where rank 0 announces the number of a save.
_NUMBER = "everstep/dcp/number"

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
    :meth:`fail`."""

    def __init__(self) -> None:
        # Before anything can fail on one rank: all ranks must count alike.
        self._key = f"everstep/dcp/{next(_saves)}" if in_group() else None

    def fail(self, error: Exception) -> None:
        """Reports to all ranks that this one cannot take part."""
        if self._key is not None:
            text = " ".join(str(error).split())[:ERROR_MAX]
            self._set("digest", json.dumps({"error": f"{type(error).__name__}: {text}"}))

    def deal(self, pieces: Sequence[Piece], number: Number | None, fixed: int | None) -> tuple[list[Piece], Number]:
        """Returns those of this rank's pieces that it saves, and rank 0's number, which the others
        give as ``None``. ``fixed`` is the step that this rank's path names.

        Raises:
            CheckpointError: on all ranks, when one has failed, or their paths name several steps.
        """
        if self._key is None:
            assert number is not None
            return list(pieces), number
        alike = {p.name: p.bytes for p in pieces if p.tensor is None or tuple(p.tensor.shape) == p.shape}
        names, number = self._share(alike, number, fixed)
        mine = set(names)
        return [p for p in pieces if p.name not in alike or p.name in mine], number

    def _share(self, alike: dict[str, int], number: Number | None, fixed: int | None) -> tuple[list[str], Number]:
        global _last
        names = json.dumps(alike, sort_keys=True)
        digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
        said = {"digest": digest, "number": None if number is None else str(number), "fixed": fixed}
        self._set("digest", json.dumps(said))
        ranks = [json.loads(text) for text in self._get("digest")]
        for rank, found in enumerate(ranks):
            if "error" in found:
                raise CheckpointError(f"rank {rank} could not copy its state: {found['error']}")
        require_same({r["fixed"] for r in ranks})
        agreed = Number.parse(ranks[0]["number"])
        together = hashlib.blake2b("".join(r["digest"] for r in ranks).encode(), digest_size=16).hexdigest()
        if _last is None or _last[0] != together:
            self._set("names", names)
            held = [json.loads(text) for text in self._get("names")]
            _last = (together, deal(held)[_rank()])
        return _last[1], agreed

    def _set(self, what: str, text: str) -> None:
        _store().set(f"{self._key}/{what}/{_rank()}", text)

    def _get(self, what: str) -> list[bytes]:
        import torch.distributed as dist

        return [_store().get(f"{self._key}/{what}/{r}") for r in range(dist.get_world_size())]


def announce(number: Number) -> None:
    """Sets the number of the save that all ranks plan, on rank 0, before they receive their plans:
    by then, each finds it, whatever failed on it in earlier saves."""
    if in_group():
        _store().set(_NUMBER, str(number))


def announced() -> Number:
    """Returns the number of the save whose plan this rank has received."""
    return Number.parse(_store().get(_NUMBER).decode())


def _store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank())
