"""The command lines. ``{port}``, ``{tmp}`` and ``{probe}`` are filled in.

Two-node cases have one line per node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROBE = "{probe}"


@dataclass(frozen=True)
class Case:
    """One command line (per node), the added environment, and whether it should fail."""

    name: str
    lines: list[list[str]]
    env: dict[str, str] = field(default_factory=dict)
    fails: bool = False
    term_after: float | None = None


def _one(
    name: str, *line: str, env: dict[str, str] | None = None, fails: bool = False, term_after: float | None = None
) -> Case:
    return Case(name, [list(line)], env or {}, fails, term_after)


def _two(
    name: str,
    common: list[str],
    *,
    own: list[list[str]] | None = None,
    tail: list[str] | None = None,
    fails: bool = False,
) -> Case:
    own = own or [["--node-rank", "0"], ["--node-rank", "1"]]
    return Case(name, [[*common, *o, *(tail or [PROBE])] for o in own], {}, fails)


STATIC = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "{port}"]
C10D = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "pair"]
ANY = [["--local-addr", "127.0.0.1"], ["--local-addr", "127.0.0.1"]]

CASES = [
    _one("plain", PROBE),
    _one("two-workers", "--nproc-per-node", "2", PROBE),
    _one("underscores", "--nproc_per_node=2", "--max_restarts=0", PROBE),
    _one("per-cpu", "--nproc-per-node", "cpu", PROBE),
    _one("auto", "--nproc-per-node=auto", PROBE),
    _one("standalone", "--standalone", "--nproc-per-node", "2", PROBE),
    _one("standalone-id", "--standalone", "--rdzv-id", "ignored", PROBE),
    _one("range", "--nnodes", "1:1", PROBE),
    _one("shortened", "--nn", "1", "--stand", PROBE),
    _one("restarts", "--max-restarts", "3", PROBE),
    _one("role", "--role", "trainer", "--nproc-per-node", "2", PROBE),
    _one("module", "-m", "figures.conformance.probe", "--x", "1"),
    _one("module-long", "--module", "figures.conformance.probe"),
    _one("no-python", "--no-python", "{python}", "-u", PROBE, "a"),
    _one("no-python-shell", "--no-python", "/bin/sh", "-c", "exec {python} -u {probe} $0", "b"),
    _one("run-path", "--run-path", PROBE, "c"),
    _one("logs-specs", "--logs-specs=default", PROBE),
    _one("timer", "--nproc-per-node", "2", PROBE, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    _one("timer-named", PROBE, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "{tmp}/timer"}),
    _one("timer-off", PROBE, env={"TORCHELASTIC_TIMER_FILE": "{tmp}/timer"}),
    _one("timer-used", PROBE, "--timer=9", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    _one("arguments", PROBE, "--lr", "0.1", "-x", "--nproc-per-node", "5", "--", "y"),
    _one("macros", "--nproc-per-node", "2", PROBE, "--x=${local_rank}", "$local_rank", "$$x", "${other}", "$local_ranks"),
    _one("dashes-before", "--nproc-per-node", "1", "--", PROBE, "--flag"),
    _one("dashes-inside", PROBE, "a", "--", "--flag"),
    _one("stdin", PROBE, "--stdin"),
    _one("master-port", "--master-port", "{port}", PROBE),
    _one("master-both", "--master-addr", "127.0.0.1", "--master-port", "{port}", "--nproc-per-node", "2", PROBE),
    _one("static-id", "--rdzv-backend", "static", "--rdzv-id", "named", "--master-port", "{port}", PROBE),
    _one("c10d-free", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", PROBE),
    _one("c10d-id", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job7", PROBE),
    _one("c10d-odd-id", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=a:b c", PROBE),
    _one("conf", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j",
         "--rdzv-conf", "join_timeout=30,is_host=true", PROBE),
    _one("local-addr", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j",
         "--local-addr", "127.0.0.1", PROBE),
    _one("logs-none", "--log-dir", "{tmp}/logs", "--nproc-per-node", "2", PROBE),
    _one("logs-redirect", "--log-dir", "{tmp}/logs", "-r", "3", "--nproc-per-node", "2", PROBE),
    _one("logs-out", "--log-dir={tmp}/logs", "-r1", PROBE),
    _one("logs-tee", "--log-dir", "{tmp}/logs", "-t", "3", "--nproc-per-node", "2", PROBE),
    _one("logs-both", "--log-dir", "{tmp}/logs", "--tee", "1", "--redirects", "2", PROBE),
    _one("logs-map", "--log-dir", "{tmp}/logs", "-r", "0:3,1:1", "--nproc-per-node", "2", PROBE),
    _one("logs-tee-map", "--log-dir", "{tmp}/logs", "-t", "0:1,1:2", "--nproc-per-node", "2", PROBE),
    _one("prefix", "--log-dir", "{tmp}/logs", "-t", "3",
         "--log-line-prefix-template", "[${rank}/${role_name}/${local_rank}] ", "--nproc-per-node", "2", PROBE),
    _one("prefix-host", "--log-dir", "{tmp}/logs", "-t", "1", PROBE, env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${hostname}> "}),
    _one("filter", "--local-ranks-filter", "0", "--nproc-per-node", "2", PROBE),
    _one("filter-tee", "--local-ranks-filter=1", "-t", "3", "--log-dir", "{tmp}/logs", "--nproc-per-node", "2", PROBE),
    _one("duplicate", "--duplicate-stdout-filters", "apple", "-t", "3", "--log-dir", "{tmp}/logs", "--nproc-per-node", "2", PROBE),
    _one("duplicate-comma", "--duplicate-stderr-filters", "grape,pear,, plum", "-t", "3", "--log-dir", "{tmp}/logs", PROBE),
    _one("logs-nowhere", "--log-dir", "/dev/null", "-r", "3", PROBE),
    _one("virtual", "--virtual-local-rank", "--nproc-per-node", "2", PROBE),
    _one("virtual-of", "--virtual-local-rank", "--nproc-per-node", "2", PROBE, env={"CUDA_VISIBLE_DEVICES": "4,5"}),
    _one("devices", "--nproc-per-node", "2", PROBE, env={"CUDA_VISIBLE_DEVICES": "0,1"}),
    _one("threads", "--nproc-per-node", "2", PROBE, env={"OMP_NUM_THREADS": "3"}),
    _one("env-workers", PROBE, env={"PET_NPROC_PER_NODE": "2"}),
    _one("env-overridden", "--nproc-per-node", "1", PROBE, env={"PET_NPROC_PER_NODE": "3", "PET_ROLE": "r"}),
    _one("env-flags", PROBE, env={"PET_STANDALONE": "1", "PET_MAX_RESTARTS": "2"}),
    _one("env-logs", PROBE, env={"PET_LOG_DIR": "{tmp}/logs", "PET_REDIRECTS": "3"}),
    _one("env-module", "figures.conformance.probe", env={"PET_MODULE": "1"}),
    _one("signals", "--signals-to-handle", "SIGTERM,SIGUSR1", PROBE),
    _one("ignored", "--shutdown-timeout", "5", "--monitor-interval", "0.5", "--start-method", "fork", "--event-log-handler", "null", PROBE),
    _one("interpreter", PROBE, env={"PYTHON_EXEC": "{python}"}),
    _one("python-path", PROBE, env={"PYTHONPATH": "/nowhere:{tmp}"}),
    _one("nccl", PROBE, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    # -- that fail
    _one("exit", PROBE, "--do=exit", fails=True),
    _one("exit-of-one", "--nproc-per-node", "2", PROBE, "--do=exit@1", fails=True),
    _one("exit-message", PROBE, "--do=message", fails=True),
    _one("raise", PROBE, "--do=raise", fails=True),
    _one("raise-recorded", "--log-dir", "{tmp}/logs", PROBE, "--do=raise", "--record", fails=True),
    _one("raise-of-one", "--log-dir", "{tmp}/logs", "--nproc-per-node", "2", PROBE, "--do=raise@1", "--record", fails=True),
    _one("raise-copied", PROBE, "--do=raise", "--record", env={"TORCHELASTIC_ERROR_FILE": "{tmp}/own.json"}, fails=True),
    _one("run-path-raise", "--run-path", "--log-dir", "{tmp}/logs", PROBE, "--do=raise", fails=True),
    _one("killed", PROBE, "--do=SIGKILL", fails=True),
    _one("segfault", PROBE, "--do=SIGSEGV", fails=True),
    _one("fail-once", "--max-restarts", "1", "--log-dir", "{tmp}/logs", "-r", "3", PROBE, "--do=fail-once"),
    _one("fail-always", "--max-restarts", "2", "--log-dir", "{tmp}/logs", "-r", "3", PROBE, "--do=exit", fails=True),
    _one("no-module", "-m", "no.such.module", fails=True),
    _one("no-script", "{tmp}/nothing.py", fails=True),
    _one("no-program", "--no-python", "{tmp}/nothing", fails=True),
    _one("unknown-option", "--frobnicate", PROBE, fails=True),
    _one("bad-nodes", "--nnodes", "two", PROBE, fails=True),
    _one("bad-redirects", "-r", "7", PROBE, fails=True),
    _one("contradiction", "-m", "--no-python", "x", fails=True),
    _one("terminated", "--nproc-per-node", "2", PROBE, "--do=wait", fails=True, term_after=6.0),
    # -- on two nodes
    _two("two-static", STATIC),
    _two("two-static-workers", [*STATIC, "--nproc-per-node", "2"]),
    _two("two-static-endpoint", ["--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "127.0.0.1:{port}"]),
    _two("two-static-role", [*STATIC, "--role", "r", "--max-restarts", "2"]),
    _two("two-roles", [*STATIC, "--nproc-per-node", "2"], own=[["--node-rank=0", "--role=master"], ["--node-rank=1", "--role=trainer"]]),
    _two("two-same-roles", ["--nproc-per-node", "2", "--role=ps", *STATIC]),
    _two("two-static-logs", [*STATIC, "--log-dir", "{tmp}/logs{node}", "-t", "3"]),
    _two("two-static-module", STATIC, tail=["-m", "figures.conformance.probe", "z"]),
    _two("two-static-underscores", ["--nnodes=2", "--master_addr=127.0.0.1", "--master_port={port}"],
         own=[["--node_rank=0"], ["--node_rank=1"]]),
    _two("two-c10d", C10D, own=ANY),
    _two("two-c10d-workers", [*C10D, "--nproc-per-node", "2", "--max-restarts", "1"], own=ANY),
    _two("two-c10d-elastic", ["--nnodes", "2:2", *C10D[2:]], own=ANY),
    _two("two-c10d-prefix", [*C10D, "-t", "3", "--log-dir", "{tmp}/logs", "--log-line-prefix-template", "${rank}:"], own=ANY),
    _two("two-c10d-conf", [*C10D, "--rdzv-conf", "join_timeout=60,last_call_timeout=1"], own=ANY),
    _two("two-static-exit", STATIC, tail=[PROBE, "--do=exit"], fails=True),
    _two("two-c10d-exit", C10D, own=ANY, tail=[PROBE, "--do=exit"], fails=True),
    _two("two-static-raise", [*STATIC, "--log-dir", "{tmp}/logs{node}"], tail=[PROBE, "--do=raise", "--record"], fails=True),
]  # fmt: skip
