"""As in Minder's own comparison, no baseline has a better F1 than the LSTM-VAE.

Its LSTM-VAE against plain samples, all metrics as one point, one model of all metrics, moments, and
no continuity. In the paper it is the best of these, and other distances are about as good: does
that hold here?
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.detector_runs import lines

BELOW = ("raw", "joined", "whole", "mahalanobis", "no-continuity")


def measure(soak: bool) -> Iterator[Bound]:
    of = {s["method"]: s for s in lines(soak) if s["of"] == "score" and s["matrix"] == "ours"}
    ours = of["lstm-vae"]["f1"]
    for name, s in sorted(of.items(), key=lambda item: -item[1]["f1"]):
        print(f"{name:13} F1 {s['f1']:.3f} [{s['interval'][0]:.3f}, {s['interval'][1]:.3f}]")
    out_of_order = [name for name in BELOW if of[name]["f1"] > ours]
    yield Bound(
        "order",
        len(out_of_order),
        f"baselines of the paper with a better F1 than the LSTM-VAE here: {', '.join(out_of_order) or 'none'}",
        "<=",
        0,
    )
    for name in ("manhattan", "chebyshev"):
        yield Bound(name, round(abs(of[name]["f1"] - ours), 4), f"F1 apart with {name} distance", "<=", 0.05)
