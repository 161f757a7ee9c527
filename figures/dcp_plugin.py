"""Through everstep, DCP is bit-exact and loses no save once async_save has returned.

DCP's own patterns bit for bit; killed right after async_save; a second save while the first
uploads. DCP's own storage is the comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.snapshot_blocking import EVERSTEP
from harness.cluster import ROOT
from harness.ranks import run_ranks

SCRIPT = "figures/scripts/dcp_runs.py"
#: Tensors of one save of ``mix``.
TENSORS = 32


def _lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _under_everstep(home: Path, *arguments: str) -> list[dict[str, Any]]:
    line = [EVERSTEP, "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", SCRIPT, *arguments]
    env = {**os.environ, "EVERSTEP_STATE_DIR": str(home / "state"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode and arguments[0] != "die":
        raise RuntimeError(done.stderr[-3000:])
    return _lines(done.stdout)


def _alone(*arguments: str, timeout: float = 300) -> list[dict[str, Any]] | None:
    """Runs two ranks without a launcher. Returns ``None`` if they fail."""
    ended = run_ranks([SCRIPT, *arguments], 2, timeout=timeout, cwd=ROOT, warm=False, OMP_NUM_THREADS="1")
    return _lines(ended[0].out) if all(r.code == 0 for r in ended) else None


def _mixed(found: list[dict[str, Any]] | None, step: int) -> int:
    """Returns the number of tensors that are not entirely of this step."""
    if not found:
        raise RuntimeError("what was saved cannot be loaded")
    return sum(1 for values in found[0]["values"] if values != [float(step)])


def _mixed_by_dcp(home: Path, attempts: int = 3) -> tuple[int, str]:
    """Returns the number of mixed tensors and how the two saves of DCP ended.

    They sometimes wait for each other forever, and are then repeated. In a save that cannot be
    loaded, all tensors count as mixed.
    """
    for attempt in range(attempts):
        where = home / f"mix-dcp-{attempt}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            _alone("mix", str(where), "--peer", timeout=60)
            loaded = [(_alone("load", str(where / f"step-{n}"), "--peer"), n) for n in (1, 2)]
            unreadable = sum(1 for found, _ in loaded if not found)
            ended = f"; {unreadable} of 2 cannot be loaded" if unreadable else ""
            return sum(_mixed(found, n) if found else TENSORS for found, n in loaded), ended
    return 2 * TENSORS, f"; the two saves waited for each other for ever, {attempts} times of {attempts}"


def measure(soak: bool) -> Iterator[Bound]:
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        home = Path(scratch)
        for label, run in (("agent", lambda *a: _under_everstep(home, *a)), ("plain", lambda *a: _alone(*a) or [])):
            told = run("patterns", str(home / f"patterns-{label}"))
            good = sum(1 for t in told if t["good"])
            missed = ", ".join(t["pattern"] for t in told if not t["good"])
            yield Bound(
                f"patterns-{label}",
                good,
                f"of {len(told)} bit-exact{': not ' + missed if missed else ''}",
                ">=",
                max(len(told), 22),
            )
        kills = 20 if soak else 5
        lost = theirs = 0
        for n in range(kills):
            _under_everstep(home, "die", str(home / f"die-{n}"))
            found = _alone("load", str(home / f"die-{n}"))
            lost += found is None or _mixed(found, 1) > 0
            _alone("die", str(home / f"die-dcp-{n}"), "--peer")
            found = _alone("load", str(home / f"die-dcp-{n}"), "--peer")
            theirs += found is None or _mixed(found, 1) > 0
        yield Bound(
            "lost",
            lost,
            f"of {kills} checkpoints whose processes were killed right after async_save had returned",
            "=",
            0,
        )
        yield Bound("lost-by-dcp", theirs, f"of {kills} (DCP's own storage)", "=", 0, control=True)
        _under_everstep(home, "mix", str(home / "mix"))
        _alone("mix", str(home / "mix-plain"))
        mixed = sum(
            _mixed(_alone("load", str(home / where / f"step-{n}")), n) for where in ("mix", "mix-plain") for n in (1, 2)
        )
        yield Bound(
            "mixed",
            mixed,
            "of 128 tensors of two saves, the second made while the first was on its way, with and without an agent",
            "=",
            0,
        )
        mixed, ended = _mixed_by_dcp(home)
        yield Bound(
            "mixed-by-dcp", mixed, f"of 64 tensors (DCP with a stager that is used again{ended})", "=", 0, control=True
        )
