"""Weights in the files that Hugging Face's loaders read: safetensors, with an index if there are
several."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ._internal import CheckpointError
from .layout import MODULE, OPTIMIZER
from .tensors import DTYPES

#: Limit on the bytes of tensors in a file of `--to hf`.
HF_FILE_BYTES = 5_000_000_000
#: Names that one warning lists.
NAMED_MAX = 10
#: The index of which file has which tensor; other files may be beside them.
HF_INDEX = "model.safetensors.index.json"


def _is_module(value: Any) -> bool:
    """Returns whether this is a module's state: tensors by name, and perhaps extra state."""
    return (
        isinstance(value, dict)
        and any(isinstance(v, Tensor) for v in value.values())
        and all(isinstance(v, Tensor) or str(k).endswith("_extra_state") for k, v in value.items())
    )


def _loose_parameters(value: Any) -> list[str]:
    """Returns the parameters of no module whose values an optimizer's state has, as
    :func:`everstep.convert.load` returns it."""
    values = value.get("values") if _is_optimizer(value) else None
    return [*values] if isinstance(values, dict) else []


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


def _has_tensors(value: Any, seen: dict[int, Any] | None = None) -> bool:
    """``seen``: containers that were looked at, by identity. Some occur many times."""
    seen = {} if seen is None else seen
    if not isinstance(value, (dict, list, tuple)):
        return isinstance(value, Tensor)
    if id(value) in seen:
        return False
    seen[id(value)] = value
    return any(_has_tensors(inner, seen) for inner in (value.values() if isinstance(value, dict) else value))


def _weights(state: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the modules' tensors; with one module, by their own names. An object that the
    checkpoint calls neither a module nor an optimizer is a module if it looks like one."""
    known = {name for name in state if kinds.get(name) == MODULE}
    others = {name: value for name, value in state.items() if name not in known and kinds.get(name) != OPTIMIZER}
    looks = {name for name, value in others.items() if _is_module(value)}
    entries = {name: state[name] for name in state if name in known | looks}
    tensors = {name: {k: t for k, t in value.items() if isinstance(t, Tensor)} for name, value in entries.items()}
    modules = {name: found for name, found in tensors.items() if found}
    if not modules:
        raise CheckpointError("there is no module in this checkpoint whose weights could be exported")
    no_tensors = [f"{n}.{k}" for n, value in entries.items() for k, v in value.items() if not isinstance(v, Tensor)]
    no_modules = [n for n, v in others.items() if n not in looks and not _is_optimizer(v) and _has_tensors(v)]
    loose = [f"{name}.{p}" for name, value in state.items() for p in _loose_parameters(value)]
    for why, names in (
        ("only tensors can be", no_tensors),
        ("they are not known to be modules", no_modules),
        ("they belong to no module", loose),
    ):
        if names:
            warnings.warn(f"not exported, because {why}: {listed(names)}", stacklevel=3)
    one = len(modules) == 1
    weights = {
        key if one else f"{name}.{key}": t.contiguous() for name, found in modules.items() for key, t in found.items()
    }
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold; export with --to torch")
    return weights


def listed(names: list[str]) -> str:
    """The first of these names, and how many more there are."""
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def to_hf(state: dict[str, Any], out: Path, kinds: Mapping[str, str] | None = None) -> None:
    """Writes weights as safetensors files with an index, for Hugging Face's loaders. ``kinds``: the
    kinds of the objects, as far as they are known."""

    save_file = _safetensors().save_file
    weights = _weights(state, kinds or {})
    out.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in weights.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if files[-1] and size + bytes_ > HF_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size, total = size + bytes_, total + bytes_
    if len(files) == 1:
        save_file(files[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for n, tensors in enumerate(files, 1):
        file = f"model-{n:05}-of-{len(files):05}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as e:
        raise CheckpointError("this needs the package safetensors: pip install safetensors") from e
    return safetensors.torch


def _indexed(source: Path) -> dict[str, str] | None:
    """Returns the file of each tensor in the index of a directory; ``None`` without an index."""

    from .dcp import foreign

    path = source / HF_INDEX
    if not source.is_dir() or not path.exists():
        return None
    with foreign.open_regular(path, follow=True) as file:
        try:
            found = json.loads(file.read())["weight_map"]
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{path} is not an index of safetensors files: {type(e).__name__}: {e}") from e
    # No file outside of the directory is read.
    if not isinstance(found, dict) or not all(isinstance(f, str) and Path(f).name == f for f in found.values()):
        raise CheckpointError(f"{path} is not an index of safetensors files: its weight_map is not of names and files")
    return found


def _tensors_in(file: Path) -> dict[str, Tensor]:
    load_file = _safetensors().load_file
    from safetensors import SafetensorError

    try:
        found: dict[str, Tensor] = load_file(file)
    except SafetensorError as e:
        raise CheckpointError(f"{file} is not a complete safetensors file: {e}; copy or download it again") from e
    return found


def from_hf(source: Path) -> dict[str, Any]:
    """Reads safetensors files: one, those in the index of a directory, or all of a directory
    without an index."""
    index = _indexed(source)
    if index is not None:
        files = [source / name for name in sorted(set(index.values()))]
    else:
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if missing := [f for f in files if not f.exists()]:
        raise CheckpointError(f"there is no safetensors file at {missing[0]}")
    if not files:
        raise CheckpointError(f"there is no safetensors file at {source}")
    from .dcp import foreign

    for file in files:
        # Hugging Face's own cache consists of links.
        foreign.open_regular(file, follow=True).close()
    state: dict[str, Tensor] = {}
    origin: dict[str, Path] = {}
    for file in files:
        for name, tensor in _tensors_in(file).items():
            if index is not None and index.get(name) != file.name:
                continue
            if name in origin:
                raise CheckpointError(
                    f"{name} is in both {origin[name].name} and {file.name} of {source}, which has no {HF_INDEX}; "
                    "give one of the files, or a directory with one version of the weights"
                )
            state[name], origin[name] = tensor, file
    if index is not None and (lost := sorted(index.keys() - state.keys())):
        raise CheckpointError(
            f"{lost[0]} is in {HF_INDEX}, but not in {index[lost[0]]}; the files in {source} are not complete"
        )
    return {"model": state}
