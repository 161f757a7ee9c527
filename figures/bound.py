"""One bound of a figure: a measured value and the limit that it must satisfy."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

_OPERATORS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "=": operator.eq}


@dataclass(frozen=True)
class Bound:
    """A bound. A ``control`` repeats the measurement without the mechanism or with a planted fault.

    It must read short.
    """

    part: str
    value: float
    unit: str
    op: str
    limit: float
    control: bool = False
    samples: tuple[Any, ...] = ()

    @property
    def met(self) -> bool:
        """Whether the value is within the bound."""
        return bool(_OPERATORS[self.op](self.value, self.limit))

    @property
    def good(self) -> bool:
        """Whether the bound is as it should be: met or, for a control arm, short."""
        return self.met != self.control

    def line(self, name: str) -> str:
        """Returns the line that is printed."""
        word = "control" if self.control else "figure"
        note = " (a control arm must read short)" if self.control else ""
        verdict = "ok" if self.met else "short"
        return f"{word} {name}.{self.part}: {self.value:g} {self.unit} (must {self.op} {self.limit:g}): {verdict}{note}"
