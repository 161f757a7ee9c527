"""Optimizers: the torch optimizer behind wrappers, and its state by the names of parameters.

torch numbers parameters by their positions. Here each has the name of its object in front
(``encoder.0.weight``): two modules may have parameters of the same name, and neither their order in
the optimizer nor that of the objects matters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from . import fsdp1
from ._internal import CheckpointError
from .sharded import is_sharded
from .tensor_places import Place, parameter_in, place_of
from .tensors import local
from .value_limits import HASHED_ELEMENTS_MAX, hashed_elements

if TYPE_CHECKING:
    from .state import Item

#: How parameters are named in the state of an optimizer. Earlier checkpoints have no number: their
#: names have no object.
NAMES = 2


class ParameterNames:
    """Names of the parameters of all modules."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        #: The first name of each parameter, by identity. The order of objects and modules decides.
        self.first: dict[int, str] = {}
        #: Identities by every name that a parameter has: tied ones have several.
        self.by_name: dict[str, int] = {}
        for name, obj in objects.items():
            if isinstance(obj, nn.Module):
                for key, parameter in obj.named_parameters(remove_duplicate=False):
                    full = f"{name}.{fsdp1.clean(key)}"
                    self.first.setdefault(id(parameter), full)
                    self.by_name[full] = id(parameter)

    def of(self, optimizer: Optimizer) -> list[str]:
        """Names of an optimizer's parameters, in its order; ``param_N`` for those of no module."""
        return [self.first.get(id(p), f"param_{i}") for i, p in enumerate(parameters_of(optimizer))]


