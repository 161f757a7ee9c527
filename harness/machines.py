"""A job whose nodes are machines, as far as that is possible on one machine.

Each node is a network namespace with its own address and kernel log.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from harness.cluster import EVERSTEP, ROOT, Cluster


class Machines(Cluster):
    """Node ``i`` runs in namespace ``names[i]`` with the address 10.77.8.(i+1).

    See ``figures.hosts``.
    """

    def __init__(
        self,
        names: list[str],
        job: str,
        command: list[str],
        *,
        workers: int = 1,
        options: list[str] | None = None,
        elastic: str | None = None,
    ) -> None:
        super().__init__(job, command, nodes=len(names), workers=workers, options=options, elastic=elastic)
        self.names = names
        #: Command-line prefix for the agent of a machine, by the machine's name.
        self.through: dict[str, list[str]] = {}
        self.token = self.home / "token"
        self.token.write_text("secret")
        self.token.chmod(0o600)

    @property
    def store(self) -> Any:
        return self.home / "state" / "coordinators" / f"10.77.8.1_{self.port}"

    def kernel_log(self, node: int) -> Any:
        """Returns the file that serves as this machine's kernel log."""
        path = self.home / f"kmsg-{node}"
        path.touch()
        return path

    def kernel_says(self, node: int, line: str) -> None:
        """Appends a line to a machine's kernel log."""
        with self.kernel_log(node).open("a") as log:
            log.write(f"3,1,2,-;{line}\n")

    def start(self, node: int = 0) -> None:
        meet = [
            "--insecure",
            "--token-file",
            str(self.token),
            "--nnodes",
            self.elastic or str(self.nodes),
            "--rdzv-endpoint",
            f"10.77.8.1:{self.port}",
            "--node-rank",
            str(node),
        ]
        line = [
            *self.through.get(self.names[node], []),
            "ip",
            "netns",
            "exec",
            self.names[node],
            str(EVERSTEP),
            "run",
            "--name",
            self.job,
            *meet,
            "--nproc-per-node",
            str(self.workers),
            *self.options,
            *self.command,
        ]
        own = {**self.env, "GLOO_SOCKET_IFNAME": "eth0", "EVERSTEP_KERNEL_LOG": str(self.kernel_log(node))}
        log = (self.home / f"node-{node}.log").open("ab")
        self.agents[node] = subprocess.Popen(line, env=own, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def ask(self, *words: str, node: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs everstep on a machine."""
        line = ["ip", "netns", "exec", self.names[node], str(EVERSTEP), *words]
        return subprocess.run(line, env=self.env, capture_output=True, text=True, check=False, timeout=30)

    def status(self) -> dict[str, Any]:
        out = self.ask("status", "--json", self.job).stdout
        jobs = json.loads(out)["jobs"] if out else []
        return jobs[0] if jobs else {}
