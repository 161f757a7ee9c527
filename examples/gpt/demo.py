"""`make demo`: trains on real text with two nodes of two workers, and survives three real losses.

Runs the job twice with the same seed: once undisturbed, and once while a worker, then the
coordinator, then a whole node (agent, workers and memory) is killed. Prints what each loss cost and
whether the two runs are identical to the last bit.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from harness.cluster import Cluster, cluster  # noqa: E402
from harness.training import differences  # noqa: E402

NODES, WORKERS, STEPS, PERSIST = 2, 2, 160, 20


def command(out: Path) -> list[str]:
    return ["examples/gpt/train.py", "--steps", str(STEPS), "--persist", str(PERSIST), "--out", str(out)]


def after(c: Cluster, kind: str, when: float) -> dict[str, Any]:
    """Waits for the first fact of a kind after ``when``, and returns it."""
    return c.wait_for(lambda: next((f for f in c.facts(kind) if f["ts"] >= when), None), 90, kind)


def report(c: Cluster, what: str, when: float) -> dict[str, Any]:
    """Prints and returns what a loss of processes cost, according to the coordinator's records."""
    opened, restored, stepped = (after(c, kind, when) for kind in ("IncidentOpened", "Restored", "FirstStep"))
    tiers = sorted(set(restored["tiers"]))
    row = {
        "what": what,
        "noticed": opened["ts"] - when,
        "next": stepped["ts"] - when,
        "lost": restored["steps_lost"],
        "tier": "durable storage" if "Durable" in tiers else "memory",
        "step": restored["step"],
    }
    print(
        f"   noticed after {row['noticed']:.2f} s, next new step after {row['next']:.2f} s, from {row['tier']}",
        flush=True,
    )
    return row


def disturbed(c: Cluster) -> list[dict[str, Any]]:
    c.start_all()
    c.wait_step(35)
    print("-> kill -9 of the worker with rank 3", flush=True)
    rows = [report(c, "worker (rank 3)", c.kill_worker(3))]

    c.wait_step(75)
    generations = len(c.facts("GenerationStarted"))
    print("-> kill -9 of the coordinator", flush=True)
    when = c.kill_coordinator()
    back = after(c, "CoordinatorStarted", when)
    at = c.step()
    c.wait_for(lambda: c.step() > max(at, 1), 60, "a step after the coordinator's return")
    restarted = len(c.facts("GenerationStarted")) - generations
    print(f"   back after {back['ts'] - when:.2f} s, {restarted} workers restarted", flush=True)
    rows.append(
        {
            "what": "coordinator",
            "noticed": back["ts"] - when,
            "next": 0.0,
            "lost": restarted,
            "tier": "memory",
            "step": None,
        }
    )

    c.wait_step(111)
    print("-> kill -9 of node 1: agent, workers, memory", flush=True)
    when = c.kill_node(1)
    time.sleep(1.0)
    print("   (the scheduler starts its agent again)", flush=True)
    c.start(1)
    rows.append(report(c, "node 1", when))
    return rows


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="everstep-demo-") as scratch:
        calm_out, out = Path(scratch) / "undisturbed", Path(scratch) / "disturbed"
        print(
            f"everstep demo: a GPT on the standard library's source, {NODES} nodes x {WORKERS} workers, {STEPS} steps"
        )
        print("1. undisturbed", flush=True)
        began = time.time()
        with cluster("demo-undisturbed", command(calm_out), nodes=NODES, workers=WORKERS) as c:
            codes = c.start_all().wait()
            if any(codes):
                print(c.output()[-3000:])
                return 1
        print(f"   done in {time.time() - began:.0f} s\n2. the same seed with three losses", flush=True)
        with cluster("demo-disturbed", command(out), nodes=NODES, workers=WORKERS) as c:
            rows = disturbed(c)
            codes = c.wait()
            leaks, output = c.leaks(), c.output()
        wrong = differences(calm_out, out, NODES * WORKERS, STEPS)
    print(f"\n{'killed':<18}{'noticed':>10}{'next step':>15}{'steps lost':>12}  came back from")
    for r in rows:
        following = "never stopped" if r["what"] == "coordinator" else f"{r['next']:.2f} s"
        where = r["tier"] if r["step"] is None else f"{r['tier']}, step {r['step']}"
        print(f"{r['what']:<18}{r['noticed']:>8.2f} s{following:>15}{r['lost']:>12}  {where}")
    print(
        f"losses of all {NODES * WORKERS} ranks and final parameters: {'bit-identical to the undisturbed run' if not wrong else wrong[:3]}"
    )
    good = not any(codes) and not wrong and not leaks and rows[0]["lost"] == 0 and rows[1]["lost"] == 0
    if leaks:
        print(f"left behind: {leaks}")
    if not good:
        print(output[-3000:])
    print("demo:", "ok" if good else "FAILED", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
