"""Runs a case under one launcher and reduces the result to what can be compared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.cluster import free_port

from .cases import Case

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
LAUNCHERS = {"torchrun": [str(BIN / "torchrun")], "everstep": [str(BIN / "everstep"), "run"]}
RANK_VARIABLES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
}  # fmt: skip

#: Documented differences and their reasons (docs/guide/from-torchrun.md explains them to users).
DOCUMENTED = {
    "environment MASTER_ADDR": "a lone node meets itself on 127.0.0.1, not on its host name",
    "environment MASTER_PORT": "the process-group store has a port of its own in each generation, unless --master-port fixes it",
    "environment TORCHELASTIC_RUN_ID": "a lone node's random id is a job name, not a UUID",
    "environment EVERSTEP_*": "variables of our own are added",
    "exit code on a bad command line": "2, before anything is started (torchrun: 1)",
    "session of a --run-path worker": "its own, as for every worker (torchrun: the launcher's)",
    "exit code on a signal": "128 + signal (torchrun: 1); --exit-codes torchrun gives 1",
}


def run(case: Case, launcher: str) -> dict[str, Any]:
    """Returns the exit codes, workers, logs and error files of a case under ``launcher``."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        tmp = Path(scratch)
        (tmp / "notes").mkdir()
        port = free_port()

        def fill(text: str, node: int) -> str:
            for name, value in (
                ("port", port),
                ("tmp", tmp),
                ("probe", ROOT / "figures/conformance/probe.py"),
                ("node", node),
                ("python", sys.executable),
            ):
                text = text.replace("{" + name + "}", str(value))
            return text

        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PET_", "TORCHELASTIC_", "EVERSTEP_")) and k != "OMP_NUM_THREADS"
        }
        env |= {k: fill(v, 0) for k, v in case.env.items()} | {"PROBE_OUT": str(tmp / "notes")}
        if launcher == "everstep":
            env |= {"EVERSTEP_STATE_DIR": str(tmp / "state"), "EVERSTEP_SHM_DIR": str(tmp / "memory")}
        nodes = []
        for node, line in enumerate(case.lines):
            log = (tmp / f"out-{node}").open("w")
            command = [*LAUNCHERS[launcher], *(fill(a, node) for a in line)]
            nodes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=(tmp / f"err-{node}").open("w"),
                )
            )
            assert nodes[-1].stdin is not None
            with contextlib.suppress(BrokenPipeError):
                nodes[-1].stdin.write(b"typed\n")
                nodes[-1].stdin.close()
        if case.term_after is not None:
            _wait_for_notes(tmp / "notes", 2)
            nodes[0].send_signal(signal.SIGTERM)
        codes = [n.wait(120) for n in nodes]
        return _reduce(case, tmp, codes, port, env)


