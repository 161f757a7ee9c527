"""What commands print with `--json`, and the event log, match docs/schema.

The commands about jobs are run on a job with several kinds of faults, before and after the faults;
the other commands get small inputs. As a control, a document with a field of the wrong type must be
rejected.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from figures.bound import Bound
from figures.detector_csv import FAULT, table
from figures.planner_bad_input import CLUSTER, DOWN, JOB
from harness.cluster import EVERSTEP, ROOT, Cluster, cluster

SCHEMAS = ROOT / "docs" / "schema"

#: Command, name of its schema, and the files that the command reads.
OFFLINE: list[tuple[str, str, dict[str, str]]] = [
    ("memory --state 14G --workers 8 --nodes 16 --replicas 4+2 --step-time 2", "memory", {}),
    ("memory --state 1M --replicated", "memory", {}),
    ("doctor", "doctor", {}),
    ("classify error.txt", "classify", {"error.txt": "torch.OutOfMemoryError: CUDA out of memory.\n"}),
    ("classify error.txt", "classify", {"error.txt": "all is well\n"}),
    ("plan --cluster c --jobs j --event lose:node1 --mode fair", "plan", {"c": CLUSTER, "j": JOB}),
    ("plan throughput --model gpt3-7b --gpus 1:64:21 --hardware a100-80", "throughput", {}),
    ("simulate --trace gen:poisson,nodes=16,days=9,mtbf=20d,repair=4h..20h --seeds 2", "simulate", {}),
    ("simulate --trace t --seeds 1 --policies wait,spares:2 --nodes 4", "simulate", {"t": DOWN}),
    ("size --slo goodput=0.9 --trace gen:poisson,nodes=16,days=9,mtbf=20d,repair=4h..20h --seeds 1", "size", {}),
    ("size --slo available=0.9 --trace gen:poisson,nodes=16,days=9,mtbf=20d,repair=4h..20h", "size", {}),
    ("trace fit gen:poisson,nodes=16,days=90,mtbf=20d,repair=4h..20h", "trace-fit", {}),
    ("detect run --csv samples.csv", "detect-run", {}),
    ("detect eval --csv samples.csv --faults faults.csv", "detect-eval", {}),
]


def problems(name: str, document: Any) -> list[str]:
    """Returns the differences between a document and its schema."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return [f"{name}: {e.json_path}: {e.message[:200]}" for e in Draft202012Validator(schema).iter_errors(document)]


def printed(command: str, directory: Path, env: dict[str, str] | None = None) -> Any:
    """Returns the document that a command prints."""
    line = [str(EVERSTEP), *command.split(), "--json"]
    done = subprocess.run(line, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=120)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as e:
        raise RuntimeError(f"{command}: {done.stdout[:500]!r}, {done.stderr[-1000:]}") from e


def of_a_job(seen: Counter[str]) -> Iterator[str]:
    """Yields the differences in the documents about a job, and in the lines of its event log."""

    def ask(c: Cluster, command: str, name: str) -> list[str]:
        seen[name] += 1
        return problems(name, printed(command, ROOT, c.env))

    with (
        tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch,
        cluster(
            "schema",
            ["figures/scripts/dropout.py", "--out", scratch, "--steps", "100000", "--persist", "50", "--pause", "0.01"],
            nodes=2,
            workers=2,
            options=["--max-restarts", "9"],
        ) as c,
    ):
        (Path(scratch) / "kills").touch()
        c.start_all()
        c.wait_step(20, 180)
        about = [
            ("status", "status"),
            ("goodput", "goodput"),
            ("incidents ls", "incidents"),
            ("ckpt ls", "checkpoints"),
        ]
        for command, name in [*about, (f"stacks {c.job}", "stacks"), (f"explain --job {c.job}", "explain")]:
            yield from ask(c, command, name)
        for fault in ("slow --rank 0 --for 3s", "kill --rank 1", "oom --rank 3", "xid --rank 2 --code 79"):
            before = len(c.facts("FirstStep"))
            yield from ask(c, f"inject {fault} --job {c.job}", "inject")
            if fault.startswith(("kill", "oom")):
                c.wait_for(lambda before=before: len(c.facts("FirstStep")) > before, 120, f"the restart after {fault}")
        yield from ask(c, f"inject kill --rank 77 --job {c.job}", "inject")
        for command, name in [*about, (f"explain --job {c.job}", "explain"), ("incidents nodes", "nodes")]:
            yield from ask(c, command, name)
        lines = (c.store / "events.jsonl").read_text().splitlines()
        seen["events"] += len(lines)
        for line in lines:
            yield from problems("events", json.loads(line))


def of_files(seen: Counter[str]) -> Iterator[str]:
    """Yields the differences in the documents of commands that need no job."""
    for command, name, files in OFFLINE:
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
            directory = Path(scratch)
            for file, text in files.items():
                (directory / file).write_text(text)
            if "samples.csv" in command:
                table(directory / "samples.csv", long=False)
                start, end = (1_790_000_000 + at for at in FAULT)
                (directory / "faults.csv").write_text(f"machine,start,end\nhost-4,{start},{end}\n")
            seen[name] += 1
            yield from problems(name, printed(command, directory))


def measure(soak: bool) -> Iterator[Bound]:
    seen: Counter[str] = Counter()
    wrong = [*of_files(seen), *of_a_job(seen)]
    print("\n".join(wrong[:20]), dict(seen))
    yield Bound("differ", len(wrong), f"differences from the schemas in {seen.total()} documents and lines", "=", 0)
    never = {path.stem for path in SCHEMAS.glob("*.json")} - set(seen)
    yield Bound("not-printed", len(never), f"schemas of which no document was printed ({sorted(never)})", "=", 0)
    document = printed("memory --state 1M", ROOT)
    text, missing = {**document, "slot_bytes": "1"}, {"version": 1}
    unnoticed = sum(not problems("memory", changed) for changed in (text, missing))
    yield Bound("unnoticed", unnoticed, "of the changed documents go unnoticed", "=", 0)
    yield Bound("control", len(problems("memory", text)), "differences with a changed type", "=", 0, True)
