"""Convert at the border of the reference backend: numpy arrays outside, torch tensors inside, over the same memory."""

from collections.abc import Mapping

import numpy as np
import torch

from ridgeline.core.dtypes import BFLOAT16, Array

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_tensor(array: Array) -> torch.Tensor:
    """View a writable array as a tensor."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> Array:
    """View a tensor's values as an array, without its gradients; copy them where another device has them."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def as_tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """View every array of a mapping as a tensor."""
    return {name: as_tensor(array) for name, array in arrays.items()}


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """View every tensor of a mapping as an array."""
    return {name: as_array(tensor) for name, tensor in tensors.items()}


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Return a context whose matrix products have a type, on torch's default device."""
    return torch.autocast(torch.get_default_device().type, dtype, enabled=dtype != torch.float32)
