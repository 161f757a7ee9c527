"""Attacks in rounds, and writes a JSON object for each.

A round is all attacks. If the orders say ``turns``, it is the next attacks for ``TURN`` seconds,
and a turn of the same length follows that burns as much processor time and touches nothing.
"""

import contextlib
import itertools
import json
import os
import resource
import socket
import time

from figures.second.base import ATTACKS, HELD, MY, ORDERS

#: Seconds that a turn lasts at least.
TURN = 0.1


def free(much):
    """Releases what is held, as descriptors are limited."""
    while len(HELD) > (0 if much else 600):
        one = HELD.pop(0)
        with contextlib.suppress(OSError):
            if isinstance(one, socket.socket):
                one.close()
            elif isinstance(one, int):
                os.close(one)
            else:
                os.unlink(one)


def spent():
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in of)


def burn(wall, cpu):
    """Uses this much processor time, half of it in the kernel, evenly over this much time."""
    free(True)
    began, used = time.monotonic(), spent()
    while (passed := time.monotonic() - began) < wall:
        if spent() - used > cpu * passed / wall:
            time.sleep(0.001)
        else:
            for _ in range(20):
                os.getppid()
                sum(range(50))


def attacks(names, least):
    """Makes the next attacks, for this many seconds at least. Returns how often, and what they
    gained."""
    tally, gained = {}, {}
    began = time.monotonic()
    for name in names:
        tally[name] = tally.get(name, 0) + 1
        if got := ATTACKS[name]():
            gained[name] = got[:5]
        free(False)
        if least is not None and time.monotonic() - began >= least:
            break
    return tally, gained


class Turn:
    """Reports what happens in it."""

    def __init__(self, mode):
        self.said = {"mode": mode, "tally": {}, "gained": {}}

    def __enter__(self):
        self.said["at"], self.began, self.used = time.time(), time.monotonic(), spent()
        return self

    def __exit__(self, *_):
        self.said["wall"], self.said["cpu"] = time.monotonic() - self.began, spent() - self.used
        print(json.dumps(self.said), flush=True)


def main():
    with contextlib.suppress(OSError):
        os.mkdir(MY, 0o700)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    only = ORDERS.get("only") or sorted(ATTACKS)
    print("ready", flush=True)
    turns = ORDERS["turns"]
    names, least = (itertools.cycle(only), TURN) if turns else (only, None)
    while True:
        with open(ORDERS["mode"]) as f:
            if f.read().strip() == "end":
                break
        with Turn("attack") as turn:
            turn.said["tally"], turn.said["gained"] = attacks(names, least)
        if turns:
            wall, cpu = turn.said["wall"], turn.said["cpu"]
            with Turn("burn"):
                burn(wall, cpu)
    free(True)


main()
