"""This process as a worker: its step board, its agent, and what it reports to them."""

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
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

from . import imports, loading
from ._internal import Agent, AgentError, Board, CheckpointError
from .exit_code import ExitCode
from .world import World as World
from .world import world as world

Scope = Literal["user", "process", "node", "fabric", "storage", "unknown"]
F = TypeVar("F", bound=Callable[..., Any])
#: The signal with which the agent asks for stacks: SIGRTMIN + 6 of glibc.
_STACKS_SIGNAL = 40
#: Limit on the characters of a reported traceback.
_TRACE_MAX = 16_000
#: Limit on the time that taking down a process takes (freed memory, communicators, exporters).
_EXIT_TIMEOUT = timedelta(seconds=60)


class _Worker:
    """The connections of this process; ``None`` where there is no agent."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.sections: list[tuple[str, int]] = []
        #: A CheckpointManager uses the slots.
        self.managed = False
        #: Sections that were entered, those that wait for checkpoints not counted.
        self.entered = 0
        self.stop_signal = 0
        self.handles_signals = False
        #: The script reports its steps itself.
        self.reports_steps = False
        #: Number of steps of this process, observed from outside, and the step that it continues
        #: from, if that is known.
        self.updates = 0
        self.origin: int | None = None
        #: When the last gradient of this rank was complete, and when the update began (see
        #: zero_line.py).
        self.gradients_at = 0
        self.update_at = 0
        self.watches_gradients = False
        self.watches_data = False
        self.noted_imports = False
        self.step_began = time.perf_counter_ns()
        self.exit_code = ExitCode()
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
            return  # the board of an earlier generation: continue as without an agent
        if board.generation != world().generation:
            return
        if not board.claim():
            return  # started by the script (an evaluation, a tool): the process that is the rank is alive
        self.board = board
        board.attach()
        self._offer_stacks(board)
        main = threading.main_thread().ident
        if main is not None:
            try:
                board.start_pulse(main)
            except CheckpointError as e:
                print(
                    f"everstep: hangs are detected by missing steps only: cannot start a thread to watch the interpreter: {e}",
                    file=sys.stderr,
                    flush=True,
                )
        self._mark_exit()
        _watch_os_exit(board)
        self._watch_exceptions()

    def _watch_exceptions(self) -> None:
        """Reports an uncaught exception at once: taking down the process may take long, or never
        end."""
        inner, pid = sys.excepthook, os.getpid()

        def hook(kind: type[BaseException], exc: BaseException, trace: Any) -> None:
            self.exit_code.value = 1
            inner(kind, exc, trace)
            if os.getpid() == pid and not issubclass(kind, KeyboardInterrupt):
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                    self._report_uncaught(exc)

        sys.excepthook = hook

    def _report_uncaught(self, exc: BaseException) -> None:
        if self.agent is not None:
            text = "".join(traceback.format_exception(exc))[-_TRACE_MAX:]
            self.agent.report_error(_one_line(exc), text)

    def _mark_exit(self) -> None:
        """Marks the time in which the interpreter shuts down and is not responsive, so that it does
        not count as a hang."""
        pid = os.getpid()

        def leaving() -> None:
            if os.getpid() == pid:
                self.sections.append(("exit", int(_EXIT_TIMEOUT.total_seconds() * 1000)))
                _show_section(self)
                # Python waits for the script's threads next, and one of them may still train. This
                # runs after them.
                atexit.register(over)

        def over() -> None:
            if os.getpid() != pid:
                return
            if self.exit_code.value or getattr(sys, "last_type", None) is not None:
                # Whatever ends this process now, this is the cause.
                if self.board is not None and self.board.is_mine():
                    self.board.script_failed(self.exit_code.value or 1)
            else:
                for manager in list(self.unfinished):
                    # For a script without close(): what was captured for durable storage is still
                    # written.
                    manager._finish()
                _mark_script_over(self)

        self.exit_code.watch()

        try:
            threading._register_atexit(leaving)  # type: ignore[attr-defined] # before anything is torn down
        except (AttributeError, RuntimeError):
            atexit.register(leaving)

    def _offer_stacks(self, board: Board) -> None:
        """Lets the agent ask a hung worker for its stacks; the answer needs neither the interpreter
        nor a lock."""
        path = os.environ.get("EVERSTEP_STACKS")
        if not path:
            return
        try:
            self._stacks = open(path, "w")  # noqa: SIM115 - open as long as the process lives
            faulthandler.register(_STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError):
            return  # no such directory, or no such signal: the agent gets no stacks
        board.offer_stacks()

    @property
    def agent(self) -> Agent | None:
        """The agent, with a connection that is opened on first use."""
        if self._agent is None and self.board is not None:
            w = world()
            self._agent = Agent(os.environ["EVERSTEP_SOCKET"], w.generation, w.rank, w.local_rank)
        return self._agent

    def stepped(self, step: int) -> None:
        """Records that the script has completed ``step`` steps in all."""
        if self.board is None:
            return
        if not self.reports_steps:
            self._take_over_steps()
            # Where it continues from is not known: the steps observed so far are its own, or only
            # this one.
            self._number_from(max(step - max(self.updates, 1), 0))
        self._note(step)

    def _take_over_steps(self) -> None:
        self.reports_steps = True
        self.board.zero_line = False  # type: ignore[union-attr]

    def _number_from(self, origin: int | None) -> None:
        """Records that steps continue after ``origin``; ``None``: they are counted since this
        process started."""
        board = self.board
        if board is None or origin == self.origin:
            return
        # In this order: the agent reads in the opposite order.
        if origin is None or self.origin is not None:
            board.numbered = False
        board.restored = origin or 0
        if self.updates and not self.reports_steps:
            board.step = (origin or 0) + self.updates
        if origin is not None:
            board.numbered = True
        self.origin = origin

    def continue_from(self, origin: int | None) -> None:
        """Records the same, observed from outside; ignored once the script reports its steps
        itself."""
        if not self.reports_steps:
            self._number_from(origin)

    def observed(self, step: int) -> None:
        """Records a completed step that was observed from outside; ignored once the script reports
        its steps itself."""
        if self.board is not None and not self.reports_steps:
            self._note(step)

    def _note(self, step: int) -> None:
        self.exit_code.went_on()
        now = time.perf_counter_ns()
        if not self.noted_imports:
            # A program that the script has started (a data loader) may have claimed the board. Its
            # claim yields only until a step is known.
            self.board.claim()  # type: ignore[union-attr]
        wall = now - self.step_began
        # Between its last gradient and the update, a rank waits for the other ranks' gradients.
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
        """Records that training continues after ``step`` completed steps."""
        if self.board is not None:
            self.board.claim()
            self._take_over_steps()
            self._number_from(step)
            self.board.continue_from(step)
        self.step_began = time.perf_counter_ns()

    def plan_total(self, total: int) -> None:
        """Records that the script is to complete ``total`` steps in all, so that a crash before the
        last one does not count as one at the end."""
        if self.board is not None:
            self.board.total = max(total, 0)

    def handle_signals(self) -> None:
        """Makes SIGTERM and SIGUSR1 set a flag, which the loop polls, instead of ending the
        process."""
        if self.handles_signals or threading.current_thread() is not threading.main_thread():
            return
        self.handles_signals = True
        if self.board is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.board.flag_stop_signals()
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
    """Detaches a forked child (a data loader), which is not a worker: the connections are its
    parent's."""
    if _current is not None:
        _current.board = None
        _current._agent = None


