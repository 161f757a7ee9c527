"""The cost of failures, on the command line.

Policies compared, accounts that add up, sizes, traces, throughput, histories read back.
"""

from __future__ import annotations

import json
import subprocess

from conftest import EVERSTEP


def _simulate(everstep, *options):
    done = everstep("simulate", *options, "--json")
    assert done.returncode == 0, done.stderr
    return {policy["policy"]: policy for policy in json.loads(done.stdout)["policies"]}


def test_the_same_failures_under_several_policies(everstep, tmp_path):
    page = tmp_path / "page.html"
    found = _simulate(
        everstep, "--trace", "gen:trace-b", "--policies", "unicron,wait,spares:2", "--seeds", "10", "--html", str(page)
    )
    assert list(found) == ["unicron", "wait", "spares:2"]
    assert (
        found["unicron"]["goodput"]["mean"] > found["wait"]["goodput"]["mean"]
        and found["wait"]["first_by_it"]["low"] > 1
    )
    for policy in found.values():
        assert len(policy["seeds"]) == 10
        for seed in policy["seeds"]:
            all_of_it = seed["productive"] + sum(seed["blocked"].values()) + seed["discarded"] + seed["unavailable"]
            assert all_of_it == 16 * 7 * 86_400 * 10**6
    down = [[seed["unavailable"] for seed in policy["seeds"]] for policy in found.values()]
    assert down[0] == down[1] == down[2], "the same failures"
    text = page.read_text()
    assert "<svg" in text and "http" not in text.replace("http://www.w3.org/2000/svg", ""), (
        "one file, nothing from elsewhere"
    )
    again = _simulate(everstep, "--trace", "gen:trace-b", "--policies", "unicron,wait,spares:2", "--seeds", "10")
    assert again == found


def test_own_policies_jobs_and_traces(everstep, tmp_path):
    (tmp_path / "trace.jsonl").write_text(
        '{"kind": "cluster", "nodes": 4, "length_s": 36000}\n{"t_s": 18000, "node": "b", "kind": "sev1", "repair_s": 3600}\n'
    )
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nsource = "our runbook"\non_loss = "wait"\nregroup_s = 60\ninterval_s = 3600\nwrite_s = 36\n'
        "detect_s = { node = 100, process = 10, transient = 10 }\nrestart_s = { node = 200, process = 200, transient = 200 }\n"
    )
    found = _simulate(everstep, "--trace", str(tmp_path / "trace.jsonl"), "--policies", str(tmp_path / "mine.toml"))[
        "mine"
    ]
    seed = found["seeds"][0]
    assert (
        seed["blocked"]["detection"] == 3 * 100 * 10**6
        and seed["blocked"]["waiting"] == 3 * 3500 * 10**6
        and seed["blocked"]["restart"] == 4 * 200 * 10**6
    )
    assert seed["unavailable"] == 3600 * 10**6 and 0 < seed["discarded"] <= 4 * 3600 * 10**6
    (tmp_path / "cluster.toml").write_text('nodes = 4\ngpus_per_node = 8\npeak = "312 TFLOP/s"\n')
    (tmp_path / "jobs.toml").write_text(
        "".join(f'[[job]]\nid = "{j}"\nmin = 1\n[job.throughput]\n1 = "1 PFLOP/s"\n4 = "4 PFLOP/s"\n' for j in "ab")
    )
    files = "--cluster", str(tmp_path / "cluster.toml"), "--jobs", str(tmp_path / "jobs.toml")
    shared = _simulate(everstep, "--trace", str(tmp_path / "trace.jsonl"), "--policies", "everstep,wait", *files)
    assert shared["everstep"]["goodput"]["mean"] > shared["wait"]["goodput"]["mean"]


def test_a_history_is_read_back(everstep, tmp_path):
    path = tmp_path / "incidents.jsonl"
    trace = "gen:poisson,nodes=32,days=60,mtbf=60d,repair=4h..20h"
    then = _simulate(everstep, "--trace", trace, "--policies", "elastic", "--seeds", "1", "--export", str(path))[
        "elastic"
    ]
    found = _simulate(everstep, "--from-incidents", str(path), "--policies", "everstep")
    assert abs(found["recorded"]["goodput"]["mean"] - then["goodput"]["mean"]) < 0.005
    assert found["everstep"]["goodput"]["mean"] > found["recorded"]["goodput"]["mean"]


