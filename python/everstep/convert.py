"""Checkpoints to and from what other tools read: ``everstep ckpt export`` and ``import``.

Runs in one process; the whole state has to fit into its memory.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from . import decoding, module_state, optimizer_state, optimizer_value
from ._internal import CheckpointError, WholeCheckpoint, list_checkpoints
from .blob_format import BLOB
from .damage import reading
from .directory import Directory, in_the_way
from .tensors import BY_NAME, as_real_dtype
from .values import MODULE, OPTIMIZER, OTHER, check_step

#: What is each rank's own, or of no use without everstep.
_OWN = {"rng", "layout", "align", "parts", "dcp"}
#: Tensors of one file of `--to hf`.
HF_FILE_BYTES = 5_000_000_000
THREADS = 4


def _published(source: str | PathLike[str], step: int | None) -> str:
    """The directory of one checkpoint: ``source`` itself, or one of those in it."""
    root, said = Directory(source).located()
    step = said if step is None else step
    for number, path, _, wrong in list_checkpoints(root) if root.is_there() else []:
        if step is None and wrong is not None:
            continue
        if step in (None, number):
            if wrong is not None:
                raise CheckpointError(wrong)
            return path
    blocked = None if root.is_url else in_the_way(Path(root))
    raise CheckpointError(
        f"there is no complete checkpoint{'' if step is None else f' of step {step}'} in {source}{f': {blocked}' if blocked else ''}"
    )


def load(source: str | PathLike[str], step: int | None = None) -> dict[str, Any]:
    """A durable checkpoint as nested state dicts of whole tensors, by the names that were given to ``CheckpointManager`` or DCP.

    Optimizer state is by the names of its parameters: ``{"state": {name: …}, "param_groups": […]}``.

    Raises:
        CheckpointError: when it cannot be read, or some of it is damaged.
    """
    path = _published(source, step)
    whole = WholeCheckpoint(path)
    names = {t[0]: t for t in whole.tensors()}
    if BLOB + "dcp" in names:
        return _through_dcp(path)
    check_step(names)
    # Room only for what is there.
    whole.plan(
        [
            (n, [0] * len(shape), shape, False, 0, 0)
            for n, _, shape, *_ in names.values()
            if not n.startswith(BLOB) and 0 not in shape
        ]
    )
    tensors = {
        n: torch.empty(shape, dtype=BY_NAME[dtype]) for n, dtype, shape, *_ in names.values() if not n.startswith(BLOB)
    }
    largest = max((t.nbytes for t in tensors.values()), default=0)
    whole.read(
        [(n, [0] * t.dim(), list(t.shape), False, t.data_ptr(), t.nbytes) for n, t in tensors.items() if t.numel()],
        THREADS,
        largest,
    )
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, dot, key = name.partition(".")
        if dot and "/" not in module:
            state.setdefault(module, {})[key] = tensor
    ranks = range(1 if _layout(whole, 0).get("replicated") else whole.world_size)
    kinds = dict(item for rank in ranks for item in _layout(whole, rank).get("kinds", {}).items())
    saved = [{n for n in whole.names(rank) if n.startswith(BLOB)} for rank in ranks]
    for blob in names:
        name = blob.removeprefix(BLOB)
        if blob.startswith(BLOB) and name not in _OWN and "/" not in name:
            held = (whole.bytes(rank, blob) for rank in ranks if blob in saved[rank])
            values = (decoding.decode(data, tensors.__getitem__) for data in held)
            kind, value = kinds.get(name), next(values)
            if kind is None:
                kind = _guessed(value, in_module=name in state)
            if kind == OPTIMIZER:
                by_names = "groups" in optimizer_value.checked(value)
                value = optimizer_state.exported(_merged(name, [value, *values])) if by_names else value["whole"]
            elif kind == MODULE:
                value = _with_beside(state.get(name, {}), [value, *values])
            state[name] = value
    own = [n for n, *_, parts, holders, _ in names.values() if holders > 1 and not parts and not n.startswith(BLOB)]
    if len(ranks) > 1 and own:
        warnings.warn(
            f"{path} has states of {whole.world_size} ranks that are each one's own (as {own[0]}): rank 0's are taken",
            stacklevel=2,
        )
    return state


def _merged(name: str, ranks: list[Any]) -> dict[str, Any]:
    """The state of an optimizer that all ranks have together: each may have parameters of its own (pipeline stages), or no piece of some
    (FSDP1), and then no state of those either.

    Raises:
        CheckpointError: when their groups do not match.
    """
    merged: dict[str, Any] = optimizer_value.checked(ranks[0])
    for other in map(optimizer_value.checked, ranks[1:]):
        if len(other.get("groups", ())) != len(merged["groups"]):
            raise CheckpointError(
                f"{name}= has other parameter groups on other ranks, so that it cannot be exported as one; export the weights "
                "(--to hf), or restore it with everstep"
            )
        alone = {n for n in other["state"].keys() & merged["state"].keys() if n.startswith("param_")}
        if alone := alone - {*other.get("sharded", ())}:
            warnings.warn(
                f"{name}= has a parameter of no module on several ranks ({min(alone)}): the state of the first of them is taken",
                stacklevel=4,
            )
        merged["state"] = other["state"] | merged["state"]
        for group, more in zip(merged["groups"], other["groups"], strict=True):
            known = set(group["params"])
            new = [i for i, p in enumerate(more["params"]) if p not in known]
            labels = [g.get("param_names") for g in (group, more)]
            if new and all(isinstance(names, list) for names in labels):
                group["param_names"] = [*labels[0], *(labels[1][i] for i in new)]
            elif new:
                group.pop("param_names", None)
            group["params"] = [*group["params"], *(more["params"][i] for i in new)]
    return merged


def _guessed(value: Any, *, in_module: bool) -> str:
    """What an object is in an earlier checkpoint, which does not say."""
    if isinstance(value, dict) and ({"state", "groups"} <= value.keys() or value.keys() == {"whole"}):
        return OPTIMIZER
    return MODULE if in_module and isinstance(value, dict) else OTHER


def _with_beside(tensors: dict[str, Tensor], ranks: list[Any]) -> dict[str, Any]:
    """A module's tensors with their own dtypes, and what it has beside them. Each rank may have a part of the module."""
    found = [module_state.read_beside(module_state.checked_beside(value)) for value in ranks]
    dtypes = dict(item for beside in found for item in beside["dtypes"].items())
    values: dict[str, Any] = {}
    for beside in reversed(found):
        values |= beside["values"]
    return {key: as_real_dtype(t, dtypes[key]) if key in dtypes else t for key, t in tensors.items()} | values


