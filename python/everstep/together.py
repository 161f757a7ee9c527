"""Ranks of one node read a checkpoint together, so that no byte is read twice (``crates/checkpoint/src/reshard/together.rs``).

They find each other through torch's store, not by a collective: what backend the process group has does not matter. Without a process
group, or alone on a node, a rank reads for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ._internal import WholeCheckpoint, window_bytes
from .meeting import Meeting, meet

#: (name, offsets, sizes, is a range, address, bytes of room), as the native half takes them.
Asked = tuple[str, list[int], list[int], bool, int, int]

#: Threads of a rank that reads for itself.
THREADS = 4

#: Where ranks meet on the way to a restored state, in this order. A rank that fails goes past those that are left.
_KIND, _LACKS, _READ, _VOTE = "kind", "lacks", "read", "vote"
_attempts = 0
_attended: set[str] = set()


def _meet(name: str) -> Meeting | None:
    _attended.add(name)
    return meet(f"restore/{_attempts}/{name}")


def begin() -> None:
    """An attempt to restore begins. To be called on all ranks."""
    global _attempts
    _attempts += 1
    _attended.clear()


def _any_rank(name: str, flag: bool) -> bool:
    meeting = _meet(name)
    if meeting is None:
        return flag
    if flag:
        meeting.count("yes")
    meeting.all_here()
    return meeting.said("yes") > 0


def any_as_one(flag: bool) -> bool:
    """Whether some rank has to see the checkpoint as one. To be called on all."""
    return _any_rank(_KIND, flag)


def any_failed(flag: bool) -> bool:
    """Whether some rank could not read its part; it does not keep the others waiting. To be called on all, last."""
    if flag:
        for name in (_LACKS, _READ):
            meeting = None if name in _attended else _meet(name)
            if meeting is not None:
                meeting.come()
    return _any_rank(_VOTE, flag)


def lacked_by_all(names: set[str]) -> set[str]:
    """Of the names that this rank lacks, those that every rank lacks. To be called on all."""
    meeting = _meet(_LACKS)
    if meeting is None:
        return names
    text = json.dumps(sorted(names))
    # Ranks of one pipeline stage lack the same.
    if meeting.count(hashlib.blake2b(text.encode(), digest_size=16).hexdigest()) == 1:
        meeting.tell(f"list {meeting.count('lists')}", text)
    meeting.all_here()
    lists = (set(json.loads(meeting.hear(f"list {n}"))) for n in range(1, meeting.said("lists") + 1))
    return set.intersection(*lists)


def _here() -> str:
    """What ranks must have in common to see each other's memory: the machine, the processes they can see, the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def read(whole: WholeCheckpoint, asked: list[Asked], largest: int) -> None:
    """Copies parts of tensors to where they are wanted, every byte verified. To be called on all ranks.

    Args:
        whole: the checkpoint, the same on all ranks.
        asked: what this rank wants.
        largest: bytes of the largest tensor; the memory that is used or shared meanwhile is about as large.

    Raises:
        CheckpointError: when some of it cannot be read, here or on another rank of this node.
        DamagedError: when some of it is not what was written.
    """
    meeting = _meet(_READ)
    if meeting is None:
        whole.read(asked, THREADS, largest)
        return
    here = _here()
    me = meeting.count(f"{here} at")
    wants = json.dumps([os.getpid(), whole.chunks(asked), largest])
    meeting.tell(f"{here} {me}", wants)
    meeting.all_here()
    count = meeting.said(f"{here} at")
    if count == 1:
        whole.read(asked, THREADS, largest)
        return
    said = [json.loads(meeting.hear(f"{here} {n}")) for n in range(1, count + 1)]
    members = [(pid, [(shard, first, end) for shard, first, end in chunks]) for pid, chunks, _ in said]
    window = None
    try:
        if me == 1:
            window = os.memfd_create("everstep-read")
            os.ftruncate(window, window_bytes(max(most for *_, most in said)))
            meeting.tell(f"{here} window", f"/proc/{os.getpid()}/fd/{window}")
        whole.read_together(asked, members, me - 1, meeting.hear(f"{here} window"))
    finally:
        if window is not None:
            os.close(window)
