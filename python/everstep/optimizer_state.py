"""Optimizers: the torch optimizer behind wrappers, its state by the names of parameters, and how it is put back.

torch numbers parameters by their positions. Here each has the name of its object in front (``encoder.0.weight``): two modules may have
parameters of the same name, and neither their order in the optimizer nor that of the objects matters.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import flat
from ._internal import CheckpointError
from .compare import difference
from .placed import Place, parameter_in, place_of
from .sharded import Part, is_sharded, rebuilt
from .tensors import assign, local

if TYPE_CHECKING:
    from .state import Item

#: How parameters are named in the state of an optimizer. Earlier checkpoints have no number: their names have no object.
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
                    full = f"{name}.{flat.clean(key)}"
                    self.first.setdefault(id(parameter), full)
                    self.by_name[full] = id(parameter)

    def of(self, optimizer: Optimizer) -> list[str]:
        """Names of an optimizer's parameters, in its order; ``param_N`` for those of no module."""
        return [self.first.get(id(p), f"param_{i}") for i, p in enumerate(parameters_of(optimizer))]


class TrainedParameters:
    """The parameters of modules that optimizers have at the first capture: what a fresh process has, too."""

    def __init__(self, names: dict[int, str], optimizers: Mapping[str, Optimizer]) -> None:
        trained = (p for o in optimizers.values() for p in parameters_of(o))
        self._names = {id(p): (weakref.ref(p), names[id(p)]) for p in trained if id(p) in names}

    def lost(self, optimizer: Optimizer, now: ParameterNames) -> str | None:
        """The name of a parameter that ``optimizer`` still has and its module has no longer."""
        for parameter in parameters_of(optimizer):
            held, full = self._names.get(id(parameter), (None, ""))
            if held is not None and held() is parameter and id(parameter) not in now.first:
                return full
        return None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All of its parameters, in the order of its groups."""
    return [p for g in optimizer.param_groups for p in g["params"]]


def unwrapped(obj: Any) -> Any:
    """The torch optimizer inside wrappers that pass its state on as it is (Accelerate's, Trainer's); any other object itself."""
    found = obj
    while (inner := _inner(found)) is not None:
        found = inner
    return found if is_complete(found) else obj


def is_complete(obj: Any) -> TypeGuard[Optimizer]:
    """A torch optimizer; wrappers that only subclass it have no hooks."""
    return isinstance(obj, Optimizer) and hasattr(obj, "_optimizer_step_pre_hooks")


def _inner(outer: Any) -> Any:
    """What a wrapper wraps: ``.optimizer`` of something that looks like an optimizer (a scheduler does not)."""
    if isinstance(outer, (nn.Module, Tensor)) or not all(
        hasattr(outer, a) for a in ("param_groups", "zero_grad", "state_dict")
    ):
        return None
    inner = getattr(outer, "optimizer", None)
    if inner is None or inner is outer or not hasattr(inner, "param_groups"):
        return None
    return inner if _passes_on(outer, inner) else None


def _passes_on(outer: Any, inner: Any) -> bool:
    """The state of ``outer`` is that of ``inner`` and nothing else: it returns the very object that ``inner`` returns."""
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
    """The state is as torch's own optimizers have it."""
    return isinstance(state, dict) and state.keys() == {"state", "param_groups"}


def kind_of(optimizer: Any) -> str:
    """The class of an optimizer, or of anything else."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def in_no_module(optimizer: Optimizer, order: list[str], saved: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Parameters that belong to no module and are not among the tensors that other objects save (``saved``)."""
    loose = {n: p for n, p in zip(order, parameters_of(optimizer), strict=True) if n.startswith("param_")}
    if not loose:
        return {}
    # Tensors without elements all begin at 0, and are one another's only by chance.
    begins = {local(p).data_ptr() for p in loose.values()} - {0}
    elsewhere = {_elements(t) for t in saved if t.data_ptr() in begins}
    return {n: p.detach() for n, p in loose.items() if _elements(local(p)) not in elsewhere}


