"""OLMo 2: norms behind each block and none before, RMSNorm over all queries together and over all keys."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, head_size, llama_renames, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_heads, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim", high=1024) or head_size(hidden, heads)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim),
        qk_norm=norm,
        qk_norm_over="row",
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = GatedMlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "silu"))
    layer = Layer(attention, mlp, mixer_post_norm=norm, ffn_post_norm=norm)
    return DecoderSpec(
        model_type="olmo2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    return llama_renames(
        Rename(f"model.{at}.post_attention_layernorm.weight", (f"{at}.mixer_post_norm.weight",)),
        Rename(f"model.{at}.post_feedforward_layernorm.weight", (f"{at}.ffn_post_norm.weight",)),
    )


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, head_dim = tiny_heads(choose)
    return {
        "model_type": "olmo2",
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
