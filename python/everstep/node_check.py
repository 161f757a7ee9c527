"""A node's part in a node check: its own speed, and a real collective with others. The agent runs
it as ``python -m everstep.node_check``.

Each line on standard input requests a part of a round, each line on standard output answers::

    {"measure": true, "wait": 100, "tests": [{"name": "7/1/a+b", "host": "10.0.0.1", "port": 4321, "first": true}]}
    {"speed": {"compute": 310, "memory": 2100}, "pairs": [5100], "cannot": null}

Everything that may hang or crash with a bad device runs in a child process of its own, which is
killed when its time is up. Times are microseconds; a pair that failed is ``null``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

#: Seconds for a collective of two nodes, set-up included, over sockets and over NCCL.
_PAIR_SECONDS = {"gloo": 3.0, "nccl": 45.0}
#: Limit on the factor by which a collective may take longer on a machine with a load above its
#: number of processors.
_BUSY_MAX = 4.0
#: Seconds of multiplying and of copying: longer than a period of the scheduler's quota (0.1 s).
_COMPUTE_SECONDS, _MEMORY_SECONDS = 0.4, 0.2
#: Seconds for both, with the start of a device.
_MEASURE_SECONDS = 60.0
#: Collectives in a row, the seconds for which they are repeated, and the limit on their number; the
#: best time counts. On a busy machine, a process waits for longer than a collective takes.
_TIMES, _LONG_SECONDS, _MOST_TIMES = 5, 0.25, 40
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Child:
    """``work`` in a forked process; its result, as JSON, comes through a pipe."""

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.pipe, theirs = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _die_with_parent()
                os.dup2(2, 1)  # what libraries print is not an answer
                os.write(theirs, json.dumps({"ok": work()}).encode())
                code = 0
            except BaseException as exc:  # noqa: BLE001  # a child process, which reports the error and ends
                traceback.print_exc()
                os.write(theirs, json.dumps({"why": f"{type(exc).__name__}: {exc}".splitlines()[0][:300]}).encode())
            finally:
                os._exit(code)
        os.close(theirs)

    def result(self) -> dict[str, Any]:
        """Returns ``{"ok": …}``, or ``{"why": …}``."""
        said = b""
        while (left := self.until - time.monotonic()) > 0 and select.select([self.pipe], [], [], left)[0]:
            part = os.read(self.pipe, 1 << 16)
            if not part:
                break
            said += part
        os.close(self.pipe)
        late = time.monotonic() >= self.until
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        if said:
            found: dict[str, Any] = json.loads(said)
            return found
        return {"why": "timed out" if late else f"exited unexpectedly (status {os.waitstatus_to_exitcode(status)})"}


def _devices() -> int:
    """Returns the number of visible GPUs without starting CUDA, which would not survive a fork."""
    import torch

    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def _speed_of(device: str) -> dict[str, int]:
    import torch

    torch.set_num_threads(1)
    on_gpu = device != "cpu"
    sync: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.set_device(device)
    a = torch.rand(
        4096 if on_gpu else 384,
        4096 if on_gpu else 384,
        device=device,
        dtype=torch.float16 if on_gpu else torch.float32,
    )
    source = torch.ones((256 if on_gpu else 16) << 18, device=device)
    target = torch.empty_like(source)

    def timed(work: Callable[[], object], seconds: float) -> int:
        work()
        sync()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            work()
            sync()
            count += 1
        return max(int((time.perf_counter() - began) * 1e6 / count), 1)

    first = a @ a
    compute = timed(lambda: a @ a, _COMPUTE_SECONDS)
    if not torch.equal(first, a @ a):
        raise RuntimeError(f"the same multiplication on {device} gave two different results")
    memory = timed(lambda: target.copy_(source), _MEMORY_SECONDS)
    if not torch.equal(source, target):
        raise RuntimeError(f"a copy in the memory of {device} differs from its source")
    return {"compute": compute, "memory": memory}


def _measure() -> dict[str, Any]:
    """Returns the times of the slowest of this node's devices."""
    devices = [f"cuda:{i}" for i in range(_devices())] or ["cpu"]
    children = [_Child(partial(_speed_of, device), _MEASURE_SECONDS) for device in devices]
    results = [child.result() for child in children]
    for device, result in zip(devices, results, strict=True):
        if "why" in result:
            return {"error": f"{device}: {result['why']}"}
    return {name: max(r["ok"][name] for r in results) for name in ("compute", "memory")}


def _collective(store: Any, rank: int, size: int, device: str, seconds: float) -> int:
    import torch
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))

    def once() -> int:
        data = torch.full(((64 if backend == "nccl" else 4) << 18,), float(rank + 1), device=device)
        began = time.perf_counter()
        dist.all_reduce(data)
        if not bool((data == size * (size + 1) / 2).all()):
            raise RuntimeError("an all-reduce over two nodes returned a wrong sum")
        return max(int((time.perf_counter() - began) * 1e6), 1)

    times: list[int] = []
    took = torch.zeros(1, device=device)
    while took.item() < _LONG_SECONDS * 1e6 and len(times) < _MOST_TIMES:
        times += [once() for _ in range(_TIMES)]
        # Both sides must stop at the same time.
        took = torch.tensor([float(sum(times))], device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return min(times)


def _limit(backend: str) -> float:
    """Returns the seconds for a collective at the load of this machine."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1) if backend == "gloo" else 1.0
    return _PAIR_SECONDS[backend] * min(max(busy, 1.0), _BUSY_MAX)


def _pair(test: dict[str, Any], wait: float) -> list[_Child]:
    """Starts the ranks of this node in one test; they fail if the other node does not arrive."""
    import torch.distributed as dist

    def store() -> Any:
        limit = timedelta(seconds=wait)
        return dist.PrefixStore(
            f"check/{test['name']}",
            dist.TCPStore(test["host"], test["port"], is_master=False, wait_for_workers=False, timeout=limit),
        )

    devices = [f"cuda:{i}" for i in range(_devices())] or ["cpu"]
    seconds = _limit("gloo" if devices == ["cpu"] else "nccl")
    own, other = ("first", "second") if test["first"] else ("second", "first")

    def rank(local: int) -> int:
        met = store()
        met.set(f"{own}/{local}", str(len(devices)))
        theirs = int(met.get(f"{other}/0"))
        # Both have arrived. A library that waits in the kernel does not check the time.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return _collective(
            met, local + (0 if test["first"] else theirs), len(devices) + theirs, devices[local], seconds
        )

    return [_Child(partial(rank, local), wait + seconds) for local in range(len(devices))]


def _part(asked: dict[str, Any]) -> dict[str, Any]:
    speed = _measure() if asked["measure"] else None
    tests = [_pair(test, asked["wait"]) for test in asked["tests"]]
    results = [[child.result() for child in children] for children in tests]
    return {
        "speed": speed,
        "pairs": [max(r["ok"] for r in rs) if all("ok" in r for r in rs) else None for rs in results],
        "cannot": None,
    }


def main() -> None:
    """Answers until standard input ends."""
    _die_with_parent()
    try:
        import torch.distributed as dist

        cannot = None if dist.is_available() else "torch was built without torch.distributed"
    except ImportError as exc:
        cannot = f"{exc}; the check runs a real collective: install torch for {sys.executable}"
    for line in sys.stdin:
        answer = {"speed": None, "pairs": [], "cannot": cannot} if cannot else _part(json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
