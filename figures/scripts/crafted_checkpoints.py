"""Crafted checkpoints, given to everything in Python that reads them.

``crafted_checkpoints.py DIRECTORY SEED FIRST LAST`` prints one JSON line for each input. Finally
``everstep ckpt verify`` checks all of them at once, for comparison with ``restore()``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from everstep import CheckpointError, CheckpointManager, convert
from figures import crafted_changes as changes
from figures import crafted_codes as codes
from figures import crafting
from figures.crafting import BLOB, Checkpoint
from figures.scripts.crafted_trainers import TRAINERS, Trainer, as_before, draw

warnings.simplefilter("ignore")
#: What reading one input may add to the most memory that the process has had, in bytes.
MEMORY_MAX = 512 << 20
#: Seconds that one reader may take for one input.
INPUT_SECONDS = 30
#: Seconds of the processor that `verify` may take, for all checkpoints and for each.
VERIFY_SECONDS = (30.0, 0.3)

#: What is said of checkpoints that only the ranks that wrote them can restore.
OWN = ("each with its own state", "the shards are not from the same model")


class Endless(BaseException):
    """A reader does not end. No handler of errors takes it for one of its own."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raises :class:`Endless` in what takes longer than an input may."""

    def late(*_: object) -> None:
        raise Endless(f"it took more than {INPUT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(INPUT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def running(directory: Path, what: str) -> None:
    """Notes what is read now, for a process that dies or hangs meanwhile."""
    (directory / "running").write_text(what)


def peak() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def saved(directory: Path, made: Trainer) -> Checkpoint:
    """Returns a checkpoint of a trainer."""
    manager = CheckpointManager(directory, persist=1, **made.objects)
    with contextlib.redirect_stderr(io.StringIO()):
        manager.restore()
        made.train()
        manager.step(1, **made.extra)
        manager.close()
    return crafting.read(directory / "step-1")


def _tree(blob: bytes) -> Any:
    if blob[:1] != codes.MARK:
        return None
    try:
        return msgpack.unpackb(blob[1:], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        # That of a rank whose values were not wanted.
        return None


class Plain:
    """The contents of a checkpoint's files, read without everstep."""

    def __init__(self, directory: Path) -> None:
        self.shards: list[tuple[dict[str, Any], dict[str, bytes], dict[str, list[int]]]] = []
        for path in sorted(directory.glob("rank-*.safetensors")):
            data = path.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header, region = json.loads(data[8 : 8 + length]), data[8 + length :]
            metadata = header.pop("__metadata__")
            lines = sorted(header, key=lambda n: (header[n]["data_offsets"], n))
            words = [int(w, 16) for w in metadata.get("everstep.places", "").split(" ") if w]
            places: dict[str, list[int]] = {}
            while words:
                n, flat, dimensions, *_ = words
                end = 3 + dimensions + (1 if flat else dimensions)
                places[lines[n]], words = words[:end], words[end:]
            self.shards.append((header, {n: region[slice(*header[n]["data_offsets"])] for n in lines}, places))

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns whether each element of the tensor equals that in one of the shards."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.is_complex() and not any(h[name]["dtype"].startswith("C") for h, _, _ in self.shards if name in h):
            # A header has no name for some of them.
            tensor = torch.view_as_real(tensor)
        size = tensor.element_size()
        # A dimension of one does not move anything, and numpy allows fewer dimensions than torch.
        kept = [n for n, length in enumerate(tensor.shape) if length != 1]
        shape = [tensor.shape[n] for n in kept]
        # numpy lacks some of torch's types.
        dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        got = dense.numpy().reshape(*shape, size)
        right = np.zeros(shape, bool)
        for header, data, places in self.shards:
            if name not in header or len(data[name]) != size * math.prod(header[name]["shape"]):
                continue
            sizes, where = header[name]["shape"], tuple(slice(None) for _ in shape)
            _, flat, dimensions, *rest = places.get(name, [0, 0, 0])
            offsets = rest[dimensions:]
            if flat:
                first, n = offsets[0], math.prod(sizes)
                right.reshape(-1)[first : first + n] |= (
                    got.reshape(-1, size)[first : first + n] == np.frombuffer(data[name], np.uint8).reshape(-1, size)
                ).all(-1)
                continue
            if 0 in sizes or len(sizes) != tensor.dim():
                continue
            if offsets:
                where = tuple(slice(offsets[n], offsets[n] + sizes[n]) for n in kept)
            sizes = [sizes[n] for n in kept]
            said = np.frombuffer(data[name], np.uint8).reshape(*sizes, size)
            if right[where].shape == said.shape[:-1]:
                right[where] |= (got[where] == said).all(-1)
        return bool(right.all())

    def values(self, name: str) -> list[Any]:
        """Returns a value in each shard that has it, as a tree of msgpack; ``None`` if only
        everstep can read it, or nothing can."""
        return [_tree(data[BLOB + name]) for _, data, _ in self.shards if BLOB + name in data]

    def has_name(self, name: str) -> bool:
        """Returns whether a shard has a tensor of this name."""
        return any(name in header for header, _, _ in self.shards)

    def value(self, name: str) -> Any:
        """Returns the value of the first shard."""
        return next(iter(self.values(name)), None)

    def blob(self, name: str) -> bytes:
        """Returns the bytes of a value of the first shard."""
        return self.shards[0][1].get(BLOB + name, b"")


def plain(tree: Any) -> bool:
    """Returns whether the value contains only msgpack's own types."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if not all(isinstance(k, str) for k in node):
                return False
            left += node.values()
        elif isinstance(node, list):
            left += node
    return True


def referred(tree: Any) -> dict[tuple[Any, ...], str]:
    """Returns the names of the tensors that a value refers to, by their places in its plain dicts
    and lists."""
    found: dict[tuple[Any, ...], str] = {}
    left: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while left:
        path, node = left.pop()
        if isinstance(node, list):
            left += [((*path, n), v) for n, v in enumerate(node)]
        elif isinstance(node, dict) and list(node) == [codes.TENSOR]:
            match node[codes.TENSOR]:
                # With other notes, it may have another shape or type in memory than in the file.
                case str(name):
                    found[path] = name
                case [str(name), dict(note)] if note == {"dtype": "complex128"} or not note.keys() - {
                    "grad",
                    "parameter",
                }:
                    found[path] = name
        elif isinstance(node, dict) and all(isinstance(k, str) for k in node):
            left += [((*path, k), v) for k, v in node.items()]
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """Returns what is at a place; ``None`` if there is no such place."""
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        return None
    return value


def _as_torch_has_it(state: Any) -> bytes:
    """Returns the state of a generator after torch has loaded it, which clears what it does not
    use."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator.get_state().numpy().tobytes()


def wrong(found: Plain, base: Plain, made: Trainer, extra: Any) -> list[str]:
    """Returns what was restored but differs from the files."""
    lines = [
        f"{name}.{key}"
        for name, module in made.modules().items()
        for key, t in module.state_dict().items()
        if isinstance(t, torch.Tensor)
        # Extra state may be a tensor in a value.
        and (key != "_extra_state" or found.has_name(f"{name}.{key}"))
        and not found.has(f"{name}.{key}", t)
    ]
    said = found.value("extra")
    if (plain(said) and repr(said) != repr(extra)) or (
        found.blob("extra") == base.blob("extra") and repr(extra) != repr(made.extra)
    ):
        lines.append(f"extra: {said!r} became {extra!r}"[:2000])
    rng = found.value("rng")
    if isinstance(rng, dict) and _as_torch_has_it(rng["torch"]) != torch.get_rng_state().numpy().tobytes():
        lines.append("random numbers")
    if isinstance(rng, dict) and isinstance(rng.get("numpy"), list):
        _, numbers, position, *_ = np.random.get_state()
        if [numbers.tobytes(), position] != rng["numpy"][1:3]:
            lines.append("random numbers of numpy")
    for name, state in made.kept():
        shards = [referred(tree) for tree in found.values(name)]
        for path in dict.fromkeys(p for names in shards for p in names if p and p[0] not in ("groups", "other")):
            # Any rank's value may have been taken.
            there, names = at(state, path), [n[path] for n in shards if path in n]
            if len(names) == len(shards) and not (
                isinstance(there, torch.Tensor) and any(found.has(n, there) for n in names)
            ):
                lines.append(f"{name}/{'/'.join(map(str, path))}")
    return lines


def restored(directory: Path, step: int, made: Trainer, base: Plain) -> dict[str, Any]:
    """Returns the result of ``restore()`` for a step."""
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            with limited():
                manager = CheckpointManager(directory, persist=0, **made.objects)
                done = manager.restore(step)
        except CheckpointError as e:
            # That other ranks wrote it, each with its own state or model, does not mean it is
            # damaged.
            damaged = any(
                "skipping a checkpoint" in str(w.message) and not any(own in str(w.message) for own in OWN)
                for w in said
            )
            why = str([str(w.message) for w in said] or e)[:400]
            return {"restore": "damaged" if damaged else "refused", "why": why}
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # noqa: BLE001  # a panic of the extension is no Exception
            return {"restore": "crashed", "why": f"{type(e).__name__}: {e}"[:300]}
    if done != step:
        return {"restore": "refused", "why": f"step {done}"}
    found = wrong(Plain(directory / f"step-{step}"), base, made, manager.extra)
    try:
        draw()
    except Exception as e:  # noqa: BLE001
        found.append(f"drawing random numbers: {type(e).__name__}: {e}"[:300])
    return {"restore": "accepted", "wrong": found}


def converted(*arguments: object) -> tuple[str, str]:
    """Runs ``everstep ckpt export|import`` in this process.

    Returns accepted, refused or crashed, and the message.
    """
    before, sys.argv = sys.argv, ["everstep", *map(str, arguments)]
    out = io.StringIO()
    try:
        with contextlib.redirect_stderr(out), limited():
            code = convert.main()
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001  # an error of torch's DCP, and a panic of the extension, are no Exceptions
        return "crashed", f"{type(e).__name__}: {e}"[:300]
    finally:
        sys.argv = before
    said = out.getvalue().strip()
    if said.rpartition("\n")[2].startswith("everstep: maximum recursion depth"):
        # The last resort takes any RuntimeError.
        return "crashed", said[-200:]
    return ("refused" if code else "accepted"), said[-200:]


def exported(directory: Path, step: int, out: Path) -> dict[str, Any]:
    """Returns the result of an export of a step, and which tensors of modules it has wrong."""
    # An earlier export may have left a part of it.
    out.unlink(missing_ok=True)
    verdict, said = converted("export", directory / f"step-{step}", out, "--to", "torch")
    row: dict[str, Any] = {"export": verdict, "said": said}
    if verdict == "accepted":
        # It was written by this process, from values of plain types.
        state = torch.load(out, weights_only=False)
        found = Plain(directory / f"step-{step}")
        row["wrong"] = [
            f"exported {name}.{key}"
            for name in ("model", "encoder")
            for key, t in (state.get(name) if isinstance(state.get(name), dict) else {}).items()
            if isinstance(t, torch.Tensor) and found.has_name(f"{name}.{key}") and not found.has(f"{name}.{key}", t)
        ]
    return row


def without_room(row: dict[str, Any], before: int) -> None:
    """Counts as a crash that an input took much more memory than its file has, or asked for more
    than there is."""
    took = peak() - before
    asked = next((k for k in ("why", "said") if "there is not enough memory" in str(row.get(k))), None)
    if took > MEMORY_MAX or asked is not None:
        verdict = next(k for k in ("restore", "import") if k in row)
        row[verdict], row["memory"] = "crashed", took


def crafted_input(r: random.Random, crafted: Checkpoint, step: int, canary: Path) -> tuple[str, Checkpoint]:
    """Changes a checkpoint. Returns the kind of change."""
    if r.random() < 0.25:
        crafted = changes.parts(crafted)
    crafted.manifest["step"] = step
    for shard in crafted.shards:
        shard.metadata["step"] = str(step)
    kind = r.choice([*changes.CHANGES, "pickled", "none"])
    for change in [kind, *([r.choice(list(changes.CHANGES))] if r.random() < 0.1 else [])]:
        # A second change may find nothing left to change.
        with contextlib.suppress(StopIteration, IndexError):
            if change == "pickled":
                changes.pickled(r, crafted, canary)
            elif change != "none":
                changes.CHANGES[change](r, crafted)
            kind = kind if change == kind else "several"
    return kind, crafted


def others(crafted: Checkpoint, made: Trainer) -> list[str]:
    """Returns the objects that have a value in the checkpoint, but are none of the trainer's."""
    names = {t.name.removeprefix(BLOB) for shard in crafted.shards for t in shard.tensors if t.name.startswith(BLOB)}
    own = {*made.objects, "rng", "extra", "layout", "align", "parts", "dcp"}
    return sorted(n for n in names - own if "/" not in n)


def managers(directory: Path, seed: int, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Tries inputs of a manager's format."""
    bases: dict[str, Plain] = {}
    for base, make in TRAINERS.items():
        as_before()
        saved(directory / base, make())
        bases[base] = Plain(directory / base / "step-1")
    where, canary = directory / "all", directory / "ran"
    rows: dict[int, dict[str, Any]] = {}
    for n in range(first, last):
        r = random.Random(f"{seed}/{n}")
        step, base = n - first + 1, r.choice([*TRAINERS])
        kind, crafted = crafted_input(r, crafting.read(directory / base / "step-1"), step, canary)
        crafted.write(where / f"step-{step}")
        as_before()
        running(directory, f"input {n} ({base}, {kind}): restore")
        before = peak()
        made = TRAINERS[base]()
        row = {"input": n, "kind": kind, "base": base, "ranks": len(crafted.shards), "others": others(crafted, made)}
        row |= restored(where, step, made, bases[base])
        running(directory, f"input {n} ({base}, {kind}): export")
        as_before()
        export = exported(where, step, directory / "out.pt")
        row["wrong"] = row.get("wrong", []) + export.pop("wrong", [])
        rows[step] = {**row, **export, "ran": canary.exists()}
        without_room(rows[step], before)
    return rows


def _verdicts(directory: Path) -> str:
    """Returns what ``everstep ckpt verify`` says of all steps.

    Raises:
        RuntimeError: when it gives no verdict.
    """
    seconds = VERIFY_SECONDS[0] + VERIFY_SECONDS[1] * len(list(directory.iterdir()))
    # The limit holds for its interpreter, too.
    limited = ["sh", "-c", f'ulimit -t {seconds:.0f}; exec "$@"', "sh"]
    line = [*limited, os.environ["EVERSTEP_BINARY"], "ckpt", "verify", str(directory)]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode not in (0, 1) or "shards are good" not in done.stdout:
        # Includes the sanitizer's report.
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}")
    return done.stdout


def _without_verdict(directory: Path, scratch: Path, steps: list[int], rows: dict[int, dict[str, Any]]) -> None:
    """Adds the verdicts of ``verify`` for these steps; for one that it does not survive, why."""
    some = scratch / "some"
    shutil.rmtree(some, ignore_errors=True)
    some.mkdir()
    for step in steps:
        shutil.copytree(directory / f"step-{step}", some / f"step-{step}", copy_function=os.link)
    running(scratch, f"verify of inputs {rows[steps[0]]['input']} to {rows[steps[-1]]['input']}")
    try:
        out = _verdicts(some)
    except RuntimeError as e:
        if len(steps) == 1:
            rows[steps[0]]["verify"] = f"no verdict: {e}"
            return
        for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
            _without_verdict(directory, scratch, half, rows)
        return
    for line in out.splitlines():
        if line.startswith("step "):
            rows.get(int(line.split(" ")[1]), {})["verify"] = line


def verified(directory: Path, rows: dict[int, dict[str, Any]]) -> None:
    """Adds the verdicts of ``everstep ckpt verify`` for each step, also if some of them end it."""
    there = [step for step in rows if (directory / "all" / f"step-{step}").is_dir()]
    if there:
        _without_verdict(directory / "all", directory, there, rows)
    for row in rows.values():
        row.setdefault("verify", "good")


def main() -> int:
    directory, seed, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    if sys.argv[5:] == ["dcp"]:
        from figures.scripts import crafted_dcp

        rows = crafted_dcp.inputs(directory, seed, first, last)
    else:
        rows = managers(directory, seed, first, last)
    verified(directory, rows)
    for row in rows.values():
        print(json.dumps(row, default=repr), flush=True)
    if unverified := [row["input"] for row in rows.values() if row["verify"].startswith("no verdict")]:
        raise RuntimeError(f"verify gave no verdict because of the inputs {unverified}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
