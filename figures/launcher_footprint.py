"""The launcher itself takes little time and memory to run a script that does nothing."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import cluster, descendants

BIN = Path(sys.executable).parent
PEERS = {
    "torchrun": ["torchrun", "--standalone"],
    "dlrover-run": ["dlrover-run", "--standalone"],
    "ft_launcher": ["ft_launcher", "--standalone"],
}


def _seconds(line: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(line, env=env, capture_output=True, check=True)
    return time.perf_counter() - began


def _memory(pid: int) -> float:
    """Returns the proportional set size in MiB."""
    rows = dict(x.split(":", 1) for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) / 1024


def measure(soak: bool) -> Iterator[Bound]:
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "nothing.py"
        script.write_text("pass\n")
        env = {**os.environ, "EVERSTEP_STATE_DIR": str(Path(scratch) / "state")}
        python = [sys.executable, "-u", str(script)]
        everstep = [str(BIN / "everstep"), "run", "--standalone", str(script)]
        pairs = [(_seconds(python, env), _seconds(everstep, env)) for _ in range(25)]
        over = statistics.median(e - p for p, e in pairs)
        yield Bound(
            "over-bare-python",
            round(over, 3),
            f"s (python {statistics.median(p for p, _ in pairs):.3f} s)",
            "<=",
            0.15,
            samples=tuple(pairs),
        )
        for name, line in PEERS.items():
            found = shutil.which(line[0], path=f"{BIN}:{os.environ.get('EVERSTEP_PEERS_BIN', '')}")
            if not found:
                print(f"peer {name}: not installed (set EVERSTEP_PEERS_BIN to its environment's bin directory)")
                continue
            try:
                seconds = statistics.median(_seconds([found, *line[1:], str(script)], env) for _ in range(3))
            except subprocess.CalledProcessError as e:
                print(
                    f"peer {name}: fails on a script that does nothing: {e.stderr.decode(errors='replace').strip().splitlines()[-1:]}"
                )
                continue
            print(f"peer {name}: {seconds:.2f} s, {seconds / statistics.median(e for _, e in pairs):.0f} times as long")
    with cluster("footprint", ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.2"], workers=1) as c:
        c.start_all().wait_step(10)
        agent = c.agents[0].pid
        guard = next(p for p in descendants(agent) if b"guard" in Path(f"/proc/{p}/cmdline").read_bytes())
        sizes = {"agent": _memory(agent), "guard": _memory(guard), "coordinator": _memory(c.coordinator_pid())}
    yield Bound(
        "agent-memory",
        round(sizes["agent"], 1),
        f"MiB (guard {sizes['guard']:.1f}, coordinator {sizes['coordinator']:.1f})",
        "<=",
        30,
    )
