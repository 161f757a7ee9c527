"""The exit code that a script gives is known while its interpreter shuts down, unless the script
has caught it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import atexit, gc, sys
from everstep.exit_code import ExitCode

found = ExitCode()
found.watch()
atexit.register(lambda: print(found.value, flush=True))
atexit.register(gc.collect)


def tool():
    try:
        sys.exit(3)
    except BaseException as e:
        # A cycle of this frame and its own exception.
        kept = e
        raise
"""

#: How scripts go on, and the exit code that is known in the end.
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit(0)": 0,
    "sys.exit('no data')": 1,
    "sys.exit(256)": 1,
    "tool()": 3,
    "try: sys.exit(3)\nexcept SystemExit: pass": 0,
    "try: sys.exit(3)\nexcept SystemExit as e: code = e.code\nsys.exit(code + 1)": 4,
    "try: sys.exit(3)\nexcept SystemExit: raise SystemExit(5)": 3,
    "try: sys.exit(3)\nfinally: print(end='')": 3,
    "try: tool()\nexcept SystemExit: pass\ngc.collect()": 0,
    "try: sys.exit(3)\nexcept SystemExit as e: first = e\ntry: sys.exit(4)\nfinally: first = None": 4,
}


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_that_is_known_at_the_end(tmp_path, end, module):
    (tmp_path / "script.py").write_text(_SCRIPT + end)
    line = [sys.executable, "-m", "script"] if module else [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{ENDS[end]}\n", done.stderr