def _wait_for_notes(notes: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(notes.glob("*.json"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)


def _reduce(case: Case, tmp: Path, codes: list[int], port: int, given: dict[str, str]) -> dict[str, Any]:
    def plain(text: str) -> str:
        text = (
            text.replace(f"<{socket.gethostname()}>", "<HOST>")
            .replace(str(tmp), "TMP")
            .replace(str(ROOT), "ROOT")
            .replace(str(port), "PORT")
        )
        # The directory of a run ends in a random string.
        text = re.sub(r"(logs\d?|/torchelastic_\w+|jobs/[^/]+/logs)/([^/]*)_\w{8}/", r"\1/\2_X/", text)
        text = re.sub(r"^(/\S+/watchdog_timer_[0-9a-f-]{36}|TMP/memory/\S+/timer)$", "TIMER", text)
        # So does a random id: a UUID, or a job name.
        return re.sub(r"/([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|job-\d+-\d+)_X/", "/RANDOM_X/", text)

    workers = {}
    for note in sorted((tmp / "notes").glob("*.json")):
        seen = json.loads(note.read_text())
        # The interpreter's name depends on the name under which pip was called.
        seen["executable"] = re.sub(r"python[\d.]*$", "python", seen["executable"])
        # Variables that the launcher has not touched are irrelevant.
        environment = {
            k: plain(v) for k, v in seen.pop("environment").items() if given.get(k) != v or k in RANK_VARIABLES
        }
        if environment.get("MASTER_ADDR") in (socket.getfqdn(), socket.gethostname()):
            environment["MASTER_ADDR"] = "HOST"
        seen["rank variables"] = {k: v for k, v in environment.items() if k in RANK_VARIABLES}
        for name in RANK_VARIABLES | {
            "PYTHONUNBUFFERED",
            "EVERSTEP_STATE_DIR",
            "EVERSTEP_SHM_DIR",
            "_",
            "SHLVL",
            "OLDPWD",
        }:
            environment.pop(name, None)
        error_file = environment.pop("TORCHELASTIC_ERROR_FILE", "")
        seen["error file"] = error_file[error_file.rfind("attempt_") :] if "attempt_" in error_file else error_file
        seen["environment"] = environment
        key = "-".join(note.stem.split("-")[:2])
        workers[key] = json.loads(plain(json.dumps(seen)))
    files = {}
    for root in sorted(tmp.glob("logs*")):
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.name != "error.json":
                name = plain(str(path)).replace("TMP/", "")
                files[name] = sorted([*files.get(name, []), *_own(path.read_text())])
            elif path.is_file():
                files[plain(str(path)).replace("TMP/", "")] = _error(path)
    if (tmp / "own.json").exists():
        files["own.json"] = _error(tmp / "own.json")
    # Neither launcher promises which of two nodes gets which ranks (except with --node-rank), so
    # their output is compared together.
    shown = [
        sorted(plain(x) for i in range(len(codes)) for x in _own((tmp / f"{kind}-{i}").read_text()))
        for kind in ("out", "err")
    ]
    return {"exit": codes, "workers": workers, "files": files, "console": shown}


def _own(text: str) -> list[str]:
    """Returns the lines that the probe wrote, with their prefixes."""
    return [
        line
        for line in text.splitlines()
        if re.search(r"(out|err) of rank \d", line) and not line.startswith("everstep: ")
    ]


def _error(path: Path) -> Any:
    """Returns an error file without what differs in every run."""
    data = json.loads(path.read_text())
    message = data["message"]
    if isinstance(message, dict):
        message["extraInfo"]["timestamp"] = "T"
        stack = message["extraInfo"].pop("py_callstack")
        # torchrun's own frames differ from launcher to launcher; the user's do not.
        message["extraInfo"]["own frames"] = [
            x.strip().replace(str(ROOT), "ROOT")
            for x in stack.splitlines()
            if "probe.py" in x or x.startswith("ValueError")
        ]
    return data


def differences(case: Case, theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """Returns the names of what differs, or an empty set."""
    found: set[str] = set()
    if theirs["exit"] != ours["exit"]:
        usage = ours["exit"] == [2] and not ours["workers"]
        found.add(
            "exit code on a bad command line"
            if usage
            else "exit code on a signal"
            if case.term_after is not None
            else f"exit {theirs['exit']} / {ours['exit']}"
        )
        if usage:
            return found
    if set(theirs["workers"]) != set(ours["workers"]):
        return found | {f"workers {sorted(theirs['workers'])} / {sorted(ours['workers'])}"}
    for rank, t in theirs["workers"].items():
        o = ours["workers"][rank]
        for key in t:
            if key == "environment":
                found |= _environment(t[key], o[key])
            elif key == "session" and "--run-path" in case.lines[0] and t[key] != o[key]:
                found.add("session of a --run-path worker")
            elif t[key] != o[key]:
                found.add(f"{key}: {t[key]!r} / {o[key]!r}")
    for name in sorted(set(theirs["files"]) | set(ours["files"])):
        t, o = theirs["files"].get(name), ours["files"].get(name)
        if t != o:
            found.add(f"file {name}: {t} / {o}")
    if theirs["console"] != ours["console"]:
        found.add(f"console: {theirs['console']} / {ours['console']}")
    return found


def _environment(theirs: dict[str, str], ours: dict[str, str]) -> set[str]:
    found = set()
    for name in set(theirs) | set(ours):
        if theirs.get(name) != ours.get(name):
            found.add("environment EVERSTEP_*" if name.startswith("EVERSTEP_") else f"environment {name}")
    return found
