"""Lower a DecoderSpec to a Program. Reads like the forward pass; one file for each kind of mixer."""

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import recurrent
from ridgeline.program.lower.attention import lower_attention
from ridgeline.program.lower.builder import Builder
from ridgeline.program.lower.feed_forward import lower_experts, lower_gated_mlp, lower_mlp
from ridgeline.program.lower.latent import lower_latent_attention
from ridgeline.program.op import LOGIT_ROWS, LOGITS, POSITIONS, TOKEN_IDS, Program
from ridgeline.program.ops.dense import AddRowAttrs, EmbedAttrs, ScaleAttrs, SoftcapAttrs
from ridgeline.spec.attention import GroupedQueryAttention, LatentAttention
from ridgeline.spec.experts import MixtureOfExperts
from ridgeline.spec.parts import GatedMlp, Mlp, Norm
from ridgeline.spec.recurrent import GatedDeltaNet, LightningAttention, Mamba, Mamba2
from ridgeline.spec.spec import (
    AnyLayer,
    Classifier,
    DecoderSpec,
    FeedForward,
    Head,
    Layer,
    Mixer,
    NormedResidualLayer,
    ParallelLayer,
    PostNormLayer,
)


def lower(spec: DecoderSpec, context_length: int | None = None, *, hidden: bool = False) -> Program:
    """Return the program of `spec` for sequences of up to `context_length` tokens (default: `spec.max_positions`).

    It ends in the logits of the selected rows, a classifier's where there is one; with `hidden`, and for a model
    without a head, in what the head would read. Raises ConfigError where shapes do not fit or a learned position table
    is shorter than the context.
    """
    b = Builder(spec, context_length or spec.max_positions)
    x = _embed(b)
    for index, layer in enumerate(spec.layers):
        x = LAYERS[type(layer)](b, f"layers.{index}", layer, x)
    if spec.classifier is not None:
        x = _classify(b, spec.classifier, _optional_norm(b, "final_norm", spec.final_norm, x))
    (x,) = b.emit("select_rows", "rows", (x, LOGIT_ROWS))
    if spec.classifier is not None:
        return b.program()
    x = _optional_norm(b, "final_norm", spec.final_norm, x)
    if spec.head is not None and not hidden:
        lower_head(b, spec.head, x)
    return b.program()


def _embed(b: Builder) -> str:
    spec = b.spec
    table = b.weight("embed.weight", spec.vocab_size, spec.hidden_size)
    typed = spec.vocab_size if spec.num_types > 1 else 0
    (x,) = b.emit("embed", "embed", (TOKEN_IDS,), (table,), EmbedAttrs(spec.embedding.scale, typed))
    if num_positions := spec.embedding.num_positions:
        if b.context_length > num_positions:
            raise ConfigError(f"context length {b.context_length} exceeds the {num_positions} learned positions")
        if spec.embedding.unused_positions:
            b.weight("unused_positions.weight", spec.embedding.unused_positions, spec.hidden_size)
        table = b.weight("positions.weight", num_positions, spec.hidden_size)
        (p,) = b.emit("embed", "positions", (POSITIONS,), (table,), EmbedAttrs(1.0))
        (x,) = b.emit("add", "embed.sum", (x, p))
    if spec.embedding.num_types:
        table = b.weight("types.weight", spec.embedding.num_types, spec.hidden_size)
        if typed:
            (t,) = b.emit("embed", "types", (TOKEN_IDS,), (table,), EmbedAttrs(1.0, typed, of_types=True))
            (x,) = b.emit("add", "embed.type", (x, t))
        else:
            (x,) = b.emit("add_row", "embed.type", (x,), (table,), AddRowAttrs(0))
    return _optional_norm(b, "embed_norm", spec.embedding.norm, x)


def _sequential(b: Builder, prefix: str, layer: Layer, x: str) -> str:
    for half, part, norm, post_norm in (
        ("mixer", layer.mixer, layer.mixer_norm, layer.mixer_post_norm),
        ("ffn", layer.feed_forward, layer.ffn_norm, layer.ffn_post_norm),
    ):
        if part is not None:
            h = _part(b, prefix, part, _optional_norm(b, f"{prefix}.{half}_norm", norm, x))
            h = _optional_norm(b, f"{prefix}.{half}_post_norm", post_norm, h)
            h = _scaled(b, f"{prefix}.{half}_scale", layer.residual_scale, h)
            (x,) = b.emit("add", f"{prefix}.{half}_sum", (x, h))
    return x


