"""Restores the state of an optimizer that was saved by the names of its parameters
(:mod:`everstep.optimizer_state`)."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._internal import CheckpointError
from .compare import difference
from .damage import loading
from .optimizer_state import NAMES, ParameterNames, kind_of, parameters_of
from .sharded import Part, is_sharded, rebuilt
from .tensor_places import Place, place_of
from .tensors import assign, local


def _positions(name: str, value: dict[str, Any], optimizer: Optimizer, names: ParameterNames) -> dict[str, int]:
    """Returns the position of each saved parameter in this optimizer."""
    order, parameters = names.of(optimizer), parameters_of(optimizer)
    by_identity = {id(p): i for i, p in enumerate(parameters)}
    unnamed = {n: i for i, n in enumerate(order) if n == f"param_{i}"}
    known: dict[str, set[int]] = {}
    for full, identity in names.by_name.items():
        if identity in by_identity:
            key = full if value.get("names") == NAMES else full.partition(".")[2]
            known.setdefault(key, set()).add(by_identity[identity])
    saved = [n for g in value["groups"] for n in g["params"]]
    times = Counter(saved)
    found: dict[str, int] = {}
    for key in times:
        at = known.get(key, {unnamed[key]} if key in unnamed else set())
        if len(at) > 1 or times[key] > 1:
            raise CheckpointError(
                f"{name}=: {key} names several parameters in this checkpoint, which an earlier everstep wrote without the names "
                "of their objects, so their states cannot be told apart; restore the objects without the optimizer"
            )
        if at:
            found[key] = next(iter(at))
    for key, shape in value.get("shapes", {}).items():
        if key in found and list(parameters[found[key]].shape) != shape:
            raise CheckpointError(
                f"{name}=: parameter {found[key]} has shape {shape} in the checkpoint, but {list(parameters[found[key]].shape)} here"
            )
    return found


def _differences(value: dict[str, Any], optimizer: Optimizer, order: list[str], found: dict[str, int]) -> list[str]:
    """Lists where the groups of the checkpoint and of this optimizer have other parameters."""
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
    """Restores the state of :func:`everstep.optimizer_state.by_names`.

    Args:
        places: where the checkpoint's tensors belong, by name, if this rank's own shard was read
            unchanged.

    Raises:
        CheckpointError: when parameters and groups do not match one to one, and when something was
            not restored.
    """
    with loading(name, optimizer):
        _restore(name, optimizer, value, names, places)


def _restore(
    name: str,
    optimizer: Optimizer,
    value: dict[str, Any],
    names: ParameterNames,
    places: Mapping[str, Place] | None,
) -> None:
    order, parameters = names.of(optimizer), parameters_of(optimizer)
    if len(value["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{name}=: the checkpoint's optimizer has {len(value['groups'])} parameter groups, "
            f"but this one has {len(optimizer.param_groups)}"
        )
    found = _positions(name, value, optimizer, names)
    lines = _differences(value, optimizer, order, found)
    lines += [f"{n}: has state in the checkpoint, but is in no group there" for n in value["state"] if n not in found]
    if lines:
        shown = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
        raise CheckpointError(
            f"{name}=: the checkpoint's optimizer has different parameters; use the same parameters in the same groups:\n  {shown}"
        )
    _check_kind(name, value, optimizer)
    groups = _groups(value, optimizer, found)
    state = _state(name, value, parameters, found, places or {})
    plainly = _loads_plainly(optimizer)
    _load(name, value, optimizer, groups, state, plainly=plainly)
    if plainly:
        _keep_exact(optimizer, parameters, state)
    _verify(name, optimizer, state, groups, order)
    _restore_values(name, value, parameters, found, places)


def _groups(value: dict[str, Any], optimizer: Optimizer, found: dict[str, int]) -> list[dict[str, Any]]:
    """Returns the groups of the checkpoint with the positions of parameters in this optimizer,
    which torch identifies them by."""
    groups, at = [], 0
    for saved, own in zip(value["groups"], optimizer.param_groups, strict=True):
        members = list(range(at, at + len(own["params"])))
        group = {**saved, "params": members}
        if "initial_lr" in own:
            # Not in the checkpoint if the scheduler that sets it was added later.
            group.setdefault("initial_lr", own["initial_lr"])
        if isinstance(labels := saved.get("param_names"), list):
            by_position = {found[n]: label for n, label in zip(saved["params"], labels, strict=True)}
            group["param_names"] = [by_position[i] for i in members]
        groups.append(group)
        at += len(members)
    return groups


def _state(
    name: str,
    value: dict[str, Any],
    parameters: list[Tensor],
    found: dict[str, int],
    places: Mapping[str, Place],
) -> dict[Any, Any]:
    """Returns the state of the checkpoint by positions in this optimizer, with tensors sharded as
    they are here."""
    noted, made = set(value.get("sharded", ())), dict[int, tuple[Any, Any]]()
    state: dict[Any, Any] = {}
    for n, of_parameter in value["state"].items():
        parameter = parameters[found[n]]
        as_parameter = functools.partial(_are_at, places, place_of(parameter))
        state[found[n]] = {
            k: rebuilt(x, parameter, f"{name}/state/{n}/{k}", made, by_shape=n not in noted, as_parameter=as_parameter)
            for k, x in of_parameter.items()
        }
    state.update((k, v) for k, v in value.get("other", []))
    return state


def _load(
    name: str,
    value: dict[str, Any],
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    *,
    plainly: bool,
) -> None:
    """Calls ``load_state_dict()``.

    Raises:
        CheckpointError: when it fails, or the groups lack options that this optimizer has.
    """
    before = [set(g) for g in optimizer.param_groups]
    # torch takes state that belongs to no parameter as it is.
    count = sum(len(group["params"]) for group in groups)
    cast = {k for k, v in state.items() if plainly and type(k) is int and 0 <= k < count and isinstance(v, dict)}
    given = {k: _castable(v) if k in cast else v for k, v in state.items()}
    optimizer.load_state_dict({"state": given, "param_groups": groups})
    for was, group in zip(before, optimizer.param_groups, strict=True):
        if lost := sorted(was - group.keys()):
            raise CheckpointError(
                f"{name}=: the checkpoint is of {value.get('kind', 'another optimizer')}, whose groups have no "
                f"{', '.join(lost)}, which {kind_of(optimizer)} needs"
            )


def _restore_values(
    name: str,
    value: dict[str, Any],
    parameters: list[Tensor],
    found: dict[str, int],
    places: Mapping[str, Place] | None,
) -> None:
    """Restores the values of parameters that belong to no module.

    Raises:
        CheckpointError: when one is sharded in another way in the checkpoint.
    """
    noted = set(value.get("sharded", ()))
    saved_values = value.get("values", {}).items()
    values = {n: v.tensor if isinstance(v, Part) else v for n, v in saved_values if n in found}
    lacking = [n for n in found if n not in values and n not in noted and n.startswith("param_")]
    if unsaved := [found[n] for n in lacking if is_sharded(parameters[found[n]])]:
        warnings.warn(
            f"everstep: parameter {unsaved[0]} of {name}= is sharded and belongs to no module, and this checkpoint was written by an "
            "everstep version that did not save such parameters: unless another object restores it, it keeps its current value",
            stacklevel=7,
        )
    if places is not None:
        for n in values:
            if _of_part(places.get(f"{name}/values/{n}")) != _of_part(place_of(parameters[found[n]])):
                raise CheckpointError(
                    f"{name}=: parameter {found[n]}, which belongs to no module, is sharded differently in the checkpoint; "
                    "run with the same ranks and sharding, or pass the module that it belongs to to CheckpointManager"
                )
    _put_back(name, {found[n]: v for n, v in values.items()}, parameters)


def _are_at(places: Mapping[str, Place], place: Place | None, tensor: str) -> bool:
    return place is not None and places.get(tensor) == place


def _of_part(place: Place | None) -> Place | None:
    """Returns ``None`` for a whole tensor, too."""
    return None if place is None or place.sizes == place.shape else place


def _put_back(name: str, values: dict[int, Tensor], parameters: list[Tensor]) -> None:
    """Restores the values of parameters of no module."""
    for i, saved in values.items():
        parameter = local(parameters[i]).detach()
        if (parameter.dtype, parameter.shape) != (saved.dtype, saved.shape):
            raise CheckpointError(
                f"{name}=: parameter {i} is {saved.dtype} of shape {list(saved.shape)} in the checkpoint, "
                f"{parameter.dtype} of shape {list(parameter.shape)} here"
            )
        assign(parameter, saved)


def _check_kind(name: str, value: dict[str, Any], optimizer: Optimizer) -> None:
    """Accepts another class than the saved one if both have the same options.

    Raises:
        CheckpointError: when they have not.
    """
    if value.get("kind") in (None, kind_of(optimizer)):
        return
    for saved, own in zip(value["groups"], optimizer.param_groups, strict=True):
        if differ := sorted((saved.keys() ^ own.keys()) - {"initial_lr", "param_names"}):
            raise CheckpointError(
                f"{name}=: the checkpoint was saved with {value['kind']}, but this is {kind_of(optimizer)}; "
                f"they differ in {', '.join(differ)}"
            )


def _loads_plainly(optimizer: Optimizer) -> bool:
    """Returns whether only torch's own code takes part in loading."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and not hooks


