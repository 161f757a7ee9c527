"""``torch.distributed.checkpoint`` through everstep: one argument changes.

::

    dcp.save(state, storage_writer=everstep.dcp.Writer("out"))
    dcp.async_save(state, storage_writer=everstep.dcp.Writer("out"))
    dcp.load(state, storage_reader=everstep.dcp.Reader("out"))

Under ``everstep run``, :func:`async_save` returns when the state is in shared memory; from there,
this node's agent writes it to ``out``, even if the training process dies.
"""

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
