"""The surroundings of a job: environment, limits, streams, parent processes, system calls."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from figures.hostile import directories
from figures.hostile.case import FAILED, NO_COORDINATOR, PERSIST, RANKS, SETUP, Case
from figures.hostile.job import SCRIPT, Job
from figures.hostile.means import CANNOT, KILLED, denied, mounted, redirected, shell
from harness.cluster import EVERSTEP


def _not_text(case: Case, made: Job) -> None:
    odd = os.fsdecode(b"dir-\xff\xfe")
    cwd = made.cwd / odd
    cwd.mkdir()
    script = cwd / os.fsdecode(b"train-\xe9.py")
    shutil.copy(SCRIPT, script)
    env = {os.fsencode(k): os.fsencode(v) for k, v in case.environment(made).items()} | {
        b"ODD\xfe": b"\xff value",
        b"LC_ALL": b"\xff\xfe",
    }
    env[b"EVERSTEP_STATE_DIR"] = os.fsencode(cwd / "state")
    line = [
        str(EVERSTEP),
        "run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        "--log-dir",
        "logs",
        "--tee",
        "3",
        str(script),
    ]
    made.start([*line, "--out", str(made.out), "--checkpoints", os.fsdecode(b"\xfd-checkpoints")], env, cwd=cwd)


def _large(total: int, grow: bool) -> Callable[[Case, Job], None]:
    """Adds variables of 100,000 bytes each. ``grow`` lifts the stack limit, which bounds them."""
    code = (
        "import os, resource, sys; n, grow = int(sys.argv[1]), sys.argv[2] == '1'; "
        "grow and resource.setrlimit(resource.RLIMIT_STACK, (-1, -1)); "
        "os.environ.update({f'LARGE_{i}': 'x' * 100_000 for i in range(n)}); os.execv(sys.argv[3], sys.argv[3:])"
    )

    def start(case: Case, made: Job) -> None:
        made.start(
            [sys.executable, "-c", code, str(total // 100_000), str(int(grow)), *case.line(made)],
            case.environment(made),
        )

    return start


def _refused_by_the_kernel(case: Case, made: Job) -> None:
    """everstep itself still starts with this environment, but with a worker's variables it is too
    large."""
    env = {**case.environment(made), **{f"LARGE_{i}": "x" * 99_000 for i in range(20)}}
    for pad in range(130_000, 0, -300):
        try:
            made.start(case.line(made), {**env, "PAD": "x" * pad})
            return
        except OSError:
            (made.home / "node-0.log").unlink()


def _unwritable_home(made: Job) -> None:
    made.home.joinpath("user").rmdir()
    made.home.joinpath("user").write_text("")


BYTES = [
    Case("bytes.not-utf-8", start=_not_text),
    Case("bytes.environment-1.5-MiB", start=_large(1_500_000, grow=False)),
    Case("bytes.environment-4-MiB", start=_large(4_000_000, grow=True)),
    Case(
        "bytes.environment-refused",
        start=_refused_by_the_kernel,
        codes=CANNOT,
        refused=True,
        says="Argument list too long.*ulimit -s",
    ),
    Case("bytes.state-path-200", env={"EVERSTEP_STATE_DIR": "{home}/" + "s" * 200}),
    Case("bytes.state-path-1000", env={"EVERSTEP_STATE_DIR": "{home}/" + "/".join(["s" * 200] * 5)}),
    Case(
        "bytes.state-path-5000",
        env={"EVERSTEP_STATE_DIR": "{home}/" + "/".join(["s" * 200] * 25)},
        codes=frozenset({SETUP}),
        refused=True,
        says="EVERSTEP_STATE_DIR",
    ),
    Case("bytes.job-name-long", options=("--name", "n" * 300), codes=CANNOT | {2}),
    Case("bytes.job-name-odd", options=("--name", "a b\n../c$(x)"), codes=CANNOT | {2}),
    Case("bytes.state-dir-relative", env={"EVERSTEP_STATE_DIR": "state here"}),
]

VARIABLES = [
    Case("variables.none", unset=("HOME", "USER", "LOGNAME", "LANG", "TERM", "TMPDIR", "SHELL", "PWD", "LC_ALL")),
    Case("variables.no-path", unset=("PATH",)),
    Case(
        "variables.home-is-a-file",
        before=_unwritable_home,
        unset=("EVERSTEP_STATE_DIR",),
        env={"HOME": "{home}/user"},
        codes=CANNOT,
        says="EVERSTEP_STATE_DIR|done",
    ),
    Case("variables.home-missing", env={"HOME": "{home}/nowhere/at/all"}, unset=("EVERSTEP_STATE_DIR",)),
    Case("variables.home-empty", env={"HOME": ""}),
    Case("variables.tmpdir-missing", env={"TMPDIR": "/nowhere"}),
    Case(
        "variables.proxies",
        env=dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), "http://127.0.0.1:9"
        ),
    ),
    Case(
        "variables.stale-torchrun",
        env={
            "RANK": "7",
            "WORLD_SIZE": "9",
            "LOCAL_RANK": "5",
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "1",
            "GROUP_RANK": "3",
            "TORCHELASTIC_RESTART_COUNT": "4",
            "TORCHELASTIC_RUN_ID": "old",
        },
    ),
    Case(
        "variables.nested",
        env={
            "EVERSTEP_SOCKET": "/nowhere",
            "EVERSTEP_GENERATION": "99",
            "EVERSTEP_BOARD": "/nowhere",
            "EVERSTEP_JOB": "other",
            "EVERSTEP_NODE": "3",
        },
    ),
    Case(
        "variables.python-strict",
        env={
            "PYTHONOPTIMIZE": "2",
            "PYTHONSAFEPATH": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "0",
            "LC_ALL": "C",
            "PYTHONCOERCECLOCALE": "0",
        },
    ),
    Case(
        "variables.nonsense",
        env={
            "TZ": "Nowhere/Else",
            "LC_ALL": "xx_YY.KLINGON",
            "COLUMNS": "-3",
            "RUST_LOG": "!!",
            "OMP_NUM_THREADS": "many",
        },
        codes=CANNOT,
    ),
    Case(
        "variables.wrong-number",
        env={"EVERSTEP_DETECT_TIMEOUT": "soon"},
        codes=frozenset({2}),
        refused=True,
        says="error: .*soon",
    ),
]

LIMITS = [
    *(
        Case(f"files.{n}", through=("prlimit", f"--nofile={n}:{n}"), during=KILLED, codes=CANNOT, repeats=PERSIST)
        for n, PERSIST in ((16, 5), (24, 5), (32, 5), (48, 5))
    ),
    *(
        Case(f"files.{n}", through=("prlimit", f"--nofile={n}:{n}"), during=KILLED, repeats=PERSIST)
        for n in (64, 128, 256, 1024)
    ),
    Case("limits.file-size-1-MiB", through=shell("ulimit -f 1024"), codes=frozenset({SETUP}), says="ulimit -f"),
    Case("limits.file-size-64-KiB", through=shell("ulimit -f 64"), codes=frozenset({SETUP}), says="ulimit -f"),
    Case("limits.address-space-6-GiB", through=shell("ulimit -v 6291456"), codes=CANNOT),
    Case("limits.locked-memory-0", through=shell("ulimit -l 0")),
    Case("limits.stack-256-KiB", through=shell("ulimit -s 256"), codes=CANNOT),
    Case("limits.umask-777", through=shell("umask 777"), codes=CANNOT),
    Case("limits.umask-0", through=shell("umask 0")),
    Case("limits.idle-scheduling", through=("chrt", "--idle", "0"), during=KILLED, repeats=PERSIST),
    Case("limits.one-core", through=("taskset", "-c", "0"), during=KILLED, repeats=PERSIST),
]

STREAMS = [
    Case("streams.stdin-closed", through=redirected("<&-"), during=KILLED, repeats=PERSIST),
    Case("streams.all-closed", through=redirected("<&- >&- 2>&-"), during=KILLED, repeats=PERSIST),
    Case("streams.stderr-full", through=redirected("2>/dev/full"), during=KILLED, repeats=PERSIST),
    Case(
        "streams.all-full",
        through=redirected(">/dev/full 2>&1"),
        during=KILLED,
        repeats=PERSIST,
        codes=frozenset({FAILED}),
    ),
    Case(
        "streams.tee-full",
        options=("--tee", "3"),
        through=redirected(">/dev/full 2>&1"),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case(
        "streams.reader-gone",
        through=("bash", "-c", '"$@" 2>&1 | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}', "bash"),
        options=("--tee", "3"),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case(
        "signals.ignored",
        through=(
            "python3",
            "-c",
            "import os, signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGCHLD, signal.SIGPIPE, "
            "signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT)]; os.execvp(sys.argv[1], sys.argv[1:])",
        ),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case(
        "signals.blocked",
        through=(
            "python3",
            "-c",
            "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
            "os.execvp(sys.argv[1], sys.argv[1:])",
        ),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case("place.pid-1", through=("unshare", "--pid", "--fork", "--mount-proc"), codes=frozenset()),
    Case("place.no-network", through=("unshare", "--net"), codes=CANNOT | {NO_COORDINATOR}),
    Case(
        "place.clock-monotonic-years",
        through=("unshare", "--time", "--fork", "--monotonic", "100000000", "--boottime", "100000000"),
        repeats=0,
    ),
    Case("place.user-namespace", through=("unshare", "--user", "--map-root-user")),
    Case("place.no-proc", through=mounted("mount -t tmpfs none /proc"), codes=CANNOT),
]

CALLS = [
    Case(
        "calls.like-nfs",
        through=denied(
            "renameat2=EINVAL@4&15",
            "link=EPERM",
            "linkat=EPERM",
            "openat=EOPNOTSUPP@2&0x400000",
            "openat=EINVAL@2&0x4000",
            "fallocate=EOPNOTSUPP",
            "copy_file_range=EXDEV",
        ),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case("calls.no-locks", through=denied("flock=ENOLCK"), codes=CANNOT),
    Case(
        "calls.old-kernel",
        through=denied(
            "openat2=ENOSYS",
            "close_range=ENOSYS",
            "pidfd_send_signal=ENOSYS",
            "memfd_create=ENOSYS",
            "renameat2=ENOSYS",
            "statx=ENOSYS",
            "clone3=ENOSYS",
        ),
        during=KILLED,
        repeats=PERSIST,
    ),
    Case("calls.no-pidfd", through=denied("pidfd_open=ENOSYS"), codes=CANNOT, refused=True, says="Linux 5.3"),
    Case(
        "calls.strict-container",
        through=denied(
            "ptrace=EPERM",
            "process_vm_readv=EPERM",
            "sched_setaffinity=EPERM",
            "mlock=EPERM",
            "inotify_init1=EMFILE",
            "madvise=EINVAL",
            "memfd_create=EPERM",
            "pidfd_open=EPERM",
        ),
        during=KILLED,
        repeats=PERSIST,
        codes=CANNOT,
    ),
]

CASES = [*BYTES, *VARIABLES, *LIMITS, *STREAMS, *directories.CASES, *CALLS]
