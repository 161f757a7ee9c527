"""Hosts on this machine: network namespaces on one bridge, with links of any speed."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator

#: Several sets of hosts may exist at the same time.
_SETS = itertools.count()


def _ip(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None, data: bool = False) -> Iterator[list[str]]:
    """Yields namespaces. Host i has the address 10.77.8.(i+1); ``rate`` (such as ``2gbit``) limits
    what each sends.

    With ``data``, each has a second network for training traffic: ``eth1``, 10.77.9.(i+1).

    Use with ``ip netns exec NAME …``. Requires permission to make namespaces.
    """
    mark = f"evf{os.getpid() % 100000}s{next(_SETS)}"
    names = [f"{mark}h{i}" for i in range(count)]
    bridge = f"{mark}b"
    try:
        _ip(f"ip netns add {bridge}")
        networks = range(2 if data else 1)
        for net in networks:
            _ip(f"ip -n {bridge} link add br{net} type bridge")
            _ip(f"ip -n {bridge} link set br{net} up")
        for i, name in enumerate(names):
            _ip(f"ip netns add {name}")
            _ip(f"ip -n {name} link set lo up")
            for net in networks:
                _ip(f"ip link add eth{net} netns {name} type veth peer name n{net}p{i} netns {bridge}")
                _ip(f"ip -n {bridge} link set n{net}p{i} master br{net}")
                _ip(f"ip -n {bridge} link set n{net}p{i} up")
                _ip(f"ip -n {name} addr add 10.77.{8 + net}.{i + 1}/24 dev eth{net}")
                _ip(f"ip -n {name} link set eth{net} up")
            if rate:
                _ip(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms")
        yield names
    finally:
        for name in [*names, bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def link(names: list[str], index: int, state: str, net: int = 0) -> None:
    """Cuts a host off from all others (``down``), or connects it again (``up``).

    With ``net`` 1, only in the network for training traffic: a check on the other network finds
    nothing wrong.
    """
    bridge = names[0].rsplit("h", 1)[0] + "b"
    _ip(f"ip -n {bridge} link set n{net}p{index} {state}")


def data_path(names: list[str], a: int, b: int) -> None:
    """Blocks all training traffic between these two hosts. Both still reach all others."""
    for here, there in ((a, b), (b, a)):
        _ip(f"ip -n {names[here]} route add blackhole 10.77.9.{there + 1}/32")


def data_rate(names: list[str], index: int, rate: str) -> None:
    """Limits the training traffic that this host sends (``200mbit``)."""
    _ip(f"tc -n {names[index]} qdisc add dev eth1 root tbf rate {rate} burst 64kb latency 50ms")
