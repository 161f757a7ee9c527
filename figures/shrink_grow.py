"""Worlds that shrink and grow (3 → 2 → 3 → 2 nodes) use every sample exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures import elastic
from figures.bound import Bound
from harness.cluster import ROOT, Cluster, cluster, descendants, free_port

STEPS = 400


def _run(out: Path, rng: random.Random) -> tuple[Cluster, list[float], list[float], list[int]]:
    command = ["figures/elastic.py", "--out", str(out), "--steps", str(STEPS), "--pause", "0.04"]
    shrinks, losses = [], []
    with cluster("elastic", command, nodes=3, workers=1, elastic="2:3") as c:
        c.start_all()
        for turn, victim in enumerate((1, 2)):
            c.wait_for(lambda: c.runs(3, warm=True), 90, "three nodes, ready to restart")
            time.sleep(rng.uniform(0.2, 1.0))
            began = time.time()
            c.agents[victim].kill()
            first = c.wait_for(
                lambda began=began: next((f for f in c.facts("FirstStep") if f["ts"] > began), None),
                60,
                "the smaller world",
            )
            shrinks.append(first["ts"] - began)
            if turn == 0:
                c.start(victim)
                c.wait_for(lambda: c.facts("Growing") and c.runs(3), 90, "growth")
        codes = [a.wait(120) for node, a in c.agents.items() if node != 2]
        losses = [f["steps_lost"] for f in c.facts("Restored")]
        return c, shrinks, losses, codes


def _torchrun_shrink(watch: float) -> float:
    """Returns the seconds from the kill of one of two torchrun nodes (1:2) to a new step of the
    other."""
    with tempfile.TemporaryDirectory() as scratch:
        port = free_port()
        line = [
            "torchrun",
            "--nnodes",
            "1:2",
            "--max-restarts",
            "3",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "e",
            "--local-addr",
            "127.0.0.1",
        ]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        nodes = []
        for node in range(2):
            out = Path(scratch) / str(node)
            out.mkdir()
            command = [*line, "figures/scripts/plain_ddp.py", "--steps", "100000", "--out", str(out)]
            nodes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**env, "PATH": f"{elastic_bin()}:{env['PATH']}"},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            time.sleep(1.0)
        try:

            def logs(node: int) -> list[list[str]]:
                files = (Path(scratch) / str(node)).glob("log-*")
                return [x.split() for f in files for x in f.read_text().splitlines() if x.startswith("step")]

            deadline = time.monotonic() + 90
            while (len(logs(0)) < 30 or len(logs(1)) < 30) and time.monotonic() < deadline:
                time.sleep(0.1)
            began = time.time()
            # The second node is killed, because the first hosts torchrun's store.
            for pid in [nodes[1].pid, *descendants(nodes[1].pid)]:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
            killed = time.time()
            while time.time() - began < watch:
                after = [float(ts) for _, _, ts in logs(0) if float(ts) > killed]
                if after:
                    return min(after) - began
                time.sleep(0.1)
            return watch
        finally:
            for node in nodes:
                for pid in [node.pid, *descendants(node.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                node.wait()


def elastic_bin() -> str:
    """Returns the directory in which torchrun is installed."""
    import sys

    return str(Path(sys.executable).parent)


def measure(soak: bool) -> Iterator[Bound]:
    rng = random.Random(4)
    wrong, shrinks, losses, failed, open_epochs = 0, [], [], 0, 0
    for _ in range(6 if soak else 2):
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch)
            _, seconds, lost, codes = _run(out, rng)
            wrong += elastic.unaccounted(out, STEPS)
            shrinks += seconds
            losses += lost
            failed += sum(c != 0 for c in codes)
            from everstep.data import epoch_hash

            finished = eval((out / "finished").read_text())
            epochs = STEPS * elastic.GLOBAL_BATCH // elastic.SAMPLES
            open_epochs += sum(
                finished.get(e) != epoch_hash(elastic.SAMPLES, seed=elastic.SEED, epoch=e) for e in range(epochs)
            )
    yield Bound("samples-unaccounted", wrong, "samples not used exactly once, by what the ranks wrote down", "=", 0)
    yield Bound("epochs-open", open_epochs, "epochs whose hash does not close", "=", 0)
    yield Bound("steps-lost", sum(losses), "over all shrinks and growths", "=", 0)
    yield Bound("failed-agents", failed, "", "=", 0)
    yield Bound(
        "shrink",
        round(max(shrinks), 2),
        "s from the kill of a node to the smaller world's first new step "
        f"(median {statistics.median(shrinks):.2f}, process start included)",
        "<=",
        3,
        samples=tuple(shrinks),
    )
    seconds = _torchrun_shrink(80)
    yield Bound("torchrun-beside.shrink", round(seconds, 1), "s", ">=", 10, samples=(seconds,))
