"""Weights in, out and streamed as the package has them, with torch's tensors and types: what the tests compare with."""

from collections.abc import Mapping

import torch

from ridgeline.backends.reference.tensors import as_arrays, as_tensor, as_tensors
from ridgeline.core.dtypes import DTYPES
from ridgeline.weights import load, save


def numpy_dtype(dtype: torch.dtype):
    return DTYPES[str(dtype).removeprefix("torch.")]


def load_weights(folder, spec, program, dtype):
    return as_tensors(load.load_weights(folder, spec, program, numpy_dtype(dtype)))


def save_weights(folder, spec, weights, dtype):
    save.save_weights(folder, spec, as_arrays(weights), numpy_dtype(dtype))


class StreamedWeights(Mapping):
    def __init__(self, folder, spec, program, dtype):
        self._arrays = load.StreamedWeights(folder, spec, program, numpy_dtype(dtype))

    def __getitem__(self, name):
        return as_tensor(self._arrays[name])

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)
