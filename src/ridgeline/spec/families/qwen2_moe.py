"""Qwen 1.5 and 2 with experts: Qwen 2's attention; a shared expert behind a gate beside those that are chosen."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    expert_renames,
    llama_renames,
    read_attention,
    read_head_dim,
    read_rope,
    read_sparse_layers,
    read_windows,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Head, Layer, MixtureOfExperts, Rename, RmsNorm, Routing
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes, tiny_sparse_layers, tiny_windows


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        qkv_bias=config.flag("qkv_bias", True),
    )
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    dense = GatedMlp(config.integer("intermediate_size", 5632), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer("num_experts", 60, high=MAX_EXPERTS),
        size=config.integer("moe_intermediate_size", 1408),
        activation=activation,
        routing=Routing(config.integer("num_experts_per_tok", 4), normalize=config.flag("norm_topk_prob", False)),
        shared=GatedMlp(config.integer("shared_expert_intermediate_size", 5632), activation),
        shared_gate=True,
    )
    layers = zip(_windows(config), read_sparse_layers(config), strict=True)
    return DecoderSpec(
        model_type="qwen2_moe",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(
            Layer(replace(attention, window=window), experts if sparse else dense, norm, norm)
            for window, sparse in layers
        ),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def _windows(config: ConfigReader) -> Sequence[int | None]:
    """Without layer_types every other layer slides, of the first `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096, low=0) or None
    if not config.flag("use_sliding_window", False):
        window = None
    end = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda index: window is not None and index % 2 == 0 and index < end)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*llama_renames(), *expert_renames()]


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    num_experts = choose(2, 5, 16)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen2_moe",
        **attention,
        "qkv_bias": choose(False, True),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2, min(8, num_experts)),
        "moe_intermediate_size": choose(12, 40),
        "shared_expert_intermediate_size": choose(20, 56),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
