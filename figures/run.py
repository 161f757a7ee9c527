"""`make figure NAME=…`: measures one claim and prints one line per bound.

Keeps samples, machine and commit.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from figures.bound import Bound  # noqa: E402

FIGURES = [
    "simulation", "demo", "kill-random", "hang", "coordinator-restart", "clean-restart",
    "torchrun-conformance", "zero-line", "shrink-grow", "restart-vs-torchrun", "overhead", "launcher-footprint",
    "rendezvous-scale", "sampler", "lines-changed",
    "snapshot-blocking", "lost-time", "two-phase-breakdown", "replication-overhead",
    "replication-throughput", "persist-throughput", "restore", "placement-exact",
    "writer-kills", "crash-states", "kill-matrix",
    "corruption", "memory-flat", "gpu-snapshot",
    "dcp-plugin", "frequency-contention", "silent-corruption", "planning-cost", "export", "reshard", "data-ledger", "s3-faults", "erasure",
    "error-classifier", "ledger", "notify", "detection-time", "injected-faults",
    "stacks", "quiet-soak", "incident-simulation", "node-check", "detector-overhead",
    "planner-exact", "planner-speed", "throughput-model", "unicron-fig11", "unicron-cases",
    "gemini-figures", "ettr", "spares", "what-if", "simulator-speed", "reproducible", "planner-bad-input",
    "detector-benchmark", "detector-delay", "minder-ordering", "detector-speed", "detector-training", "real-traces",
    "detector-concurrent", "detector-live", "collection-overhead", "detector-bad-input", "detector-csv",
    "no-harm-regressions", "hostile-environment", "second-user", "foreign-directories",
    "state-roundtrip", "torn-by-user", "small-step-cost", "quiet-slow-ranks",
    "restart-frameworks", "told-true", "exact-kills", "finished-once", "crafted-checkpoints",
    "house-checks", "house-shape", "house-schema", "house-miri", "house-fuzz", "ci-time",
]  # fmt: skip


def commit() -> str:
    """Returns the commit, marked if the tree differs from it."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def machine() -> dict[str, object]:
    """Returns what the numbers were measured on."""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def measure(name: str, soak: bool) -> list[Bound]:
    """Runs one figure and writes its file."""
    began, of = time.time(), commit()
    bounds: list[Bound] = []
    for bound in importlib.import_module(f"figures.{module(name)}").measure(soak):
        bounds.append(bound)
        print(bound.line(name), flush=True)
    out = ROOT / "target" / "figures" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**b.__dict__, "met": b.met, "line": b.line(name)} for b in bounds]
    record = {
        "name": name,
        "soak": soak,
        "commit": of,
        "machine": machine(),
        "seconds": time.time() - began,
        "bounds": rows,
    }
    out.write_text(json.dumps(record, indent=1, default=str))
    return bounds


def module(name: str) -> str:
    """Returns the name of the figure's module."""
    return name.replace("-", "_")


def claim(name: str) -> str:
    """Returns what the figure claims: the first sentence of its module's docstring."""
    # Parsed, because some figures import what only their own run installs.
    text = (ROOT / "figures" / f"{module(name)}.py").read_text()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")


def write_page() -> None:
    """Writes docs/figures.md: what each figure claims, and its newest measurement.

    What was not measured on this machine is kept.
    """
    page = ROOT / "docs" / "figures.md"
    there = dict(re.findall(r"^## (\S+)\n\n(.*?```\n.*?```)\n", page.read_text(), re.DOTALL | re.MULTILINE))
    lines = [
        "# Figures",
        "",
        "`make figure NAME=…` measures one claim.",
        "",
        "| figure | what it claims |",
        "|---|---|",
        *(f"| {name} | {claim(name)} |" for name in FIGURES),
        "",
        "The sections below are recorded results, printed by `make figure NAME=…` on a 2-core machine unless",
        "a section names another. They describe the commit that the section names, and their counts may have",
        "changed since. A control arm must read short. A result that misses its bound reads short, too.",
        "",
    ]
    for name in FIGURES:
        path = ROOT / "target" / "figures" / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            bounds = "\n".join(b["line"] for b in record["bounds"])
            there[name] = f"commit {record['commit']}, {record['seconds']:.0f} s\n\n```\n{bounds}\n```"
        if name in there:
            lines += [f"## {name}", "", there[name], ""]
    page.write_text("\n".join(lines))


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("name", nargs="?", choices=FIGURES)
    p.add_argument("--all", action="store_true")
    p.add_argument("--soak", action="store_true")
    args = p.parse_args()
    if not args.name and not args.all:
        p.error(f"name one of {', '.join(FIGURES)}: make figure NAME=demo")
    installed = ROOT / ".venv" / "profile"
    if installed.exists() and installed.read_text().strip() != "release":
        p.error("the installed wheel is the one of make test, with checks in it: run make setup first")
    bounds = [b for name in (FIGURES if args.all else [args.name]) for b in measure(name, args.soak)]
    if args.all:
        write_page()
    # A figure that needs what this machine lacks prints so and has no bounds.
    return 0 if all(b.good for b in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
