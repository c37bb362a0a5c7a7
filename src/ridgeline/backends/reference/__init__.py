"""The reference backend: the program interpreted op by op in plain torch."""

from ridgeline.backends.reference.dense import DenseModel, dense_logits
from ridgeline.backends.reference.paged import ReferenceExecutable

__all__ = ["DenseModel", "ReferenceExecutable", "dense_logits"]