def _castable(values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns what torch can cast of a parameter's state. torch passes anything else to the
    constructor of its type, which few types accept."""
    return {k: v for k, v in values.items() if v is None or isinstance(v, (Tensor, int, float))}


def _keep_exact(optimizer: Optimizer, parameters: list[Tensor], state: dict[Any, Any]) -> None:
    """Replaces what torch has cast to the dtype of a parameter with the saved values, and adds what
    torch was not given.

    If torch has taken over a value unchanged, it replaces the saved one in ``state``, so that it
    need not be compared again.
    """
    moved: dict[tuple[int, torch.device], Any] = {}
    for i, values in state.items():
        if type(i) is not int or not 0 <= i < len(parameters) or not isinstance(values, dict):
            continue
        own, parameter = optimizer.state[parameters[i]], parameters[i]
        for key, saved in values.items():
            live = own.get(key)
            if not isinstance(live, Tensor):
                if difference(saved, live) is not None:
                    own[key] = _to(saved, parameter.device, moved)
            elif not isinstance(saved, Tensor):
                # torch has converted a number of an earlier version to a tensor.
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
                    # Kernels expect state with the memory format of its parameter (channels last).
                    live = torch.empty_like(parameter, dtype=live.dtype, requires_grad=False).copy_(live)
                if _same_kind(live, saved):
                    own[key] = values[key] = live
        if [*own] != [*values]:
            ordered = {k: own[k] for k in values} | own
            own.clear()
            own.update(ordered)


def _same_kind(live: Tensor, saved: Tensor) -> bool:
    """Returns whether the two differ in device or layout at most."""
    return live.dtype == saved.dtype and live.shape == saved.shape


def _to(value: Any, device: torch.device, moved: dict[tuple[int, torch.device], Any]) -> Any:
    """Moves the tensors of plain containers to a device. ``moved``: results by identity, so that an
    object that occurs twice remains one."""
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
    """Checks that everything was restored. A tensor that torch has taken over is the very tensor
    that was read, and costs nothing to compare."""
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
                f"{at} was not restored: after load_state_dict() the optimizer has a different value (a hook or its own "
                "load_state_dict changes it)"
            )
    for g, (saved, live) in enumerate(zip(groups, now["param_groups"], strict=True)):
        for key, value in saved.items():
            at = difference(value, live.get(key), f"{name}/groups[{g}]/{key}")
            if at is not None:
                raise CheckpointError(
                    f"{at} was not restored: after load_state_dict() the optimizer has a different value"
                )
