"""``torchrun --rdzv-backend everstep``: torchrun runs the workers, everstep the rendezvous.

An entry point of the group ``torchrun.handlers``. The coordinator detects lost nodes at once, keeps
node ids in order and survives its own death; the process group's store is outside the ranks and is
a new one for every world. For the rest of everstep, use ``everstep run`` in place of ``torchrun``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)


def _binary() -> str:
    beside = Path(sys.executable).parent / "everstep"
    found = str(beside) if beside.is_file() else shutil.which("everstep")
    if not found:
        raise RendezvousConnectionError(
            f"there is no everstep command next to {sys.executable} or on PATH; install the everstep package in this "
            "environment"
        )
    return found


class EverstepRendezvousHandler(RendezvousHandler):
    """Talks to ``everstep rendezvous``, which takes part for this node."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        line = [
            _binary(),
            "rendezvous",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            params.endpoint,
            "--rdzv-id",
            params.run_id,
        ]
        line += ["--nnodes", f"{params.min_nodes}:{params.max_nodes}", "--max-restarts", "1000000"]
        if params.local_addr:
            line += ["--local-addr", params.local_addr]
        for option in ("join_timeout", "is_host"):
            if option in params.config:
                line += ["--rdzv-conf", f"{option}={params.config[option]}"]
        for option in ("detect_timeout", "token_file", "node_rank"):
            if option in params.config:
                line += [f"--{option.replace('_', '-')}", str(params.config[option])]
        if params.config.get("insecure"):
            line.append("--insecure")
        self._helper = subprocess.Popen([*line, "torchrun"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._places: Queue[dict[str, Any]] = Queue()
        self._waiting = False
        self._over: str | None = None
        threading.Thread(target=self._listen, daemon=True, name="everstep-rendezvous").start()

    def _listen(self) -> None:
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            said = json.loads(line)
            if "rank" in said:
                self._waiting = False
                self._places.put(said)
            elif "waiting" in said:
                self._waiting = True
            else:
                self._over = said["why"]
        self._over = self._over or "everstep rendezvous has ended"
        self._places.put({})

    def _send(self, what: str) -> None:
        try:
            assert self._helper.stdin is not None
            self._helper.stdin.write(what + "\n")
            self._helper.stdin.flush()
        except OSError:
            pass  # it has ended; whatever waits for an answer is notified

    def get_backend(self) -> str:
        """Returns ``everstep``."""
        return "everstep"

    @property
    def use_agent_store(self) -> bool:
        """True: the store that workers use is served by everstep, not by a rank."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for a place in the next world.

        Raises:
            RendezvousClosedError: the job is over, or cannot continue; the text gives the cause.
        """
        self._send("next")
        place = self._places.get()
        if not place:
            self._places.put({})
            raise RendezvousClosedError(self._over)
        store = TCPStore(place["host"], place["port"], is_master=False)
        info = RendezvousStoreInfo(place["host"], place["port"])
        return RendezvousInfo(
            PrefixStore(f"torchelastic/{place['generation']}", store), place["rank"], place["world_size"], info
        )

    def is_closed(self) -> bool:
        """Returns whether the job is over."""
        return self._over is not None

    def set_closed(self) -> None:
        """Ends the part of this node."""
        self._send("done")

    def num_nodes_waiting(self) -> int:
        """Returns 1 when the world must be formed again: torchrun's agent then restarts its
        workers."""
        return int(self._waiting)

    def get_run_id(self) -> str:
        """Returns ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Reports how it ended and waits until the other nodes are notified."""
        self._send("failed" if sys.exc_info()[0] is not None else "done")
        try:
            self._helper.wait(10)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            return False
        return True


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the class that torchrun registers."""
    return EverstepRendezvousHandler
