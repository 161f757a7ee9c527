"""A worker that records what it was given, and then ends as ``--do`` requests."""

import json
import os
import signal
import sys
import time


def note() -> None:
    """Writes everything that a launcher decides for a worker, as JSON, into ``$PROBE_OUT``."""
    environment = dict(os.environ)
    out = environment.pop("PROBE_OUT")
    seen = {
        "argv": sys.argv,
        "executable": sys.executable,
        "unbuffered": sys.stdout.write_through,
        "cwd": os.getcwd(),
        "path0": sys.path[0],
        "session": os.getsid(0) == os.getpid(),
        "stdin": sys.stdin.read() if "--stdin" in sys.argv else None,
        "environment": environment,
    }
    name = f"{environment['RANK']}-{environment['TORCHELASTIC_RESTART_COUNT']}-{os.getpid()}.json"
    with open(os.path.join(out, name), "w") as file:
        json.dump(seen, file)
    rank = environment["RANK"]
    os.write(1, f"out of rank {rank}: apple\nout of rank {rank}: pear, plum\n".encode())
    os.write(2, f"err of rank {rank}: apple\nerr of rank {rank}: pear, plum\n".encode())


def take_timer() -> None:
    """Handles ``--timer=SECONDS``: a block of code that must end within that time."""
    seconds = next((a.removeprefix("--timer=") for a in sys.argv if a.startswith("--timer=")), "")
    if seconds:
        from torch.distributed.elastic import timer

        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=float(seconds), scope="probe"):
            end()


def wait_for_all() -> None:
    """Waits for the note of every rank of this attempt, because the first failure ends all."""
    attempt, size = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        notes = [n for n in os.listdir(os.environ["PROBE_OUT"]) if n.split("-")[1] == attempt]
        if len(notes) >= size:
            return
        time.sleep(0.02)


def end() -> None:
    """Handles ``--do WHAT[@RANK]``. Other ranks wait to be ended."""
    what = next((a.removeprefix("--do=") for a in sys.argv if a.startswith("--do=")), "")
    what, _, only = what.partition("@")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not what or (what == "fail-once" and not first):
        return
    wait_for_all()
    if only and os.environ["RANK"] != only:
        time.sleep(60)
    if what in ("exit", "fail-once"):
        sys.exit(3)
    if what == "message":
        sys.exit("the end")
    if what == "raise":
        raise ValueError("no such apple")
    if what == "wait":
        time.sleep(60)
    os.kill(os.getpid(), signal.Signals[what])


if __name__ == "__main__":
    note()
    take_timer()
    if any(a.startswith("--do=raise") for a in sys.argv) and "--record" in sys.argv:
        from torch.distributed.elastic.multiprocessing.errors import record

        record(end)()
    else:
        end()
