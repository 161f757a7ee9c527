"""Converts checkpoints to and from the formats of other tools: ``everstep ckpt export`` and
``import``.

Runs in one process; the whole state has to fit into its memory.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import decoding, module_state, optimizer_state, optimizer_value
from ._internal import CheckpointError, ListedCheckpoint, WholeCheckpoint, list_checkpoints, list_line
from .blob_format import BLOB
from .compare import difference
from .damage import reading
from .directory import Directory, in_the_way
from .hf_format import from_hf, listed, to_hf
from .layout import EXTRA, MODULE, OPTIMIZER, RESERVED, Layout, guessed_kind
from .tensor_places import Place
from .tensors import BY_NAME, as_real_dtype
from .values import check_step

#: Values that are each rank's own, or useless without everstep.
_OWN = RESERVED - {EXTRA}
THREADS = 4
#: Limits on the values that torch.distributed.checkpoint would write, which writes a value once for
#: each place where it occurs: a number that is always allowed, and a multiple of the values that
#: the state has in memory.
_VALUES_FREE, _VALUES_TIMES = 1 << 24, 32


def _candidates(root: Directory, step: int | None, name: str | None) -> list[ListedCheckpoint]:
    """Returns the checkpoints that may be exported, best first."""
    if name is not None:
        return root.named(name)
    line = list_line(root)
    if step is not None:
        # Like restore(step=N): the one of the branch that ran last, if there is one.
        rows = {row.path: row for row in [*line, *list_checkpoints(root)]}
        return [row for row in rows.values() if row.step == step]
    if any(row.wrong is None for row in line):
        return line
    # Checkpoints that no training loop has saved (through DCP, or imported) belong to no branch.
    return [*{row.path: row for row in [*list_checkpoints(root), *line]}.values()]


def _published(source: str | PathLike[str], step: int | None) -> str:
    """Returns the directory of one checkpoint: ``source`` itself, or one of those in it; without a
    step, the one that ``restore()`` would take."""
    root, said, name = Directory(source).located()
    if name is not None and step not in (None, said):
        raise CheckpointError(f"{source} is a checkpoint of step {said}; omit --step {step}, or give {root}")
    skipped: list[str] = []
    for row in _candidates(root, step, name) if root.is_there() else []:
        if row.wrong is None:
            if skipped:
                print(f"everstep: skipped {'; '.join(skipped)}; using step {row.step} ({row.path})", file=sys.stderr)
            return row.path
        skipped.append(row.wrong)
    if skipped and (step is not None or name is not None):
        raise CheckpointError(skipped[0])
    what, where = (name, root) if name is not None else ("" if step is None else f"of step {step}", source)
    blocked = next(iter(skipped), None) or (None if root.is_url else in_the_way(Path(root)))
    raise CheckpointError(
        f"there is no complete checkpoint {what}{' ' if what else ''}in {where}{f': {blocked}' if blocked else ''}"
    )


def load(source: str | PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Loads a durable checkpoint as nested state dicts of whole tensors, by the names that were
    given to ``CheckpointManager`` or DCP.

    Optimizer state is by the names of its parameters: ``{"state": {name: …}, "param_groups":
    […]}``, with the ``"values"`` of those that belong to no module (``param_N``).

    Raises:
        CheckpointError: when it cannot be read, or some of it is damaged.
    """
    return _loaded(source, step)[0]


