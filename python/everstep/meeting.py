"""Lets ranks agree through torch's store instead of collectives: it works with any backend of the
process group, and no collective is in progress when a process ends, at which gloo aborts now and
then."""

from __future__ import annotations

import json

from torch.distributed import PrefixStore

from .worker import in_group

_gatherings = 0


class Meeting:
    """A meeting of all ranks in torch's store: each rank publishes values and can wait until all
    have arrived."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = PrefixStore(f"everstep/{name}", dist.distributed_c10d._get_default_store())

    def count(self, what: str) -> int:
        """Adds one to a counter and returns it."""
        return int(self._store.add(what, 1))

    def counted(self, what: str) -> int:
        """Returns a counter."""
        return int(self._store.add(what, 0))

    def publish(self, name: str, value: str) -> None:
        """Publishes a value for all ranks."""
        self._store.set(name, value)

    def wait_for(self, name: str) -> str:
        """Returns the value that some rank publishes under a name, as soon as it does."""
        return str(self._store.get(name).decode())

    def arrive(self, where: str = "here") -> None:
        """Records that this rank has arrived."""
        if self.count(where) == self.size:
            self.publish(f"all {where}", "")

    def barrier(self, where: str = "here") -> None:
        """Arrives, and waits until all ranks have."""
        self.arrive(where)
        self.wait_for(f"all {where}")


def meet(name: str) -> Meeting | None:
    """Returns a meeting under a unique name; ``None`` if there is no other rank."""
    return Meeting(name) if in_group() else None


def gathered(values: list[int]) -> list[list[int]]:
    """Returns the values of all ranks, by rank. All ranks must call it, the same number of
    times."""
    global _gatherings
    _gatherings += 1
    meeting = meet(f"gathering/{_gatherings}")
    if meeting is None:
        return [values]
    meeting.publish(str(meeting.rank), json.dumps(values))
    if meeting.rank == 0:
        meeting.publish("all", json.dumps([json.loads(meeting.wait_for(str(r))) for r in range(meeting.size)]))
    found: list[list[int]] = json.loads(meeting.wait_for("all"))
    # Rank 0's process may host the store: it must not end before all ranks have read the result,
    # and no rank may use the store after that.
    meeting.arrive("heard")
    if meeting.rank == 0:
        meeting.wait_for("all heard")
    return found
