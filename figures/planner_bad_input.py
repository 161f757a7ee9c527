"""A mistake in a cluster, jobs, a trace, a policy or a goal gets one clear sentence.

One clear sentence each, exit code 2, nothing on standard output.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound

CLUSTER = 'nodes = 8\ngpus_per_node = 8\npeak = "312 TFLOP/s"\n'
JOB = '[[job]]\nid = "a"\nmin = 1\nnodes = 2\n[job.throughput]\n1 = "1 PFLOP/s"\n4 = "4 PFLOP/s"\n'
DOWN = '{"t_s": 5, "node": 1, "kind": "sev1", "repair_s": 50}\n'
POLICY = (
    'name = "p"\nsource = "-"\non_loss = "wait"\ndetect_s = { node = 1, process = 1, transient = 1 }\n'
    "restart_s = { node = 1, process = 1, transient = 1 }\nregroup_s = 1\n"
)

# What is wrong, files, command line, a word of the sentence.
CASES: list[tuple[str, dict[str, str], str, str]] = [
    ("no unit of a speed", {"c": CLUSTER.replace("312 TFLOP/s", "312"), "j": JOB}, "plan --cluster c --jobs j", "unit"),
    ("no unit of a time", {"c": CLUSTER + 'node_mtbf = "260"\n', "j": JOB}, "plan --cluster c --jobs j", "unit"),
    (
        "negative time",
        {"c": CLUSTER, "j": JOB.replace("nodes = 2", 'nodes = 2\nregroup = "-5s"')},
        "plan --cluster c --jobs j",
        "-5s",
    ),
    (
        "unknown unit",
        {"c": CLUSTER, "j": JOB.replace("nodes = 2", 'nodes = 2\nregroup = "5 years"')},
        "plan --cluster c --jobs j",
        "years",
    ),
    (
        "jobs have more nodes than there are",
        {"c": CLUSTER, "j": JOB.replace("nodes = 2", "nodes = 9")},
        "plan --cluster c --jobs j",
        "9 nodes",
    ),
    (
        "minimum beyond what is known",
        {"c": CLUSTER, "j": JOB.replace("min = 1", "min = 7")},
        "plan --cluster c --jobs j",
        "min = 7",
    ),
    (
        "no throughput",
        {"c": CLUSTER, "j": '[[job]]\nid = "a"\n[job.throughput]\n'},
        "plan --cluster c --jobs j",
        "throughput",
    ),
    ("two jobs of a name", {"c": CLUSTER, "j": JOB + JOB}, "plan --cluster c --jobs j", "two jobs a"),
    ("no such node", {"c": CLUSTER, "j": JOB}, "plan --cluster c --jobs j --event lose:node99", "node99"),
    ("no such event", {"c": CLUSTER, "j": JOB}, "plan --cluster c --jobs j --event rain", "rain"),
    ("no such file", {}, "plan --cluster c --jobs j", "cannot read c"),
    ("no such model", {}, "plan throughput --model gpt9 --gpus 8 --hardware a800", "gpt9"),
    ("no such hardware", {}, "plan throughput --model gpt3-7b --gpus 8 --hardware z1", "z1"),
    ("no such number of GPUs", {}, "plan throughput --model gpt3-7b --gpus 8:4 --hardware a800", "8:4"),
    ("unknown policy", {}, "simulate --trace gen:trace-a --policies rain", "rain"),
    ("no number of spares", {}, "simulate --trace gen:trace-a --policies spares:many", "spares:2"),
    (
        "negative time of a policy",
        {
            "p.toml": POLICY.replace(
                "node = 1, process = 1, transient = 1 }\nregroup", "node = -1, process = 1, transient = 1 }\nregroup"
            )
        },
        "simulate --trace gen:trace-a --policies p.toml",
        "-1",
    ),
    (
        "what a policy does not know",
        {"p.toml": POLICY + "rain = 1\n"},
        "simulate --trace gen:trace-a --policies p.toml",
        "rain",
    ),
    ("overlapping failures", {"t": DOWN + DOWN.replace("5,", "25,")}, "simulate --trace t", "overlap"),
    ("empty trace", {"t": ""}, "simulate --trace t", "empty"),
    ("empty list of faults", {"t": "[]"}, "simulate --trace t", "empty"),
    ("negative time of a failure", {"t": DOWN.replace("5,", "-5,")}, "simulate --trace t", "-5"),
    (
        "failure of a node that is not there",
        {"t": '{"kind": "cluster", "nodes": 1, "length_s": 100}\n' + DOWN},
        "simulate --trace t",
        "only 1 nodes",
    ),
    (
        "failure after the end",
        {"t": '{"kind": "cluster", "nodes": 2, "length_s": 3}\n' + DOWN},
        "simulate --trace t",
        "lasts",
    ),
    ("no JSON", {"t": "rain\n"}, "simulate --trace t", "line 1"),
    (
        "jobs that cannot fit",
        {
            "c": CLUSTER,
            "j": JOB.replace("min = 1", "min = 3")
            + JOB.replace('"a"', '"b"').replace("min = 1", "min = 4")
            + JOB.replace('"a"', '"d"').replace("min = 1", "min = 4"),
        },
        "simulate --trace gen:poisson,nodes=8 --cluster c --jobs j",
        "cannot fit",
    ),
    (
        "cluster of another size",
        {"c": CLUSTER, "j": JOB},
        "simulate --trace gen:poisson,nodes=9 --cluster c --jobs j",
        "9 nodes",
    ),
    ("mean time without a unit", {}, "simulate --trace gen:poisson,mtbf=260", "unit"),
    ("no such generator", {}, "simulate --trace gen:rain", "rain"),
    ("no seeds", {}, "simulate --trace gen:trace-a --seeds 0", "--seeds 0"),
    ("no such goal", {}, "size --slo rain=1 --trace gen:poisson", "rain"),
    ("goal beyond everything", {}, "size --slo goodput=1.5 --trace gen:poisson", "1.5"),
    (
        "trace without failures to fit",
        {"t": '{"kind": "cluster", "nodes": 4, "length_s": 100}\n'},
        "trace fit t",
        "nothing to fit",
    ),
]


def measure(soak: bool) -> Iterator[Bound]:
    wrong = 0
    for what, files, line, word in CASES:
        with tempfile.TemporaryDirectory() as into:
            for name, text in files.items():
                (Path(into) / name).write_text(text)
            run = subprocess.run(["everstep", *line.split()], cwd=into, capture_output=True, text=True, check=False)
        said = run.stderr.strip()
        good = run.returncode == 2 and not run.stdout and word in said and len(said.splitlines()) == 1
        wrong += not good
        print(f"{'ok' if good else 'WRONG'}  {what}: {said if good else (run.returncode, run.stdout[:200], said)}")
    yield Bound("unclear", wrong, f"of {len(CASES)} mistakes without one sentence and exit code 2", "=", 0)
