"""What a script has imported is imported ahead of its next start, where that is safe."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from harness.cluster import EVERSTEP, ROOT, descendants, processes

SCRIPT = """
import json, os, sys, time
os.environ["TORCH_NAMED_BY_SCRIPT"] = "1"  # what torch might read
import torch, plain, ranked, threaded, own_module
import torch.distributed as dist

out = sys.argv[1]
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = {
    "ahead": [m.__name__ for m in (plain, ranked, threaded, own_module) if m.PID != os.getpid()],
    "rank": ranked.RANK,
    "threads": threaded.alive(),
    "variable": os.environ.get("PLAIN_WAS_IMPORTED"),
}
for step in range(100_000):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.barrier()
    if step == 2:
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        with open(f"{out}/{attempt}-{rank}.tmp", "w") as file:
            json.dump({**seen, "pid": os.getpid()}, file)
        os.rename(file.name, f"{out}/{attempt}-{rank}")
    time.sleep(0.02)
"""
PACKAGES = {
    "site-packages/plain.py": "import os\nPID = os.getpid()\nos.environ['PLAIN_WAS_IMPORTED'] = 'yes'\n",
    "site-packages/ranked.py": (
        "import os\nPID = os.getpid()\nRANK = os.environ.get('RANK')\n"
        "open(f'{os.environ[\"IMPORTED\"]}/{RANK}-{PID}', 'w').close()\n"
    ),
    "site-packages/threaded.py": (
        "import os, threading, time\nPID = os.getpid()\n_thread = threading.Thread(target=time.sleep, args=(10_000,), daemon=True)\n"
        "_thread.start()\ndef alive():\n    return _thread.is_alive() and len(os.listdir('/proc/self/task')) > 1\n"
    ),
    "own_module.py": "import os\nPID = os.getpid()\n",
}


def _wait(what, why):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def test_a_restart_finds_what_is_safe_imported_and_nothing_else(env, tmp_path, script):
    import subprocess

    path = script(SCRIPT)
    (tmp_path / "site-packages").mkdir()
    for name, text in PACKAGES.items():
        (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    out.mkdir()
    imported = tmp_path / "imported"
    imported.mkdir()
    env = {**env, "PYTHONPATH": str(tmp_path / "site-packages"), "IMPORTED": str(imported)}
    line = [str(EVERSTEP), "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", path, str(out)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(line, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def seen(attempt: int) -> list[dict[str, object]]:
        found = [out / f"{attempt}-{rank}" for rank in (0, 1)]
        return [json.loads(p.read_text()) for p in found] if all(p.exists() for p in found) else []

    def are_ready() -> bool:
        """Whether the template, the base, and one process for each rank wait for requests."""
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(run.pid)}
        templates = {pid for pid, p in lines.items() if p.exists() and b"warm/template.py" in p.read_bytes()}
        done = {rank for rank, pid in (p.name.split("-") for p in imported.iterdir()) if int(pid) in templates}
        states = processes()
        return len(templates) == 4 and done == {"0", "1"} and all(states.get(p, (0, ""))[1] == "S" for p in templates)

    try:
        _wait(lambda: seen(0), "the first steps")
        assert [s["ahead"] for s in seen(0)] == [[], []]
        _wait(are_ready, "imports ahead")
        os.kill(int(str(seen(0)[1]["pid"])), signal.SIGKILL)
        _wait(lambda: seen(1), (tmp_path / "log").read_text())
        again = seen(1)
    finally:
        run.terminate()
        run.wait(30)
    assert [s["ahead"] for s in again] == [["plain", "ranked"]] * 2
    assert [s["rank"] for s in again] == ["0", "1"], "what a module reads of its rank is its own"
    assert [s["variable"] for s in again] == ["yes", "yes"], "what importing changes is changed in the worker"
    assert all(s["threads"] for s in again), "a module that starts a thread is imported by the worker"