def _layout(whole: WholeCheckpoint, rank: int) -> dict[str, Any]:
    """Whose state a shard is, and what its objects are; earlier ones do not say."""
    if BLOB + "layout" not in whole.names(rank):
        return {}
    found: dict[str, Any] = decoding.decode(whole.bytes(rank, BLOB + "layout"), lambda name: None)
    return found


def _through_dcp(path: str) -> dict[str, Any]:
    from .dcp import Reader

    return _dcp_state(Reader(path))


def _dcp_state(reader: dcp.StorageReader) -> dict[str, Any]:
    """All that is there, without a model to load it into."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    try:
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    except CheckpointException as e:
        # DCP's own error, which is no Exception: what is behind it.
        raise next(iter(e.failures.values()))[0] from e
    return state


def _is_module(value: Any) -> bool:
    """A module's state: tensors by name, and perhaps extra state."""
    return (
        isinstance(value, dict)
        and any(isinstance(v, Tensor) for v in value.values())
        and all(isinstance(v, Tensor) or str(k).endswith("_extra_state") for k, v in value.items())
    )


def _weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The modules' tensors; with one module, by their own names."""
    modules = {
        name: {key: t for key, t in value.items() if isinstance(t, Tensor)}
        for name, value in state.items()
        if _is_module(value)
    }
    if not modules:
        raise CheckpointError("there is no module in this checkpoint whose weights could be exported")
    left_out = [f"{n}.{k}" for n in modules for k, v in state[n].items() if not isinstance(v, Tensor)]
    if left_out:
        warnings.warn(f"not exported, because only tensors can be: {', '.join(left_out[:5])}", stacklevel=3)
    one = len(modules) == 1
    return {
        key if one else f"{name}.{key}": t.contiguous()
        for name, tensors in modules.items()
        for key, t in tensors.items()
    }


def to_torch(state: dict[str, Any], out: Path) -> None:
    """One file for ``torch.load``."""
    torch.save(state, out)


