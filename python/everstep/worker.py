"""This process as a worker: its step board, its agent, and what it tells them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

from . import imports, loading
from ._internal import Agent, AgentError, Board, CheckpointError

Scope = Literal["user", "process", "node", "fabric", "storage", "unknown"]
F = TypeVar("F", bound=Callable[..., Any])
#: The agent's question for stacks: SIGRTMIN + 6 of glibc.
_STACKS_SIGNAL = 40
#: What the board adds to the exit code of a script that has failed.
_FAILED = 256
#: Characters of a traceback that are told.
_TRACE_MAX = 16_000
#: Taking down a process may last this long (freed memory, communicators, exporters).
_EXIT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class World:
    """Where this worker stands. Outside ``everstep run``: what the environment says, else one rank."""

    job: str
    generation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    node: str
    is_spare: bool = False


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def world() -> World:
    """The world of this worker's generation."""
    return World(
        job=os.environ.get("EVERSTEP_JOB", ""),
        generation=_number("EVERSTEP_GENERATION", 0),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_rank=_number("EVERSTEP_LOCAL_RANK", _number("LOCAL_RANK", 0)),
        node=os.environ.get("EVERSTEP_NODE", ""),
    )


class _Worker:
    """The connections of this process; ``None`` where there is no agent."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.sections: list[tuple[str, int]] = []
        #: A CheckpointManager has the slots.
        self.managed = False
        #: Sections that were entered, those that wait for checkpoints not counted.
        self.entered = 0
        self.stop_signal = 0
        self.handles_signals = False
        #: The script tells its steps itself.
        self.told = False
        #: Steps of this process, seen from outside; the one that it goes on from, if that is known.
        self.updates = 0
        self.origin: int | None = None
        #: When the last gradient of this rank was complete, and when the update began (see zero.py).
        self.gradients_at = 0
        self.update_at = 0
        self.watches_gradients = False
        self.watches_data = False
        self.noted_imports = False
        self.step_began = time.perf_counter_ns()
        #: The script ends with an exception or an exit code of its own.
        #: The exit code with which the script says that it has failed; 0 as long as it does not.
        self.gave_up = 0
        #: Managers with a checkpoint that may be on its way to durable storage.
        self.unfinished: set[Any] = set()
        self._agent: Agent | None = None
        path = os.environ.get("EVERSTEP_BOARD")
        if path and os.environ.get("EVERSTEP_SOCKET"):
            self._attach(path)

    def _attach(self, path: str) -> None:
        try:
            board = Board(path)
        except Exception:  # noqa: BLE001
            return  # the page of a generation that is over: work as if there were no agent
        if board.get("Generation") != world().generation:
            return
        if not board.claim():
            return  # a process that the script started (an evaluation, a tool): the rank is another one, which lives
        self.board = board
        board.set("Attached", 1)
        self._offer_stacks(board)
        main = threading.main_thread().ident
        if main is not None:
            try:
                board.start_pulse(main)
            except CheckpointError as e:
                print(
                    f"everstep: hangs are noticed by missing steps only, there is no thread to watch the interpreter: {e}",
                    file=sys.stderr,
                    flush=True,
                )
        self._mark_exit()
        _watch_os_exit(board)
        self._watch_exceptions()

    def _watch_exceptions(self) -> None:
        """An exception that nobody catches is told at once: taking the process down may take long, or never end."""
        inner, pid = sys.excepthook, os.getpid()

        def hook(kind: type[BaseException], exc: BaseException, trace: Any) -> None:
            self.gave_up = 1
            inner(kind, exc, trace)
            if os.getpid() == pid and not issubclass(kind, KeyboardInterrupt):
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                    self._tell_uncaught(exc)

        sys.excepthook = hook

    def _tell_uncaught(self, exc: BaseException) -> None:
        if self.agent is not None:
            text = "".join(traceback.format_exception(exc))[-_TRACE_MAX:]
            self.agent.report_error(_one_line(exc), text)

    def _mark_exit(self) -> None:
        """While the interpreter takes itself down it answers to nobody, which is no hang yet."""
        pid = os.getpid()

        def leaving() -> None:
            if os.getpid() == pid:
                self.sections.append(("exit", int(_EXIT_TIMEOUT.total_seconds() * 1000)))
                _show_section(self)
                # Threads of the script are waited for next, and one of them may still train. This runs after them.
                atexit.register(over)

        def over() -> None:
            if os.getpid() != pid:
                return
            if self.gave_up or getattr(sys, "last_type", None) is not None:
                # Whatever ends this process now, this is why.
                if self.board is not None and self.board.is_mine():
                    self.board.set("ShuttingDown", _FAILED + (self.gave_up or 1))
            else:
                for manager in list(self.unfinished):
                    # A script without close(): what was captured for durable storage still gets there.
                    manager._finish()
                _script_is_over(self)

        self._watch_exit_codes()

        try:
            threading._register_atexit(leaving)  # type: ignore[attr-defined] # before anything is torn down
        except (AttributeError, RuntimeError):
            atexit.register(leaving)

    def _watch_exit_codes(self) -> None:
        """A script that ends with an exit code other than 0 says itself that it has failed."""
        inner, main = sys.exit, threading.main_thread()

        @functools.wraps(inner)
        def leave(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is main:
                code = status if isinstance(status, int) else int(status is not None)
                self.gave_up = code & 0xFF or int(code != 0)
            inner(status)

        sys.exit = leave

    def _offer_stacks(self, board: Board) -> None:
        """A hung worker's agent asks where its threads are; the answer needs neither interpreter nor lock."""
        path = os.environ.get("EVERSTEP_STACKS")
        if not path:
            return
        try:
            self._stacks = open(path, "w")  # noqa: SIM115 - open as long as the process lives
            faulthandler.register(_STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError):
            return  # no such directory, or no such signal: then without stacks
        board.set("Stacks", 1)

    @property
    def agent(self) -> Agent | None:
        """A connection of its own, opened on first use."""
        if self._agent is None and self.board is not None:
            w = world()
            self._agent = Agent(os.environ["EVERSTEP_SOCKET"], w.generation, w.rank, w.local_rank)
        return self._agent

    def stepped(self, step: int) -> None:
        """Step ``step`` is complete (so many steps in all)."""
        if self.board is None:
            return
        if not self.told:
            self._tells()
            # It has not said from where it goes on: so many steps were seen until now, or just this one.
            self._number(max(step - max(self.updates, 1), 0))
        self._note(step)

    def _tells(self) -> None:
        self.told = True
        self.board.set("ZeroLine", 0)  # type: ignore[union-attr]

    def _number(self, origin: int | None) -> None:
        """Steps go on from that one; ``None``: they are counted since this process started."""
        board = self.board
        if board is None or origin == self.origin:
            return
        # In this order: the agent reads the other way round.
        if origin is None or self.origin is not None:
            board.set("Numbered", 0)
        board.set("Restored", origin or 0)
        if self.updates and not self.told:
            board.set("Step", (origin or 0) + self.updates)
        if origin is not None:
            board.set("Numbered", 1)
        self.origin = origin

    def goes_on_from(self, origin: int | None) -> None:
        """The same, seen from outside; counts as long as the script tells nothing itself."""
        if not self.told:
            self._number(origin)

    def seen(self, step: int) -> None:
        """The same, for a step that was seen from outside; counts as long as the script tells nothing itself."""
        if self.board is not None and not self.told:
            self._note(step)

    def _note(self, step: int) -> None:
        now = time.perf_counter_ns()
        if not self.noted_imports:
            # A program that the script has started meanwhile (a data loader) may have claimed the board. It gives way
            # only as long as no step is known.
            self.board.claim()  # type: ignore[union-attr]
        wall = now - self.step_began
        # From the last gradient of its own to the update, a rank waits for the others' gradients.
        gradients, self.gradients_at = self.gradients_at, 0
        wait = max(self.update_at - gradients, 0) if gradients > self.step_began else 0
        self.board.stepped(step, wall, wall - wait, wait)  # type: ignore[union-attr]
        if not self.watches_data:
            self.watches_data = loading.watch(self)
        if not self.noted_imports:
            self.noted_imports = True
            imports.note(os.environ.get("EVERSTEP_BOARD", ""))
        self.step_began = now

    def restored(self, step: int) -> None:
        """Training continues after ``step`` completed steps."""
        if self.board is not None:
            self.board.claim()
            self._tells()
            self._number(step)
            self.board.set("Step", step)
            self.board.set("StepKnown", 1)
            self.board.add("Beats", 1)
        self.step_began = time.perf_counter_ns()

    def plans(self, total: int) -> None:
        """The script is to complete ``total`` steps in all: a crash before that is none at the end."""
        if self.board is not None:
            self.board.set("Total", max(total, 0))

    def handle_signals(self) -> None:
        """TERM and USR1 set a flag instead of ending the process: the loop asks for it."""
        if self.handles_signals or threading.current_thread() is not threading.main_thread():
            return
        self.handles_signals = True
        if self.board is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.board.set("FlagsStop", 1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stop_signal = number


_current: _Worker | None = None


def current() -> _Worker:
    """The worker of this process."""
    global _current
    if _current is None:
        _current = _Worker()
    return _current


def _forked() -> None:
    """A forked child (a data loader) is no worker, and the agent's connections are those of its parent."""
    if _current is not None:
        _current.board = None
        _current._agent = None


os.register_at_fork(after_in_child=_forked)


def in_group() -> bool:
    """torch's process group is there, with more than one rank."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def watch_gradients(optimizer: Any) -> None:
    """A backward pass ends with the gradient of the first parameter; what follows until the update is
    waiting for other ranks. Seen by one hook on one parameter."""
    worker = current()
    if worker.watches_gradients or not in_group():
        return

    def complete(_: Any) -> None:
        worker.gradients_at = time.perf_counter_ns()
        if worker.board is not None:
            # Where other ranks end, this shows that the script has more to do than they.
            worker.board.add("Passes", 1)

    def before_update(*_: Any) -> None:
        worker.update_at = time.perf_counter_ns()

    try:
        first = next(p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
        first.register_post_accumulate_grad_hook(complete)
        optimizer.register_step_pre_hook(before_update)
        worker.watches_gradients = True
    except (StopIteration, RuntimeError, AttributeError):
        pass  # nothing to hang it on: all of the step counts as this rank's own


def heartbeat(step: int | None = None, **metrics: float) -> None:
    """Progress, not liveness: call it where the loop advances, never from a background thread.

    ``step`` is the number of optimizer steps completed. ``metrics`` are kept for later use.
    """
    worker = current()
    if worker.board is None:
        return
    if step is None:
        worker.board.add("Beats", 1)
    else:
        worker.stepped(step)


@contextmanager
def section(name: str, *, timeout: timedelta | None = None) -> Iterator[None]:
    """A block that is not a step: evaluation, a long save. No hang is declared inside, unless
    ``timeout`` is given and passes."""
    worker = current()
    # Checkpoints are what the schedule of checkpoints measures.
    worker.entered += name != "checkpoint"
    if worker.board is None:
        yield
        return
    limit = int(timeout.total_seconds() * 1000) if timeout else 0
    worker.sections.append((name, limit))
    _show_section(worker)
    try:
        yield
    finally:
        worker.sections.pop()
        _show_section(worker)


def _show_section(worker: _Worker) -> None:
    board = worker.board
    if board is None:
        return
    name, limit = worker.sections[-1] if worker.sections else ("", 0)
    board.enter(name, limit, len(worker.sections))


def _script_is_over(worker: _Worker) -> None:
    """Nothing of the script is left but its exit handlers: whatever happens to this process now, it has done its work."""
    board = worker.board
    # A launcher that has imported torch had it until the training claimed it.
    if board is None or not board.is_mine():
        return
    board.set("ShuttingDown", 1)


def _watch_os_exit(board: Board) -> None:
    """Records that ``os._exit`` ends this process, which is no crash: a forked ``multiprocessing.Process`` ends like that."""
    leave = os._exit

    @functools.wraps(leave)
    def leave_at_once(status: int) -> NoReturn:
        if board.is_mine():
            over = board.get("ShuttingDown")
            if over == 1:
                board.set("ShuttingDown", 2)
            elif over == 0 and status == 0:
                board.set("ShuttingDown", 3)
        leave(status)

    os._exit = leave_at_once


def _one_line(exc: BaseException) -> str:
    text = f"{type(exc).__name__}: {exc}".splitlines()
    return (text[0] if text else type(exc).__name__)[:1000]


def report_error(
    exc: BaseException,
    *,
    scope: Scope = "unknown",
    retryable: bool | None = None,
    suspect_node: bool = False,
) -> None:
    """Tells the agent what the program knows of a failure, before the process ends."""
    worker = current()
    message = _one_line(exc)
    notes = [f"scope={scope}"] if scope != "unknown" else []
    notes += [] if retryable is None else [f"retryable={retryable}"]
    notes += ["suspect node"] if suspect_node else []
    if notes:
        message += f" ({', '.join(notes)})"
    try:
        if worker.agent is not None:
            worker.agent.report_error(message[:1000])
    except AgentError:
        pass  # the process is about to end anyway, and its exit says the rest


def record(fn: F) -> F:
    """As ``torch.distributed.elastic.multiprocessing.errors.record`` (same error file), and also
    tells the agent at once."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except SystemExit as exit_:
            if exit_.code not in (0, None):
                report_error(exit_)
            raise
        except Exception as exc:
            report_error(exc)
            path = os.environ.get("TORCHELASTIC_ERROR_FILE")
            if path:
                _write_error_file(path, exc)
            raise

    return wrapped  # type: ignore[return-value]


def _write_error_file(path: str, exc: BaseException) -> None:
    import json

    stack = "".join(traceback.format_exception(exc))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    body = {"message": {"message": f"{type(exc).__name__}: {exc}", "extraInfo": extra}}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(body, file)
    except OSError:
        pass  # a full disk must not hide the exception itself


def should_stop() -> bool:
    """True when the job is stopping and this step is the last one; the same step on all ranks."""
    worker = current()
    worker.handle_signals()
    board = worker.board
    if board is None:
        return worker.stop_signal != 0
    if board.get("StopRequested") == 0:
        return False
    at = board.get("StopAt")
    return at == 0 or board.get("Step") + 1 >= at
