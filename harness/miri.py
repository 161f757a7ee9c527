"""Runs tests of the checkpoint crate under Miri, which finds undefined behaviour and data races.

Miri comes with a nightly compiler, which is installed if it is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys

from harness.cluster import ROOT

TOOLCHAIN = "nightly"
COMPONENTS = ("miri", "rust-src")
#: Tests that Miri can run: they use no files.
TESTS = ("arena::protocol::", "memory::")


def install() -> None:
    """Installs the compiler and Miri, unless they are there: a run must not change the compiler of
    the next one."""
    there = ["rustup", "component", "list", "--toolchain", TOOLCHAIN, "--installed"]
    installed = subprocess.run(there, capture_output=True, text=True, check=False).stdout
    if all(component in installed for component in COMPONENTS):
        return
    line = ["rustup", "toolchain", "install", TOOLCHAIN, "--profile", "minimal", "--component", ",".join(COMPONENTS)]
    subprocess.run(line, check=True, capture_output=True)


def miri(*, orders: int, planted: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the tests, or only the one with a planted race, with this many orders of their
    threads."""
    install()
    # One reason per flag, in this order: slot descriptions contain the time; threads that copy wait
    # for work until the process ends; tensors arrive as plain addresses, as from Python.
    flags = "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance"
    line = ["cargo", f"+{TOOLCHAIN}", "miri", "test", "-p", "everstep-checkpoint", "--lib"]
    env = os.environ | {"MIRIFLAGS": f"{flags} -Zmiri-many-seeds=0..{orders}"}
    tests = ["--ignored", "planted"] if planted else [*TESTS]
    return subprocess.run([*line, "--", *tests], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    done = miri(orders=int(sys.argv[1]) if len(sys.argv) > 1 else 4)
    print(done.stdout + (done.stderr if done.returncode else ""))
    sys.exit(done.returncode)
