"""What the first generation's workers had imported, imported ahead of the next one.

The template has torch only. A process forked from it, the base, imports the rest, and workers are then forked from the base::

    template ── base ── trial    imports everything once, reports what must not be imported ahead, ends
                    └── rank r   what reads variables that differ from worker to worker, imported with r's own

A package is left out when importing it starts threads that survive a fork, touches a GPU, changes the working directory or a signal's
handler. A package that reads RANK, LOCAL_RANK or another variable of a worker's own is imported once for each local rank, and used only
while those variables have the same values. Without a base, or until it is ready, workers are forked from the template.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1
#: Trials until nothing is left that must not be imported ahead.
_TRIALS = 5


def send(sock, body, fds=()):
    """One message and its descriptors."""
    sock.sendmsg([struct.pack("<I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    sock.sendall(body)


def receive(sock):
    """One message and its descriptors; None when the other side is gone."""
    head, ancillary, _, _ = sock.recvmsg(4, socket.CMSG_SPACE(struct.calcsize("3i")))
    if len(head) < 4:
        return None
    fds = array.array("i")
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    (length,) = struct.unpack("<I", head)
    body = bytearray()
    while len(body) < length:
        more = sock.recv(min(length - len(body), 1 << 20))
        if not more:
            return None
        body += more
    return bytes(body), list(fds)


def _apply(changes):
    """Sets variables, or removes those whose value is None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def changed_by_script():
    """The variables that the script changes before it imports torch, for as long as torch is imported here."""
    kept = dict(os.environ)
    _apply(json.loads(os.environ.pop("EVERSTEP_WARM_AT_IMPORT", "{}")))
    yield
    os.environ.clear()
    os.environ.update(kept)


#: Variables that importing ahead has set or (None) removed; a worker's import would have done the same.
_changes = {}


def repeat_changes():
    """In a worker, after it was given its environment."""
    _apply(_changes)


