"""Attacks, or burns as much processor time, in rounds. Writes a JSON object for each round.

A round is all attacks or, if the orders say ``piecemeal``, the next one of them.
"""

import contextlib
import itertools
import json
import os
import resource
import socket
import time

from figures.second.base import ATTACKS, HELD, MY, ORDERS


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
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def burn(seconds):
    """Half of it in the kernel."""
    until = spent() + seconds
    while spent() < until:
        for _ in range(200):
            os.getppid()
            sum(range(50))


def main():
    with contextlib.suppress(OSError):
        os.mkdir(MY, 0o700)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    only = ORDERS.get("only") or sorted(ATTACKS)
    print("ready", flush=True)
    turns = itertools.cycle([[name] for name in only] if ORDERS["piecemeal"] else [only])
    used_in_all, taken_in_all = 0.0, 0.0
    while True:
        with open(ORDERS["mode"]) as f:
            mode = f.read().strip()
        if mode == "end":
            break
        began, used = time.monotonic(), spent()
        tally, gained = {}, {}
        if mode == "burn":
            free(True)
            rate = max(0.05, min(1.0, used_in_all / taken_in_all)) if taken_in_all else 1.0
            burn(0.2 * rate)
            time.sleep(0.2 * (1 - rate))
        else:
            for name in next(turns):
                tally[name] = tally.get(name, 0) + 1
                if got := ATTACKS[name]():
                    gained[name] = got[:5]
                free(False)
            used_in_all += spent() - used
            taken_in_all += time.monotonic() - began
        print(
            json.dumps(
                {
                    "mode": mode,
                    "tally": tally,
                    "gained": gained,
                    "cpu": spent() - used,
                    "wall": time.monotonic() - began,
                }
            ),
            flush=True,
        )
    free(True)


main()
