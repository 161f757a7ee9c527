"""Who saves what several ranks hold alike (plain tensors and objects under DDP): one of them, in shares of equal size.

Ranks tell each other what they hold through torch's store, not by a collective: the thread of the save before may be in the middle
of some of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import Any

from ..worker import in_group
from .pieces import Piece

_saves = itertools.count()
#: What was dealt last: the digest of what all ranks held, and this rank's share.
_last: tuple[str, list[str]] | None = None


def deal(held: list[dict[str, int]]) -> list[list[str]]:
    """Names for each rank, from the names and lengths that each holds: every name once, long ones first, to whoever has least."""
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


def own(pieces: Iterable[Piece]) -> list[Piece]:
    """Of this rank's pieces those that it saves. To be called on all ranks."""
    import torch.distributed as dist

    pieces = list(pieces)
    if not in_group():
        return pieces
    alike = {p.name: p.bytes for p in pieces if p.tensor is None or tuple(p.tensor.shape) == p.shape}
    mine = set(_share(alike, dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()))
    return [p for p in pieces if p.name not in alike or p.name in mine]


def _share(alike: dict[str, int], store: Any, rank: int, size: int) -> list[str]:
    global _last
    key = f"everstep/dcp/{next(_saves)}"
    names = json.dumps(alike, sort_keys=True)
    digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
    store.set(f"{key}/digest/{rank}", digest)
    together = hashlib.blake2b(
        b"".join(store.get(f"{key}/digest/{r}") for r in range(size)), digest_size=16
    ).hexdigest()
    if _last is not None and _last[0] == together:
        return _last[1]
    store.set(f"{key}/names/{rank}", names)
    held = [json.loads(store.get(f"{key}/names/{r}")) for r in range(size)]
    _last = (together, deal(held)[rank])
    return _last[1]
