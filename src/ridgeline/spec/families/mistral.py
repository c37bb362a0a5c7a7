"""Mistral 7B and its successors of the same type: Llama with a sliding window in every layer, or in none."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim)),
        num_kv_heads=config.integer("num_key_value_heads"),
        window=config.optional_integer("sliding_window", 4096),  # null: full attention
    )
    mlp = read_gated_mlp(config)
    return DecoderSpec(
        model_type="mistral",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "mistral",
        **attention,
        "sliding_window": choose(None, 1, 4, 16, 64),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
