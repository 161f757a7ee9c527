"""Watching costs the training thread microseconds per step and no system calls.

The agent's share of a core is bounded, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, cluster, descendants

EVERSTEP = str(Path(sys.executable).parent / "everstep")
LOOP = "figures/scripts/optimizer_loop.py"
STEPS = 10_000


def _loop(*options: str) -> float:
    """Returns the microseconds per step of the bare optimizer loop, as the median of ten tenths."""
    with tempfile.TemporaryDirectory() as scratch:
        line = [EVERSTEP, "run", "--standalone", *options, LOOP, str(STEPS)]
        env = {**os.environ, "EVERSTEP_STATE_DIR": scratch}
        out = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
        found = re.search(r"us ([\d.]+)", out)
        assert found, out
        return float(found.group(1))


def _system_calls() -> float:
    """Returns the system calls of the training thread per step, over three seconds of steps."""
    with tempfile.TemporaryDirectory() as scratch:
        steps = 20_000_000
        line = [EVERSTEP, "run", "--standalone", LOOP, str(steps), "--mark", "1.5"]
        env = {**os.environ, "EVERSTEP_STATE_DIR": scratch}
        run = subprocess.Popen(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        try:
            pid = re.match(r"pid (\d+)", run.stdout.readline())
            assert pid
            time.sleep(3.5)

            def step() -> int:
                out = subprocess.run([EVERSTEP, "status", "--json"], env=env, capture_output=True, check=True).stdout
                return int(json.loads(out)["jobs"][0]["workers"][0]["step"])

            trace = Path(scratch) / "trace"
            # Only the training thread (its id is the process's), not the pulse thread.
            before = step()
            strace = subprocess.Popen(["strace", "-o", str(trace), "-p", pid.group(1)], stderr=subprocess.DEVNULL)
            time.sleep(3)
            strace.terminate()
            strace.wait()
            stepped = step() - before
            calls = [x for x in trace.read_text().splitlines() if "(" in x and not x.startswith(("---", "+++"))]
            print(
                f"strace: {len(calls)} calls in {stepped} steps: {Counter(x.split('(')[0] for x in calls).most_common(4)}"
            )
            return len(calls) / stepped
        finally:
            for p in [*descendants(run.pid), run.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(p, 9)
            run.wait()


def _agent_share(seconds: float) -> float:
    """Returns the percentage of a core that agent, guard and coordinator use per worker during
    training."""
    ticks = os.sysconf("SC_CLK_TCK")

    def used(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with cluster("overhead", ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.05"]) as c:
        c.start_all().wait_step(60)
        c.wait_for(lambda: all(w["warm"] for w in c.workers_now().values()), 60, "the warm process")
        agent = c.agents[0].pid
        guard = next(p for p in descendants(agent) if b"guard" in Path(f"/proc/{p}/cmdline").read_bytes())
        pids = [agent, guard, c.coordinator_pid()]
        before = sum(map(used, pids))
        time.sleep(seconds)
        share = (sum(map(used, pids)) - before) / ticks / seconds * 100 / 2
    return share


def measure(soak: bool) -> Iterator[Bound]:
    pairs = [(_loop("--no-preload"), _loop()) for _ in range(20)]
    costs = [w - o for o, w in pairs]
    yield Bound(
        "per-step",
        round(statistics.median(costs), 2),
        f"µs on the training thread, median of 20 alternations over {STEPS} steps each",
        "<=",
        50,
        samples=tuple(pairs),
    )
    ratios = sorted(w / o for o, w in pairs)
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    yield Bound(
        "ratio-of-an-empty-step",
        round(statistics.median(ratios), 3),
        f"paired, 95 % interval [{low:.3f}, {high:.3f}]; an optimizer step of one number, nothing else",
        "<=",
        10,
    )
    yield Bound("system-calls", round(_system_calls(), 4), "per step on the training thread", "<=", 0.001)
    yield Bound(
        "agent",
        round(_agent_share(60 if soak else 20), 3),
        "% of a core per worker: agent, guard and coordinator together",
        "<=",
        0.5,
    )
