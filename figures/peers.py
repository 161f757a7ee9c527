"""Third-party programs, in their own virtual environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.cluster import ROOT

#: Includes what DLRover imports but does not declare.
PACKAGES = ("torch", "dlrover", "grpcio", "protobuf", "psutil", "torchft-nightly")


def python() -> str:
    """Returns the interpreter that has them. ``EVERSTEP_PEERS`` names an existing environment."""
    given = os.environ.get("EVERSTEP_PEERS")
    home = Path(given) if given else ROOT / "target" / "peers"
    interpreter = home / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(interpreter)
