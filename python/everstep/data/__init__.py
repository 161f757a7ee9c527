"""Data loading that survives failures and changes of the world: every sample of an epoch exactly
once.

The order of an epoch depends on (seed, epoch) only. The position is one number, the samples used by
*committed* steps: it is saved with the weights, and any number of ranks can continue from it.
Samples that a data loader has only fetched ahead do not count.
"""

from .augment import Reproducible, SampleId
from .cursor import epoch_hash
from .iterable import ElasticIterable
from .sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler", "ElasticIterable", "Reproducible", "SampleId", "epoch_hash"]