def _elements(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements. One that only begins where another does has others, too."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def loose_places(optimizers: Mapping[str, Optimizer], names: ParameterNames) -> dict[str, Place]:
    """Where this rank's parts of sharded parameters of no module belong, by the names of their tensors in a checkpoint."""
    loose = ((n, k, p) for n, o in optimizers.items() for k, p in in_no_module(o, names.of(o)).items())
    places = ((f"{name}/values/{key}", place_of(parameter)) for name, key, parameter in loose)
    return {name: place for name, place in places if place is not None}


def by_names(
    optimizer: Optimizer, state: dict[str, Any], order: list[str], values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What is saved of a standard state, and of parameters of no module (``values``)."""
    parameters = parameters_of(optimizer)

    def named(key: Any) -> bool:
        return type(key) is int and 0 <= key < len(order)

    return {
        "state": {order[k]: v for k, v in state["state"].items() if named(k)},
        "names": NAMES,
        "kind": kind_of(optimizer),
        # State of the optimizer as a whole, which some put beside that of parameters.
        "other": [[k, v] for k, v in state["state"].items() if not named(k)],
        # Parameters of no module are told apart by their positions only.
        "shapes": {n: list(p.shape) for n, p in zip(order, parameters, strict=True) if n.startswith("param_")},
        **({"values": dict(values)} if values else {}),
        # Whose state says itself which of its tensors were sharded.
        **(
            {"sharded": sharded}
            if (sharded := [n for n, p in zip(order, parameters, strict=True) if is_sharded(p)])
            else {}
        ),
        # Last: it is what changes from step to step (learning rates) where the rest stays as it is.
        "groups": [{**g, "params": [order[i] for i in g["params"]]} for g in state["param_groups"]],
    }


def describe(name: str, items: list[Item], sharded: Iterable[str], ranges: Mapping[str, Place]) -> None:
    """Says of an optimizer's tensors when they change, and where the pieces of FSDP1's parameters (``ranges``) belong.

    Raises:
        CheckpointError: naming a sharded tensor that is in the state of no sharded parameter, so that its mesh would not be known.
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
            ranges and (owner := parameter_in(item.name, ranges)) is not None and flat.fits(item.tensor, ranges[owner])
        ):
            item.whole = ranges[owner]


def exported(value: dict[str, Any]) -> dict[str, Any]:
    """As ``state_dict()`` has it, by names of parameters; without the name of the object where there is only one."""
    names = [n for g in value["groups"] for n in g["params"]]
    one = (
        value.get("names") == NAMES and len({n.partition(".")[0] for n in names}) == 1 and all("." in n for n in names)
    )

    def short(name: str) -> str:
        return name.partition(".")[2] if one else name

    state = {**{short(n): v for n, v in value["state"].items()}, **dict(value.get("other", []))}
    return {"state": state, "param_groups": [{**g, "params": [short(n) for n in g["params"]]} for g in value["groups"]]}


def _positions(name: str, value: dict[str, Any], optimizer: Optimizer, names: ParameterNames) -> dict[str, int]:
    """The position of each saved parameter in this optimizer."""
    order, parameters = names.of(optimizer), parameters_of(optimizer)
    by_identity = {id(p): i for i, p in enumerate(parameters)}
    unnamed = {n: i for i, n in enumerate(order) if n == f"param_{i}"}
    known: dict[str, set[int]] = {}
    for full, identity in names.by_name.items():
        if identity in by_identity:
            key = full if value.get("names") == NAMES else full.partition(".")[2]
            known.setdefault(key, set()).add(by_identity[identity])
    saved = [n for g in value["groups"] for n in g["params"]]
    found: dict[str, int] = {}
    for key in saved:
        at = known.get(key, {unnamed[key]} if key in unnamed else set())
        if len(at) > 1 or saved.count(key) > 1:
            raise CheckpointError(
                f"{name}=: {key} is the name of several parameters in this checkpoint, which was made when names had no object: "
                "which state belongs to which is not known; restore the objects without the optimizer"
            )
        if at:
            found[key] = next(iter(at))
    for key, shape in value.get("shapes", {}).items():
        if key in found and list(parameters[found[key]].shape) != shape:
            raise CheckpointError(
                f"{name}=: parameter {found[key]} had shape {shape} in the checkpoint, {list(parameters[found[key]].shape)} here"
            )
    return found


def _differences(value: dict[str, Any], optimizer: Optimizer, order: list[str], found: dict[str, int]) -> list[str]:
    """Where the groups of the checkpoint and of this optimizer have other parameters."""
    lines = []
    matched = set(found.values())
    at = itertools.count()
    live = {next(at): g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]}
    for g, group in enumerate(value["groups"]):
        for key in group["params"]:
            if key not in found:
                lines.append(f"{key}: only in the checkpoint, in group {g}")
            elif live[found[key]] != g:
                lines.append(f"{key}: in group {g} of the checkpoint, in group {live[found[key]]} here")
    lines += [f"{order[i]}: only in this optimizer, in group {g}" for i, g in live.items() if i not in matched]
    return lines


