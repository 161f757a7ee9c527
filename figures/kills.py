"""SIGKILL of a job's workers, at random times and at chosen moments of captures and restores."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from pathlib import Path

from figures.slots import SEALED, WRITING, superblock
from harness.cluster import Cluster

#: Words of a step board: 1 once the rank has completed a step or restored, and the depth of its
#: sections (a restore is one).
STEP_KNOWN, DEPTH, WORDS = 3, 10, 11
#: Seconds to wait for a chosen moment. After that, the kill counts as random.
PATIENCE = 20.0


def _slots(c: Cluster, rank: int) -> list[Path]:
    node, local = divmod(rank, c.workers)
    return list((c.memory / str(node)).glob(f"local-{local}-slot-*"))


def _newest(slots: list[Path]) -> tuple[int, int]:
    """Returns the generation and step of the last complete capture, or zeros for none."""
    return max(((s.generation, s.step) for s in map(superblock, slots) if s.state == SEALED), default=(0, 0))


def _board(c: Cluster, rank: int) -> tuple[int, ...]:
    """Returns the first words of a rank's step board, or zeros if it has none.

    See ``crates/checkpoint/src/step_board.rs``.
    """
    node, local = divmod(rank, c.workers)
    try:
        with (
            (c.memory / str(node) / f"local-{local}-board").open("rb") as f,
            mmap.mmap(f.fileno(), 4096, prot=mmap.PROT_READ) as m,
        ):
            return struct.unpack_from(f"<{WORDS}Q", m)
    except (OSError, ValueError):
        return (0,) * WORDS


class Moment:
    """Something that a rank is in the middle of.

    ``capture``: a slot is being written. ``restore``. ``behind``: another rank has sealed a newer
    step than this one, and the two must not continue from that step. Remains of an earlier kill do
    not count.
    """

    def __init__(self, c: Cluster, rank: int, what: str) -> None:
        self._c, self._rank, self._what = c, rank, what
        own = _slots(c, rank)
        # The slot that a killed rank was writing stays as it is until it is written again.
        self._own = own if what == "behind" else [p for p in own if superblock(p).state != WRITING]
        self._others = [p for other in range(c.nodes * c.workers) if other != rank for p in _slots(c, other)]
        self._before = _newest(self._others)

    def now(self) -> bool:
        """Returns whether the moment is now."""
        if self._what == "capture":
            return any(superblock(p).state == WRITING for p in self._own)
        if self._what == "behind":
            return _newest(self._others) > max(self._before, _newest(self._own))
        return _board(self._c, self._rank)[DEPTH] > 0

    def wait(self) -> bool:
        """Polls until the moment comes, without pausing for one that passes at once. Returns false
        if it never comes."""
        deadline = time.monotonic() + PATIENCE
        while not self.now():
            over = self._what == "restore" and _board(self._c, self._rank)[STEP_KNOWN] == 1
            if over or time.monotonic() > deadline:
                return False
            if self._what == "restore":
                time.sleep(0.0002)
        return True


def _steps(c: Cluster) -> bool:
    """Returns whether the newest generation has completed a step."""
    return len(c.facts("FirstStep")) > 0 and c.facts("FirstStep")[-1]["ts"] > c.facts("GenerationStarted")[-1]["ts"]


def kill(c: Cluster, how: str, rng: random.Random, longest: float) -> str:
    """Kills a random rank at a random time within ``longest`` seconds, or at a :class:`Moment`.

    The time counts from the start of the rank (``random``) or from its first step (``steps``).
    Returns which of them it was, or ``missed`` if the process had already ended.
    """
    rank = rng.randrange(c.nodes * c.workers)
    pid = c.worker_pid(rank)
    if how in ("steps", "capture", "behind"):
        c.wait_for(lambda: _steps(c), why="a step")
    if how in ("random", "steps"):
        time.sleep(rng.uniform(0.0, longest))
        pid = c.worker_pid(rank)
    else:
        moment = Moment(c, rank, how)
        if not moment.wait():
            how = "random"
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "missed"
    # A capture takes less than a millisecond, so it may have ended before the signal arrived.
    return "random" if how in ("capture", "behind") and not moment.now() else how


def _over(c: Cluster) -> bool:
    return all(agent.poll() is not None for agent in c.agents.values())


def _one(c: Cluster, how: str, rng: random.Random, longest: float) -> str:
    """Kills, and waits until the job continues."""
    incidents, started = len(c.facts("IncidentOpened")), len(c.facts("GenerationStarted"))
    if how == "agent":
        c.wait_for(lambda: _steps(c), why="a step")
        time.sleep(rng.uniform(0.0, longest))
        node = rng.randrange(c.nodes)
        c.agents[node].kill()
        c.agents[node].wait()
        c.start(node)
    else:
        how = kill(c, how, rng, longest)
        if how == "missed":
            return how
        c.wait_for(lambda: len(c.facts("IncidentOpened")) > incidents, 30, "the kill to be noticed")
    # The next kill may come at any time after the next start, but not before it.
    c.wait_for(lambda: len(c.facts("GenerationStarted")) > started, 120, "the next generation")
    return how


def disturb(c: Cluster, hows: list[str], rng: random.Random, longest: float = 6.0) -> list[str]:
    """Starts the job and kills a rank of it in each of these ways, one after the other.

    ``agent`` kills a whole node except its memory, which the node's next agent finds. Returns the
    ways that were used, which are fewer if the job ends before.
    """
    c.start_all().wait_for(lambda: c.facts("GenerationStarted"), why="the first generation")
    done: list[str] = []
    for how in hows:
        try:
            done.append(_one(c, how, rng, longest))
        except RuntimeError:
            if not _over(c):
                raise
            break
    return [how for how in done if how != "missed"]