def test_sizes_and_traces(everstep, tmp_path):
    trace = "gen:poisson,nodes=128,days=60"
    done = everstep("size", "--slo", "goodput=0.9", "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    sized = json.loads(done.stdout)
    assert (
        sized["reached"]
        and sized["best"]["goodput"] >= 0.9
        and set(sized["without"]) == {"spares", "copies", "interval", "detection"}
    )
    never = everstep("size", "--slo", "goodput=0.9999", "--trace", trace)
    assert never.returncode == 1 and "not reached" in never.stdout
    lines = everstep("trace", "write", trace, "--seed", "3")
    (tmp_path / "t.jsonl").write_text(lines.stdout)
    fit = json.loads(everstep("trace", "fit", str(tmp_path / "t.jsonl"), "--json").stdout)
    assert fit["nodes"] == 128 and 150 < fit["mtbf_days"] < 450
    spares = json.loads(
        everstep("size", "--slo", "available=0.99", "--trace", str(tmp_path / "t.jsonl"), "--json").stdout
    )
    assert spares["spares"] >= fit["down"]["mean"]


def test_what_a_model_achieves(everstep, tmp_path):
    options = "plan", "throughput", "--model", "gpt3-7b", "--hardware", "a800"
    done = everstep(*options, "--gpus", "8:128:8", "--svg", str(tmp_path / "dips.svg"), "--json")
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)["sizes"]
    assert [size["gpus"] for size in sizes] == list(range(8, 129, 8))
    assert all(
        0.3 < size["of_peak"] < 0.7 and size["tensor"] * size["pipeline"] * size["data"] == size["gpus"]
        for size in sizes
    )
    assert (tmp_path / "dips.svg").read_text().startswith("<svg")
    large = everstep("plan", "throughput", "--model", "gpt3-175b", "--hardware", "a800", "--gpus", "8")
    assert large.returncode == 0 and "nothing fits" in large.stdout
    # A measured point replaces its computed value and scales the others.
    first = sizes[0]
    header = (
        "source,hardware,model,hidden,layers,heads,vocabulary,sequence,batch,gpus,tensor,pipeline,interleaved,"
        "micro_batch,recompute,sequence_parallel,divided_optimizer,counts,tflops_per_gpu,split"
    )
    line = (
        f"ours,a800,gpt3-7b,4096,32,32,51200,2048,1024,8,{first['tensor']},{first['pipeline']},{first['interleaved']},"
        f"{first['micro_batch']},{first['recompute']},{'yes' if first['tensor'] > 1 else 'no'},yes,model,100,fit"
    )
    (tmp_path / "points.csv").write_text(f"{header}\n{line}\n")
    calibrated = json.loads(
        everstep(*options, "--gpus", "8:16:8", "--points", str(tmp_path / "points.csv"), "--json").stdout
    )["sizes"]
    assert all(size["flops"] < 0.75 * before["flops"] for size, before in zip(calibrated, sizes, strict=False))
    wrong = everstep(*options, "--gpus", "8", "--points", str(tmp_path / "dips.svg"))
    assert wrong.returncode == 2 and "first line" in wrong.stderr


def test_a_policy_that_achieves_nothing_and_a_reader_that_goes_away(everstep):
    never = everstep(
        "simulate",
        "--trace",
        "gen:poisson,nodes=40,mtbf=1d,days=20,repair=10d..11d",
        "--policies",
        "everstep,wait",
        "--seeds",
        "3",
        "--json",
    )
    wait = json.loads(never.stdout)["policies"][1]
    assert wait["first_by_it"] is None or wait["first_by_it"]["mean"] < 1e6, never.stderr
    piped = subprocess.run(
        [
            "bash",
            "-c",
            f"{EVERSTEP} plan throughput --model gpt3-7b --gpus 8:4000:8 --hardware a800 | head -1; echo ${{PIPESTATUS[0]}}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stdout.splitlines()[-1] in ("141", "0") and "panicked" not in piped.stderr
