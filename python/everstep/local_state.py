"""What one rank's state consists of, for checkpoints of other ranks, or of other sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from . import fsdp1, optimizer_state
from .layout import OTHER, Layout
from .optimizer_state import ParameterNames
from .replicated import is_same_on_all_ranks
from .tensor_places import Place, in_module, place_of

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
    #: Tensors that all ranks train together: parameters, also of no module, and sharded tensors.
    #: Buffers may be each rank's own.
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
        names = ParameterNames(objects)
        places = places_of(items) | optimizer_state.loose_places(optimizers, names)
        parameters: dict[str, Place] = {}
        for name, place in places.items():
            parameters[name] = place
            # The name in earlier checkpoints.
            parameters.setdefault(name.partition(".")[2], place)
        loose = {
            f"{n}/values/{key}" for n, o in optimizers.items() for key in optimizer_state.in_no_module(o, names.of(o))
        }
        modules = {n: o for n, o in objects.items() if isinstance(o, nn.Module)}
        own = {
            f"{n}.{fsdp1.clean(k)}" for n, m in modules.items() for k, _ in m.named_parameters(remove_duplicate=False)
        }
        buffers = {
            f"{n}.{fsdp1.clean(k)}" for n, m in modules.items() for k, _ in m.named_buffers(remove_duplicate=False)
        }
        return cls(
            layout,
            places,
            parameters,
            {i.name for i in items},
            loose | {i.name for i in items if i.name in own or (i.whole is not None and i.name not in buffers)},
            set(optimizers),
            {n for n, o in objects.items() if kinds[n] == OTHER and not is_same_on_all_ranks(o)},
        )

    def is_personal(self, name: str) -> bool:
        """Returns whether each rank may have a tensor of its own by this name, which is not that of
        a value."""
        if in_module(name):
            return name not in self.trained
        return name.partition("/")[0] not in self.optimizers