def _parallel(b: Builder, prefix: str, layer: ParallelLayer, x: str) -> str:
    h = b.norm(f"{prefix}.mixer_norm", layer.mixer_norm, x)
    f = b.norm(f"{prefix}.ffn_norm", layer.ffn_norm, x) if layer.ffn_norm is not None else h
    (x,) = b.emit("add", f"{prefix}.mixer_sum", (x, _part(b, prefix, layer.mixer, h)))
    f = _part(b, prefix, layer.feed_forward, f)
    return b.emit("add", f"{prefix}.ffn_sum", (x, f))[0]


def _post_normed(b: Builder, prefix: str, layer: PostNormLayer, x: str) -> str:
    (x,) = b.emit("add", f"{prefix}.mixer_sum", (x, _part(b, prefix, layer.mixer, x)))
    x = b.norm(f"{prefix}.mixer_norm", layer.mixer_norm, x)
    (x,) = b.emit("add", f"{prefix}.ffn_sum", (x, _part(b, prefix, layer.feed_forward, x)))
    return b.norm(f"{prefix}.ffn_norm", layer.ffn_norm, x)


def _normed_residual(b: Builder, prefix: str, layer: NormedResidualLayer, x: str) -> str:
    x = b.norm(f"{prefix}.mixer_norm", layer.mixer_norm, x)
    x = _weighted_sum(b, f"{prefix}.mixer_sum", layer.mixer_factors, x, _part(b, prefix, layer.mixer, x))
    x = b.norm(f"{prefix}.ffn_norm", layer.ffn_norm, x)
    return _weighted_sum(b, f"{prefix}.ffn_sum", layer.ffn_factors, x, _part(b, prefix, layer.feed_forward, x))


def _weighted_sum(b: Builder, prefix: str, factors: tuple[float, float], *terms: str) -> str:
    scaled = [
        _scaled(b, f"{prefix}.{name}", factor, term)
        for name, factor, term in zip(("residual", "branch"), factors, terms, strict=True)
    ]
    return b.emit("add", prefix, tuple(scaled))[0]


def _part(b: Builder, prefix: str, part: Mixer | FeedForward, x: str) -> str:
    name, lower_part = PARTS[type(part)]
    return lower_part(b, f"{prefix}.{name}", part, x)


def _optional_norm(b: Builder, prefix: str, norm: Norm | None, x: str) -> str:
    return x if norm is None else b.norm(prefix, norm, x)


def _scaled(b: Builder, prefix: str, factor: float, x: str) -> str:
    return x if factor == 1.0 else b.emit("scale", prefix, (x,), (), ScaleAttrs(factor))[0]


def _classify(b: Builder, classifier: Classifier, x: str) -> str:
    if classifier.dense:
        x = b.linear("classifier.dense", x, b.width(x), bias=True)
        (x,) = b.emit("softcap", "classifier.tanh", (x,), (), SoftcapAttrs(1.0))
    return b.linear("classifier.out", x, len(classifier.labels), classifier.bias)


def lower_head(b: Builder, head: Head, x: str) -> None:
    """Add the logits of `x` over the vocabulary of the builder's spec."""
    x = _scaled(b, "head.scale", head.scale, x)
    table = b.weight("embed.weight" if head.tied else "head.weight", b.spec.vocab_size, b.spec.hidden_size)
    weights = (table, b.weight("head.bias", b.spec.vocab_size)) if head.bias else (table,)
    if head.softcap is None:
        b.emit("lm_head", LOGITS, (x,), weights)
    else:
        (x,) = b.emit("lm_head", "head", (x,), weights)
        b.emit("softcap", LOGITS, (x,), (), SoftcapAttrs(head.softcap))


Lowering = Callable[[Builder, str, Any, str], str]
"""(builder, prefix of all labels, the part of the spec, its input) -> its output."""

LAYERS: Mapping[type[AnyLayer], Lowering] = {
    Layer: _sequential,
    ParallelLayer: _parallel,
    PostNormLayer: _post_normed,
    NormedResidualLayer: _normed_residual,
}
PARTS: Mapping[type[Mixer | FeedForward], tuple[str, Lowering]] = {
    GroupedQueryAttention: ("attn", lower_attention),
    Mamba: ("mamba", recurrent.lower_mamba),
    Mamba2: ("mamba", recurrent.lower_mamba2),
    GatedDeltaNet: ("delta", recurrent.lower_gated_delta_net),
    LightningAttention: ("lightning", recurrent.lower_lightning_attention),
    LatentAttention: ("attn", lower_latent_attention),
    GatedMlp: ("ffn", lower_gated_mlp),
    Mlp: ("ffn", lower_mlp),
    MixtureOfExperts: ("ffn", lower_experts),
}
