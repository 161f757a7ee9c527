"""Two nodes on two hosts with their own addresses, and a path between them that is cut."""

from __future__ import annotations

import subprocess

from conftest import EVERSTEP
from hosts import NAMES, namespaces

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.tensor([float(dist.get_rank() + 1)]); dist.all_reduce(t)
line = f"rank {dist.get_rank()} of {dist.get_world_size()} sum {t.item()} master {os.environ['MASTER_ADDR']}"
os.write(1, (line + "\\n").encode())  # in one piece: another rank writes to the same console
dist.destroy_process_group()
"""


def test_two_hosts_form_one_world(env, script, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    options = [
        "--insecure",
        "--token-file",
        str(token),
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-endpoint",
        "10.77.9.1:29400",
    ]
    path = script(SUM)
    with namespaces():
        nodes = []
        for rank, (name, device) in enumerate(zip(NAMES, ("evsa", "evsb"), strict=True)):
            line = ["ip", "netns", "exec", name, EVERSTEP, "run", *options, "--node-rank", str(rank), path]
            own = {**env, "GLOO_SOCKET_IFNAME": device}
            nodes.append(subprocess.Popen(line, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        outputs = [n.communicate(timeout=90)[0] for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], outputs
    for rank in range(4):
        assert f"rank {rank} of 4 sum 10.0 master 10.77.9.1" in outputs[rank // 2]
