"""Popular training frameworks, in a virtual environment on top of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from harness.cluster import ROOT

PACKAGES = ("transformers==5.23.0", "accelerate==1.15.0", "lightning==2.6.6", "psutil")


def environment() -> dict[str, str]:
    """Returns the variables that make ``everstep run`` and ``torchrun`` use that interpreter."""
    home = ROOT / "target" / "frameworks"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        (site,) = home.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "-q", *PACKAGES],
            check=True,
        )
        (home / "ready").touch()
    return {
        **os.environ,
        "VIRTUAL_ENV": str(home),
        "PYTHON_EXEC": str(home / "bin" / "python"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def python() -> Path:
    """Returns the path of the interpreter."""
    return ROOT / "target" / "frameworks" / "bin" / "python"
