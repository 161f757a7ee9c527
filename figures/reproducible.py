"""The same seeds give the same bytes, in debug and release builds, with one thread and two."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT

SIMULATIONS = [
    ["--trace", "gen:trace-a", "--policies", "unicron,wait,oobleck,varuna,bamboo,elastic,spares:2", "--seeds", "20"],
    ["--trace", "gen:trace-b", "--policies", "everstep,unicron,gemini", "--seeds", "20"],
    [
        "--trace",
        "gen:weibull,nodes=200,days=200,burst=0.1,lemons=0.1:4,shape=0.6",
        "--policies",
        "everstep,gemini,elastic",
        "--seeds",
        "6",
    ],
    ["--trace", "gen:poisson,nodes=64,days=100,repair=exp:1d", "--policies", "everstep,wait", "--seeds", "6"],
]


def _built(profile: list[str], where: str) -> str:
    subprocess.run(["cargo", "build", "-q", "-p", "everstep", *profile], cwd=ROOT, check=True)
    return str(ROOT / "target" / where / "everstep")


def measure(soak: bool) -> Iterator[Bound]:
    binaries = {"debug": _built([], "debug"), "release": _built(["--release"], "release")}
    different = 0
    for options in SIMULATIONS:
        hashes = {}
        for name, binary in binaries.items():
            for threads, line in ((2, []), (1, ["taskset", "-c", "0"])):
                said = subprocess.run(
                    [*line, binary, "simulate", *options, "--json"], capture_output=True, check=True
                ).stdout
                hashes[name, threads] = hashlib.sha256(said).hexdigest()
        different += len(set(hashes.values())) - 1
        print(options[1], len(said), "bytes", next(iter(hashes.values()))[:16], "debug and release, 1 and 2 threads")
    yield Bound("different", different, f"of {len(SIMULATIONS)} simulations, 4 runs each, other bytes", "=", 0)