def _loaded(source: str | PathLike[str], step: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the same as :func:`load`, and the kinds of its objects, as far as the checkpoint
    names them."""
    path = _published(source, step)
    whole = WholeCheckpoint(path)
    names = {t.name: t for t in whole.tensors()}
    if BLOB + "dcp" in names:
        from .dcp import Reader

        return _dcp_state(Reader(path)), {}
    check_step(names)
    # Memory is allocated only for tensors that can be read.
    whole.plan(
        [
            Place.whole(t.shape).wanted(t.name)
            for t in names.values()
            if not t.name.startswith(BLOB) and 0 not in t.shape
        ]
    )
    tensors = {
        n: torch.empty(t.shape, dtype=BY_NAME[t.dtype], device="cpu")
        for n, t in names.items()
        if not n.startswith(BLOB)
    }
    largest = max((t.nbytes for t in tensors.values()), default=0)
    whole.read(
        [Place.whole(t.shape).wanted(n, t.data_ptr(), t.nbytes) for n, t in tensors.items() if t.numel()],
        THREADS,
        largest,
    )
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, dot, key = name.partition(".")
        if dot and "/" not in module:
            state.setdefault(module, {})[key] = tensor
    layouts = [Layout.of_rank(whole, rank) for rank in range(whole.world_size)]
    ranks = range(1 if layouts[0] is not None and layouts[0].replicated else whole.world_size)
    kinds = dict(item for layout in layouts[: len(ranks)] if layout is not None for item in layout.kinds.items())
    own: list[str] = []
    saved = [{n for n in whole.names(rank) if n.startswith(BLOB)} for rank in range(whole.world_size)]

    def decoded(data: bytes) -> Any:
        return decoding.decode(data, tensors.__getitem__)

    for blob in names:
        name = blob.removeprefix(BLOB)
        if blob.startswith(BLOB) and name not in _OWN and "/" not in name:
            held = [whole.bytes(rank, blob) for rank in range(whole.world_size) if blob in saved[rank]]
            value = decoded(held[0])
            kind = kinds.setdefault(name, guessed_kind(value, in_module=name in state))
            others = (decoded(data) for data in dict.fromkeys(held) if data != held[0])
            if kind == OPTIMIZER and "groups" in optimizer_value.checked(value):
                value = optimizer_state.exported(_merged(name, [value, *map(decoded, held[1 : len(ranks)])]))
            elif kind == MODULE:
                value, differing = _with_beside(state.get(name, {}), [value, *others])
                own += [f"{name}.{key}" for key in differing]
            else:
                if any(difference(value, other) is not None for other in others):
                    own.append(name)
                value = value["whole"] if kind == OPTIMIZER else value
            state[name] = value
    # Those that have nothing beside their tensors.
    kinds |= {name: MODULE for name in state if name not in kinds}
    if len(ranks) > 1:
        own += [n for n, t in names.items() if t.holders > 1 and not t.in_parts and not n.startswith(BLOB)]
    if own:
        warnings.warn(
            f"{path}: the {whole.world_size} ranks that saved it have different values of {listed(own)}: exporting rank 0's",
            stacklevel=3,
        )
    return state, kinds


def _merged(name: str, ranks: list[Any]) -> dict[str, Any]:
    """Merges the state of an optimizer from all ranks: each may have parameters of its own
    (pipeline stages), or no piece of some (FSDP1), and then no state of those either.

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
        values, more_values = merged.get("values", {}), other.get("values", {})
        alone = {n for n in other["state"].keys() & merged["state"].keys() if n.startswith("param_")}
        if alone := (alone | (more_values.keys() & values.keys())) - {*other.get("sharded", ())}:
            warnings.warn(
                f"{name}=: parameter {min(alone)} belongs to no module and exists on several ranks: exporting the state "
                "and the value of the first one",
                stacklevel=4,
            )
        merged["state"] = other["state"] | merged["state"]
        merged["values"] = more_values | values
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


def _with_beside(tensors: dict[str, Tensor], ranks: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a module's tensors with their own dtypes and the values beside them, and the names of
    the values that differ between ranks. Each rank may have a part of the module."""
    found = [module_state.read_beside(module_state.checked_beside(value)) for value in ranks]
    dtypes = dict(item for beside in found for item in beside["dtypes"].items())
    values: dict[str, Any] = {}
    differing: dict[str, None] = {}
    for beside in found:
        for key, value in beside["values"].items():
            if difference(values.setdefault(key, value), value) is not None:
                differing[key] = None
    with reading("what a module has beside its tensors"):
        as_saved = {key: as_real_dtype(t, dtypes[key]) if key in dtypes else t for key, t in tensors.items()}
    return as_saved | values, [*differing]


def _dcp_state(reader: dcp.StorageReader) -> dict[str, Any]:
    """Loads everything in a checkpoint, without a model to load it into."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from .dcp import nesting

    # torch would raise an error of its own if this fails.
    metadata = reader.read_metadata()
    mappings = metadata.planner_data or {}
    # Before memory is allocated.
    nesting.nested(dict.fromkeys(metadata.state_dict_metadata), mappings)
    values: dict[str, Any] = {
        name: torch.empty(known.size, dtype=known.properties.dtype, device="cpu")
        if isinstance(known, TensorStorageMetadata)
        else known
        for name, known in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _load_state_dict(values, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as e:
        # DCP's own error is not an Exception; raise its cause.
        raise next(iter(e.failures.values()))[0] from e
    return nesting.nested(values, mappings)


def _nested_too_deeply(what: Path) -> CheckpointError:
    return CheckpointError(
        f"{what} cannot be written: its state has lists or dicts that are nested too deeply; flatten them and save it again"
    )


def to_torch(state: dict[str, Any], out: Path) -> None:
    """Writes one file for ``torch.load``."""
    try:
        torch.save(state, out)
    except BaseException as e:
        # A part of a file is of no use.
        out.unlink(missing_ok=True)
        if isinstance(e, RecursionError):
            raise _nested_too_deeply(out) from e
        raise


def _check_occurrences(state: dict[str, Any], what: Path) -> None:
    """Checks that a state is not much larger once each value is written where it occurs.

    Raises:
        CheckpointError: when it is.
    """
    known: dict[int, int] = {}
    own = 0

    def occurrences(value: Any) -> int:
        nonlocal own
        if not isinstance(value, (dict, list)):
            return 1
        if id(value) not in known:
            own += len(value)
            known[id(value)] = 1 + sum(map(occurrences, value.values() if isinstance(value, dict) else value))
        return known[id(value)]

    if occurrences(state) > max(_VALUES_FREE, _VALUES_TIMES * own):
        raise CheckpointError(
            f"{what} cannot be written: its lists and dicts occur in each other so often that torch.distributed.checkpoint would "
            f"write more than {_VALUES_FREE} values; use --to torch, which writes each once, or keep each once in the state"
        )


def _empty_dicts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        if not value and path:
            yield path
        for key, inner in value.items():
            yield from _empty_dicts(inner, (*path, str(key)))
    elif type(value) is list:
        for n, inner in enumerate(value):
            yield from _empty_dicts(inner, (*path, n))


def _without_attributes(value: Any) -> Any:
    """Returns the state with tensors that have nothing but their elements: torch's planner asks a
    tensor for attributes, which a file may have given it."""
    if isinstance(value, Tensor):
        return value.detach() if vars(value) or type(value) is not Tensor else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_attributes(inner)) for key, inner in value.items())
    return [_without_attributes(inner) for inner in value] if type(value) is list else value


def _dcp_save(state: dict[str, Any], what: Path, **where: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        _check_occurrences(state, what)
        if empty := [".".join(map(str, path)) for path in _empty_dicts(state, ())]:
            warnings.warn(
                f"torch.distributed.checkpoint does not save empty dicts, so {listed(empty)} will be missing; "
                "add them again before an optimizer or module loads its state",
                stacklevel=3,
            )
        dcp.save(_without_attributes(state), no_dist=True, **where)
    except (CheckpointException, ValueError, TypeError, AttributeError, RecursionError) as e:
        # CheckpointException is no Exception: what is behind it.
        cause = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        if isinstance(cause, RecursionError):
            raise _nested_too_deeply(what) from e
        if isinstance(cause, (ValueError, TypeError, AttributeError)):
            # Two values that would have one name.
            cause = CheckpointError(
                f"torch.distributed.checkpoint cannot save {what}: {cause}; rename or remove one of its entries"
            )
        elif isinstance(cause, CheckpointError) and str(what) not in str(cause):
            cause = CheckpointError(f"{what}: {cause.args[0]}")
        raise cause from e


def to_dcp(state: dict[str, Any], out: Path) -> None:
    """Writes a directory for ``torch.distributed.checkpoint.load``."""
    # Those of the step are empty unless the training loop gives some, and nobody misses them.
    given = {name: value for name, value in state.items() if name != EXTRA or value != {}}
    _dcp_save(given, out, checkpoint_id=str(out))


def from_dcp(source: Path) -> dict[str, Any]:
    """Reads what torch.distributed.checkpoint saved."""
    from .dcp import foreign

    if not (source / ".metadata").exists():
        raise CheckpointError(f"{source} is not a checkpoint of torch.distributed.checkpoint: it has no .metadata")
    return foreign.load(source)


def from_torch(source: Path) -> dict[str, Any]:
    """Reads what ``torch.save`` wrote, tensors and plain values only."""
    from .dcp import foreign

    try:
        with foreign.open_regular(source, follow=True) as file:
            state = foreign.bounded_load(file, str(source))
    except CheckpointError as e:
        raise CheckpointError(f"{source} is not a torch.save file that can be read: {e.args[0]}") from e
    if not isinstance(state, dict):
        raise CheckpointError(f"{source} holds a {type(state).__name__}, not state dicts by name")
    return state


_EXPORTS = {"torch": to_torch, "dcp": to_dcp}
_IMPORTS = {"torch": from_torch, "dcp": from_dcp, "hf": from_hf}


def main() -> int:
    """``python -m everstep.convert export|import``; the options are those of ``everstep ckpt``."""
    p = argparse.ArgumentParser(prog="everstep ckpt")
    commands = p.add_subparsers(dest="command", required=True)
    e = commands.add_parser("export")
    e.add_argument("source")
    e.add_argument("out", type=Path)
    e.add_argument("--to", choices=sorted([*_EXPORTS, "hf"]), required=True)
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
                state, kinds = _loaded(a.source, a.step)
            if a.to == "hf":
                to_hf(state, a.out, kinds)
            else:
                _EXPORTS[a.to](state, a.out)
        else:
            from .dcp import Writer

            warnings.filterwarnings("ignore", message="torch.distributed is")
            with reading(str(a.source)):
                state = _IMPORTS[a.of](a.source)
            writer = Writer(a.out)
            # Otherwise, torch would print a traceback of its own code.
            Directory(a.out).located()[0].prepare()
            _dcp_save(state, a.source, storage_writer=writer)
    except (CheckpointError, OSError, RuntimeError) as e:
        # An error about damage has arguments besides its text.
        print(f"everstep: {e.args[0] if isinstance(e, CheckpointError) else e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
