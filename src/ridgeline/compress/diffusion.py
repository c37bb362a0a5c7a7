"""Define what a masked diffusion model learns from, and how well it knows a text.

Block diffusion (arXiv 2503.09573): a sequence is a prompt and blocks; every block is masked to a degree of its own and
predicted from its unmasked tokens, the blocks before it and the prompt. One pass over the clean sequence beside the
masked one gives the loss of all blocks. Called by `train.py`; served as `decoding/strategies/diffusion.py` decides.
"""

import math
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import autocast

BLOCK_LENGTHS = (8, 16, 32)
NUM_MASKINGS = 4  # of a window whose bits are measured
MIN_MASKED = 1e-3  # the weight of a block is the inverse of its masked share


def diffusion_loss(model: DenseModel, tokens_BT: torch.Tensor, mask_id: int, rng: np.random.Generator) -> torch.Tensor:
    """Return the bound on the negative log-likelihood, nats per token, of random prompts and block lengths."""
    length = tokens_BT.shape[1]
    block_length = int(rng.choice(BLOCK_LENGTHS))
    num_prompt = int(rng.integers(1, max(2, length - block_length)))
    return _bound(model, tokens_BT, mask_id, num_prompt, block_length, rng)


def diffusion_bits(model: DenseModel, tokens: np.ndarray, num_bytes: int, mask_id: int, dtype: torch.dtype) -> float:
    """Estimate an upper bound on bits per byte of the text of `tokens`, over NUM_MASKINGS maskings per window."""
    length, rng = model.program.context_length, np.random.default_rng(0)
    nats = 0.0
    with torch.inference_mode(), autocast(dtype):
        for start in range(0, len(tokens) - 1, length):
            window = torch.as_tensor(tokens[start : start + length].astype(np.int64))[None]
            bounds = [_bound(model, window, mask_id, 1, BLOCK_LENGTHS[-1], rng).item() for _ in range(NUM_MASKINGS)]
            nats += (window.shape[1] - 1) * fmean(bounds)
    return nats / math.log(2) / num_bytes


def _bound(
    model: DenseModel,
    tokens_BT: torch.Tensor,
    mask_id: int,
    num_prompt: int,
    block_length: int,
    rng: np.random.Generator,
) -> torch.Tensor:
    batch, length = tokens_BT.shape
    block_T = np.maximum((np.arange(length) - num_prompt) // block_length + 1, 0)  # 0: the prompt
    num_blocks = int(block_T[-1])
    # One masked share for each block, spread evenly over (0, 1]: fewer extremes than independent ones.
    shares = (rng.permuted(np.arange(batch * num_blocks)) + rng.random(batch * num_blocks)) / (batch * num_blocks)
    share_BK = np.maximum(shares.reshape(batch, num_blocks), MIN_MASKED)
    share_BK = np.concatenate([np.zeros((batch, 1)), share_BK], axis=1)
    share_BT = torch.as_tensor(share_BK[:, block_T])
    masked_BT = torch.as_tensor(rng.random((batch, length))) < share_BT
    noisy_BT = torch.where(masked_BT, mask_id, tokens_BT)
    logits = model(
        torch.cat([tokens_BT, noisy_BT], dim=1),
        positions_T=torch.arange(length).repeat(2),
        visible_TT=_visible(torch.as_tensor(block_T)),
    )[:, length:]
    nats = F.cross_entropy(logits[masked_BT].float(), tokens_BT[masked_BT], reduction="none")
    return (nats / share_BT[masked_BT]).sum() / (batch * (length - num_prompt))


def _visible(block_T: torch.Tensor) -> torch.Tensor:
    """Return which tokens see which, [2T, 2T] for the clean sequence before the masked one: clean tokens see clean
    ones up to their own block, masked ones the clean blocks before theirs and their own masked block."""
    query, key = block_T[:, None], block_T[None]
    clean = torch.cat([key <= query, torch.zeros(len(block_T), len(block_T), dtype=torch.bool)], dim=1)
    return torch.cat([clean, torch.cat([key < query, key == query], dim=1)])
