"""Hand-made checkpoints with correct checksums harm no reader.

All readers run under an address sanitizer. The control is the reader without its checks. The crates
are built for the sanitizer by the same toolchain as everything else (it ships the runtime);
``target/asan`` keeps the builds. Python loads the sanitized extension with the C compiler's runtime
preloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from figures.bound import Bound
from harness import wrapper_script
from harness.cluster import ROOT

#: Inputs of the native reader, of managers' checkpoints in Python, and of DCP's, with and without
#: `--soak`.
INPUTS = {True: (2_000_000, 16_000, 4_000), False: (100_000, 700, 300)}
#: Inputs per process.
NATIVE_BATCH, BATCH = 50_000, 400
#: Inputs of the control arms.
CONTROL = (2_000, 200)
#: By the sanitizer, or before it by the checks of copies that the compiler adds to a debug build.
REPORTS = ("ERROR: AddressSanitizer", "unsafe precondition(s) violated")
#: Exit code of a process with a report.
REPORTED = 99
#: Seconds that a batch may take. One that takes longer has crashed: some reader does not end.
BATCH_SECONDS = 600
#: Memory is checked in full. What only makes reports richer, or patterns in fresh memory, takes a
#: third of the time.
OPTIONS = ":".join(
    (
        "detect_leaks=0",
        f"exitcode={REPORTED}",
        "allocator_may_return_null=1",
        "malloc_context_size=1",
        "detect_stack_use_after_return=0",
        "max_malloc_fill_size=0",
    )
)
#: No input needs as much memory at once. A reader that asks for more gets none, and says so.
ALLOCATION = "max_allocation_size_mb=2048"
UNCHECKED = "everstep_unchecked_lengths"

_WRAPPER = """#!/bin/sh
# Only everstep's own crates come here; generic code of others is compiled with them. A stable compiler has to be told that it may.
RUSTC_BOOTSTRAP=1 exec "$@" -Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer --cfg everstep_sanitized {cfgs}
"""


def _build(checked: bool) -> Path:
    """Builds the driver, the extension and the binary. Returns their directory."""
    target = ROOT / "target" / "asan"
    name = "checked" if checked else "unchecked"
    # The wrapper's name is part of cargo's key for a build.
    wrapper = target / f"rustc-{name}"
    wrapper_script.write(wrapper, _WRAPPER.format(cfgs="" if checked else f"--cfg {UNCHECKED}"))
    line = ["cargo", "build", "-q", "--target-dir", str(target)]
    # Keeps the checks of a debug build, and reads twice as many inputs in the same time.
    environment = {**os.environ, "RUSTC_WORKSPACE_WRAPPER": str(wrapper), "CARGO_PROFILE_DEV_OPT_LEVEL": "1"}
    subprocess.run([*line, "-p", "everstep-checkpoint", "--example", "crafted"], cwd=ROOT, check=True, env=environment)
    subprocess.run([*line, "-p", "everstep-python"], cwd=ROOT, check=True, env=environment)
    built = target / name
    package = built / "python" / "everstep"
    shutil.rmtree(built, ignore_errors=True)
    package.mkdir(parents=True)
    shutil.copy2(target / "debug" / "examples" / "crafted", built / "crafted")
    for entry in (ROOT / "python" / "everstep").iterdir():
        if entry.name not in ("_internal.abi3.so", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    shutil.copy2(target / "debug" / "lib_internal.so", package / "_internal.abi3.so")
    # The interpreter of `ckpt verify` is a child of the binary and loads the same extension.
    wrapper_script.write(built / "interpreter", f'#!/bin/sh\nLD_PRELOAD={_runtime()} exec {sys.executable} "$@"\n')
    return built


def _runtime() -> str:
    """Returns the sanitizer's runtime, for a program that was built without it.

    Also the C++ runtime, because the sanitizer passes on its exceptions (torch's).
    """
    found = (
        subprocess.run(["gcc", f"-print-file-name={n}"], capture_output=True, text=True, check=True).stdout.strip()
        for n in ("libasan.so", "libstdc++.so")
    )
    return ":".join(str(Path(f).resolve(strict=True)) for f in found)


def _limited(line: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs one batch, and ends it and its own processes when it takes too long."""
    with subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        late = ""
        try:
            out, said = process.communicate(timeout=BATCH_SECONDS)
        except subprocess.TimeoutExpired:
            late = f"\nit took more than {BATCH_SECONDS} s"
        finally:
            # `everstep ckpt verify`, and the interpreter of that. Nothing is left of a batch that
            # has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if late:
            out, said = process.communicate()
    return subprocess.CompletedProcess(line, process.returncode, out, said + late)


def _native(built: Path, inputs: int, seed: int) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    with tempfile.TemporaryDirectory(prefix="everstep-crafted-", dir="/dev/shm") as scratch:
        line = [str(built / "crafted"), scratch, str(inputs), str(seed)]
        done = _limited(line, {**os.environ, "ASAN_OPTIONS": OPTIONS})
    return _rows(done), done


def _python(
    built: Path, seed: int, first: int, last: int, *sort: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    with tempfile.TemporaryDirectory(prefix="everstep-crafted-", dir="/dev/shm") as scratch:
        environment = {
            **os.environ, "PYTHONPATH": str(built / "python"), "PYTHON_EXEC": str(built / "interpreter"), "EVERSTEP_BINARY": str(_binary()),
            "ASAN_OPTIONS": f"{OPTIONS}:{ALLOCATION}", "PYTHONMALLOC": "malloc",
        }  # fmt: skip
        line = [
            str(built / "interpreter"),
            str(ROOT / "figures" / "scripts" / "crafted_checkpoints.py"),
            scratch,
            str(seed),
            str(first),
            str(last),
            *sort,
        ]
        done = _limited(line, environment)
        running = Path(scratch) / "running"
        if done.returncode and running.exists():
            done.stderr += f"\nended during {running.read_text()}"
    return _rows(done), done


def _rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Returns what a batch has printed, without a last line that it has not finished."""
    lines = [x for x in done.stdout.splitlines(keepends=True) if x.startswith("{") and x.endswith("\n")]
    return [json.loads(x) for x in lines]


def _binary() -> Path:
    """Returns the path of the everstep that belongs to this interpreter."""
    return Path(sys.executable).parent / "everstep"


def _reports(done: subprocess.CompletedProcess[str]) -> int:
    """Returns 1 if a memory error was reported. Any other abnormal end counts as a crash."""
    return int(any(report in done.stderr for report in REPORTS))


def _in_parallel(
    run: Callable[[Any], tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]], batches: list[Any]
) -> tuple[list[dict[str, Any]], int, int, list[str]]:
    """Runs batches on all cores.

    Returns their rows, the number of sanitizer reports, the number of other abnormal ends, and the
    last output of each batch that did not end well.
    """
    rows: list[dict[str, Any]] = []
    samples: list[str] = []
    reports = crashes = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch, (found, done) in zip(batches, pool.map(run, batches), strict=True):
            rows += found
            reports += _reports(done)
            crashes += int(done.returncode not in (0, REPORTED))
            if done.returncode:
                samples.append(f"{batch}: {done.stderr[-2000:]}")
    return rows, reports, crashes, samples


def _native_bounds(built: Path, inputs: int, seed: int) -> Iterator[Bound]:
    kinds: dict[str, Counter[str]] = {}
    at: Counter[str] = Counter()
    batches = [(min(NATIVE_BATCH, inputs - n), seed + n) for n in range(0, inputs, NATIVE_BATCH)]
    rows, reports, crashes, samples = _in_parallel(lambda batch: _native(built, *batch), batches)
    for row in rows:
        kinds.setdefault(row["kind"], Counter()).update({k: row[k] for k in ("inputs", "accepted", "wrong", "panics")})
        at.update(row["refused"])
        samples += row["samples"]
    for kind, row in kinds.items():
        print(f"  {kind}: {dict(row)}", flush=True)
    print(f"  refused at: {dict(at)}", flush=True)
    total = sum(kinds.values(), Counter())
    yield Bound(
        "native-inputs",
        total["inputs"],
        f"inputs of {len(kinds)} kinds through the native reader, seed {seed}",
        ">=",
        inputs,
    )
    yield Bound(
        "native-accepted",
        round(total["accepted"] / max(total["inputs"], 1), 4),
        "part of them that was read to the end",
        ">=",
        0.1,
    )
    yield Bound(
        "native-stages",
        sum(n >= inputs / 5000 for n in at.values()),
        "stages that refuse some",
        ">=",
        6,
        samples=tuple(at.items()),
    )
    yield Bound("native-reports", reports, "reports of the sanitizer", "=", 0, samples=tuple(samples[:10]))
    yield Bound(
        "native-crashes", crashes + total["panics"], "other ends, and panics", "=", 0, samples=tuple(samples[:10])
    )
    yield Bound(
        "native-wrong", total["wrong"], "inputs accepted as what they are not", "=", 0, samples=tuple(samples[:10])
    )


def disagrees(row: dict[str, Any]) -> bool:
    """Returns whether ``verify`` and restoring disagree on whether the checkpoint is damaged.

    A checkpoint of another model counts as good. No verdict disagrees with any.
    """
    if row.get("imported") is False:
        return False
    if row["verify"].startswith("no verdict"):
        return True
    verdict, good = row.get("restore", "accepted"), row["verify"] == "good"
    if row["kind"].startswith("through"):
        # Objects that only a pickle could restore are good, but refused by a reader that does not
        # unpickle.
        return (verdict == "accepted" and not good) or (
            verdict == "refused" and good and "allow_pickle=True" not in row["said"]
        )
    # A single process that restores a checkpoint of several ranks reads only some of their values,
    # whichever rank has them, and only those of its own objects. `verify` checks what each rank
    # would read, with any objects.
    all_read = row.get("ranks", 1) == 1 and not row.get("others")
    return (verdict == "accepted" and not good and all_read) or (verdict == "damaged" and good)


def _python_bounds(built: Path, inputs: int, dcp: int, seed: int) -> Iterator[Bound]:
    batches = [
        (n, min(n + BATCH, count), *sort)
        for sort, count in (((), inputs), (("dcp",), dcp))
        for n in range(0, count, BATCH)
    ]
    rows, reports, crashes, samples = _in_parallel(lambda batch: _python(built, seed, *batch), batches)
    verdicts: dict[str, Counter[str]] = {}
    for row in rows:
        verdicts.setdefault(row["kind"], Counter())[row.get("restore") or row["import"]] += 1
    for kind, found in sorted(verdicts.items()):
        print(f"  {kind}: {dict(found)}", flush=True)
    crashed = [r for r in rows if "crashed" in (r.get("restore"), r.get("export"), r.get("import"))]
    wrong = [r for r in rows if r.get("wrong")]
    differ = [r for r in rows if disagrees(r)]
    ran = [r for r in rows if r["ran"]]
    accepted = sum("accepted" in (r.get("restore"), r.get("import")) for r in rows) / max(len(rows), 1)
    yield Bound(
        "python-inputs",
        len(rows),
        f"inputs through restore, verify, export and import, seed {seed}",
        ">=",
        inputs + dcp,
        samples=tuple(samples),
    )
    yield Bound("python-accepted", round(accepted, 4), "part of them that was restored or imported", ">=", 0.1)
    yield Bound("python-reports", reports, "reports of the sanitizer", "=", 0, samples=tuple(samples))
    yield Bound(
        "python-crashes",
        crashes + len(crashed),
        "errors that are not CheckpointError",
        "=",
        0,
        samples=(*crashed[:10], *samples[:5]),
    )
    yield Bound("python-wrong", len(wrong), "values that are not what the files say", "=", 0, samples=tuple(wrong[:10]))
    yield Bound(
        "disagree", len(differ), "times that `verify` and `restore` disagree", "=", 0, samples=tuple(differ[:10])
    )
    yield Bound(
        "code-run", len(ran), "inputs after which something of a checkpoint had run", "=", 0, samples=tuple(ran[:10])
    )


def measure(soak: bool) -> Iterator[Bound]:
    native, managers, dcp = INPUTS[soak]
    seed = int(time.time())
    unchecked = _build(False)
    _, done = _native(unchecked, CONTROL[0], seed)
    yield Bound(
        "native-control", _reports(done), "reports with a reader that does not compare lengths", "=", 0, control=True
    )
    reports = _reports(_python(unchecked, seed, 0, CONTROL[1])[1])
    yield Bound("python-control", reports, "reports in Python with that reader", "=", 0, control=True)
    built = _build(True)
    yield from _native_bounds(built, native, seed)
    yield from _python_bounds(built, managers, dcp, seed)
