"""What a script logged itself (``figures/scripts/own_log.py``).

This is the truth with which everstep's reports are compared.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path


class OwnLog:
    """Steps by generation and rank, as the logs currently show them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _steps(self) -> dict[int, dict[int, list[int]]]:
        found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for path in self.directory.glob("log-*"):
            rank = int(path.name.removeprefix("log-"))
            for line in path.read_text().splitlines():
                generation, step = map(int, line.split())
                found[generation][rank].append(step)
        return found

    def generations(self) -> list[int]:
        """Returns the generations in which a step was done."""
        return sorted(self._steps())

    def last_generation(self) -> int:
        """Returns the last of these generations, or 0 if no step was done."""
        return max(self._steps(), default=0)

    def reached(self, rank: int) -> int:
        """Returns the last step that this rank has done."""
        return max((of[rank][-1] for of in self._steps().values() if rank in of), default=0)

    def first(self, generation: int) -> int:
        """Returns the first step of a generation."""
        return min(of[0] for of in self._steps()[generation].values())

    def done(self, generation: int) -> int:
        """Returns the last step of a generation that all of its ranks have done."""
        return min(of[-1] for of in self._steps()[generation].values())

    def top(self, generation: int) -> int:
        """Returns the last step of a generation that any of its ranks has done."""
        return max(of[-1] for of in self._steps()[generation].values())


class Altered(OwnLog):
    """A falsified log, for controls: every generation but the first is shifted by three steps."""

    def _steps(self) -> dict[int, dict[int, list[int]]]:
        moved = super()._steps()
        first = min(moved, default=0)
        return {
            g: {rank: [s + 3 * (g != first) for s in steps] for rank, steps in of.items()} for g, of in moved.items()
        }
