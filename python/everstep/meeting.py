"""Ranks meet through torch's store, not by collectives: what backend the process group has does not matter, and no rank's last words to
the others are a collective, after which gloo aborts now and then when a process ends."""

from __future__ import annotations

import json

from torch.distributed import PrefixStore

from .worker import in_group

_gatherings = 0


class Meeting:
    """All ranks, through torch's store: who comes says something, and can go on when all have come. A few words per rank."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = PrefixStore(f"everstep/{name}", dist.distributed_c10d._get_default_store())

    def count(self, what: str) -> int:
        """One more has said so; returns how many."""
        return int(self._store.add(what, 1))

    def said(self, what: str) -> int:
        """How many have said so."""
        return int(self._store.add(what, 0))

    def tell(self, name: str, value: str) -> None:
        """For all."""
        self._store.set(name, value)

    def hear(self, name: str) -> str:
        """What somebody tells, as soon as it does."""
        return str(self._store.get(name).decode())

    def come(self, where: str = "here") -> None:
        """Here, too."""
        if self.count(where) == self.size:
            self.tell(f"all {where}", "")

    def all_here(self, where: str = "here") -> None:
        """Comes, and waits until all have."""
        self.come(where)
        self.hear(f"all {where}")


def meet(name: str) -> Meeting | None:
    """A meeting under a name that no other has; ``None`` where there is nobody to meet."""
    return Meeting(name) if in_group() else None


def gathered(values: list[int]) -> list[list[int]]:
    """The values of all ranks, by rank. To be called on all, as often."""
    global _gatherings
    _gatherings += 1
    meeting = meet(f"gathering/{_gatherings}")
    if meeting is None:
        return [values]
    meeting.tell(str(meeting.rank), json.dumps(values))
    if meeting.rank == 0:
        meeting.tell("all", json.dumps([json.loads(meeting.hear(str(r))) for r in range(meeting.size)]))
    found: list[list[int]] = json.loads(meeting.hear("all"))
    # Rank 0's process may have the store: it must not end before all have heard, and nobody may ask for anything after that.
    meeting.come("heard")
    if meeting.rank == 0:
        meeting.hear("all heard")
    return found