def to_dcp(state: dict[str, Any], out: Path) -> None:
    """A directory for ``torch.distributed.checkpoint.load``."""
    dcp.save(state, checkpoint_id=str(out), no_dist=True)


def to_hf(state: dict[str, Any], out: Path) -> None:
    """Weights as safetensors files with an index, as Hugging Face's loaders expect them."""
    import json

    save_file = _safetensors().save_file
    weights = _weights(state)
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


def from_dcp(source: Path) -> dict[str, Any]:
    """What torch.distributed.checkpoint saved."""
    from .dcp import foreign

    if not (source / ".metadata").exists():
        raise CheckpointError(f"{source} is no checkpoint of torch.distributed.checkpoint: it has no .metadata")
    return foreign.load(source)


#: Says which file has which tensor, beside files that may have others.
HF_INDEX = "model.safetensors.index.json"


def _indexed(source: Path) -> dict[str, str] | None:
    """The file of each tensor as the index of a directory has it; ``None`` without one."""
    import json

    from .dcp import foreign

    path = source / HF_INDEX
    if not source.is_dir() or not path.exists():
        return None
    with foreign.open_regular(path, follow=True) as file:
        try:
            found = json.loads(file.read())["weight_map"]
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{path} is not an index of safetensors files: {type(e).__name__}: {e}") from e
    # Nothing outside of the directory is read.
    if not isinstance(found, dict) or not all(isinstance(f, str) and Path(f).name == f for f in found.values()):
        raise CheckpointError(f"{path} is not an index of safetensors files: its weight_map is not of names and files")
    return found


def from_hf(source: Path) -> dict[str, Any]:
    """safetensors files: one, those in the index of a directory, or without an index all of it."""
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
        # Hugging Face's own cache is made of links.
        foreign.open_regular(file, follow=True).close()
    load_file = _safetensors().load_file
    state: dict[str, Tensor] = {}
    origin: dict[str, Path] = {}
    for file in files:
        for name, tensor in load_file(file).items():
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


def from_torch(source: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, tensors and plain values only."""
    from .dcp import foreign

    try:
        with foreign.open_regular(source, follow=True) as file:
            state = foreign.safe_load(file, str(source))
    except CheckpointError as e:
        raise CheckpointError(f"{source} is no file of torch.save that can be read: {e.args[0]}") from e
    if not isinstance(state, dict):
        raise CheckpointError(f"{source} holds a {type(state).__name__}, not state dicts by name")
    return state


_EXPORTS = {"torch": to_torch, "dcp": to_dcp, "hf": to_hf}
_IMPORTS = {"torch": from_torch, "dcp": from_dcp, "hf": from_hf}


def main() -> int:
    """``python -m everstep.convert export|import``; the options are those of ``everstep ckpt``."""
    p = argparse.ArgumentParser(prog="everstep ckpt")
    commands = p.add_subparsers(dest="command", required=True)
    e = commands.add_parser("export")
    e.add_argument("source")
    e.add_argument("out", type=Path)
    e.add_argument("--to", choices=sorted(_EXPORTS), required=True)
    e.add_argument("--step", type=int)
    i = commands.add_parser("import")
    i.add_argument("source", type=Path)
    i.add_argument("out")
    i.add_argument("--from", dest="of", choices=sorted(_IMPORTS), required=True)
    a = p.parse_args()
    try:
        if a.command == "export":
            if a.out.is_symlink() and not a.out.exists():
                raise CheckpointError(
                    f"{a.out} is a dangling link to {a.out.readlink()}; give a path that does not exist"
                )
            if a.out.exists() and (not a.out.is_dir() or any(a.out.iterdir())):
                raise CheckpointError(f"{a.out} exists; give a path that does not")
            with reading(str(a.source)):
                state = load(a.source, a.step)
            _EXPORTS[a.to](state, a.out)
        else:
            from .dcp import Writer

            warnings.filterwarnings("ignore", message="torch.distributed is")
            with reading(str(a.source)):
                state = _IMPORTS[a.of](a.source)
            # torch would show where in its own code this fails.
            Directory(a.out).located()[0].prepare()
            dcp.save(state, storage_writer=Writer(a.out), no_dist=True)
    except (CheckpointError, OSError, RuntimeError) as e:
        # Damage has more to say than its text.
        print(f"everstep: {e.args[0] if isinstance(e, CheckpointError) else e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
