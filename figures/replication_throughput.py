"""Replicas travel nearly as fast as two bare TCP streams between the same memories.

On loopback, and on a 2 Gbit/s link.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures import transfer
from figures.bound import Bound
from figures.hosts import hosts


def _bounds(label: str, found: dict[str, list[float]], size: int, limit: float) -> Iterator[Bound]:
    for ours, bare in (("push", "raw-send"), ("pull", "raw-receive")):
        share = transfer.ratio(found[bare], found[ours])
        rate = size / min(found[ours]) / 1e9
        yield Bound(
            f"{label}-{ours}",
            round(share, 3),
            f"of raw TCP ({rate:.2f} GB/s at best)",
            ">=",
            limit,
            samples=tuple(found[ours] + found[bare]),
        )


def measure(soak: bool) -> Iterator[Bound]:
    transfer.build()
    rounds = 15 if soak else 7
    with transfer.memory() as memory:
        with transfer.serving(memory / "holder", "127.0.0.1") as (holder, raw):
            found = transfer.run("send", holder, raw, memory, transfer.GB, rounds)
        yield from _bounds("loopback", found, transfer.GB, 0.75)
    with transfer.memory() as memory, hosts(2, "2gbit") as (here, there):
        size = transfer.GB // 4
        with transfer.serving(memory / "holder", "10.77.8.2", ("ip", "netns", "exec", there)) as (holder, raw):
            found = transfer.run("send", holder, raw, memory, size, 5, prefix=("ip", "netns", "exec", here))
        yield from _bounds("2gbit", found, size, 0.95)
