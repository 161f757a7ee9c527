"""Object stores on this machine: real servers, and proxies that make requests fail."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.cluster import free_port

BUCKET = "checkpoints"
#: From Linux (asm-generic/socket.h). TCP itself paces to this rate.
SO_MAX_PACING_RATE = 47
#: Bytes passed on at a time.
PIECE = 1 << 18


def _ready(port: int, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        time.sleep(0.05)
    raise TimeoutError(f"no server answers at port {port}")


@contextlib.contextmanager
def _process(line: list[str], port: int) -> Iterator[str]:
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _ready(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Runs moto's S3 in memory with one bucket. Yields its URL."""
    port = free_port()
    with _process([str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], port) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
        yield url


def s3s_binary() -> Path | None:
    """Returns the path of s3s-fs, or ``None`` if it is not installed (``make s3s``)."""
    root = Path(__file__).resolve().parent.parent
    found = shutil.which("s3s-fs", path=f"{root / 'target' / 's3s' / 'bin'}:{os.environ.get('PATH', '')}")
    return Path(found) if found else None


@contextlib.contextmanager
def s3s() -> Iterator[str]:
    """Runs s3s-fs on files with one bucket. It checks access keys. Yields its URL."""
    binary = s3s_binary()
    if binary is None:
        raise FileNotFoundError("s3s-fs is not installed: make s3s")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as root:
        (Path(root) / BUCKET).mkdir()
        port = free_port()
        keys = ["--access-key", "everstep", "--secret-key", "everstep"]
        with _process([str(binary), "--host", "127.0.0.1", "--port", str(port), *keys, root], port) as url:
            yield url


def environment(url: str) -> dict[str, str]:
    """Returns the environment variables with which a process finds the store."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "everstep", "AWS_SECRET_ACCESS_KEY": "everstep",
        "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


@dataclass
class Fault:
    """What happens to request number ``at`` (from 0) and to the ``times - 1`` that follow.

    ``kind``: ``503`` (answered without asking the server), ``slow`` (three seconds late),
    ``cut-before`` (half of it reaches the server), ``cut-after`` (done, but only half of the answer
    comes back), ``crash-before`` and ``crash-after`` (the writer is killed before the server
    receives it, or after the server has done it), ``none``.
    """

    kind: str
    at: int
    times: int = 1


@dataclass
class Proxy:
    """A proxy that counts requests and makes some fail."""

    upstream: str
    #: Strips conditions from requests to the server.
    unconditional: bool = False
    fault: Fault = field(default_factory=lambda: Fault("none", -1))
    count: int = 0
    #: ``METHOD path`` of each request.
    seen: list[str] = field(default_factory=list)
    #: Kills the writer.
    kill: Callable[[], None] = lambda: None
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """The URL on which it listens."""
        return f"http://127.0.0.1:{self.port}"

    def begin(self, fault: Fault) -> None:
        """Resets the counts and sets the fault."""
        self.fault, self.count, self.seen = fault, 0, []

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        """Serves from its own thread."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=PIECE), loop
        ).result()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        number, self.count = self.count, self.count + 1
        what = head.split(b" HTTP", 1)[0].decode(errors="replace")
        self.seen.append(what)
        hit = self.fault.kind if self.fault.at <= number < self.fault.at + self.fault.times else "none"
        length = _length(head)
        if b"expect: 100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        dropped = (b"expect:", b"if-none-match:", b"if-match:") if self.unconditional else (b"expect:",)
        head = b"\r\n".join(x for x in head.split(b"\r\n") if not x.lower().startswith(dropped))
        if hit == "503":
            await _read(reader, length)
            body = b"<Error><Code>SlowDown</Code></Error>"
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            return True
        if hit == "slow":
            await asyncio.sleep(3)
        if hit == "crash-before":
            self.kill()
            return False
        host, port = self.upstream.removeprefix("http://").split(":")
        up_reader, up = await asyncio.open_connection(host, int(port), limit=PIECE)
        try:
            up.write(head)
            if hit == "cut-before":
                await _pass(reader, up, length // 2)
                return False
            await _pass(reader, up, length)
            answer = await up_reader.readuntil(b"\r\n\r\n")
            if hit == "crash-after":
                self.kill()
                return False
            if hit == "cut-after":
                writer.write(answer[: len(answer) // 2])
                await writer.drain()
                return False
            writer.write(answer)
            bodiless = what.startswith("HEAD ") or b" 204 " in answer[:16] or b" 304 " in answer[:16]
            if not bodiless:
                await _answer(up_reader, writer, answer)
            await writer.drain()
            return b"connection: close" not in answer.lower()
        finally:
            up.close()


@dataclass
class Link:
    """A proxy that limits each connection to ``rate`` bytes per second in each direction.

    The bytes are passed on within the kernel, because with many connections copying them here would
    be the limit.
    """

    upstream: str
    rate: int
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """The URL on which it listens."""
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Link]:
        """Serves from its own threads."""
        with socket.create_server(("127.0.0.1", self.port), backlog=64) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield self
            # Wakes the thread that waits in accept, which closing does not.
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        host, port = self.upstream.removeprefix("http://").split(":")
        with contextlib.suppress(OSError):
            while True:
                ends = (listener.accept()[0], socket.create_connection((host, int(port))))
                for end_ in ends:
                    end_.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self.rate)
                    end_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for come, go in (ends, ends[::-1]):
                    threading.Thread(target=_splice, args=(come, go), daemon=True).start()


def _splice(come: socket.socket, go: socket.socket) -> None:
    """Passes on data until the connection ends."""
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
        while left := os.splice(come.fileno(), into, 1 << 20):
            while left:
                left -= os.splice(out, go.fileno(), left)
        go.shutdown(socket.SHUT_WR)
    except OSError:
        for end_ in (come, go):
            with contextlib.suppress(OSError):
                end_.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(out)
        os.close(into)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    if b"transfer-encoding: chunked" not in head.lower():
        await _pass(reader, writer, _length(head))
        return
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        writer.write(line)
        await _pass(reader, writer, size + 2)
        if size == 0:
            return


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


async def _read(reader: asyncio.StreamReader, length: int) -> None:
    while length:
        length -= len(await reader.readexactly(min(length, PIECE)))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
    while length:
        data = await reader.read(min(length, PIECE))
        if not data:
            raise OSError("the other end is gone")
        writer.write(data)
        await writer.drain()
        length -= len(data)


def end(pid: int) -> None:
    """Kills a process, which may already be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
