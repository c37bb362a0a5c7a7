"""Multi-head latent attention attends over compressed latents in the cache (DeepSeek-V2, arXiv 2405.04434).

Legend: T tokens · N heads · C entries of a latent · R rotated entries that all heads share · P further entries of a
head's key · V entries of its value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Op, Program, Shape, dims_of
from ridgeline.program.ops.attention import CacheWriteAttrs, cache_write_cost, nothing, visible_keys
from ridgeline.program.pricing import OpCost, Operands, OpRow, WeightShape, elements, weight_bytes


@dataclass(frozen=True, slots=True)
class LatentAttentionAttrs(Attrs):
    """Queries attend to latent state number `state`."""

    state: int
    scale: float


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The letters of this file are these numbers."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Sequence[int], latent: Sequence[int], k_rope: Sequence[int], weight: Sequence[int]) -> "LatentSizes":
        """Read the sizes off the shapes of a latent_attention's operands."""
        nope_dim = q[-1] - k_rope[-1]
        return cls(q[-2], latent[-1], k_rope[-1], nope_dim, weight[0] // q[-2] - nope_dim)

    @classmethod
    def of_op(cls, program: Program, op: Op) -> "LatentSizes":
        """Return the sizes of a latent_attention of the program."""
        q, latent, k_rope = (dims_of(program.shapes[name]) for name in op.inputs)
        return cls.of(q, latent, k_rope, program.weights[op.weights[0]])

    @property
    def absorbed_entries(self) -> int:
        """Return the elements of the transposed copy of W_k that the absorbed form needs."""
        return self.num_heads * self.nope_dim * self.latent_dim

    def absorbed_flops(self, num_tokens: int, kv_length: int) -> int:
        """Return the FLOPs over the latents: q W_k before the softmax, (weights times latents) W_v after it."""
        pairs, _ = visible_keys(num_tokens, kv_length, None)
        per_pair = 2 * (self.latent_dim + self.rope_dim) + 2 * self.latent_dim
        return self.num_heads * (num_tokens * self._per_row + pairs * per_pair)

    def expanded_flops(self, num_tokens: int, kv_length: int) -> int:
        """Return the FLOPs if every latent of the sequence is expanded to the keys and values of all heads first."""
        pairs, _ = visible_keys(num_tokens, kv_length, None)
        per_pair = 2 * (self.nope_dim + self.rope_dim) + 2 * self.value_dim
        return self.num_heads * (kv_length * self._per_row + pairs * per_pair)

    def expands(self, num_tokens: int, kv_length: int) -> bool:
        """Return whether the last `num_tokens` of `kv_length` take fewer FLOPs in the expanded form.

        Backends choose by this rule; native/runtime/latent.cpp says it once more.
        """
        return self.expanded_flops(num_tokens, kv_length) < self.absorbed_flops(num_tokens, kv_length)

    @property
    def _per_row(self) -> int:
        return 2 * self.latent_dim * (self.nope_dim + self.value_dim)


def _attention_cost(x: Operands) -> OpCost:
    """Count latents as read from the cache, once for all heads; softmax and scale are 5 FLOPs per pair and head."""
    q, latent, k_rope = x.inputs
    sizes = LatentSizes.of(q, latent, k_rope, x.weights[0])
    flops = kv_read = 0.0
    for num_tokens, kv_length in x.load.spans:
        pairs, keys = visible_keys(num_tokens, kv_length, None)
        forms = (sizes.absorbed_flops(num_tokens, kv_length), sizes.expanded_flops(num_tokens, kv_length))
        flops += min(forms) + 5 * sizes.num_heads * pairs
        kv_read += keys * (sizes.latent_dim + sizes.rope_dim) * x.element.kv
    moved = x.input_bytes[0] * elements(q) + x.output_bytes[0] * elements(x.outputs[0])
    weights = weight_bytes(x) if x.load.spans else 0
    return OpCost(flops, weight_bytes=weights, kv_read_bytes=kv_read, activation_bytes=moved)


def _attention_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (num_heads, head_dim), (latent_dim,), (*_, rope_dim) = map(dims_of, inputs)
    rows, columns = weights[0]
    value_dim = rows // num_heads - (head_dim - rope_dim)
    if rows % num_heads or columns != latent_dim or value_dim < 1:
        raise ConfigError(
            f"weight {list(weights[0])} does not make keys of {head_dim - rope_dim} entries and values for "
            f"{num_heads} heads of a latent of {latent_dim}"
        )
    return ((inputs[0][0], num_heads * value_dim),)


ROWS: Mapping[str, OpRow] = {
    # latent [T,C], k [T,1,R] -> the cache
    "latent_write": OpRow(CacheWriteAttrs, 2, (0,), nothing, cache_write_cost),
    # q [T,N,P+R], latent and k as written, over the cache, w [N*(P+V),C] -> [T,N*V]
    "latent_attention": OpRow(LatentAttentionAttrs, 3, (1,), _attention_shape, _attention_cost),
}
