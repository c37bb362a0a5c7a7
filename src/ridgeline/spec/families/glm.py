"""GLM-4 9B and its like: Llama with pairs of the first half of each head rotated, gate and up in one matrix."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, head_size, llama_renames, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_partial_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim", high=1024) or head_size(hidden, heads)
    norm = RmsNorm(config.number("rms_norm_eps", 1.5625e-7, low=0.0))
    attention = GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=replace(read_rope(config, head_dim, default_partial=0.5), interleaved=True),
        qkv_bias=config.flag("attention_bias", True),
    )
    mlp = GatedMlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "silu"))
    return DecoderSpec(
        model_type="glm",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 131072),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    return llama_renames(
        Rename(f"model.{at}.mlp.gate_up_proj.weight", (f"{at}.ffn.gate.weight", f"{at}.ffn.up.weight")),
    )


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    return {
        "model_type": "glm",
        "hidden_size": heads * choose(4, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_partial_rope(choose, head_dim),
    }
