"""A process with torch imported that forks workers, so that a restart need not import anything.

The guard starts it with a socket as standard input. It forks only while it has one thread and has
not touched a GPU. Each request is JSON with three descriptors: the worker's standard streams. The
script's other imports are made ahead, too, where that is safe (see frameworks.py).
"""

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import types

_found = importlib.util.spec_from_file_location("_everstep_frameworks", os.path.join(os.path.dirname(__file__), "frameworks.py"))
frameworks = importlib.util.module_from_spec(_found)
_found.loader.exec_module(frameworks)

_PR_SET_PDEATHSIG = 1


def _import_torch():
    """Imports torch and what a first step needs. Returns why forking would be unsafe, or None."""
    import importlib

    import torch

    for name in ("torch.nn.parallel.distributed", "torch.utils.data", "torch.distributed.elastic.multiprocessing.errors", "torch._dynamo"):
        try:
            importlib.import_module(name)
        except Exception:
            pass  # not in this build of torch: the worker imports what it needs
    try:
        import everstep.checkpoint
        import everstep.data
        import everstep.zero_line  # noqa: F401
    except ImportError:
        pass
    if torch.cuda.is_initialized():
        return "importing torch initializes the GPU"
    # Threads that survive a fork (see frameworks.threads) make forking unsafe.
    threads = frameworks.threads()
    if threads != 1:
        return f"importing torch has started {threads - 1} threads"
    return None


def _send(sock, **what):
    data = json.dumps(what).encode()
    sock.sendall(struct.pack("<I", len(data)) + data)


def _bytes(given):
    """Converts text, or a list of bytes that are not text, to what the system was given."""
    return given.encode() if isinstance(given, str) else bytes(given)


def _become(sock, guard, request, fds):
    """Completes a worker's start, in the worker."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    # Our parent exits at once. Then the guard is our parent, and we must end when it does.
    while os.getppid() != guard:
        if os.getppid() == 1:
            os._exit(1)
        os.sched_yield()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(1)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    for fd in fds:
        if fd > 2:
            os.close(fd)
    _send(sock, pid=os.getpid())
    sock.close()
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    os.environ.clear()
    os.environb.update((_bytes(name), _bytes(value)) for name, value in request["env"])
    frameworks.repeat_changes()
    own = os.environ.pop("EVERSTEP_PRELOAD", None)
    if own is not None:
        users = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and p != own]
        if users:
            os.environ["PYTHONPATH"] = ":".join(users)
        else:
            os.environ.pop("PYTHONPATH", None)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as in a new process, not with the template's state
    gc.enable()
    # Frozen objects are not collected when the interpreter exits, and libraries report leaks.
    atexit.register(gc.unfreeze)
    if own is not None and "everstep.zero_line" in sys.modules:
        sys.modules["everstep.zero_line"].install(warm_safe=True)


def _main_module(path):
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __file__=path, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    return main


def _run(request):
    """Runs a file or a module like the interpreter does."""
    sys.argv = [os.fsdecode(_bytes(argument)) for argument in request["argv"]]
    if request["module"]:
        import runpy

        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, os.getcwd())
        _main_module(None)
        runpy._run_module_as_main(sys.argv[0])
        return
    path = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = _main_module(path)
    from importlib.machinery import SourceFileLoader

    main.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _serve():
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    guard = os.getppid()
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    with frameworks.changed_by_script():
        why_not = _import_torch()
    gc.collect()
    gc.freeze()
    gc.disable()
    _send(sock, ready=why_not is None, why_not=why_not)
    if why_not is not None:
        return None

    def work(requests, children):
        """Serves requests for workers that arrive on this socket."""
        return _work(requests, children, sock, guard)

    base, request = frameworks.start(work)
    if request is not None:
        return request
    return _work(sock, {"": base} if base else {}, sock, guard)


def _work(requests, children, sock, guard):
    """Forks workers from this process, or has a child fork them.

    Returns the request in a worker, and None once the other side is gone.
    """
    while True:
        waiting = [c for c in children.values() if not c.ready]
        readable, _, _ = select.select([requests, *(c.sock for c in waiting)], [], [])
        for name, child in list(children.items()):
            if child in waiting and child.sock in readable and not child.read_first_message():
                del children[name]
        if requests not in readable:
            continue
        received = frameworks.receive(requests)
        if received is None:
            return None
        body, fds = received
        request = json.loads(body)
        env = {os.fsdecode(_bytes(name)): os.fsdecode(_bytes(value)) for name, value in request["env"]}
        better = children.get("") or children.get(env.get("EVERSTEP_LOCAL_RANK", ""))
        if better is None or not better.fits(env) or not better.ask(body, fds):
            middle = os.fork()
            if not middle:
                if os.fork():
                    os._exit(0)
                for other in (*(c.sock for c in children.values()), requests):
                    if other is not sock:
                        other.close()
                _become(sock, guard, request, fds)
                return request
            os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _start():
    request = _serve()
    if request is None:
        os._exit(0)
    try:
        _run(request)
    except SystemExit:
        raise
    except BaseException as error:
        # Hide this file's frames: people look for their own. Two of runpy stay, as with `python
        # -m`.
        trace = error.__traceback__.tb_next
        for _ in range(1):
            trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        error.__traceback__ = trace
        sys.last_type = type(error)  # as the interpreter does: the script has failed
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


_start()
