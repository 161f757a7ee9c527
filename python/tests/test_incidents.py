"""A running job is broken on purpose: what is noticed, named, reported, accounted for, and sent to
whom.

Tested with real workers, signals and HTTP.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser

from figures.receivers import WEBHOOK_SECRET, Receivers


def test_what_is_injected_is_what_is_told(job):
    j = job()
    done = j.ask("inject", "kill", "--rank", "1")
    assert done.returncode == 0 and "injecting kill into rank 1 of job job, node 0" in done.stdout, done
    assert j.incident(1)["failure"]["verdict"]["class"] == "killed"
    j.steps()
    # Like the kernel, which names the process in its log.
    j.ask("inject", "oom", "--rank", "0")
    j.wait(lambda: j.incident(2)["blamed"]["verdict"]["class"] == "host-memory")
    said = j.ask("explain", "inc-2").stdout.splitlines()
    assert len(said) <= 12 and "Killed process" in "\n".join(said), said
    assert any(line.startswith("Why") and "host-memory" in line for line in said), said
    listed = j.ask("approve")
    assert listed.returncode == 0 and listed.stdout == "" and "no requests" in listed.stderr, listed
    missing = j.ask("inject", "kill", "--rank", "7")
    assert missing.returncode == 1 and "has no rank 7 in training" in missing.stderr


def test_what_prometheus_reads_counts_what_happened(job):
    j = job()
    j.ask("inject", "xid", "--rank", "1", "--code", "79")
    j.ask("inject", "kill", "--rank", "1")
    j.incident(1)
    config = j.ask("metrics", "--config").stdout
    target, token = (
        re.search(pattern, config).group(1) for pattern in (r'targets: \[ "(.+?)" \]', r'credentials_file: "(.+?)"')
    )

    def read() -> dict[tuple[str, ...], float]:
        """Like Prometheus: HTTP/1.1, the token as bearer, OpenMetrics."""
        asked = urllib.request.Request(
            f"http://{target}/metrics", headers={"Authorization": f"Bearer {Path(token).read_text().strip()}"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert "openmetrics" in answer.headers["Content-Type"]
            text = answer.read().decode()
        return {
            (s.name, *sorted(v for k, v in s.labels.items() if k != "run")): s.value
            for family in parser.text_string_to_metric_families(text)
            for s in family.samples
        }

    j.wait(lambda: read()[("everstep_incidents_total", "gpu-lost", "recovered")] == 1)
    # A restarted job has a step duration from its second step on.
    j.wait(lambda: (now := read())[("everstep_last_step",)] > 20 and ("everstep_step_duration_seconds",) in now)
    # The alerting rules refer only to metrics that are served.
    rules = j.ask("metrics", "--alerts").stdout
    served = j.ask("metrics").stdout
    families = {
        name
        for family in parser.text_string_to_metric_families(served)
        for name in (family.name, family.name + "_total")
    }
    assert "alert: " in rules and set(re.findall(r"everstep_\w+", rules)) <= families
    assert set(re.findall(r'state="(\w+)"', rules)) <= set(re.findall(r'world_size{.*state="(\w+)"', served))
    if promtool := shutil.which("promtool"):
        (j.out / "rules.yml").write_text(rules)
        subprocess.run([promtool, "check", "rules", j.out / "rules.yml"], check=True)
    now = read()
    assert now[("everstep_world_size", "active")] == 2 and now[("everstep_node_state", "0", "active")] == 1
    assert now[("everstep_coordinator_leader",)] == 1
    assert 0 < now[("everstep_goodput_ratio", "all")] <= 1
    held = sum(v for k, v in now.items() if k[0] == "everstep_gpu_seconds_total")
    spent = json.loads(j.ask("goodput", "--json").stdout)["jobs"][0]["held_us"] / 1e6
    assert 0 < held <= spent + 1
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{target}/metrics", timeout=10)
    # Which card it is, and everything about it in one file.
    ranked = json.loads(j.ask("incidents", "nodes", "--json").stdout)["jobs"][0]["nodes"]
    assert ranked[0]["of_machine"] == 1 and ranked[0]["devices"], ranked
    bundle = j.out / "bundle.tar.gz"
    assert j.ask("incidents", "export", "inc-1", "-o", str(bundle)).stdout.strip() == str(bundle)
    with tarfile.open(bundle) as files:
        names = files.getnames()
        about = json.load(files.extractfile("job-inc-1/incident.json"))
        facts = [json.loads(line) for line in files.extractfile("job-inc-1/facts.jsonl")]
    assert about["incident"]["number"] == 1 and any("IncidentOpened" in f["fact"] for f in facts)
    assert "job-inc-1/explain.txt" in names and any(n.endswith("stderr.log") for n in names), names
    assert {"job-inc-1/logs/agent-0.jsonl", "job-inc-1/logs/coordinator.jsonl"} <= {*names}, names
    assert bundle.stat().st_mode & 0o777 == 0o600
    again = j.ask("incidents", "export", "inc-1", "-o", str(bundle))
    assert again.returncode == 78 and "another -o" in again.stderr


def test_the_kernels_log_says_why_a_process_was_killed(job):
    j = job()
    pid = j.pid(1)
    with (j.out / "kmsg").open("a") as log:
        log.write(f"[ 12.345] Out of memory: Killed process {pid} (python) total-vm:1kB\n")
    os.kill(pid, signal.SIGKILL)
    j.incident(1)
    j.wait(lambda: j.incident(1)["blamed"]["verdict"]["class"] == "host-memory")


def test_an_exception_is_told_at_once_and_the_process_may_take_itself_down(job):
    j = job()
    (j.out / "ask-1").write_text("raise ValueError('odd batch')")
    opened = j.wait(lambda: json.loads(j.ask("incidents", "ls", "--json").stdout)["incidents"], 20)
    assert "odd batch" in opened[0]["incident"]["failure"]["message"]
    down = j.out / "down-1"
    j.wait(lambda: down.read_text() == "written to its end", 20)
    # Reported when it was raised, not when the process had ended.
    assert opened[0]["incident"]["opened"] / 1e6 < down.stat().st_mtime
    assert j.incident(1)["failure"]["cause"] == {"Exited": {"Code": 1}}


def test_stacks_show_the_odd_rank_first(job):
    j = job()
    (j.out / "ask-1").write_text("def stuck_here():\n    while True: pass\nstuck_here()")
    j.wait(lambda: not (j.out / "ask-1").exists())
    lines = j.wait(lambda: [line for line in j.ask("stacks").stdout.splitlines() if line.startswith("rank")], 20)
    assert len(lines) == 2, lines
    told = j.wait(lambda: j.incident(1)["stacks"])
    assert any("stuck_here" in frame for frame in told["1"][:1]) and told["0"], told
    assert "Stacks" in j.ask("explain").stdout


def test_the_time_goes_somewhere(job):
    j = job()
    (j.out / "ask-0").write_text("with everstep.section('eval'): time.sleep(2)")
    j.wait(lambda: not (j.out / "ask-0").exists())
    j.steps()
    j.ask("inject", "kill", "--rank", "1")
    j.incident(1)
    j.steps()

    def counted() -> dict[str, Any] | None:
        goodput = json.loads(j.ask("goodput", "--json").stdout)["jobs"][0]
        spent = goodput["spent_us"]
        return goodput if spent["eval"] >= 2e6 and spent["productive"] > 0 and spent["decide"] > 0 else None

    found = j.wait(counted)
    assert sum(found["spent_us"].values()) == found["held_us"]
    assert found["incidents"]["1"], found
    by = j.ask("goodput", "--by", "category").stdout
    assert "eval" in by and "productive" in by
    assert "inc-1" in j.ask("goodput", "--by", "incident").stdout
    assert "node 0" in j.ask("goodput", "--by", "node", "--since", "1h").stdout
    assert j.ask("goodput", "--since", "soon").returncode == 2


def test_a_webhook_hears_of_it_once_and_again_when_it_is_over(job, tmp_path):
    got = Receivers(fail_first=1)
    routes = tmp_path / "notify.toml"
    routes.write_text(
        f'[[route]]\nkind = "webhook"\nurl = "{got.url}/hook"\nsecret = "{WEBHOOK_SECRET}"\n[[route]]\nkind = "otlp"\nurl = "{got.url}"\n'
    )
    j = job("--notify", str(routes))
    assert "webhook: not delivered: HTTP 503" in j.ask("notify", str(routes)).stdout
    tried = j.ask("notify", str(routes))
    assert tried.returncode == 0 and "webhook: delivered" in tried.stdout, tried.stdout
    killed = j.ask("inject", "kill", "--rank", "1")
    assert killed.returncode == 0, killed.stderr
    j.wait(
        lambda: any(b["status"] == "resolved" and b["groupLabels"] == {"job": "job"} for b in got.taken["/hook"]), 30
    )
    j.wait(lambda: "incident killed" in json.dumps(got.taken["/v1/traces"]))
    ours = [b for b in got.taken["/hook"] if b["groupLabels"] == {"job": "job"}]
    assert len({b["groupKey"] for b in ours}) == 1 and len(ours) <= 2 and not got.wrong, got.wrong
    traces = [body["resourceSpans"][0]["scopeSpans"][0]["spans"] for body in got.taken["/v1/traces"]]
    (ours,) = [[span["name"] for span in spans] for spans in traces if spans[0]["name"] == "incident killed"]
    assert ours == ["incident killed", "regroup", "start", "restore", "recompute"], traces
    got.close()


def test_what_cannot_be_used_is_said_in_a_sentence(everstep, script, tmp_path):
    bad = tmp_path / "notify.toml"
    bad.write_text('[[route]]\nkind = "pigeon"\n')
    done = everstep("run", "--standalone", "--notify", str(bad), script("pass"))
    assert done.returncode == 78 and len(done.stderr.splitlines()) == 1 and "pigeon" in done.stderr, done.stderr
    for words in (["inject", "kill"], ["stacks"]):
        done = everstep(*words)
        assert done.returncode == 69 and "no job is running here" in done.stderr, done.stderr
    assert everstep("inject", "flood").returncode == 2
    # Options without effect are refused.
    for words in (["export"], ["note", "--verdict", "right"]):
        done = everstep("incidents", *words, "--json")
        assert done.returncode == 2 and "--json" in done.stderr, done.stderr


def test_a_log_collector_can_read_what_everstep_says(everstep, script):
    done = everstep(
        "run",
        "--standalone",
        "--log-format",
        "json",
        "--name",
        "lines",
        script("import sys; print('mine', file=sys.stderr); sys.exit(3)"),
    )
    own = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {line["level"] for line in own} == {"info", "warn", "error"} and all(line["node"] == "0" for line in own), (
        own
    )
    assert own[-1]["generation"] == 1, own[-1]
    assert done.returncode == 1 and "everstep: " not in done.stderr and "mine" in done.stderr.splitlines(), done.stderr
    assert len(own) >= 2 and all(
        (line["job"], line["from"]) == ("lines", "everstep") and line["message"] for line in own
    ), own


@pytest.mark.parametrize("chosen", ["everstep::agent=trace", "everstep::log=trace", "warn,everstep::agent=debug"])
def test_what_a_message_belongs_to_does_not_depend_on_the_filter(env, everstep, script, chosen):
    env["EVERSTEP_LOG"] = chosen
    options = ("--standalone", "--max-restarts", "1", "--log-format", "json", "--name", "chosen")
    done = everstep("run", *options, script("raise SystemExit(3)"))
    own = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert own and all((line["job"], line["node"]) == ("chosen", "0") for line in own), own
    assert {line["generation"] for line in own if "generation" in line} == {1, 2}, own


def test_messages_are_selected_by_level_and_kept_with_what_they_belong_to(job):
    j = job()
    j.ask("inject", "kill", "--rank", "1")
    j.incident(1)
    j.steps()
    own = Path(j.env["EVERSTEP_STATE_DIR"]) / "jobs" / "job" / "agent-0.jsonl"
    kept = [json.loads(line) for line in own.read_text().splitlines()]
    assert own.stat().st_mode & 0o777 == 0o600
    assert all((line["job"], line["node"]) == ("job", "0") for line in kept), kept
    assert {line["generation"] for line in kept if "generation" in line} >= {1, 2}, kept
    assert any(line["level"] == "info" and line["message"].startswith("restart 1") for line in kept), kept
    orders = [line["message"] for line in kept if line["level"] == "debug" and line["message"].startswith("order: ")]
    assert any("Start(" in order for order in orders), kept


@pytest.mark.parametrize(
    ("chosen", "code", "shown", "hidden"),
    [
        ("debug", 0, "everstep: debug everstep::", "everstep: trace"),
        ("everstep::agent=error,everstep=info", 0, "", "job quiet: 1 rank"),
        ("off", 0, "", "everstep: "),
        ("loud", 2, "EVERSTEP_LOG=loud", "job quiet"),
    ],
)
def test_the_console_shows_what_was_asked_for(env, everstep, script, chosen, code, shown, hidden):
    env["EVERSTEP_LOG"] = chosen
    done = everstep("run", "--standalone", "--name", "quiet", script("pass"))
    assert done.returncode == code and shown in done.stderr and hidden not in done.stderr, done.stderr
