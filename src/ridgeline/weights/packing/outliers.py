"""Inputs that keep 16 bits beside others of 8: they come last in the order of a matrix's inputs."""

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ridgeline.quant.stored import StoredFormat, StoredMatrix

Inputs = npt.NDArray[np.int32]


def order_of(num_inputs: int, outliers: Inputs) -> Inputs:
    """Return the order of all inputs with `outliers`, which are in order, last."""
    return np.concatenate([np.setdiff1d(np.arange(num_inputs, dtype=np.int32), outliers), outliers])


def format_of(form: StoredFormat, outliers: Inputs) -> StoredFormat:
    """Return the format with these outliers. Two formats with different ones differ."""
    return replace(form, order=hashlib.blake2b(outliers.tobytes(), digest_size=16).hexdigest(), outliers=len(outliers))


def with_outliers(stored: StoredMatrix, outliers: Inputs) -> StoredMatrix:
    """Return a matrix of inputs as they are computed in, with `outliers` last."""
    if not len(outliers):
        return stored
    order = order_of(stored.codes.shape[1], outliers)
    return replace(stored, format=format_of(stored.format, outliers), packed=stored.codes[:, order], order=order)


def in_given_order(stored: StoredMatrix) -> StoredMatrix:
    """Return the same matrix without outliers, its inputs as they are computed in."""
    if stored.order is None:
        return stored
    form = replace(stored.format, order="", outliers=0)
    return replace(stored, format=form, packed=stored.codes[:, np.argsort(stored.order)], order=None)
