"""Notices of incidents are what real services accept; none is lost or sent twice.

A webhook (Alertmanager's version 4, signed), Slack in both ways, PagerDuty, DingTalk,
OpenTelemetry, and a real Alertmanager, which passes them on.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.receivers import DINGTALK_SECRET, ROUTING_KEY, SLACK_TOKEN, WEBHOOK_SECRET, Receivers
from harness.cluster import EVERSTEP, cluster, free_port

COMMAND = ["figures/convnet.py", "--steps", "2000", "--pause", "0.03"]
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")


def _routes(at: Path, url: str, alertmanager: str | None) -> Path:
    text = f'''
[[route]]
kind = "webhook"
url = "{url}/hook"
secret = "{WEBHOOK_SECRET}"
[[route]]
kind = "slack"
url = "{url}/slack"
[[route]]
kind = "slack"
url = "{url}/api"
token = "{SLACK_TOKEN}"
channel = "C1"
[[route]]
kind = "pagerduty"
url = "{url}/pagerduty"
routing_key = "{ROUTING_KEY}"
[[route]]
kind = "dingtalk"
url = "{url}/ding?access_token=t"
secret = "{DINGTALK_SECRET}"
[[route]]
kind = "otlp"
url = "{url}"
'''
    if alertmanager:
        text += f'[[route]]\nkind = "alertmanager"\nurl = "{alertmanager}"\n'
    (at / "notify.toml").write_text(text)
    return at / "notify.toml"


def _alertmanager(at: Path, url: str) -> tuple[subprocess.Popen[bytes], str] | None:
    if not ALERTMANAGER:
        return None
    port = free_port()
    config = {
        "route": {
            "receiver": "r",
            "group_wait": "100ms",
            "group_interval": "500ms",
            "repeat_interval": "1h",
            "group_by": ["incident"],
        },
        "receivers": [{"name": "r", "webhook_configs": [{"url": f"{url}/from-alertmanager", "send_resolved": True}]}],
    }
    (at / "alertmanager.yml").write_text(json.dumps(config))
    line = [
        ALERTMANAGER,
        f"--config.file={at / 'alertmanager.yml'}",
        f"--storage.path={at / 'am'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with (at / "am.log").open("wb") as log:
        run = subprocess.Popen(line, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/-/ready", timeout=1)
            return run, address
        except OSError:
            time.sleep(0.1)
    run.kill()
    raise RuntimeError((at / "am.log").read_text())


def _incidents(bodies: list[Any], status: Any) -> list[tuple[str, str]]:
    return [status(b) for b in bodies]


@dataclass(frozen=True)
class Job:
    """A job that failed four times, and what it has recorded of its notices."""

    codes: list[int]
    facts: list[dict[str, Any]]
    #: Pages before the last two failures.
    pages_before: int


def _job(scratch: str, options: list[str], got: Receivers, through_alertmanager: bool) -> Job:
    with cluster("notify", [*COMMAND, "--out", scratch], options=options) as c:
        c.start_all()
        c.wait_step(30)
        for incident, sign in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            c.kill_worker(1, sign)
            c.wait_for(
                lambda n=incident: (
                    len(c.facts("CaughtUp")) + len([f for f in c.facts("FirstStep") if f["incident"] == n]) > 0
                ),
                60,
                "recovery",
            )
            c.wait_for(
                lambda n=incident: [f for f in c.facts("Notified") if f["incident"] == n and f["status"] == "resolved"],
                60,
                "the notice",
            )
        # The coordinator is killed: its next life does not repeat the notices.
        c.kill_coordinator()
        time.sleep(4)
        c.wait_step(30)
        pages_before = sum(b["event_action"] == "trigger" for b in got.taken.get("/pagerduty", []))
        # Two more failures, the second of which ends the job.
        c.kill_worker(0, signal.SIGKILL)
        c.wait_for(
            lambda: [f for f in c.facts("Notified") if f["incident"] == 3 and f["status"] == "resolved"],
            60,
            "the third",
        )
        c.kill_worker(0, signal.SIGKILL)
        codes = c.wait(60)
        time.sleep(3)
        if through_alertmanager:
            # Alertmanager resolves an alert 40 s later, and not before it has reported it as
            # firing.
            deadline = time.monotonic() + 60
            while (
                time.monotonic() < deadline
                and len([b for b in got.taken.get("/from-alertmanager", []) if b["status"] == "resolved"]) < 3
            ):
                time.sleep(0.2)
        facts = c.facts("Notified")
    return Job(codes, facts, pages_before)


def _services(got: Receivers, job: Job, through_alertmanager: bool) -> Iterator[Bound]:
    """Compares what each service received with what the job has recorded."""
    posts, updates = got.taken.get("/api/chat.postMessage", []), got.taken.get("/api/chat.update", [])
    told = len({f["incident"] for f in job.facts})
    yield Bound(
        "slack.messages", len(posts), "messages by the bot for four incidents, updated in place after that", "=", told
    )
    yield Bound("slack.updates", len(updates), "updates", ">=", 1)
    yield Bound("slack.webhook", len(got.taken.get("/slack", [])), "messages to the incoming webhook", ">=", told)
    yield Bound("dingtalk", len(got.taken.get("/ding", [])), "signed messages", ">=", told)
    traces = [b["resourceSpans"][0]["scopeSpans"][0]["spans"] for b in got.taken.get("/v1/traces", [])]
    print("traces:", [[span["name"] for span in spans] for spans in traces])
    yield Bound(
        "otlp.traces",
        len({spans[0]["traceId"] for spans in traces}),
        "traces, one for each incident that is over, read by OpenTelemetry's own schema",
        "=",
        told,
    )
    pages = [b["event_action"] for b in got.taken.get("/pagerduty", [])]
    yield Bound(
        "pagerduty.pages-for-what-recovered", job.pages_before, "pages for three failures that were handled", "=", 0
    )
    yield Bound(
        "pagerduty.pages-for-a-person", pages.count("trigger"), "page for the failure that ended the job", "=", 1
    )
    if through_alertmanager:
        passed = {(b["alerts"][0]["labels"]["incident"], b["status"]) for b in got.taken.get("/from-alertmanager", [])}
        print("through alertmanager:", sorted(passed))
        yield Bound(
            "alertmanager.incidents",
            len({i for i, _ in passed}),
            "incidents passed on by a real Alertmanager",
            "=",
            told,
        )
        yield Bound(
            "alertmanager.resolved",
            len({i for i, s in passed if s == "resolved"}),
            "of them resolved in place (the last one ended the job)",
            "=",
            told - 1,
        )


def measure(soak: bool) -> Iterator[Bound]:
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        # The first two requests are answered with 503, so their notices must be sent again.
        got = Receivers(fail_first=2)
        served = _alertmanager(at, got.url)
        options = ["--max-restarts", "3", "--notify", str(_routes(at, got.url, served[1] if served else None))]
        try:
            job = _job(scratch, options, got, served is not None)
        finally:
            if served:
                served[0].kill()
                served[0].wait()
            got.close()
    print("\n".join(got.wrong[:5]))
    yield Bound(
        "refused", len(got.wrong), "requests that the services would have refused (signatures, fields, tokens)", "=", 0
    )
    hook = [(b["commonLabels"]["incident"], b["status"]) for b in got.taken["/hook"]]
    print("webhook:", hook, "exit", job.codes)
    wanted = {(f"inc-{f['incident']}", "resolved" if f["status"] == "resolved" else "firing") for f in job.facts}
    # Two statuses of one incident that are due at once become one message with the latest.
    missing = [w for w in wanted if w not in hook and not (w[1] == "firing" and (w[0], "resolved") in hook)]
    yield Bound("webhook.missing", len(missing), f"of {len(wanted)} messages", "=", 0)
    yield Bound(
        "webhook.twice",
        len(hook) - len(set(hook)),
        "messages that came twice (the coordinator was killed in between)",
        "=",
        0,
    )
    yield from _services(got, job, served is not None)
    tried = subprocess.run([str(EVERSTEP), "notify", "/nonexistent.toml"], capture_output=True, text=True, check=False)
    yield Bound("bad-file.code", tried.returncode, "exit code for a file that is not there", "=", 78)
