"""`everstep detect` answers bad input with a clear sentence or a defined result.

Each input must end with the documented exit code.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import EVERSTEP


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(EVERSTEP), "detect", *words], capture_output=True, text=True, check=False, timeout=120)


def _fleet(value: Callable[[int, int], str], seconds: int = 600, skew: int = 0) -> str:
    """Returns a table of eight machines that all behave the same, except for ``value``."""
    lines = ["time,machine,cpu,net-sent"]
    for second in range(seconds):
        for machine in range(8):
            usual = 10 + math.sin(second * 0.3) + ((second * 7919 + machine * 104729) % 97) / 97
            at = second + (skew if machine == 3 else 0)
            lines.append(f"{at},m{machine},{value(second, machine) or f'{usual:.4f}'},{usual * 10:.4f}")
    return "\n".join(lines) + "\n"


#: Name, table, exit code, word that the message must contain.
SENTENCES: list[tuple[str, str, int, str]] = [
    ("empty", "", 2, "no column time"),
    ("only a header", "time,machine,cpu\n", 2, "no samples"),
    ("no machine column", "time,cpu\n1,2\n", 2, "no column machine"),
    ("no metric", "time,machine\n1,a\n", 2, "no metric"),
    ("a word for a number", "time,machine,cpu\n1,a,much\n", 2, "is not a number"),
    ("a word for a time", "time,machine,cpu\nsoon,a,1\n", 2, "is not a time"),
    ("a machine twice", "time,machine,cpu\n1,a,1\n1,a,2\n", 2, "two values"),
    ("two roles", "time,machine,role,cpu\n1,a,x,1\n2,a,y,2\n", 2, "two roles"),
    ("times in nanoseconds", "time,machine,cpu\n1,a,1\n1790000000000000000,b,1\n", 2, "in seconds"),
    ("a short row", "time,machine,cpu\n1,a\n", 2, "cannot be read"),
    ("no name", "time,machine,cpu\n1,,2\n", 2, "no name"),
]
#: Name, table. No machine may be named.
QUIET: list[tuple[str, str]] = [
    ("NaN and infinity", _fleet(lambda s, m: ["nan", "inf", "-inf", ""][m % 4] if s % 50 == m else "")),
    ("a value of the largest kind", _fleet(lambda s, m: "1e38" if (s, m) == (300, 2) else "")),
    ("constant", _fleet(lambda s, m: "5")),
    ("never anything of one metric", _fleet(lambda s, m: "nan")),
    (
        "two machines",
        "time,machine,cpu\n" + "".join(f"{s},a,{s % 7}\n{s},b,{50 if s > 300 else s % 7}\n" for s in range(600)),
    ),
    ("one second", "time,machine,cpu\n1,a,1\n1,b,1\n1,c,9\n"),
    ("minutes of clock skew", _fleet(lambda s, m: "", skew=240).replace("inf", "")),
]


def measure(soak: bool) -> Iterator[Bound]:
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        for name, text, code, word in SENTENCES:
            (at / "t.csv").write_text(text)
            said = _run("run", "--csv", str(at / "t.csv"))
            if (
                said.returncode != code
                or word not in said.stderr
                or len(said.stderr.strip().splitlines()) != 1
                or "panicked" in said.stderr
            ):
                bad.append(f"{name}: {said.returncode} {said.stderr.strip()[:200]}")
        for name, text in QUIET:
            (at / "t.csv").write_text(text)
            said = _run("run", "--csv", str(at / "t.csv"), "--json")
            wrong = said.returncode not in (0, 1) or "panicked" in said.stderr
            # A machine whose clock is minutes off has no samples at the table's end, so it appears
            # to be gone.
            named = '"machines":["m3"]' in said.stdout if "skew" in name else '"alarms":[]' not in said.stdout
            if wrong or (named and "skew" not in name):
                bad.append(f"{name}: {said.returncode} {said.stdout.strip()[:200]} {said.stderr.strip()[:200]}")
        words: list[tuple[list[str], int, str]] = [
            (["run"], 2, "--csv"),
            (["run", "--csv", str(at / "none.csv")], 2, "cannot read"),
            (["run", "--parquet", str(at / "t.csv")], 2, "as Parquet"),
            (["run", "--prometheus", "http://127.0.0.1:9"], 78, "is a Prometheus server running there"),
            (["run", "--csv", str(at / "t.csv"), "--detector", "best"], 2, "cannot read best"),
            (
                ["run", "--csv", str(at / "t.csv"), "--detector", "lstm-vae", "--models", str(at / "t.csv")],
                2,
                "not a models file",
            ),
            (["eval", "--csv", str(at / "t.csv"), "--faults", str(at / "t.csv")], 2, "machine,start,end"),
            (
                ["calibrate", "--csv", str(at / "t.csv"), "--false-alarms", "0.4", "-o", str(at / "s.toml")],
                2,
                "machine-days",
            ),
            (
                ["train", "--csv", str(at / "t.csv"), "--models", str(at / "t.csv"), "-o", str(at / "m.json")],
                2,
                "not a models file",
            ),
        ]
        for line, code, word in words:
            said = _run(*line)
            if said.returncode != code or word not in said.stderr or "panicked" in said.stderr:
                bad.append(f"{' '.join(line[:2])}: {said.returncode} {said.stderr.strip()[:200]}")
        # A model with one changed digit.
        (at / "ok.csv").write_text(_fleet(lambda s, m: "", seconds=60))
        said = _run("train", "--csv", str(at / "ok.csv"), "--epochs", "1", "-o", str(at / "m.json"))
        text = (at / "m.json").read_text()
        place = text.index("parameters") + 14
        (at / "m.json").write_text(text[:place] + ("1" if text[place] != "1" else "2") + text[place + 1 :])
        said = _run("run", "--csv", str(at / "ok.csv"), "--detector", "lstm-vae", "--models", str(at / "m.json"))
        if said.returncode != 2 or "digest" not in said.stderr:
            bad.append(f"changed model: {said.returncode} {said.stderr.strip()[:200]}")
    for line in bad:
        print(line)
    many = len(SENTENCES) + len(QUIET) + len(words) + 1
    yield Bound(
        "bad",
        len(bad),
        f"of {many} inputs that do not end as they should; counters that wrap, clocks that differ and late samples "
        "are property tests (crates/detector)",
        "=",
        0,
    )