os.register_at_fork(after_in_child=_forked)


def in_group() -> bool:
    """Returns whether torch's process group is initialized with more than one rank."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def watch_gradients(optimizer: Any) -> None:
    """Measures the time between the last gradient of a backward pass and the update, in which a
    rank waits for the others, with a hook on the first parameter."""
    worker = current()
    if worker.watches_gradients or not in_group():
        return

    def complete(_: Any) -> None:
        worker.gradients_at = time.perf_counter_ns()
        if worker.board is not None:
            # If other ranks end, this shows that this rank has more to do.
            worker.board.backward_pass()

    def before_update(*_: Any) -> None:
        worker.update_at = time.perf_counter_ns()

    try:
        first = next(p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
        first.register_post_accumulate_grad_hook(complete)
        optimizer.register_step_pre_hook(before_update)
        worker.watches_gradients = True
    except (StopIteration, RuntimeError, AttributeError):
        pass  # no parameter to hook: the whole step counts as this rank's own time


def heartbeat(step: int | None = None) -> None:
    """Reports progress, not liveness: call it where the loop advances, never from a background
    thread.

    ``step`` is the number of optimizer steps completed.
    """
    worker = current()
    if worker.board is None:
        return
    if step is None:
        worker.board.beat()
    else:
        worker.stepped(step)


@contextmanager
def section(name: str, *, timeout: timedelta | None = None) -> Iterator[None]:
    """Marks a block that is not a step: evaluation, a long save. No hang is declared inside it,
    unless ``timeout`` is given and passes."""
    worker = current()
    # The schedule of checkpoints measures these sections itself.
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


def _mark_script_over(worker: _Worker) -> None:
    """Records that only exit handlers of the script are left: however this process ends, it has
    done its work."""
    board = worker.board
    # A launcher that has imported torch owned the board until the training claimed it.
    if board is None or not board.is_mine():
        return
    board.script_over()


def _watch_os_exit(board: Board) -> None:
    """Records that ``os._exit`` ends this process, which is not a crash: a forked
    ``multiprocessing.Process`` ends like that."""
    leave = os._exit

    @functools.wraps(leave)
    def leave_at_once(status: int) -> NoReturn:
        if board.is_mine():
            board.os_exit(bool(status == 0))
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
    """Reports what the program knows about a failure to the agent, before the process ends."""
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
        pass  # the process is about to end anyway, and its exit code reports the failure


def record(fn: F) -> F:
    """Does what ``torch.distributed.elastic.multiprocessing.errors.record`` does (the same error
    file), and also reports the error to the agent at once."""

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
    """Returns True when the job is stopping and this step is the last one; the same step on all
    ranks."""
    worker = current()
    worker.handle_signals()
    board = worker.board
    if board is None:
        return worker.stop_signal != 0
    if not board.stop_requested:
        return False
    at = board.stop_at
    return at is None or board.step >= at