def die_with_parent(parent):
    """This process ends when its parent does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def threads(known=1):
    """Threads of this process that a fork does not end; ``known``: those of before."""
    if len(os.listdir("/proc/self/task")) > known:
        # Libraries that know of forks (OpenBLAS) end their threads before one.
        trial = os.fork()
        if not trial:
            os._exit(0)
        os.waitpid(trial, 0)
    return len(os.listdir("/proc/self/task"))


def wanted():
    """Names of the modules that a worker had at its first step, and what is a worker's own in each local rank's environment."""
    try:
        with open(os.environ["EVERSTEP_WARM_MODULES"]) as file:
            names = [str(n) for n in json.load(file)]
        with open(os.environ["EVERSTEP_WARM_RANKS"]) as file:
            ranks = json.load(file)
        return names, {str(r): {k: v for k, v in env.items() if os.environ.get(k) != v} for r, env in ranks.items()}
    except (KeyError, OSError, ValueError, TypeError):
        return [], {}


def _state(known=1):
    torch = sys.modules["torch"]
    handlers = [signal.getsignal(n) for n in range(1, 32)]
    return threads(known), torch.cuda.is_initialized(), os.getcwd(), handlers


def _import(name):
    try:
        importlib.import_module(name)
    except BaseException as error:  # a module may exit, or not import on its own: the worker imports what it needs
        return not isinstance(error, (SystemExit, KeyboardInterrupt))
    return True


class _Reads:
    """Records which of these variables are read through ``os.environ``."""

    def __init__(self, keys):
        self.keys, self.seen = frozenset(keys), set()
        self._get, self._iterate = os._Environ.__getitem__, os._Environ.__iter__

    def __enter__(self):
        def get(environ, key):
            if key in self.keys:
                self.seen.add(key)
            return self._get(environ, key)

        def iterate(environ):
            self.seen |= self.keys
            return self._iterate(environ)

        os._Environ.__getitem__, os._Environ.__iter__ = get, iterate
        return self

    def __exit__(self, *_):
        os._Environ.__getitem__, os._Environ.__iter__ = self._get, self._iterate


def _try(names, keys):
    """Imports all in a process that ends: packages that must not be imported ahead, and those that read a worker's own variables.
    None: the process crashed."""
    ours, theirs = os.pipe()
    trial = os.fork()
    if not trial:
        unsafe, own, before = set(), {}, _state()
        with _Reads(keys) as reads:
            for name in names:
                if name in sys.modules:
                    continue
                good = _import(name)
                package, after = name.partition(".")[0], _state(before[0])
                if not good or after != before:
                    unsafe.add(package)
                    before = after
                if reads.seen:
                    own.setdefault(package, set()).update(reads.seen)
                    reads.seen.clear()
        with os.fdopen(theirs, "w") as file:
            json.dump({"unsafe": sorted(unsafe), "own": {p: sorted(k) for p, k in own.items()}}, file)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        told = file.read()
    _, status = os.waitpid(trial, 0)
    return json.loads(told) if status == 0 and told else None


def _settle(names, ranks):
    """(what the base imports, what each rank imports, the variables that those read); None when there is nothing safe."""
    keys = {key for env in ranks.values() for key in env}
    own = {}
    for _ in range(_TRIALS):
        base = [n for n in names if n.partition(".")[0] not in own]
        found = _try(base, keys)
        if found is None:
            return None
        names = [n for n in names if n.partition(".")[0] not in found["unsafe"]]
        new = {p: k for p, k in found["own"].items() if p not in found["unsafe"]}
        if not found["unsafe"] and not new:
            return base, [n for n in names if n.partition(".")[0] in own], {k for keys in own.values() for k in keys}
        own.update(new)
    return None


def _import_all(names):
    """Imports them here. Returns the variables that this has changed, as they were before: what a worker must start with, too."""
    before, environment = _state(), dict(os.environ)
    for name in names:
        if not _import(name):
            os._exit(1)
    if _state() != before:
        os._exit(1)
    changed = {n for n in environment.keys() | os.environ.keys() if environment.get(n) != os.environ.get(n)}
    _changes.update({n: os.environ.get(n) for n in changed})
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    gc.freeze()
    return {n: environment.get(n) for n in changed}


class Fork:
    """A process that forks workers, and the socket it is asked through."""

    def __init__(self, sock):
        self.sock, self.needs, self.ready = sock, {}, False

    def fits(self, env):
        return self.ready and all(env.get(k) == v for k, v in self.needs.items())

    def hear(self):
        """Its first word, the variables that a worker must have with their values; False when it is gone."""
        received = receive(self.sock)
        if received is not None:
            self.needs, self.ready = json.loads(received[0]), True
        return self.ready

    def ask(self, body, fds):
        try:
            send(self.sock, body, fds)
        except OSError:
            self.ready = False
        return self.ready


def start(work):
    """Forks the base, which serves requests by ``work``. Returns ``(Fork, None)`` in the template, ``(None, None)`` there when nothing is to
    be imported ahead, and ``(None, request)`` in a worker."""
    names, ranks = wanted()
    if not names:
        return None, None
    ours, theirs = socket.socketpair()
    template = os.getpid()
    if os.fork():
        theirs.close()
        return Fork(ours), None
    die_with_parent(template)
    ours.close()
    found = _settle(names, ranks)
    if found is None:
        os._exit(0)
    base, own, keys = found
    needs = _import_all(base)
    children = {}
    for local, env in ranks.items() if own else ():
        fork, request = _start_rank(env, own, keys, work)
        if request is not None:
            return None, request
        children[local] = fork
    return None, _serve(theirs, children, work, needs)


def _start_rank(env, own, keys, work):
    ours, theirs = socket.socketpair()
    base = os.getpid()
    if os.fork():
        theirs.close()
        return Fork(ours), None
    die_with_parent(base)
    ours.close()
    read = {k: env[k] for k in keys if k in env}
    os.environ.update(read)
    needs = _import_all(own)
    return None, _serve(theirs, {}, work, {**needs, **read})


def _serve(sock, children, work, needs):
    """Returns in a worker only."""
    send(sock, json.dumps(needs).encode())
    request = work(sock, children)
    if request is None:
        os._exit(0)
    return request
