"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows in the upper layers if asked."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, head_size, llama_renames, read_qwen_windows, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes, tiny_windows


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim", high=1024) or head_size(hidden, heads)
    config.expect("use_mrope", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim),
        qkv_bias=True,
    )
    mlp = GatedMlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "silu"))
    return DecoderSpec(
        model_type="qwen2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
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
        "model_type": "qwen2",
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **sizes,
        **tiny_rope(choose, head_dim),
        **tiny_windows(choose, sizes),
    }
