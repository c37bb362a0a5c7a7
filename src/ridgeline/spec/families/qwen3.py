"""Qwen 3 (dense): Llama with RMSNorm on every query and key head, and sliding windows in the upper layers if asked."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import llama_renames, read_attention, read_gated_mlp, read_rope
from ridgeline.spec.families.qwen2 import read_qwen_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes, tiny_windows


def read(config: ConfigReader) -> DecoderSpec:
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    head_dim = config.integer("head_dim", 128, high=1024)
    bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
    )
    mlp = read_gated_mlp(config)
    return DecoderSpec(
        model_type="qwen3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(Layer(replace(attention, window=window), mlp, norm, norm) for window in read_qwen_windows(config)),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    return {
        "model_type": "qwen3",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
