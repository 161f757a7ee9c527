"""What one rank's state consists of, for checkpoints of other ranks, or of other sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from . import optimizer_state
from .layout import OTHER, Layout
from .optimizer_state import ParameterNames
from .replicated import is_same_on_all_ranks
from .tensor_places import Place, in_module, place_of
from .tensors import is_lazy, local

if TYPE_CHECKING:
    from .state import Item


def places_of(items: Iterable[Item]) -> dict[str, Place]:
    """Returns where the parts of sharded tensors among the items belong."""
    wholes = [(i.name, i.whole) for i in items if i.whole is not None]
    return {name: place for name, whole in wholes if (place := place_of(whole)) is not None}


@dataclass(frozen=True)
class LocalState:
    """One rank's objects, and where the parts of sharded tensors that it has belong."""

    layout: Layout
    #: Where its parts of sharded tensors belong, by name; also of parameters that no module has.
    places: Mapping[str, Place]
    #: Where its parameters belong, by the names in the state of optimizers.
    parameters: Mapping[str, Place]
    #: The names of its modules' tensors.
    names: set[str]
    #: Those of them that all ranks train together: sharded tensors and parameters. Buffers may be
    #: each rank's own.
    trained: set[str]
    #: The names of its optimizers.
    optimizers: set[str]
    #: The names of objects that may be each rank's own, such as a data reader.
    personal: set[str]

    @classmethod
    def of(
        cls,
        layout: Layout,
        kinds: Mapping[str, str],
        objects: Mapping[str, Any],
        items: list[Item],
    ) -> LocalState:
        """Describes objects.

        Args:
            layout: the rank.
            kinds: the kind of each object.
            objects: by name.
            items: the tensors of the modules among them.
        """
        optimizers = {n: o for n, o in objects.items() if optimizer_state.is_complete(o)}
        places = places_of(items) | optimizer_state.loose_places(optimizers, ParameterNames(objects))
        parameters: dict[str, Place] = {}
        for name, place in places.items():
            parameters[name] = place
            # The name in earlier checkpoints.
            parameters.setdefault(name.partition(".")[2], place)
        modules = (o for o in objects.values() if isinstance(o, nn.Module))
        memory = {local(p).data_ptr() for m in modules for p in m.parameters() if not is_lazy(p)}
        return cls(
            layout,
            places,
            parameters,
            {i.name for i in items},
            {i.name for i in items if i.whole is not None or i.tensor.data_ptr() in memory},
            set(optimizers),
            {n for n, o in objects.items() if kinds[n] == OTHER and not is_same_on_all_ranks(o)},
        )

    def is_personal(self, name: str) -> bool:
        """Returns whether each rank may have a tensor of its own by this name, which is not that of
        a value."""
        if in_module(name):
            return name not in self.trained
        return name.partition("/")[0] not in self.optimizers
