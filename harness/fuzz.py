"""Builds the fuzz targets in `fuzz/` and runs them with libFuzzer: `make fuzz SECONDS=60`.

Inputs that reach new code are kept in `target/fuzz/corpus`, so that the next run continues from
them. An input that breaks a target is kept in `target/fuzz/findings`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import wrapper_script
from harness.cluster import ROOT

FUZZ = ROOT / "fuzz"
OUT = ROOT / "target" / "fuzz"
#: The target with a bug that must be found. It is not among :func:`targets`.
PLANTED = "planted"
#: What `cargo fuzz --sanitizer none` gives to the compiler: code that counts each edge it passes
#: and reports what it compares. A stable compiler takes all of these.
FLAGS = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "--cfg=fuzzing",
    # In tests, building takes longer than fuzzing.
    "-Copt-level=1",
)
#: What cargo gives the crates of the workspace to. Other libraries stay as the tests have compiled
#: them; what is generic in them (serde's parsers) is compiled with our crates.
WRAPPER = f"""#!/bin/sh
exec "$@" {" ".join(FLAGS)}
"""
#: As in the Makefile: with the same packages, cargo selects the same features of libraries as for
#: the tests.
PACKAGES = ("--workspace", "--exclude", "everstep-python")
#: Longest time in seconds that one input may take, and most MiB of memory of the whole process.
INPUT_SECONDS, PROCESS_MIB = 10, 2048
#: Time in seconds that a run may take beyond its own, to read its corpus and to end.
GRACE = 120


@dataclass(frozen=True)
class Run:
    """What came of fuzzing one target."""

    target: str
    #: Number of inputs that were tried.
    executions: int
    #: Edges of the code that the seeds reach, and that all inputs reach.
    seeded: int
    covered: int
    #: An input that breaks the target.
    finding: Path | None
    #: The end of libFuzzer's output.
    output: str

    def line(self) -> str:
        """Returns a line for people."""
        found = f"FOUND {self.finding}" if self.finding else "nothing found"
        return f"{self.target}: {self.executions} inputs, {self.covered} edges ({self.seeded} by the corpus), {found}"


def targets() -> list[str]:
    """Returns the names of all targets."""
    return sorted(p.stem for p in (FUZZ / "targets").glob("*.rs") if p.stem != PLANTED)


def build(planted: bool = False) -> Path:
    """Builds the targets, and returns their directory. ``planted``: also the one with a bug."""
    wrapper = OUT / "rustc"
    wrapper_script.write(wrapper, WRAPPER)
    names = [*targets(), *([PLANTED] if planted else [])]
    features = ["libfuzzer", *(["planted"] if planted else [])]
    line = [os.environ.get("CARGO", "cargo"), "build", "-q", "--profile", "checked", *PACKAGES]
    line += ["--features", ",".join(f"everstep-fuzz/{feature}" for feature in features)]
    line += [word for name in names for word in ("--bin", name)]
    subprocess.run(line, cwd=ROOT, check=True, env={**os.environ, "RUSTC_WORKSPACE_WRAPPER": str(wrapper)})
    return ROOT / "target" / "checked"


def run(built: Path, target: str, seconds: int, corpus: Path, seed: int = 0) -> Run:
    """Fuzzes one target, and keeps inputs that reach new code in ``corpus``. ``seed``: 0 for
    another one each time."""
    findings = OUT / "findings" / target
    for directory in (corpus, findings):
        directory.mkdir(parents=True, exist_ok=True)
    kept = [d for d in (FUZZ / "corpus" / target, FUZZ / "regressions" / target) if d.is_dir()]
    line = [
        str(built / target),
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={PROCESS_MIB}",
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
        str(corpus),
        *map(str, kept),
    ]
    with (OUT / f"{target}.log").open("w+") as log:
        done = subprocess.run(line, stdout=log, stderr=log, timeout=seconds + GRACE, check=False)
        log.seek(0)
        output = log.read()
    return report(target, done.returncode, output)


def report(target: str, code: int, output: str) -> Run:
    """Reads libFuzzer's output."""
    executions = re.findall(r"^stat::number_of_executed_units: (\d+)$", output, re.MULTILINE)
    covered = [int(n) for n in re.findall(r"\bcov: (\d+)", output)]
    seeded = re.findall(r"\bINITED cov: (\d+)", output)
    written = re.findall(r"Test unit written to (\S+)", output)
    finding = Path(written[-1]) if written else None
    if code != 0 and finding is None:
        raise RuntimeError(f"the target {target} ended with {code}:\n{output[-4000:]}")
    return Run(
        target,
        int(executions[-1]) if executions else 0,
        int(seeded[0]) if seeded else 0,
        max(covered, default=0),
        finding,
        output[-4000:],
    )


def fuzz(built: Path, target: str, seconds: int) -> Run:
    """Fuzzes one target from the committed corpus alone."""
    with tempfile.TemporaryDirectory(prefix="everstep-fuzz-") as corpus:
        return run(built, target, seconds, Path(corpus))


def main() -> int:
    p = argparse.ArgumentParser(description="Fuzz every target, one per core at a time.")
    p.add_argument("seconds", type=int, help="time for each target")
    p.add_argument("target", nargs="*", help="only these targets")
    p.add_argument("--seed", type=int, default=0, help="the same inputs each time, as far as time allows")
    args = p.parse_args()
    unknown = set(args.target) - set(targets())
    if unknown:
        p.error(f"there is no target {', '.join(sorted(unknown))}; choose from {', '.join(targets())}")
    built = build()
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(
            lambda target: run(built, target, args.seconds, OUT / "corpus" / target, args.seed),
            args.target or targets(),
        )
        for result in runs:
            print(result.line(), flush=True)
            if result.finding:
                found.append(result)
                print(result.output, flush=True)
    for result in found:
        print(
            f"{result.target} fails for {result.finding}; fix the cause and add the file to "
            f"fuzz/regressions/{result.target}/",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
