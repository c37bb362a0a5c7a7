"""Training through the reference backend: the program that learns is the program that serves.

Muon for the matrices inside the layers, AdamW for embeddings and norms; warm-up, a constant learning rate, then a
linear decay to zero. Called by `ridgeline train`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import autocast
from ridgeline.compress.diffusion import diffusion_loss
from ridgeline.program.lower import lower
from ridgeline.spec.spec import DecoderSpec

TokenStream = npt.NDArray[np.integer]
TABLES = ("embed.weight", "head.weight")  # with a row for each token


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training run. Lengths and counts in tokens. Muon: Jordan et al. 2024; its rate is scaled to AdamW's."""

    num_tokens: int
    batch_tokens: int = 8192
    sequence_lengths: tuple[int, int] = (256, 1024)
    long_fraction: float = 0.25  # the share of steps, at the end, that use the second length
    matrix_rate: float = 6e-3
    vector_rate: float = 6e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.4
    max_grad_norm: float = 1.0
    seed: int = 0
    eval_every_steps: int = 100
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_steps(self) -> int:
        return max(1, self.num_tokens // self.batch_tokens)


@dataclass(frozen=True, slots=True)
class Progress:
    """Says what a training step reports; `held_out` is what is measured every `eval_every_steps`."""

    step: int
    num_steps: int
    loss: float
    tokens_per_s: float
    held_out: float | None


class Loss(torch.nn.Module):
    """Tells a model how wrong it is on windows of int64 [B, T + 1]; its own parameters are trained with the model's."""

    def forward(self, model: DenseModel, window_BT: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        raise NotImplementedError


class TextLoss(Loss):
    """Predicts the next token, or the masked ones for a model that fills in masks."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self._diffusion, self._dtype = spec.diffusion, dtype

    def forward(self, model: DenseModel, window_BT: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return the mean loss of a token, nats."""
        with autocast(self._dtype):
            if self._diffusion is not None:
                return diffusion_loss(model, window_BT[:, :-1], self._diffusion.mask_id, rng)
            logits = model(window_BT[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window_BT[:, 1:].flatten())


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Draw fp32 weights: normal with deviation 0.5 / sqrt(inputs), norms 1, biases and outputs to the residual 0."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith((".bias", ".attn.o.weight", ".ffn.down.weight")):
            weights[name] = torch.zeros(shape)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            deviation = 0.02 if name == "embed.weight" else 0.5 / math.sqrt(shape[1])
            drawn = torch.randn(shape, generator=generator, device="cpu") * deviation  # the same for every device
            weights[name] = drawn.to(torch.get_default_device())
    return weights


def initial_model(spec: DecoderSpec, seed: int, start: Mapping[str, torch.Tensor] | None = None) -> DenseModel:
    """Return a model to train, with random weights, or with those of `start`, which may know fewer tokens."""
    program = lower(spec)
    weights = initial_weights(program.weights, seed)
    for name, begun in (start or {}).items():
        weights[name][:] = begun.mean(0)  # a token that is new begins as the mean of the others
        weights[name][: len(begun)] = begun
    return DenseModel(program, weights)


def train(
    model: DenseModel, recipe: Recipe, tokens: TokenStream, measure: Callable[[DenseModel], float], loss_of: Loss
) -> Iterator[Progress]:
    """Train on one long token stream, yielding after every step.

    `loss_of` says what is learned, with what it learns itself; `measure` what is reported every `eval_every_steps`.
    """
    optimizers = _optimizers(model, recipe, list(loss_of.parameters()))
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    rng = np.random.default_rng(recipe.seed)
    for step in range(recipe.num_steps):
        started = time.perf_counter()
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * _schedule(step, recipe)
        loss = loss_of(model, _batch(tokens, step, recipe, rng), rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        elapsed = time.perf_counter() - started
        due = (step + 1) % recipe.eval_every_steps == 0 or step + 1 == recipe.num_steps
        held_out = measure(model) if due else None
        yield Progress(step + 1, recipe.num_steps, loss.item(), recipe.batch_tokens / elapsed, held_out)


def bits_per_byte(model: DenseModel, tokens: TokenStream, num_bytes: int, dtype: torch.dtype) -> float:
    """Measure the bits that the model needs per byte of the text behind `tokens`, in windows of its whole context."""
    length = model.program.context_length
    nats = 0.0
    with torch.inference_mode(), autocast(dtype):
        for start in range(0, len(tokens) - 1, length):
            window = torch.as_tensor(tokens[start : start + length + 1].astype(np.int64))[None]
            logits = model(window[:, :-1])
            nats += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
    return nats / math.log(2) / num_bytes


def _optimizers(model: DenseModel, recipe: Recipe, more: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    weights = model.named_weights()
    inner = {name for name, w in weights.items() if w.ndim == 2 and not name.endswith(TABLES)}
    matrices, others = ([w for name, w in weights.items() if (name in inner) == is_inner] for is_inner in (True, False))
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([*others, *more], lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, recipe: Recipe) -> float:
    """Return the fraction of the learning rate at `step`: warm-up, constant, linear decay to zero."""
    done = (step + 1) / recipe.num_steps
    warmup = min(1.0, done / recipe.warmup_fraction)
    return min(warmup, 1.0, (1.0 - done) / recipe.decay_fraction)


def _batch(tokens: TokenStream, step: int, recipe: Recipe, rng: np.random.Generator) -> torch.Tensor:
    """Draw windows at random places, int64 [B, T + 1]."""
    long = step >= recipe.num_steps * (1 - recipe.long_fraction)
    length = min(recipe.sequence_lengths[1 if long else 0], len(tokens) - 1)
    starts = rng.integers(0, len(tokens) - length, size=max(1, recipe.batch_tokens // length))
    return torch.as_tensor(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
