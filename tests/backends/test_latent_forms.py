"""The two forms of latent attention are one function, and the cache holds nothing but what both read."""

from random import Random

import pytest
import torch

from ridgeline.backends.reference.memory import CachedSpans
from ridgeline.backends.reference.ops.latent import absorbed, expanded
from ridgeline.backends.reference.paged import ReferenceExecutable
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.cache.layout import KvStateSize, plan_layout
from ridgeline.program.lower import lower
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Head, LatentAttention, Layer, RmsNorm, Rope


@pytest.mark.parametrize("seed", range(10))
def test_absorbed_equals_expanded(seed):
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    seqs, queries, tokens, heads = (rng.randint(1, high) for high in (3, 5, 40, 6))
    latent, rope, nope, value = (rng.randint(1, high) for high in (64, 8, 16, 16))

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.zeros(seqs, queries, tokens, dtype=torch.float64)
    mask[torch.rand(mask.shape, generator=generator) < 0.3] = float("-inf")
    mask[..., 0] = 0
    unread = torch.empty(0)
    spans = CachedSpans(unread, (noise(seqs, 1, tokens, latent + rope),), unread, unread, mask)
    operands = (
        noise(seqs, queries, heads, nope + rope),
        spans,
        noise(heads, nope, latent),
        noise(heads, value, latent),
    )
    torch.testing.assert_close(absorbed(*operands, 0.1), expanded(*operands, 0.1), rtol=1e-9, atol=1e-9)


def test_the_reference_holds_the_predicted_bytes():
    norm = RmsNorm(1e-6)
    attention = LatentAttention(2, 512, 16, 64, 16, 0.1, Rope(1e4, 64, interleaved=True), norm)
    layers = (Layer(attention, GatedMlp(8, "silu"), norm, norm),) * 3
    program = lower(DecoderSpec("latent", 11, 32, 64, layers, norm, Head(tied=True)))
    sizes = [KvStateSize(state.bytes_per_token(4)) for state in program.states]
    layout = plan_layout(sizes, 16, 2**22, 64, 64)
    weights = {name: torch.zeros(shape) for name, shape in program.weights.items()}
    executable = ReferenceExecutable(program, as_arrays(weights), layout)
    held = sum(memory[:-1].nbytes for memories in executable._memories.values() for memory in memories)
    assert held == layout.total_bytes == layout.groups[0].num_blocks * 16 * 3 * 576 * 4
