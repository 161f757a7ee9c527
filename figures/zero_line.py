"""Without a line of everstep in a script, steps are seen, and hangs and slow ranks noticed."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, Cluster, cluster

SCRIPT = "figures/scripts/plain_ddp.py"
STEPS, DETECT = 300, 2.0


def _seen(workers: int, options: list[str] | None = None) -> tuple[float, int]:
    """Returns the steps seen on the rank with the fewest, and the exit code."""
    with cluster(
        f"zero-{workers}", [SCRIPT, "--steps", str(STEPS), "--pause", "0.005"], workers=workers, options=options
    ) as c:
        codes = c.start_all().wait(120)
        steps = [f["step"] for f in c.facts("Progress")]
        return max(steps, default=0), max(map(abs, codes))


def _noticed(c: Cluster, kind: str, since: float, timeout: float = 60) -> float:
    fact = c.wait_for(lambda: next((f for f in c.facts(kind) if f["ts"] >= since), None), timeout, kind)
    return float(fact["ts"]) - since


def measure(soak: bool) -> Iterator[Bound]:
    text = (ROOT / SCRIPT).read_text()
    yield Bound("lines-changed", text.count("everstep"), "mentions of everstep in the script", "=", 0)
    for workers, name in ((2, "ddp"), (1, "single")):
        steps, code = _seen(workers)
        yield Bound(f"{name}.steps-seen", steps, f"of {STEPS} on every rank", "=", STEPS)
        yield Bound(f"{name}.exit", code, "", "=", 0)
    yield Bound("preload-off.steps-seen", _seen(2, ["--no-preload"])[0], "", "=", STEPS, control=True)
    with cluster("zero-hang", [SCRIPT, "--steps", "400"]) as c:
        c.start_all().wait_step(40)
        began = c.kill_worker(1, signal.SIGSTOP)
        seconds = _noticed(c, "IncidentOpened", began)
        codes = c.wait(120)
    yield Bound("hang.noticed", round(seconds, 3), "s", "<=", DETECT + 1)
    yield Bound("hang.recovered", int(not any(codes)), "", "=", 1)
    with cluster("zero-kill", [SCRIPT, "--steps", "300"]) as c:
        c.start_all().wait_step(40)
        began = c.kill_worker(0, signal.SIGKILL)
        seconds = _noticed(c, "FirstStep", began)
        codes = c.wait(120)
        restarts = len(c.facts("GenerationStarted")) - 1
    yield Bound("kill.restarts", restarts, "", "=", 1)
    yield Bound("kill.finished", int(not any(codes)), f"(first step again after {seconds:.2f} s)", "=", 1)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["--steps", "150", "--slow-rank", "1", "--slow-from", "60", "--out", scratch]
        with cluster("zero-slow", [SCRIPT, *arguments], workers=3) as c:
            c.start_all()
            seconds = 0.0
            fact = c.wait_for(
                lambda: next((f for f in c.facts("SlowRank") if f["rank"] == 1 and f["slow"]), None),
                90,
                "the slow rank",
            )
            log = [x.split() for x in (Path(scratch) / "log-1").read_text().splitlines() if x.startswith("step")]
            began = next(float(ts) for _, step, ts in log if int(step) >= 60)
            seconds = fact["ts"] - began
            c.wait(120)
            innocent = {f["rank"] for f in c.facts("SlowRank") if f["slow"] and f["ts"] >= began} - {1}
    yield Bound("slow.noticed", round(seconds, 2), "s after it became slow (0.1 s per step)", "<=", 5)
    yield Bound("slow.innocent", len(innocent), "other ranks named", "=", 0)
