"""The robust detector finds the machine at fault more often than Minder's LSTM-VAE.

Also compared with the baselines of Minder's paper. Measured on sealed seeds of generated fleets. No
verdict is adjusted: it is right if it names the right machine after the onset of the fault and
before its end. How faults show in the metrics is our own model, not the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.detector_runs import EPISODES, lines


def measure(soak: bool) -> Iterator[Bound]:
    all_lines = lines(soak)
    scores = [line for line in all_lines if line["of"] == "score"]
    for s in scores:
        low, high = s["interval"]
        print(
            f"{s['matrix']:7} {s['method']:13} P {s['precision']:.3f} R {s['recall']:.3f} F1 {s['f1']:.3f} "
            f"[{low:.3f}, {high:.3f}], delay {s['delay_median_s']} / {s['delay_p95_s']} s, "
            f"one role of 64 to 1,024: F1 {s['single_role_f1']:.3f} of {s['single_role_faults']}"
        )
    for s in scores:
        if s["method"] == "robust":
            print(
                f"{s['matrix']}, by kind (all, visible, found): "
                + ", ".join(f"{kind} {a}/{v}/{f}" for kind, (a, v, f) in s["kinds"].items())
            )
    for matrix in dict.fromkeys(s["matrix"] for s in scores):
        of = {s["method"]: s for s in scores if s["matrix"] == matrix}
        ours, minder = of["robust"], of["lstm-vae"]
        count = f"{2 * EPISODES[soak]} episodes ({ours['faulty']} faulty, {ours['visible']} visible), matrix {matrix}"
        yield Bound(f"{matrix}-precision", round(ours["precision"], 4), f"precision, {count}", ">=", 0.97)
        yield Bound(
            f"{matrix}-recall", round(ours["recall"] / ours["ceiling"], 4), "recall, of what is visible", ">=", 0.95
        )
        yield Bound(f"{matrix}-margin", round(ours["f1"] - minder["f1"], 4), "F1 more than the LSTM-VAE's", ">=", 0.05)
        yield Bound(
            f"{matrix}-apart",
            round(ours["interval"][0] - minder["interval"][1], 4),
            "between the two 95 % intervals of F1",
            ">=",
            0.0,
        )
        yield Bound(
            f"{matrix}-minder",
            round(minder["single_role_f1"], 4),
            "F1 of the LSTM-VAE on fleets of one role, 64 to 1,024 machines",
            ">=",
            0.85,
        )
    alarms = next(line for line in all_lines if line["of"] == "false-alarms")
    yield Bound(
        "false-alarms",
        round(alarms["per_1000"], 3),
        f"false alarms per 1,000 node-days ({alarms['wrong']} in {alarms['node_days']:.0f})",
        "<=",
        0.4,
    )
