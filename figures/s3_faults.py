"""When requests to an object store fail, no saved checkpoint is lost or restored in part.

Two servers (s3s-fs and moto), and one that ignores conditional puts. Each request of a save is hit
in turn: answered with 503, late, cut off before or after the server has done it, or the writer is
killed there. Afterwards another process restores: what was reported as saved is there, bit for bit,
and never half of anything. Also, the time compared with one stream.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from figures.bound import Bound
from harness import objects
from harness.cluster import ROOT
from harness.objects import BUCKET, Fault, Proxy

SCRIPT = "figures/scripts/object_writer.py"
SERVERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "s3s-fs": (objects.s3s, False),
    "moto": (objects.moto, False),
    "unconditional": (objects.moto, True),
}
#: Kinds of faults, and the number of requests from one trial to the next.
KINDS = {"503": 1, "slow": 6, "cut-before": 1, "cut-after": 1, "crash-before": 1, "crash-after": 1}
#: Bytes per second of a connection, and megabytes of the state, for the comparison with one stream.
RATE, LARGE_MB = 40_000_000, 256


class Writer:
    """Processes that have already imported torch, one after the other."""

    def __init__(self, environment: dict[str, str]) -> None:
        env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, SCRIPT]
        self.process = subprocess.Popen(
            line, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the writer is gone")
        return dict(json.loads(line))

    def run(self, line: str, ready: Callable[[int], None] = lambda pid: None) -> dict[str, Any]:
        """Returns what the writer found, or nothing if it was killed.

        ``ready`` is called before it saves.
        """
        self._say(line)
        pid, found = self._hear()["pid"], dict[str, Any]()
        while "ended" not in (said := self._hear()):
            if "ready" in said:
                ready(pid)
                self._say("")
            else:
                found = said
        return found

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def _cases(count: int, kinds: dict[str, int]) -> Iterator[Fault]:
    for kind, every in kinds.items():
        for at in range(0, count, every):
            yield Fault(kind, at)
    # The store is down for a while.
    yield Fault("503", count // 2, times=5)


def _faults(name: str) -> tuple[int, list[str]]:
    """Returns the number of cases, and what went wrong."""
    serve, unconditional = SERVERS[name]
    wrong: list[str] = []
    cases = 0
    with serve() as server, Proxy(server, unconditional).running() as proxy:
        writer = Writer(objects.environment(proxy.url))
        try:
            url = f"s3://{BUCKET}/run"
            none = Fault("none", -1)
            assert writer.run(f"save 1 {url}").get("saved") == 1, "the first save failed"
            assert writer.run(f"save 2 {url}", lambda pid: proxy.begin(none)).get("saved") == 2
            there, count = 2, proxy.count
            print(f"{name}: a save is {count} requests: {proxy.seen}", file=sys.stderr)
            for fault in _cases(count, KINDS):
                cases += 1
                step = there + 1

                def ready(pid: int, fault: Fault = fault) -> None:
                    proxy.kill = lambda: objects.end(pid)
                    proxy.begin(fault)

                said = writer.run(f"save {step} {url}", ready)
                hit = proxy.seen[fault.at : fault.at + 1]
                proxy.begin(none)
                found = writer.run(f"restore {url}")
                case = f"{name}: {fault.kind} at {fault.at} {hit}"
                if "error" in found or not found.get("exact"):
                    wrong.append(f"{case}: cannot restore: {found}")
                elif found["step"] not in (there, step) or (said.get("saved") == step and found["step"] != step):
                    wrong.append(f"{case}: {said} was saved after step {there}, step {found['step']} restored")
                elif "error" in said:
                    wrong.append(f"{case}: the save failed: {said['error']}")
                there = max(there, found.get("step", there))
        finally:
            writer.close()
    return cases, wrong


_ONE_STREAM = """
import boto3, sys, time
from botocore.config import Config
config = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
s3 = boto3.client("s3", endpoint_url=sys.argv[1], config=config)
data = bytes(int(sys.argv[2]) << 20)
began = time.perf_counter()
s3.put_object(Bucket=sys.argv[3], Key="one", Body=data)
put = time.perf_counter() - began
began = time.perf_counter()
assert len(s3.get_object(Bucket=sys.argv[3], Key="one")["Body"].read()) == len(data)
print(put, time.perf_counter() - began)
"""


def _streams() -> tuple[list[float], list[float]]:
    """Returns our seconds divided by one stream's, for writing and reading, by round."""
    writes, reads = [], []
    with objects.s3s() as server, objects.Link(server, RATE).running() as proxy:
        env = {**objects.environment(proxy.url), "LARGE_MB": str(LARGE_MB)}
        writer = Writer(env)
        try:
            for n in range(1, 4):
                ours = writer.run(f"save {n} s3://{BUCKET}/big")["seconds"]
                line = [sys.executable, "-c", _ONE_STREAM, proxy.url, str(LARGE_MB), BUCKET]
                out = subprocess.run(line, env={**os.environ, **env}, check=True, capture_output=True, text=True).stdout
                put, get = map(float, out.split())
                found = writer.run(f"restore s3://{BUCKET}/big")
                assert found["exact"] and found["step"] == n, found
                print(
                    f"write {ours:.2f} s, one stream {put:.2f} s; read {found['seconds']:.2f} s, one stream {get:.2f} s",
                    file=sys.stderr,
                )
                writes.append(put / ours)
                reads.append(get / found["seconds"])
        finally:
            writer.close()
    return writes, reads


def measure(soak: bool) -> Iterator[Bound]:
    for name in SERVERS:
        began = time.monotonic()
        cases, wrong = _faults(name)
        for line in wrong:
            print(line, file=sys.stderr)
        yield Bound(
            name,
            len(wrong),
            f"of {cases} cases lost something, showed half of something, or failed a save that could go on "
            f"({time.monotonic() - began:.0f} s)",
            "=",
            0,
        )
    writes, reads = (sorted(x) for x in _streams())
    yield Bound(
        "write",
        round(writes[1], 2),
        f"times as fast as one stream ({RATE / 1e6:.0f} MB/s a connection; {writes[0]:.2f} to {writes[-1]:.2f})",
        ">=",
        3,
        samples=tuple(writes),
    )
    yield Bound(
        "read",
        round(reads[1], 2),
        f"times as fast as one stream ({reads[0]:.2f} to {reads[-1]:.2f})",
        ">=",
        3,
        samples=tuple(reads),
    )
