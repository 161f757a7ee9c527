"""Records what a script had imported when its first step was complete, so that the launcher's warm
process can import it ahead of a restart."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Mapping

#: Limit on the modules that are recorded.
_MODULES_MAX = 50_000


def _is_installed(origin: str, library: tuple[str, ...]) -> bool:
    """Returns whether a module is part of an installed package or of the standard library; a
    script's own modules may change before the next start."""
    return origin.startswith(library) or "/site-packages/" in origin or "/dist-packages/" in origin


def modules() -> list[str]:
    """Returns the names of the installed modules that are loaded, in the order in which they were
    loaded."""
    library = tuple(os.path.join(path, "") for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))
    found = []
    for name, module in list(sys.modules.items())[:_MODULES_MAX]:
        spec = getattr(module, "__spec__", None)
        # A module under another name, or one that was created by hand, cannot be imported by that
        # name.
        if spec is None or spec.name != name or name == "sitecustomize":
            continue
        if spec.has_location and _is_installed(spec.origin or "", library):
            found.append(name)
    return found


def _write(path: str, value: object) -> bool:
    """Writes a file unless it exists. Returns True if it exists now."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            json.dump(value, file)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def note(board: str) -> None:
    """Writes the names of the loaded modules beside this worker's board; only the first local rank
    of a node does."""
    if board.endswith("-0-board"):
        _write(board.removesuffix("board") + "modules", modules())


def note_changed(board: str, changed: Mapping[str, str | None]) -> bool:
    """Records the variables that a script changes before it imports torch, so that torch can be
    imported ahead with the same ones."""
    return not changed or _write(board.removesuffix("board") + "at-import", dict(changed))
