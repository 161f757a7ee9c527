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
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from everstep import CheckpointError, CheckpointManager, convert
from figures import crafted_changes as changes
from figures import crafting
from figures.crafting import BLOB, Checkpoint

warnings.simplefilter("ignore")
STATE = ("exp_avg", "exp_avg_sq")


def trainer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def saved(directory: Path) -> Checkpoint:
    """Returns a checkpoint of a trainer."""
    model, optimizer = trainer()
    manager = CheckpointManager(directory, model=model, optimizer=optimizer, persist=1)
    with contextlib.redirect_stderr(io.StringIO()):
        manager.restore()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        manager.step(1, loss=0.5, tokens=12345)
        manager.close()
    return crafting.read(directory / "step-1")


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
        size = tensor.element_size()
        # A dimension of one does not move anything, and numpy allows fewer dimensions than torch.
        kept = [n for n, length in enumerate(tensor.shape) if length != 1]
        shape = [tensor.shape[n] for n in kept]
        got = np.frombuffer(tensor.detach().contiguous().numpy().tobytes(), np.uint8).reshape(*shape, size)
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

    def value(self, name: str) -> Any:
        """Returns a value of the first shard, or ``None`` if only everstep can read it."""
        data = self.shards[0][1].get(BLOB + name, b"")
        return msgpack.unpackb(data[1:], strict_map_key=False) if data[:1] == b"\xc1" else None


def plain(tree: Any) -> bool:
    """Returns whether the value contains only msgpack's own types."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) for k in tree) and all(map(plain, tree.values()))
    return all(map(plain, tree)) if isinstance(tree, list) else True


def _as_torch_has_it(state: Any) -> bytes:
    """Returns the state of a generator after torch has loaded it, which clears what it does not use."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator.get_state().numpy().tobytes()


def wrong(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any, kind: str) -> list[str]:
    """Returns what was restored but differs from the files."""
    found, lines = Plain(directory), []
    lines += [f"model.{key}" for key, t in model.state_dict().items() if not found.has(f"model.{key}", t)]
    said = found.value("extra")
    if plain(said) and repr(said) != repr(extra):
        lines.append(f"extra: {said!r} became {extra!r}")
    rng = found.value("rng")
    if isinstance(rng, dict) and _as_torch_has_it(rng["torch"]) != torch.get_rng_state().numpy().tobytes():
        lines.append("random numbers")
    if kind not in ("blob_tree", "blob_noise", "blob_swapped"):
        for n, p in model.named_parameters():
            lines += [
                f"{n}/{key}"
                for key in STATE
                # One of several changes may have left an entry out of the value that names them.
                if (kind != "several" or key in optimizer.state[p])
                and not found.has(f"optimizer/state/model.{n}/{key}", optimizer.state[p][key])
            ]
    return lines


def restored(directory: Path, step: int, kind: str) -> dict[str, Any]:
    """Returns the result of ``restore()`` for a step."""
    model, optimizer = trainer()
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            manager = CheckpointManager(directory, model=model, optimizer=optimizer, persist=0)
            done = manager.restore(step)
        except CheckpointError as e:
            # That other ranks wrote it, each with its own state, does not mean it is damaged.
            damaged = any(
                "skipping a checkpoint" in str(w.message) and "each with its own state" not in str(w.message)
                for w in said
            )
            return {
                "restore": "damaged" if damaged else "refused",
                "why": str([str(w.message) for w in said] or e)[:400],
            }
        except Exception as e:  # noqa: BLE001
            return {"restore": "crashed", "why": f"{type(e).__name__}: {e}"[:300]}
    if done != step:
        return {"restore": "refused", "why": f"step {done}"}
    return {"restore": "accepted", "wrong": wrong(directory / f"step-{step}", model, optimizer, manager.extra, kind)}


def converted(*arguments: object) -> tuple[str, str]:
    """Runs ``everstep ckpt export|import`` in this process.

    Returns accepted, refused or crashed, and the message.
    """
    before, sys.argv = sys.argv, ["everstep", *map(str, arguments)]
    out = io.StringIO()
    try:
        with contextlib.redirect_stderr(out):
            code = convert.main()
    except Exception as e:  # noqa: BLE001
        return "crashed", f"{type(e).__name__}: {e}"[:300]
    finally:
        sys.argv = before
    said = out.getvalue().strip()
    return ("refused" if code else "accepted"), said[-200:]


def exported(directory: Path, step: int, out: Path) -> dict[str, Any]:
    verdict, said = converted("export", directory / f"step-{step}", out, "--to", "torch")
    row: dict[str, Any] = {"export": verdict, "said": said}
    if verdict == "accepted":
        state = torch.load(out, weights_only=True)
        found = Plain(directory / f"step-{step}")
        weights = state.get("model", {}) if isinstance(state, dict) else {}
        row["wrong"] = [
            f"exported {key}"
            for key, t in weights.items()
            if isinstance(t, torch.Tensor) and not found.has(f"model.{key}", t)
        ]
        out.unlink()
    return row


def managers(directory: Path, seed: int, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Tries inputs of a manager's format."""
    base = saved(directory / "base")
    base.shards[0].metadata.pop("step", None)
    where, canary = directory / "all", directory / "ran"
    rows: dict[int, dict[str, Any]] = {}
    for n in range(first, last):
        r = random.Random(f"{seed}/{n}")
        step = n - first + 1
        crafted = crafting.read(directory / "base" / "step-1")
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
        crafted.write(where / f"step-{step}")
        row = {"input": n, "kind": kind, "ranks": len(crafted.shards), **restored(where, step, kind)}
        export = exported(where, step, directory / "out.pt")
        row["wrong"] = row.get("wrong", []) + export.pop("wrong", [])
        rows[step] = {**row, **export, "ran": canary.exists()}
    return rows


def verified(directory: Path, rows: dict[int, dict[str, Any]]) -> None:
    """Adds the verdicts of ``everstep ckpt verify`` for each step."""
    line = [os.environ["EVERSTEP_BINARY"], "ckpt", "verify", str(directory)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or "shards are good" not in done.stdout:
        # Includes the sanitizer's report.
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"verify: {done.returncode} {done.stdout}")
    for line in done.stdout.splitlines():
        if line.startswith("step "):
            rows.get(int(line.split(" ")[1]), {})["verify"] = line
    for row in rows.values():
        row.setdefault("verify", "good")


def main() -> int:
    directory, seed, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    if sys.argv[5:] == ["dcp"]:
        from figures.scripts import crafted_dcp

        rows = crafted_dcp.inputs(directory, seed, first, last)
    else:
        rows = managers(directory, seed, first, last)
    verified(directory / "all", rows)
    for row in rows.values():
        print(json.dumps(row, default=repr), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
