"""Lets the ranks of one node read a checkpoint together, so that no byte is read twice
(``crates/checkpoint/src/reshard/node_reader.rs``).

They find each other through torch's store instead of a collective, which works with any backend of
the process group. Without a process group, or alone on a node, a rank reads for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ._internal import ChunkSpan, WantedPart, WholeCheckpoint, window_bytes
from .meeting import Meeting, meet

#: Threads of a rank that reads for itself.
THREADS = 4

#: Where ranks meet during a restore, in this order. A rank that fails arrives at the remaining ones
#: at once.
_KIND, _WHOLE, _LACKS, _COMMON, _READ, _VOTE = "kind", "whole", "lacks", "common", "read", "vote"
_attempts = 0
_attended: set[str] = set()


def _meet(name: str) -> Meeting | None:
    _attended.add(name)
    return meet(f"restore/{_attempts}/{name}")


def begin() -> None:
    """Begins an attempt to restore. All ranks must call it."""
    global _attempts
    _attempts += 1
    _attended.clear()


def _any_rank(name: str, flag: bool) -> bool:
    meeting = _meet(name)
    if meeting is None:
        return flag
    if flag:
        meeting.count("yes")
    meeting.barrier()
    return meeting.counted("yes") > 0


def any_as_one(flag: bool) -> bool:
    """Returns whether some rank has to read the checkpoint as a whole. All ranks must call it."""
    return _any_rank(_KIND, flag)


def any_without_whole(flag: bool) -> bool:
    """Returns whether some rank could not open the checkpoint as a whole. All ranks must call it if
    some rank has to read it so."""
    return _any_rank(_WHOLE, flag)


def any_failed(flag: bool) -> bool:
    """Returns whether some rank could not read its part; that rank does not keep the others
    waiting. All ranks must call it, last."""
    if flag:
        for name in (_WHOLE, _LACKS, _COMMON, _READ):
            meeting = None if name in _attended else _meet(name)
            if meeting is not None:
                meeting.arrive()
    return _any_rank(_VOTE, flag)


def lacked_by_all(names: set[str]) -> set[str]:
    """Returns those of the names that every rank lacks. All ranks must call it."""
    meeting = _meet(_LACKS)
    if meeting is None:
        return names
    text = json.dumps(sorted(names))
    # Ranks of one pipeline stage lack the same names.
    if meeting.count(hashlib.blake2b(text.encode(), digest_size=16).hexdigest()) == 1:
        meeting.publish(f"list {meeting.count('lists')}", text)
    meeting.barrier()
    lists = (set(json.loads(meeting.wait_for(f"list {n}"))) for n in range(1, meeting.counted("lists") + 1))
    return set.intersection(*lists)


def found_by_any(wrong: str | None) -> str | None:
    """Returns what some rank has found wrong, the same on all ranks; ``None`` if nobody has found
    anything. All ranks must call it."""
    meeting = _meet(_COMMON)
    if meeting is None:
        return wrong
    if wrong is not None:
        meeting.publish(f"wrong {meeting.count('wrong')}", wrong)
    meeting.barrier()
    return meeting.wait_for("wrong 1") if meeting.counted("wrong") else None


def _here() -> str:
    """Returns what ranks must have in common to read each other's memory: the machine, the pid
    namespace, the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def read(whole: WholeCheckpoint, wanted: list[WantedPart], largest: int) -> None:
    """Copies parts of tensors to their targets, every byte verified. All ranks must call it.

    Args:
        whole: the checkpoint, the same on all ranks.
        wanted: what this rank wants.
        largest: bytes of the largest tensor; about as much memory is used or shared meanwhile.

    Raises:
        CheckpointError: when some of it cannot be read, here or on another rank of this node.
        DamagedError: when some of it is not what was written.
    """
    meeting = _meet(_READ)
    if meeting is None:
        whole.read(wanted, THREADS, largest)
        return
    here = _here()
    me = meeting.count(f"{here} at")
    chunks = [(span.shard, span.first, span.end) for span in whole.chunks(wanted)]
    wants = json.dumps([os.getpid(), chunks, largest])
    meeting.publish(f"{here} {me}", wants)
    meeting.barrier()
    count = meeting.counted(f"{here} at")
    if count == 1:
        whole.read(wanted, THREADS, largest)
        return
    said = [json.loads(meeting.wait_for(f"{here} {n}")) for n in range(1, count + 1)]
    members = [(pid, [ChunkSpan(*span) for span in spans]) for pid, spans, _ in said]
    window = None
    try:
        if me == 1:
            window = os.memfd_create("everstep-read")
            os.ftruncate(window, window_bytes(max(most for *_, most in said)))
            meeting.publish(f"{here} window", f"/proc/{os.getpid()}/fd/{window}")
        whole.read_together(wanted, members, me - 1, meeting.wait_for(f"{here} window"))
    finally:
        if window is not None:
            os.close(window)
