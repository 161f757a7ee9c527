"""A shard in memory whose damaged parts are repaired from a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._internal import (
    Agent,
    AgentError,
    CheckpointError,
    DamagedError,
    Shard,
)
from .slots import COPY_THREADS

if TYPE_CHECKING:
    from ._internal import Entry, Target


class HealingShard:
    """A shard whose damaged parts the agent repairs from a copy."""

    def __init__(self, shard: Shard, agent: Agent) -> None:
        self._shard, self._agent = shard, agent

    def entries(self) -> list[Entry]:
        """As :meth:`Shard.entries`."""
        return self._shard.entries()

    def places(self) -> list[int] | None:
        """As :meth:`Shard.places`."""
        return self._shard.places()

    def copy_to(self, targets: list[Target]) -> None:
        """As :meth:`Shard.copy_to`."""
        try:
            self._shard.copy_to(targets, COPY_THREADS)
        except DamagedError as e:
            self._heal(e)
            self._shard.copy_to(targets, COPY_THREADS)

    def bytes(self, name: str) -> bytes:
        """As :meth:`Shard.bytes`."""
        try:
            return self._shard.bytes(name)
        except DamagedError as e:
            self._heal(e)
            return self._shard.bytes(name)

    def _heal(self, damage: DamagedError) -> None:
        text, chunks = damage.args
        try:
            self._agent.heal(self._shard.path, chunks)
        except AgentError as e:
            raise CheckpointError(f"{text}; {e}") from damage
