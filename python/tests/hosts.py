"""Two hosts on this machine, as network namespaces: 10.77.9.1 and 10.77.9.2."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

#: Specific to this process, so that concurrent test runs do not collide.
NAMES = (f"evs{os.getpid()}a", f"evs{os.getpid()}b")
_SETUP = """netns add {0}; netns add {1}; link add evsa netns {0} type veth peer name evsb netns {1};
    -n {0} addr add 10.77.9.1/24 dev evsa; -n {1} addr add 10.77.9.2/24 dev evsb; -n {0} link set evsa up;
    -n {1} link set evsb up; -n {0} link set lo up; -n {1} link set lo up"""


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Makes the hosts for the duration of the block. Skips the test if they cannot be made."""
    try:
        for command in _SETUP.split(";"):
            if (
                subprocess.run(["ip", *command.format(*NAMES).split()], capture_output=True, check=False).returncode
                != 0
            ):
                pytest.skip("needs iproute2 and the right to make network namespaces")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
