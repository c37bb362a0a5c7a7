"""Command R: attention and feed-forward side by side behind one LayerNorm, pairs rotated, logits scaled."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, ParallelLayer, Rename
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0), bias=False)
    rope = replace(read_rope(config, head_dim, default_theta=500000.0), interleaved=True)
    attention = replace(
        read_attention(config, head_dim, rope, bias=bias),
        qk_norm=replace(norm, per_head=True) if config.flag("use_qk_norm", False) else None,
    )
    mlp = read_gated_mlp(config)
    return DecoderSpec(
        model_type="cohere",
        vocab_size=config.integer("vocab_size", 256000),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 8192),
        layers=(ParallelLayer(attention, mlp, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True), scale=config.number("logit_scale", 0.0625)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    sizes = tiny_sizes(choose)
    sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
    return {
        "model_type": "cohere",
        **attention,
        "attention_bias": choose(False, True),
        "use_qk_norm": choose(False, True),
        "logit_scale": choose(0.0625, 0.8, 1.0),
        **sizes,
        **tiny_rope(choose, head_dim),
    }
