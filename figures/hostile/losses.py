"""Packet loss between two nodes in network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable

from figures.hostile.case import Case
from figures.hostile.job import Job
from figures.hosts import hosts
from harness.cluster import free_port


def _lose(names: list[str], percent: int) -> None:
    """Drops every arriving packet with this probability, at both ends."""
    which = f"numgen random mod 100 < {percent} " if percent < 100 else ""
    for name in names:
        rules = (
            "add table ip lossy; add chain ip lossy in { type filter hook prerouting priority -300; }; "
            f"add rule ip lossy in iifname eth0 {which}drop"
        )
        subprocess.run(["ip", "netns", "exec", name, "nft", rules], check=True, capture_output=True)


def _mend(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "exec", name, "nft", "delete table ip lossy"], check=False, capture_output=True)


def _apart(percent: int, begins: str) -> Callable[[Case, Job], None]:
    """Starts two nodes of one rank.

    Packets are lost from the ``start``, or once they train (``run``).
    """

    def start(case: Case, made: Job) -> None:
        around = hosts(2)
        names = around.__enter__()
        made.cleanups.append(lambda: around.__exit__(None, None, None))
        token = made.home / "token"
        token.write_text("secret")
        token.chmod(0o600)
        port = free_port()
        if begins == "start":
            _lose(names, percent)
        for node, name in enumerate(names):
            meet = [
                "--insecure",
                "--token-file",
                str(token),
                "--nnodes",
                "2",
                "--rdzv-endpoint",
                f"10.77.8.1:{port}",
                "--node-rank",
                str(node),
                "--name",
                "lossy",
            ]
            env = {**case.environment(made), "GLOO_SOCKET_IFNAME": "eth0"}
            made.start(["ip", "netns", "exec", name, *made.line([*meet, *case.options], list(case.words))], env)
        if begins == "run" and made.reach(5):
            _lose(names, percent)
        if case.name.endswith("then-cut"):
            # For some seconds, nothing gets through at all.
            made.reach(8)
            _mend(names)
            _lose(names, 100)
            time.sleep(8)
            _mend(names)

    return start


def possible() -> bool:
    """Returns whether packets can be dropped at random here."""
    return shutil.which("nft") is not None


CASES = [
    Case("loss.20-percent-from-the-start", start=_apart(20, "start"), repeats=6, seconds=240),
    Case("loss.20-percent-while-training", start=_apart(20, "run"), repeats=6, seconds=240),
    # TCP makes hardly any progress with this loss: the job may keep waiting if it reports that.
    Case("loss.40-percent-while-training", start=_apart(40, "run"), repeats=6, waits=True, seconds=120),
    Case("loss.10-percent-then-cut", start=_apart(10, "run"), repeats=6, seconds=240),
]