class TrainedParameters:
    """The parameters of modules that optimizers have at the first capture, which a fresh process
    has, too."""

    def __init__(self, names: dict[int, str], optimizers: Mapping[str, Optimizer]) -> None:
        trained = (p for o in optimizers.values() for p in parameters_of(o))
        self._names = {id(p): (weakref.ref(p), names[id(p)]) for p in trained if id(p) in names}

    def lost(self, optimizer: Optimizer, now: ParameterNames) -> str | None:
        """Returns the name of a parameter that ``optimizer`` still has and its module does not, if
        there is one."""
        for parameter in parameters_of(optimizer):
            held, full = self._names.get(id(parameter), (None, ""))
            if held is not None and held() is parameter and id(parameter) not in now.first:
                return full
        return None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns all of its parameters, in the order of its groups."""
    return [p for g in optimizer.param_groups for p in g["params"]]


def unwrapped(obj: Any) -> Any:
    """Returns the torch optimizer inside wrappers that return its state unchanged (Accelerate's,
    Trainer's), or any other object itself."""
    found = obj
    while (inner := _inner(found)) is not None:
        found = inner
    return found if is_complete(found) else obj


def is_complete(obj: Any) -> TypeGuard[Optimizer]:
    """Returns whether this is a torch optimizer; wrappers that only subclass it have no hooks."""
    return isinstance(obj, Optimizer) and hasattr(obj, "_optimizer_step_pre_hooks")


def _inner(outer: Any) -> Any:
    """Returns what a wrapper wraps: ``.optimizer`` of something that looks like an optimizer (a
    scheduler does not)."""
    if isinstance(outer, (nn.Module, Tensor)) or not all(
        hasattr(outer, a) for a in ("param_groups", "zero_grad", "state_dict")
    ):
        return None
    inner = getattr(outer, "optimizer", None)
    if inner is None or inner is outer or not hasattr(inner, "param_groups"):
        return None
    return inner if passes_on(outer, inner) else None


def passes_on(outer: Any, inner: Any) -> bool:
    """Returns whether the state of ``outer`` is exactly that of ``inner``: it returns the very
    object that ``inner`` returns."""
    probe: dict[str, Any] = {"state": {}, "param_groups": []}
    own = getattr(inner, "__dict__", {})
    before = own.get("state_dict")
    try:
        inner.state_dict = lambda *_, **__: probe
        return outer.state_dict() is probe
    except Exception:  # noqa: BLE001  # any wrapper's own code
        return False
    finally:
        if before is not None:
            own["state_dict"] = before
        else:
            own.pop("state_dict", None)


def is_standard(state: Any) -> bool:
    """Returns whether the state has the form of torch's own optimizers."""
    return isinstance(state, dict) and state.keys() == {"state", "param_groups"}


def kind_of(optimizer: Any) -> str:
    """Returns the qualified name of the class of an optimizer, or of any other object."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def in_no_module(optimizer: Optimizer, order: list[str], saved: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Returns the parameters that belong to no module and are not among the tensors that other
    objects save (``saved``)."""
    loose = {n: p for n, p in zip(order, parameters_of(optimizer), strict=True) if n.startswith("param_")}
    if not loose:
        return {}
    # Tensors without elements all begin at 0, so equal addresses mean nothing.
    begins = {local(p).data_ptr() for p in loose.values()} - {0}
    elsewhere = {_elements(t) for t in saved if t.data_ptr() in begins}
    return {n: p.detach() for n, p in loose.items() if _elements(local(p)) not in elsewhere}


def _elements(tensor: Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for tensors with the same elements. A tensor that only begins
    where another does has another key."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def loose_places(optimizers: Mapping[str, Optimizer], names: ParameterNames) -> dict[str, Place]:
    """Returns where this rank's parts of sharded parameters of no module belong, by the names of
    their tensors in a checkpoint."""
    loose = ((n, k, p) for n, o in optimizers.items() for k, p in in_no_module(o, names.of(o)).items())
    places = ((f"{name}/values/{key}", place_of(parameter)) for name, key, parameter in loose)
    return {name: place for name, place in places if place is not None}


def by_names(
    optimizer: Optimizer, state: dict[str, Any], order: list[str], values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns what is saved of a standard state, and of parameters of no module (``values``)."""
    parameters = parameters_of(optimizer)
    if len(set(order)) < len(order):
        twice = sorted(name for name, times in Counter(order).items() if times > 1)
        raise CheckpointError(
            f"an optimizer of type {kind_of(optimizer)} has {', '.join(twice)} more than once, so its state cannot be "
            "restored; give it each parameter once"
        )

    def named(key: Any) -> bool:
        return type(key) is int and 0 <= key < len(order)

    # State of the optimizer as a whole, which some optimizers store beside that of parameters.
    other = [[k, v] for k, v in state["state"].items() if not named(k)]
    if any(hashed_elements(key) > HASHED_ELEMENTS_MAX for key, _ in other):
        raise CheckpointError(
            f"an optimizer of type {kind_of(optimizer)} has state by a key with more than {HASHED_ELEMENTS_MAX} elements, which "
            "cannot be saved; use a shorter one"
        )
    return {
        "state": {order[k]: v for k, v in state["state"].items() if named(k)},
        "names": NAMES,
        "kind": kind_of(optimizer),
        "other": other,
        # Parameters of no module are identified by their positions only.
        "shapes": {n: list(p.shape) for n, p in zip(order, parameters, strict=True) if n.startswith("param_")},
        **({"values": dict(values)} if values else {}),
        # Their state records which of its tensors were sharded.
        **(
            {"sharded": sharded}
            if (sharded := [n for n, p in zip(order, parameters, strict=True) if is_sharded(p)])
            else {}
        ),
        # Last, because only the groups (learning rates) change from step to step.
        "groups": [{**g, "params": [order[i] for i in g["params"]]} for g in state["param_groups"]],
    }


def describe(name: str, items: list[Item], sharded: Iterable[str], ranges: Mapping[str, Place]) -> None:
    """Sets when an optimizer's tensors change, and where the pieces of FSDP1's parameters
    (``ranges``) belong.

    Raises:
        CheckpointError: naming a sharded tensor in the state of a parameter that is not sharded, so
            that its mesh would not be known.
    """
    known = set(sharded)
    for item in items:
        # Learning rates and the like change between updates.
        item.eager = item.name.startswith(f"{name}/groups/")
        if item.whole is not None:
            if not item.name.startswith(f"{name}/values/") and parameter_in(item.name, known) is None:
                raise CheckpointError(
                    f"{item.name} is a sharded tensor (DTensor) that is not in the state of a sharded parameter, and could not be "
                    "restored; keep to_local() or full_tensor() there"
                )
        elif (
            ranges and (owner := parameter_in(item.name, ranges)) is not None and fsdp1.fits(item.tensor, ranges[owner])
        ):
            item.whole = ranges[owner]


def exported(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the state in the form of ``state_dict()``, by names of parameters; without the name
    of the object if there is only one. The values of parameters of no module, which no other object
    has, are added."""
    names = [n for g in value["groups"] for n in g["params"]]
    one = (
        value.get("names") == NAMES and len({n.partition(".")[0] for n in names}) == 1 and all("." in n for n in names)
    )

    def short(name: str) -> str:
        return name.partition(".")[2] if one else name

    state = {**{short(n): v for n, v in value["state"].items()}, **dict(value.get("other", []))}
    groups = [{**g, "params": [short(n) for n in g["params"]]} for g in value["groups"]]
    values = value.get("values")
    return {"state": state, "param_groups": groups, **({"values": values} if values else {})}
