"""Chooses the checkpoint that a load reads if none was named: the newest one that every rank found.

DCP calls ``read_metadata()`` on each rank and does not compare the results. A checkpoint may be
published between the listings of two ranks, or a listing may be stale. What ranks found travels
with DCP's own plans: those go to one rank and come back, errors too, among exactly the ranks that
take part in the load, which a reader cannot know (``process_group=``, ``no_dist=True``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._internal import CheckpointError
from .pieces import Stored

#: Limit on the checkpoints that one rank offers.
CANDIDATES_MAX = 64


@dataclass(frozen=True)
class Candidates:
    """The complete checkpoints that one rank found, newest first. The local plan is for the
    first."""

    names: list[str]
    #: What is wrong with those newer than the first.
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agreed:
    """The checkpoint that all ranks read."""

    name: str


def agree(root: str, ranks: Sequence[Candidates]) -> tuple[Agreed, str | None]:
    """Returns the newest checkpoint that every rank found, and a warning if newer ones are skipped.

    Raises:
        CheckpointError: when ranks have none in common.
    """
    common = set.intersection(*(set(r.names) for r in ranks))
    name = next((n for n in ranks[0].names if n in common), None)
    firsts: dict[str, int] = {}
    for rank, found in enumerate(ranks):
        firsts.setdefault(found.names[0], rank)
    differ = ", ".join(f"{first} on rank {rank}" for first, rank in firsts.items())
    if name is None:
        raise CheckpointError(
            f"no checkpoint in {root} can be read by every rank (the newest: {differ}); check that all nodes see the same files there"
        )
    skipped = [f"skipped {wrong}" for wrong in dict.fromkeys(w for r in ranks for w in r.damaged)]
    if len(firsts) > 1:
        skipped.append(f"the newest is {differ}")
    return Agreed(name), f"{root}: {'; '.join(skipped)}; loading {name}" if skipped else None


def require_same_values(planned: Metadata, agreed: Metadata) -> None:
    """Checks that a plan made for one checkpoint is also one for another: the same names, shapes
    and dtypes.

    Raises:
        CheckpointError: when it is not.
    """
    if _values(planned) != _values(agreed) or planned.planner_data != agreed.planner_data:
        a, b = (m.storage_meta and m.storage_meta.checkpoint_id for m in (planned, agreed))
        raise CheckpointError(
            f"this rank found {a} and others only {b}, which has other values; load again, or name the checkpoint to load: "
            f"Reader({str(b)!r})"
        )


def _values(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    return {
        fqn: (m.size, m.properties.dtype) if isinstance(m, TensorStorageMetadata) else None
        for fqn, m in metadata.state_dict_metadata.items()
    }


def moved(
    items: Iterable[ReadItem], planned: Mapping[MetadataIndex, Stored], blocks: Iterable[Stored]
) -> list[ReadItem]:
    """Returns reads of the same elements, to the same places, from the blocks of another
    checkpoint, which may be split in another way."""
    by_fqn: dict[str, list[Stored]] = {}
    for block in blocks:
        by_fqn.setdefault(block.fqn, []).append(block)
    found: list[ReadItem] = []
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            found.append(item)
            continue
        fqn = item.storage_index.fqn
        chunk = planned[item.storage_index].offsets
        begins = [o + s for o, s in zip(chunk, item.storage_offsets, strict=True)]
        for block in by_fqn[fqn]:
            low = [max(b, o) for b, o in zip(begins, block.offsets, strict=True)]
            ends = zip(begins, item.lengths, block.offsets, block.sizes, strict=True)
            lengths = [min(b + n, o + s) - lo for lo, (b, n, o, s) in zip(low, ends, strict=True)]
            if all(n > 0 for n in lengths):
                ahead = (d + lo - b for d, lo, b in zip(item.dest_offsets, low, begins, strict=True))
                inside = (lo - o for lo, o in zip(low, block.offsets, strict=True))
                found.append(
                    replace(
                        item,
                        dest_offsets=torch.Size(ahead),
                        storage_index=MetadataIndex(fqn, torch.Size(block.offsets)),
                        storage_offsets=torch.Size(inside),
                        lengths=torch.Size(lengths),
                    )
                )
    return found