def restore(
    name: str,
    optimizer: Optimizer,
    value: dict[str, Any],
    names: ParameterNames,
    places: Mapping[str, Place] | None = None,
) -> None:
    """Puts the state of :func:`by_names` back.

    Args:
        places: where the checkpoint's tensors belong, by name, if this rank's own shard was read as it is.

    Raises:
        CheckpointError: when parameters and groups do not match one to one, and when something did not arrive.
    """
    order, parameters = names.of(optimizer), parameters_of(optimizer)
    if len(value["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{name}=: the checkpoint's optimizer has {len(value['groups'])} parameter groups, this one {len(optimizer.param_groups)}"
        )
    found = _positions(name, value, optimizer, names)
    lines = _differences(value, optimizer, order, found)
    lines += [f"{n}: has state in the checkpoint, but is in no group there" for n in value["state"] if n not in found]
    if lines:
        shown = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
        raise CheckpointError(
            f"{name}=: the checkpoint's optimizer has other parameters than this one; give it the same in the same groups:\n  {shown}"
        )
    _check_kind(name, value, optimizer)
    # torch goes by positions: those of this optimizer, whatever the order was that the checkpoint was made with.
    groups, at = [], 0
    for saved, own in zip(value["groups"], optimizer.param_groups, strict=True):
        members = list(range(at, at + len(own["params"])))
        group = {**saved, "params": members}
        if isinstance(labels := saved.get("param_names"), list):
            by_position = {found[n]: label for n, label in zip(saved["params"], labels, strict=True)}
            group["param_names"] = [by_position[i] for i in members]
        groups.append(group)
        at += len(members)
    noted, made = set(value.get("sharded", ())), dict[int, tuple[Any, Any]]()
    state: dict[Any, Any] = {}
    for n, of_parameter in value["state"].items():
        parameter = parameters[found[n]]
        as_parameter = functools.partial(_are_at, places or {}, place_of(parameter))
        state[found[n]] = {
            k: rebuilt(x, parameter, f"{name}/state/{n}/{k}", made, by_shape=n not in noted, as_parameter=as_parameter)
            for k, x in of_parameter.items()
        }
    state.update((k, v) for k, v in value.get("other", []))
    before = [set(g) for g in optimizer.param_groups]
    plainly = _loads_plainly(optimizer)
    given = {k: _castable(v) if plainly and isinstance(v, dict) else v for k, v in state.items()}
    try:
        optimizer.load_state_dict({"state": given, "param_groups": groups})
    except Exception as e:
        raise CheckpointError(
            f"{name}=: load_state_dict() of {kind_of(optimizer)} did not take the state in the checkpoint: {type(e).__name__}: {e}"
        ) from e
    for was, group in zip(before, optimizer.param_groups, strict=True):
        if lost := sorted(was - group.keys()):
            raise CheckpointError(
                f"{name}=: the checkpoint is of {value.get('kind', 'another optimizer')}, whose groups have no "
                f"{', '.join(lost)}, which {kind_of(optimizer)} needs"
            )
    if plainly:
        _keep_exact(optimizer, parameters, state)
    _verify(name, optimizer, state, groups, order)
    saved_values = value.get("values", {}).items()
    values = {n: v.tensor if isinstance(v, Part) else v for n, v in saved_values if n in found}
    lacking = [n for n in found if n not in values and n not in noted and n.startswith("param_")]
    if unsaved := [found[n] for n in lacking if is_sharded(parameters[found[n]])]:
        warnings.warn(
            f"everstep: parameter {unsaved[0]} of {name}= is sharded and belongs to no module, and this checkpoint was made by an everstep "
            "that did not save such parameters: unless another object restores it, it keeps the value that it has now",
            stacklevel=6,
        )
    if places is not None:
        for n in values:
            if _of_part(places.get(f"{name}/values/{n}")) != _of_part(place_of(parameters[found[n]])):
                raise CheckpointError(
                    f"{name}=: parameter {found[n]}, which belongs to no module, is sharded in another way in the checkpoint; "
                    "run with the same ranks and sharding, or pass the module that it belongs to to CheckpointManager"
                )
    _put_back(name, {found[n]: v for n, v in values.items()}, parameters)


def _are_at(places: Mapping[str, Place], place: Place | None, tensor: str) -> bool:
    return place is not None and places.get(tensor) == place


def _of_part(place: Place | None) -> Place | None:
    """``None`` for what is a whole tensor, too."""
    return None if place is None or place.sizes == place.shape else place


def _put_back(name: str, values: dict[int, Tensor], parameters: list[Tensor]) -> None:
    """Values of parameters of no module."""
    for i, saved in values.items():
        parameter = local(parameters[i]).detach()
        if (parameter.dtype, parameter.shape) != (saved.dtype, saved.shape):
            raise CheckpointError(
                f"{name}=: parameter {i} is {saved.dtype} of shape {list(saved.shape)} in the checkpoint, "
                f"{parameter.dtype} of shape {list(parameter.shape)} here"
            )
        assign(parameter, saved)


def _check_kind(name: str, value: dict[str, Any], optimizer: Optimizer) -> None:
    """Another class may stand for the one that was saved when both have the same options."""
    if value.get("kind") in (None, kind_of(optimizer)):
        return
    for saved, own in zip(value["groups"], optimizer.param_groups, strict=True):
        if differ := sorted((saved.keys() ^ own.keys()) - {"initial_lr", "param_names"}):
            raise CheckpointError(
                f"{name}=: the checkpoint is of {value['kind']}, this is {kind_of(optimizer)}; they differ in {', '.join(differ)}"
            )


def _loads_plainly(optimizer: Optimizer) -> bool:
    """Nothing but torch's own code takes part in loading."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and not hooks


def _castable(values: dict[Any, Any]) -> dict[Any, Any]:
    """What torch can cast of a parameter's state. It makes anything else anew as its type of a generator, which few types take."""
    return {k: v for k, v in values.items() if v is None or isinstance(v, (Tensor, int, float))}


def _keep_exact(optimizer: Optimizer, parameters: list[Tensor], state: dict[Any, Any]) -> None:
    """torch casts state to the dtype of its parameter: what is not as saved is put in its place, and what torch was not given is added.

    What was taken over as it is replaces the saved value in ``state``, so that it need not be compared again.
    """
    moved: dict[tuple[int, torch.device], Any] = {}
    for i, values in state.items():
        if type(i) is not int or i >= len(parameters) or not isinstance(values, dict):
            continue
        own, parameter = optimizer.state[parameters[i]], parameters[i]
        for key, saved in values.items():
            live = own.get(key)
            if not isinstance(live, Tensor):
                if difference(saved, live) is not None:
                    own[key] = _to(saved, parameter.device, moved)
            elif not isinstance(saved, Tensor):
                # torch has made a tensor of a number that an earlier version had.
                if isinstance(saved, (int, float)) and live.numel() == 1 and live.item() == saved:
                    values[key] = live
                else:
                    own[key] = saved
            else:
                if live.dtype != saved.dtype:
                    live = saved.to(live.device)
                if (
                    live.shape == parameter.shape
                    and live.stride() != parameter.stride()
                    and not is_sharded(live)
                    and not is_sharded(parameter)
                ):
                    # Kernels want state that lies in memory as its parameter does (channels last).
                    live = torch.empty_like(parameter, dtype=live.dtype, requires_grad=False).copy_(live)
                if _same_kind(live, saved):
                    own[key] = values[key] = live
        if [*own] != [*values]:
            ordered = {k: own[k] for k in values} | own
            own.clear()
            own.update(ordered)


def _same_kind(live: Tensor, saved: Tensor) -> bool:
    """A copy between devices or layouts changes nothing else."""
    return live.dtype == saved.dtype and live.shape == saved.shape


def _to(value: Any, device: torch.device, moved: dict[tuple[int, torch.device], Any]) -> Any:
    """The tensors of plain containers on a device. ``moved``: by identity, so that one object stays one."""
    if (id(value), device) in moved:
        return moved[id(value), device]
    found = value
    if isinstance(value, Tensor):
        found = value.to(device)
    elif type(value) in (list, tuple, deque):
        inner = [_to(v, device, moved) for v in value]
        if any(a is not b for a, b in zip(inner, value, strict=True)):
            found = deque(inner, value.maxlen) if isinstance(value, deque) else type(value)(inner)
    elif type(value) is dict:
        entries = {k: _to(v, device, moved) for k, v in value.items()}
        if any(entries[k] is not v for k, v in value.items()):
            found = entries
    moved[id(value), device] = found
    return found


def _verify(
    name: str, optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]], order: list[str]
) -> None:
    """Everything has arrived. What torch has taken as it is is the very tensor that was read, and costs nothing to compare."""
    now = optimizer.state_dict()
    places = {
        i: f"{name}/state/{order[i]}" if type(i) is int and 0 <= i < len(order) else f"{name}/state/{i}"
        for i in state.keys() | now["state"].keys()
    }
    for i, place in places.items():
        there = i in state and i in now["state"]
        at = difference(state[i], now["state"][i], place) if there else place
        if at is not None:
            raise CheckpointError(
                f"{at} did not arrive: after load_state_dict() the optimizer has another value (a hook, or a "
                "load_state_dict of its own, changes it)"
            )
    for g, (saved, live) in enumerate(zip(groups, now["param_groups"], strict=True)):
        for key, value in saved.items():
            at = difference(value, live.get(key), f"{name}/groups[{g}]/{key}")
            if at is not None:
                raise CheckpointError(f"{at} did not arrive: after load_state_dict() the optimizer has another value")
