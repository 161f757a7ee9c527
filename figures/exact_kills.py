"""Kills change no loss and no weight, although losses depend on random numbers.

The script has six lines of everstep. Each loss and the final weights are those of an undisturbed
run. Soak runs are accumulated in docs/benchmarks/exact-kills.md for as long as the code that
captures, restores and chooses the step does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from figures.kills import disturb
from harness.cluster import ROOT, cluster
from harness.training import differences

#: `SEED=7 make soak NAME=exact-kills` kills at other times.
SEED = 20261124
RANKS = 2
#: Kills per job.
EACH = 25
#: Widths of the models, and steps between captures. ``0`` captures as often as is cheap: the larger
#: model then makes several steps between two captures.
JOBS = ((64, 0), (4096, 1), (4096, 0), (64, 3))
LOG = ROOT / "docs" / "benchmarks" / "exact-kills.md"
#: The total in the log from which the claim is made.
TOTAL = 2000
#: The code that captures, restores, or chooses the step that all ranks continue from.
COUNTED = (
    "crates/checkpoint/src",
    "crates/core/src/coordinator/rebuild.rs",
    "crates/core/src/coordinator/replication.rs",
    "crates/core/src/coordinator/restore_point.rs",
    "crates/core/src/agent/replicas.rs",
    "crates/everstep/src/agent/remote_shard.rs",
    "crates/everstep/src/agent/replicas.rs",
    "crates/everstep/src/agent/slot_files.rs",
    "python/src",
    *(
        f"python/everstep/{name}.py"
        for name in [
            "agent_tier",
            "batches",
            "blob_format",
            "branch",
            "checkpoint",
            "common_state",
            "decoding",
            "disk_tier",
            "durable_offers",
            "encoding",
            "generators",
            "healing",
            "in_place",
            "layout",
            "loading",
            "local_state",
            "module_state",
            "node_reader",
            "object_state",
            "optimizer_restore",
            "optimizer_state",
            "optimizer_value",
            "replicated",
            "resharded",
            "restoring",
            "rng",
            "sharded",
            "slots",
            "state",
            "structure",
            "tensor_places",
            "tensors",
            "tiers",
            "value_limits",
            "values",
            "worker",
            "world",
        ]
    ),
)


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def code() -> str:
    """Returns a name for the code whose kills are counted together. It changes with that code, but
    not with comments that have lines of their own."""
    files = _git("ls-tree", "-r", "--name-only", "HEAD", "--", *COUNTED).splitlines()
    lines = (line for file in files for line in [file, *_git("show", f"HEAD:{file}").splitlines()])
    text = "\n".join(line for line in lines if not line.lstrip().startswith(("//", "# ")))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _rows() -> list[list[str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in LOG.read_text().splitlines()
        if line.startswith("| ")
    ]
    return [row for row in rows if row[-1].isdigit()]


def counted() -> tuple[int, int]:
    """Returns the kills in the log with the current code, and the differences after them."""
    name = code()
    rows = [row for row in _rows() if row[1] == name]
    return sum(int(row[3]) + int(row[4]) for row in rows), sum(int(row[5]) for row in rows)


def _commit() -> str:
    """Returns the commit that is measured, or an empty string if the tree differs from it by more
    than the log."""
    others = [".", f":!{LOG.relative_to(ROOT)}"]
    return (
        ""
        if _git("status", "--porcelain", "--untracked-files=no", "--", *others)
        else _git("rev-parse", "--short=12", "HEAD")
    )


def _steps(kills: int) -> int:
    # Between two kills a job makes 10 to 15 steps, at most 40.
    return 100 + 20 * kills


def _command(out: Path, seed: int, kills: int, width: int, every: int = 0) -> list[str]:
    line = [
        "figures/scripts/dropout.py",
        "--out",
        str(out),
        "--seed",
        str(seed),
        "--width",
        str(width),
        "--every",
        str(every),
    ]
    return [*line, "--steps", str(_steps(kills)), "--persist", "50", "--pause", "0.05"]


def _keep(what: Path, name: str) -> None:
    """Keeps a copy of what is needed to examine a failed job."""
    print(f"  kept: {shutil.copytree(what, ROOT / 'target' / 'figures' / f'exact-kills-{name}', dirs_exist_ok=True)}")


def _disturbed(out: Path, nodes: int, command: list[str], hows: list[str], rng: random.Random) -> tuple[list[str], int]:
    """Runs the job with kills. Returns the kills, and the sum of the exit codes."""
    out.mkdir()
    going_on = out / "kills"
    going_on.touch()
    with cluster(
        f"exact-{nodes}", command, nodes=nodes, workers=RANKS // nodes, options=["--max-restarts", "1000"]
    ) as c:
        try:
            done = disturb(c, hows, rng, longest=2.0)
            going_on.unlink()
            codes = c.wait(300)
        except Exception:
            _keep(c.home, f"stuck-{int(time.time())}")
            raise
        restored = [(f["step"], f["tiers"]) for f in c.facts("Restored")]
        shutil.copy(c.store / "events.jsonl", out)
        (out / "console.log").write_text(c.output())
    print(
        f"  {nodes} nodes: { ({how: done.count(how) for how in sorted(set(done))}) }, restored {restored}", flush=True
    )
    return done, sum(map(abs, codes))


def _hows(nodes: int, kills: int, rng: random.Random) -> list[str]:
    ways = ["steps", "random", "capture", "behind", "restore"] + (["agent"] if nodes > 1 else [])
    hows = [ways[i % len(ways)] for i in range(kills)]
    rng.shuffle(hows)
    return hows


def measure(soak: bool) -> Iterator[Bound]:
    seed = int(os.environ.get("SEED", SEED))
    print(f"seed {seed}")
    rng = random.Random(seed)
    commit, name = _commit(), code()
    wanted, each = (100, EACH) if soak else (10, 10)
    kills: dict[int, list[str]] = {1: [], 2: []}
    wrong: list[str] = []
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        calm = {width: Path(scratch) / f"calm-{width}" for width, _ in JOBS}
        for width, out in calm.items():
            with cluster("exact-calm", _command(out, seed, each, width)) as c:
                failed += sum(map(abs, c.start_all().wait(600)))
        # Ctrl-C ends a soak: the jobs compared so far count.
        with contextlib.suppress(KeyboardInterrupt):
            for job in itertools.count():
                nodes = min(kills, key=lambda n: len(kills[n]))
                left = wanted - len(kills[nodes])
                if left <= 0:
                    break
                out, (width, every) = Path(scratch) / f"job-{job}", JOBS[job // 2 % len(JOBS)]
                done, codes = _disturbed(
                    out, nodes, _command(out, seed, each, width, every), _hows(nodes, min(each, left), rng), rng
                )
                found = differences(calm[width], out, RANKS, _steps(each))
                if found or codes:
                    _keep(out, f"{seed}-{job}")
                wrong += [f"job {job} ({nodes} nodes, width {width}, every {every}): {what}" for what in found]
                kills[nodes] += done
                failed += codes
        if soak and commit:
            with LOG.open("a") as log:
                log.write(f"| {commit} | {name} | {seed} | {len(kills[1])} | {len(kills[2])} | {len(wrong)} |\n")
        out, (width, _) = Path(scratch) / "control", JOBS[0]
        _disturbed(out, 1, [*_command(out, seed, each, width), "--forget"], ["steps"], rng)
        control = differences(calm[width], out, RANKS, _steps(each))
    yield Bound("one-node", len(kills[1]), f"kills, {RANKS} ranks on one node", ">=", wanted)
    yield Bound("two-nodes", len(kills[2]), f"kills, {RANKS} ranks on two nodes", ">=", wanted)
    for what in ("capture", "behind", "restore"):
        yield Bound(what, (kills[1] + kills[2]).count(what), "kills at this moment", ">=", wanted // 10)
    yield Bound("failed", failed, "exit codes, added up", "=", 0)
    yield Bound(
        "different",
        len(wrong),
        "losses or final weights that differ from an undisturbed run's",
        "=",
        0,
        samples=tuple(wrong[:20]),
    )
    yield Bound(
        "forgetful.different", len(control), "where a rank draws other numbers after a restore", "=", 0, control=True
    )
    total, differing = counted()
    yield Bound(
        "logged",
        total,
        f"kills of soak runs since the last change of capture, restore or commit point (code {code()})",
        ">=",
        TOTAL,
    )
    yield Bound("logged-different", differing, "losses or weights that differed in them", "=", 0)
