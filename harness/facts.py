"""The facts that a coordinator recorded, as its event log grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Facts:
    """Reads an event log. Each line is parsed once, however often one asks."""

    def __init__(self) -> None:
        self._file: tuple[Path, int] | None = None
        self._read = 0
        self._facts: list[dict[str, Any]] = []

    def of(self, path: Path) -> list[dict[str, Any]]:
        """Returns the facts in the file so far: ``{"ts", "kind", …}``, oldest first. Empty if there
        is no file."""
        try:
            with path.open("rb") as f:
                now = os.fstat(f.fileno())
                file = (path, now.st_ino)
                if file != self._file or now.st_size < self._read:
                    self._file, self._read, self._facts = file, 0, []
                f.seek(self._read)
                # The last line may be half written.
                whole = f.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            ((name, body),) = event["fact"].items()
            self._facts.append({"ts": event["ts"], "kind": name, **body})
        self._read += len(whole) + 1 if whole else 0
        return self._facts
