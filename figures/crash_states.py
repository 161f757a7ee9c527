"""After a power failure, readers find the last durable checkpoint or a newer one.

Every prefix of the file-system operations of commits and clean-ups, with unsynced ones dropped,
torn or reordered. A reader must find the last durable checkpoint or a newer one.

The operations are those of a real run (strace). The model of the disk is pessimistic: data is
durable after fsync of the file and an entry after fsync of its directory; of the rest, any part may
be missing.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures import transfer
from figures.bound import Bound
from harness.cluster import ROOT

CALLS = "open,openat,pwrite64,write,ftruncate,fallocate,fsync,fdatasync,rename,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,close,dup"


@dataclass
class Op:
    """One change, and the number of the operation after which it is certainly on disk."""

    kind: str
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""
    #: Position in the trace.
    at: int = 0
    durable: int = 1 << 60


@dataclass
class Trace:
    """Changes in order, and the number of recorded operations."""

    ops: list[Op] = field(default_factory=list)
    length: int = 0


def _unescape(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _made_durable(trace: Trace, path: str, at: int) -> None:
    """Records that a file or directory was synced: what was done to it before is durable from then
    on."""
    for op in trace.ops:
        of_data = op.kind in ("write", "truncate")
        folder = os.path.dirname(op.to or op.path)
        mine = op.path == path if of_data else folder == path.rstrip(".").rstrip("/")
        if mine and op.durable > at:
            op.durable = at


def record(out: Path, program: list[str]) -> Trace:
    """Runs a program and records what it does below ``out``."""
    with tempfile.NamedTemporaryFile("r") as log:
        subprocess.run(
            ["strace", "-f", "-xx", "-s", "2000000", "-e", f"trace={CALLS}", "-o", log.name, *program],
            check=True,
            cwd=ROOT,
            capture_output=True,
        )
        lines = log.read().splitlines()
    trace, files, pending = Trace(), {}, {}
    root = str(out)

    def below(path: str, folder: str | None = None) -> str | None:
        full = path if path.startswith("/") else os.path.join(folder or str(ROOT), path)
        return os.path.relpath(full, root) if full.startswith(root + "/") or full == root else None

    for line in lines:
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            pending[pid] = call.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", call)
        if resumed:
            call = pending.pop(pid, "") + resumed.group(1)
        found = re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", call, re.S)
        if not found or int(found.group(3)) < 0:
            continue
        name, arguments, result = found.group(1), found.group(2), int(found.group(3))
        texts = (
            [_unescape(t).decode(errors="replace") for t in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]
            if name not in ("pwrite64", "write")
            else []
        )
        handle = re.match(r"(\d+)", arguments)
        here = files.get(int(handle.group(1))) if handle else None
        trace.length += 1
        at = trace.length
        if name in ("open", "openat"):
            folder = here if handle else None
            path = below(texts[0], os.path.join(root, folder) if folder is not None else None)
            files[result] = path
            if path is not None and "O_CREAT" in arguments:
                trace.ops.append(Op("create", path, at=at))
        elif name in ("mkdir", "mkdirat"):
            path = below(texts[-1])
            if path is not None:
                trace.ops.append(Op("mkdir", path, at=at))
        elif name in ("pwrite64", "write") and here is not None:
            data = _unescape(re.search(r'"((?:\\x[0-9a-f]{2})*)"', arguments).group(1))  # type: ignore[union-attr]
            offset = (
                int(arguments.rsplit(",", 1)[1])
                if name == "pwrite64"
                else sum(len(o.data) for o in trace.ops if o.path == here and o.kind == "write")
            )
            trace.ops.append(Op("write", here, offset=offset, data=data[:result], at=at))
        elif name == "ftruncate" and here is not None:
            trace.ops.append(Op("truncate", here, offset=int(arguments.split(",")[1]), at=at))
        elif name in ("rename", "renameat2"):
            a, b = below(texts[0]), below(texts[1])
            if a is not None and b is not None:
                trace.ops.append(Op("rename", a, to=b, at=at))
                files = {
                    f: (b + p[len(a) :] if p and (p == a or p.startswith(a + "/")) else p) for f, p in files.items()
                }
        elif name in ("unlink", "unlinkat", "rmdir"):
            folder = here if handle else None
            path = below(texts[-1], os.path.join(root, folder) if folder is not None else None)
            if path is not None:
                trace.ops.append(
                    Op("rmdir" if name == "rmdir" or "AT_REMOVEDIR" in arguments else "unlink", path, at=at)
                )
        elif name in ("fsync", "fdatasync") and here is not None:
            _made_durable(trace, here, at)
    return trace


def apply(out: Path, ops: list[Op], rng: random.Random | None) -> None:
    """Applies the changes to a real directory. With ``rng``, a write may be torn."""
    for op in ops:
        target = out / op.path
        try:
            if op.kind == "mkdir":
                target.mkdir(exist_ok=True)
            elif op.kind == "create":
                target.touch()
            elif op.kind == "write":
                with target.open("r+b") as f:
                    f.seek(op.offset)
                    cut = (
                        rng.randrange(len(op.data) + 1)
                        if rng and op.durable >= 1 << 59 and rng.random() < 0.3
                        else len(op.data)
                    )
                    f.write(op.data[:cut])
            elif op.kind == "truncate":
                os.truncate(target, op.offset)
            elif op.kind == "rename":
                (out / op.path).rename(out / op.to)
            elif op.kind == "unlink":
                target.unlink()
            else:
                target.rmdir()
        except OSError:
            pass  # depends on something that is missing in this state


def newest(out: Path) -> int:
    """Returns the newest step that can be read completely, or 0 for none."""
    from everstep import _internal

    for row in _internal.list_checkpoints(out):
        try:
            if row.wrong is None:
                for rank in range(row.world_size or 0):
                    _internal.open_shard(row.path, rank).verify()
                return row.step
        except _internal.CheckpointError:
            continue
    return 0


def measure(soak: bool) -> Iterator[Bound]:
    transfer.build()
    rng, states, worse, unsynced = random.Random(4), 0, 0, 0
    per_prefix = 300 if soak else 70
    with transfer.memory() as memory, tempfile.TemporaryDirectory(dir=ROOT / "target") as disk:
        out = Path(disk) / "out"
        trace = record(out, [str(transfer.PROGRAM), "commits", str(out), str(memory), str(64 << 10), "8"])
        # A step is certainly durable once the entry of its directory is.
        named = [
            (op.at, int(op.to.removeprefix("step-")))
            for op in trace.ops
            if op.kind == "rename" and re.fullmatch(r"step-\d+", op.to)
        ]
        durable = [
            (op.durable, int(op.to.removeprefix("step-")))
            for op in trace.ops
            if op.kind == "rename" and re.fullmatch(r"step-\d+", op.to)
        ]
        tries = 0
        for end in range(1, trace.length + 1):
            before = [o for o in trace.ops if o.at <= end]
            if not before or (before[-1].at != end and end != trace.length):
                continue
            must = max((step for at, step in durable if at <= end), default=0)
            hoped = max((step for at, step in named if at <= end), default=0)
            certain = [o for o in before if o.durable <= end]
            for variant in range(per_prefix):
                if variant == 0:
                    chosen, tear = before, None
                elif variant == 1:
                    chosen, tear = certain, None
                else:
                    share = rng.random()
                    chosen, tear = [o for o in before if o.durable <= end or rng.random() < share], rng
                state = Path(disk) / "state"
                state.mkdir()
                apply(state, chosen, tear)
                found = newest(state)
                worse += found < must
                unsynced += found < hoped
                if found < must and worse < 4:
                    print(f"after operation {end} of {trace.length}: step {found}, {must} was durable", file=sys.stderr)
                shutil.rmtree(state)
                states += 1
            tries += 1
    yield Bound(
        "states", states, f"tried, {tries} prefixes of {trace.length} operations (8 commits, retention)", ">=", 5000
    )
    yield Bound("worse", worse, "without the last durable checkpoint or a newer one", "=", 0)
    yield Bound(
        "worse-if-a-rename-were-enough",
        unsynced,
        "states without a step whose directory's entry was not synced yet",
        "=",
        0,
        control=True,
    )
