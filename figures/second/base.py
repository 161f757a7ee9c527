"""An unprivileged user of the same host, run with the system's Python: the base of all attacks.

``figures.second.program`` joins this file, the attacks and the loop into one program for that user,
who can read none of our files. Orders are the first line of standard input (JSON). The mode is the
word in a file: ``attack`` or ``end``.
"""

import contextlib
import ctypes
import json
import os
import socket
import sys

ORDERS = json.loads(sys.stdin.readline())
OWN = os.getuid()
CANARIES = [c.encode() for c in ORDERS["canaries"]]
SHARED = ORDERS["shared"]  # directories that everybody may write
OURS = ORDERS["ours"]  # what an attacker would like to enter
LIBC = ctypes.CDLL(None, use_errno=True)
HELD = []
INOTIFY = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
MY = os.path.join(SHARED[0], "mine")
ATTACKS = {}


def attack(function):
    """Registers an attack, which returns what it gained."""
    ATTACKS[function.__name__] = function
    return function


def victims():
    """Returns the processes of the other user that belong to the job."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/cmdline", "rb") as f:
                    line = f.read()
                if os.stat(f"/proc/{name}").st_uid != OWN and (b"everstep" in line or b"second_loop" in line):
                    found.append(int(name))
    return found


def listening():
    """Returns the ports on which other users listen."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            with open(f"/proc/net/{table}") as f:
                rows = f.read().splitlines()[1:]
            for row in rows:
                words = row.split()
                if words[3] == "0A" and int(words[7]) != OWN:
                    found.append(int(words[1].rsplit(":", 1)[1], 16))
    return found


def secret(data, where):
    """Returns the canaries in what was read."""
    return [f"{where}: read {c.decode()}" for c in CANARIES if c in data]


def connected(port, wait=0.3):
    s = socket.socket()
    s.settimeout(wait)
    s.connect(("127.0.0.1", port))
    return s


def talk(text, wait=0.3):
    """Sends this to every port, and searches the responses."""
    gained = []
    for port in listening():
        with contextlib.suppress(OSError), connected(port, wait) as s:
            s.sendall(text)
            with contextlib.suppress(OSError):
                gained += secret(s.recv(65536), f"port {port}")
    return gained


def walk(top):
    """Yields all that is visible below a directory."""
    for root, directories, files in os.walk(top):
        for name in files + directories:
            yield os.path.join(root, name)


def others_entries():
    """Yields entries of the other user in shared directories and in those of the job."""
    for top in SHARED + OURS:
        yield top
        for path in walk(top):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid != OWN:
                    yield path
