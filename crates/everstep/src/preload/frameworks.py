"""Imports ahead of a restart what the first generation's workers had imported.

The template has only torch. A process forked from it, the base, imports the rest, and workers are
then forked from the base::

    template ── base ── trial    imports everything once, reports what is unsafe, exits
                    └── rank r   imports what reads a worker's own variables, with those of r

A package is left out if importing it starts threads that survive a fork, touches a GPU, or changes
the working directory or a signal handler. A package that reads RANK, LOCAL_RANK or another of a
worker's own variables is imported once per local rank, and used only while those variables have the
same values. Without a base, or until it is ready, workers are forked from the template.
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
#: Limit on the trials that find out what must not be imported ahead.
_TRIALS = 5


def send(sock, body, fds=()):
    """Sends a message and its descriptors."""
    sock.sendmsg([struct.pack("<I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    sock.sendall(body)


def receive(sock):
    """Receives a message and its descriptors. Returns None if the other side is gone."""
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
    """Applies the script's changes to variables while torch is imported, and then undoes them."""
    kept = dict(os.environ)
    _apply(json.loads(os.environ.pop("EVERSTEP_WARM_AT_IMPORT", "{}")))
    yield
    os.environ.clear()
    os.environ.update(kept)


#: Variables that importing ahead has set or, if None, removed. A worker's own import would have
#: done the same.
_changes = {}


def repeat_changes():
    """Repeats the changes in a worker, once it has its environment."""
    _apply(_changes)


def die_with_parent(parent):
    """Makes this process end when its parent does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def threads(known=1):
    """Counts the threads that a fork does not end; ``known`` is an earlier count."""
    if len(os.listdir("/proc/self/task")) > known:
        # Libraries that handle forks (OpenBLAS) end their threads before one.
        trial = os.fork()
        if not trial:
            os._exit(0)
        os.waitpid(trial, 0)
    return len(os.listdir("/proc/self/task"))


def wanted():
    """Returns a worker's modules at its first step, and each local rank's own variables."""
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
    except BaseException as error:  # it may exit, or fail alone: the worker imports it
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
    """Imports everything in a process that then exits.

    Returns the packages that must not be imported ahead, and those that read a worker's own
    variables; None if the process crashed.
    """
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
    """Finds out what is safe to import ahead.

    Returns what the base imports, what each rank imports, and the variables that the latter read;
    None if nothing is safe.
    """
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
    """Imports modules in this process.

    Returns the variables that this has changed, with their former values: a worker must start with
    the same ones.
    """
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
    """A process that forks workers, and the socket for requests to it."""

    def __init__(self, sock):
        self.sock, self.needs, self.ready = sock, {}, False

    def fits(self, env):
        return self.ready and all(env.get(k) == v for k, v in self.needs.items())

    def read_first_message(self):
        """Reads the first message: the variables that a worker must have, with their values.

        Returns False if the process is gone.
        """
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
    """Forks the base, which serves requests by ``work``.

    Returns ``(Fork, None)`` in the template, ``(None, None)`` there if there is nothing to import
    ahead of time, and ``(None, request)`` in a worker.
    """
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
