"""What the kills are judged by: records of losses, as killed processes leave them."""

from __future__ import annotations

from pathlib import Path

from harness.training import differences, losses


def _record(out: Path, text: str) -> Path:
    out.mkdir()
    (out / "losses-0.jsonl").write_text(text)
    (out / "final-0.txt").write_text("digest")
    return out


def test_a_line_that_a_kill_cut_short_hides_no_loss(tmp_path: Path) -> None:
    line = '{"step": %d, "loss": "%s"}\n'
    calm = _record(tmp_path / "calm", "".join(line % (step, "0x1p+1") for step in range(3)))
    # The kill came after the first bytes of the line; the rank then repeated the step. Another one
    # at the end.
    torn = _record(
        tmp_path / "torn", line % (0, "0x1p+1") + '{"step": 1' + line % (1, "0x1p+1") + line % (2, "0x1p+1") + '{"st'
    )
    assert losses(torn, 0) == {step: {"0x1p+1"} for step in range(3)}
    assert differences(calm, torn, 1, 3) == []
    wrong = _record(
        tmp_path / "wrong", line % (0, "0x1p+1") + '{"step": 1' + line % (1, "0x1p+2") + line % (2, "0x1p+1")
    )
    assert differences(calm, wrong, 1, 3) == ["rank 0 step 1: {'0x1p+1'} and {'0x1p+2'}"]
