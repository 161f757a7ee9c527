"""Runs the examples of the project's crates, which measure in Rust and print JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from harness.cluster import ROOT


def lines(package: str, example: str, *arguments: object) -> list[Any]:
    """Builds an example in release mode, runs it, and returns the JSON values that it prints, one
    per line."""
    command = ["cargo", "run", "-q", "--release", "-p", package, "--example", example, "--", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
