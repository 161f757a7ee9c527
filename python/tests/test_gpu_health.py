"""Incidents contain what NVIDIA's management library reports about a machine.

The library is a stub (harness/nvml_stub.c), because these machines have no GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.live import Job

SOURCE = Path(__file__).resolve().parent.parent.parent / "harness" / "nvml_stub.c"


@pytest.fixture
def gpus(tmp_path: Path, env: dict[str, str]) -> Path:
    """The file that sets the state of the GPUs."""
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            "-O1",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
            tmp_path / "libnvidia-ml.so.1",
            SOURCE,
        ],
        check=True,
    )
    values = tmp_path / "gpus"
    values.write_text("")
    env["NVML_STUB"], env["EVERSTEP_NVML"] = str(values), str(tmp_path / "libnvidia-ml.so.1")
    return values


def _signs(job: Job) -> list[str]:
    facts = next((Path(job.env["EVERSTEP_STATE_DIR"])).rglob("events.jsonl")).read_text()
    return [line for line in facts.splitlines() if "NVML" in line]


def test_a_gpu_that_is_lost_is_why_its_worker_failed(job, gpus):
    j = job()
    gpus.write_text("1.error 15\n")
    j.wait(lambda: _signs(j))
    j.ask("inject", "kill", "--rank", "1")
    blamed = j.wait(lambda: j.incident(1)["blamed"])
    assert blamed["verdict"]["class"] == "gpu-lost" and blamed["node"] == "0", blamed
    said = j.ask("explain", "inc-1").stdout
    assert "the GPU is lost" in said and "0000:3c:00" in said, said


def test_a_numbered_error_is_known_where_no_kernel_log_can_be_read(job, gpus):
    j = job("--kernel-log", "off")
    gpus.write_text("0.xid 48\n")
    j.wait(lambda: _signs(j))
    j.ask("inject", "kill", "--rank", "0")
    assert j.wait(lambda: j.incident(1)["blamed"])["verdict"]["class"] == "gpu-memory"
    assert "Xid (PCI:0000:3b:00): 48" in j.ask("explain", "inc-1").stdout


def test_what_only_slows_a_gpu_is_noted_and_stops_nobody(job, gpus):
    gpus.write_text("0.ecc 2\n0.remap-failed 1\n1.links 17\n")
    j = job()
    gpus.write_text("0.ecc 2\n0.remap-failed 1\n1.links 17\n0.slowed 64\n0.temperature 93\n1.lanes 8\n")
    j.wait(lambda: len(_signs(j)) == 2)
    j.steps()
    hot, lanes = sorted(_signs(j), key=lambda line: "lanes" in line)
    assert "at 93 degrees: too hot" in hot and "8 instead of 16 PCIe lanes" in lanes
    assert "no incident" in j.ask("incidents", "ls").stdout + j.ask("incidents", "ls").stderr


def test_without_a_library_nothing_is_read(job):
    j = job("--nvml", "/nowhere/libnvidia-ml.so.1")
    j.steps()
    assert not _signs(j)
