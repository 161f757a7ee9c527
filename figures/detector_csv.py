"""`everstep detect` on its own finds the bad machine in a table and on Prometheus.

In the table, a machine goes bad (precision, recall, a picture). The server scrapes real
node_exporters, one of which runs on a machine whose network is slowed down.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts
from harness.cluster import EVERSTEP

PROMETHEUS, EXPORTER = (
    shutil.which("prometheus"),
    shutil.which("prometheus-node-exporter") or shutil.which("node_exporter"),
)
MACHINES = 6
#: Seconds of a table, and of the fault in it.
SECONDS, FAULT = 1800, (900, 1300)


def table(path: Path, long: bool) -> None:
    """Writes a table of machines of two roles.

    `host-4` computes and sends less for a while. `host-1` jumps once and is healthy.
    """
    chance = random.Random(7)
    with path.open("w") as out:
        out.write("time,machine,role,metric,value\n" if long else "time,machine,role,cpu,gpu-duty,net-sent\n")
        for second in range(SECONDS):
            for machine in range(12):
                role = machine // 6
                bad = machine == 4 and FAULT[0] <= second < FAULT[1]
                jump = machine == 1 and 600 <= second < 640
                wave = 0.9 if second % 40 < 3 else 1.0
                values = {
                    "cpu": (30 + 10 * role + (15 if jump else 0)) * wave + chance.gauss(0, 1),
                    "gpu-duty": (0.9 - 0.2 * role) * wave * (0.6 if bad else 1) + chance.gauss(0, 0.01),
                    "net-sent": 1e9 * wave * (0.7 if bad else 1) + chance.gauss(0, 2e7),
                }
                if chance.random() < 0.02:
                    continue
                row = f"{1_790_000_000 + second},host-{machine},{'stage-' + str(role)}"
                if long:
                    out.writelines(f"{row},{name},{value:.6g}\n" for name, value in values.items())
                else:
                    out.write(",".join([row, *(f"{v:.6g}" for v in values.values())]) + "\n")


def _detect(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(EVERSTEP), "detect", *words], capture_output=True, text=True, check=False)


def _tables(at: Path) -> Iterator[Bound]:
    faults = at / "faults.csv"
    faults.write_text(f"machine,start,end\nhost-4,{1_790_000_000 + FAULT[0]},{1_790_000_000 + FAULT[1]}\n")
    for long in (False, True):
        name = "long" if long else "wide"
        table(at / f"{name}.csv", long)
        picture = at / f"{name}.svg"
        said = _detect(
            "eval", "--csv", str(at / f"{name}.csv"), "--faults", str(faults), "--picture", str(picture), "--json"
        )
        found = json.loads(said.stdout)
        yield Bound(f"{name}.precision", found["precision"], "of a table with one fault", "=", 1.0)
        yield Bound(f"{name}.recall", found["recall"], f"median delay {found['delay_median_s']} s", "=", 1.0)
        drawn = picture.read_text()
        yield Bound(
            f"{name}.picture",
            int(drawn.startswith("<svg") and "host-4 (red)" in drawn),
            "of the blamed machine against the fleet",
            "=",
            1,
        )


def _get(url: str) -> Any:
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=2) as answer:
        return json.loads(answer.read())
    return None


def _serve(at: Path, names: list[str], run: Callable[..., None]) -> None:
    """Starts an exporter on each host, Prometheus on the first one, and traffic."""
    # Only the network is specific to a network namespace, so the fault is in the network.
    for i, name in enumerate(names[:MACHINES]):
        run(
            "ip",
            "netns",
            "exec",
            name,
            EXPORTER,
            "--collector.disable-defaults",
            "--collector.netdev",
            "--collector.netstat",
            f"--web.listen-address=10.77.8.{i + 1}:9100",
        )
    targets = ", ".join(f'"10.77.8.{i + 1}:9100"' for i in range(MACHINES))
    (at / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nscrape_configs: [{{job_name: node, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    run(
        "ip",
        "netns",
        "exec",
        names[0],
        PROMETHEUS,
        f"--config.file={at}/prometheus.yml",
        f"--storage.tsdb.path={at}/data",
        "--web.listen-address=0.0.0.0:9090",
    )
    # All of them send to one that is not observed. Then the network of one becomes very slow.
    run("ip", "netns", "exec", names[MACHINES], "python3", "-c", _SINK)
    for name in names[:MACHINES]:
        run("ip", "netns", "exec", name, "python3", "-c", _SOURCE, f"10.77.8.{MACHINES + 1}")


def _prometheus(at: Path) -> Iterator[Bound]:
    if not PROMETHEUS or not EXPORTER:
        print("no prometheus or node_exporter here (apt: prometheus prometheus-node-exporter): not measured")
        return
    with hosts(MACHINES + 1) as names, contextlib.ExitStack() as stack:

        def run(*line: str) -> None:
            process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(lambda: (process.send_signal(signal.SIGTERM), process.wait()))

        _serve(at, names, run)
        time.sleep(150)
        onset = time.time()
        subprocess.run(
            f"tc -n {names[3]} qdisc add dev eth0 root tbf rate 2mbit burst 32kb latency 400ms".split(), check=True
        )
        time.sleep(150)
        settings = at / "settings.toml"
        settings.write_text("[robust]\none_family_s = 60\nknown_s = 60\n")
        word = [
            "ip",
            "netns",
            "exec",
            names[0],
            str(EVERSTEP),
            "detect",
            "run",
            "--prometheus",
            "http://127.0.0.1:9090",
            "--since",
            "5",
            "--step",
            "1",
            "--window",
            "5s",
        ]
        said = subprocess.run(
            [*word, "--detector", str(settings), "--json", "--picture", str(at / "p.svg")],
            capture_output=True,
            text=True,
            check=False,
        )
        print(said.stderr.strip(), said.stdout.strip()[:600])
        alarms = json.loads(said.stdout)["alarms"]
        machines = [a["machines"] for a in alarms]
        yield Bound("prometheus.right", int(["10.77.8.4"] in machines), f"machines named: {machines}", "=", 1)
        yield Bound(
            "prometheus.innocent",
            sum(m != "10.77.8.4" for a in machines for m in a),
            "machines named that were well",
            "=",
            0,
        )
        first = next((a["at"] - onset for a in alarms if a["machines"] == ["10.77.8.4"]), None)
        yield Bound("prometheus.delay", round(first or 1e9, 1), "s from the beginning to the verdict", "<=", 120)
        down = subprocess.run([*word[:-7], "http://127.0.0.1:9"], capture_output=True, text=True, check=False)
        yield Bound(
            "prometheus.down",
            int(down.returncode == 78 and len(down.stderr.strip().splitlines()) == 1),
            "a server that is not there is one sentence, exit code 78",
            "=",
            1,
        )


_SINK = """
import socket, threading
s = socket.create_server(("0.0.0.0", 5001))
def take(c):
    while c.recv(1 << 20): pass
while True:
    threading.Thread(target=take, args=(s.accept()[0],), daemon=True).start()
"""
#: Five megabytes per second, if possible.
_SOURCE = """
import socket, sys, time
time.sleep(1)
c = socket.create_connection((sys.argv[1], 5001))
while True:
    began = time.time()
    c.sendall(b"x" * 500_000)
    time.sleep(max(0, began + 0.1 - time.time()))
"""


def measure(soak: bool) -> Iterator[Bound]:
    with tempfile.TemporaryDirectory() as scratch:
        yield from _tables(Path(scratch))
        yield from _prometheus(Path(scratch))
