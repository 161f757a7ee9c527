"""CI takes at most 25 minutes from a clean clone on two cores, and covers no less than it did.

This measures what a person would start: `.ci/run`, in a clone without `target` and `.venv`. The
downloads of cargo and pip are cached already. The samples of the first bound are the stages and
their seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT

SECONDS = 25 * 60
#: make prints a command of its target `test` when it starts it: a stage.
STAGE = re.compile(r"^(make -j|make (miri|fuzz|setup)|cargo (test|build)|target/|\S+python -m pytest)")
#: Words that all stages have in common.
COMMON = re.compile(r"--workspace|--profile checked|--exclude \S+|--nocapture|(^| )-q|--(?= |$)")
#: What CI covers: where its output says so, and the least that it must be, which is what it was
#: when this figure was written (of tests in Rust, the number of test functions). Numbers are added
#: up.
COVERED = {
    "rust-tests": (r"^test result: ok\. (\d+) passed", "tests in Rust that passed", 655),
    "python-tests": (r"^(?:\d+ failed, )?(\d+) passed.* in [\d.]+s", "tests in Python that passed", 1249),
    "seeds": (r"simulation: (\d+) seeds", "simulated clusters", 600),
    "faults": (r"simulation: \d+ seeds, (\d+) faults", "faults in them", 600 * 20),
    "flips": (r"corruption: (\d+) flips", "flipped bits in a slot", 4559),
    "states": (r"crash states: (\d+) tried", "crash states", 1462),
    "fuzzed": (r"^\w+: (\d+) inputs, \d+ edges", "inputs of fuzzed parsers", 5000),
    "directories": (r'"sequences": ?(\d+)', "sequences of operations on foreign directories", 2000),
}
#: Miri repeats some of the tests, once per order of their threads.
REPEATED = re.compile(r"^python3 -m harness\.miri .*?^(?=cargo |make|python3 )", re.DOTALL | re.MULTILINE)
#: What would point the clone at another build.
FOREIGN = {"VIRTUAL_ENV", "CARGO_TARGET_DIR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}


def _run(clone: Path) -> tuple[int, list[tuple[str, float]], str]:
    """Runs CI. Returns its exit code, the seconds of each stage, and its output."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    line = [str(clone / ".ci" / "run")]
    began: list[tuple[str, float]] = []
    output = []
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ci:
        assert ci.stdout is not None
        for text in ci.stdout:
            output.append(text)
            if STAGE.match(text):
                began.append((" ".join(COMMON.sub(" ", text).split()), time.monotonic()))
    ends = [at for _, at in began[1:]] + [time.monotonic()]
    stages = [(name, round(end - at)) for (name, at), end in zip(began, ends, strict=True)]
    return ci.returncode, stages, "".join(output)


def measure(_soak: bool) -> Iterator[Bound]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "everstep"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        code, stages, output = _run(clone)
        seconds = round(time.monotonic() - began)
    for name, took in stages:
        print(f"  {took:5} s  {name}")
    yield Bound("seconds", seconds, f"s on {os.cpu_count()} cores", "<=", SECONDS, samples=tuple(stages))
    yield Bound("exit-code", code, "", "=", 0, samples=(output[-3000:],) if code else ())
    once = REPEATED.sub("", output)
    for part, (pattern, unit, least) in COVERED.items():
        found = re.findall(pattern, once, re.MULTILINE)
        yield Bound(part, sum(map(int, found)), unit, ">=", least)
