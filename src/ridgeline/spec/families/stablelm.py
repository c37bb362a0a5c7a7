"""StableLM 2 and 3B: Llama with LayerNorm and partial rotation, where configured parallel, with norms of every head."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, head_size, llama_renames, read_attention, read_gated_mlp, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, LayerNorm, ParallelLayer, Rename
from ridgeline.spec.tiny import Choose, tiny_partial_rope


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    eps = config.number("layer_norm_eps", 1e-5, low=0.0)
    norm = LayerNorm(eps)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.25)),
        qk_norm=LayerNorm(eps, bias=False, per_head=True) if config.flag("qk_layernorm", False) else None,
        qkv_bias=config.flag("use_qkv_bias", False),
    )
    mlp = read_gated_mlp(config)
    parallel = config.flag("use_parallel_residual", False)
    layer = ParallelLayer(attention, mlp, norm) if parallel else Layer(attention, mlp, norm, norm)
    return DecoderSpec(
        model_type="stablelm",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 4096),
        layers=(layer,) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    at = "layers.{i}"
    return llama_renames(
        Rename("model.norm.bias", ("final_norm.bias",)),
        Rename(f"model.{at}.input_layernorm.bias", (f"{at}.mixer_norm.bias",)),
        Rename(f"model.{at}.post_attention_layernorm.bias", (f"{at}.ffn_norm.bias",)),
        *(
            Rename(f"model.{at}.self_attn.{letter}_layernorm.norms.{{e}}.weight", (f"{at}.attn.{letter}_norm.weight",))
            for letter in "qk"
        ),
    )


def tiny(choose: Choose) -> dict[str, object]:
    kv_heads = choose(1, 2, 3)
    heads, head_dim = kv_heads * choose(1, 2), choose(16, 24, 64)
    return {
        "model_type": "stablelm",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": choose(1, 2, 3),
        "intermediate_size": choose(40, 72),
        "layer_norm_eps": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "use_qkv_bias": choose(False, True),
        "qk_layernorm": choose(False, True),
        "use_parallel_residual": choose(False, True),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **tiny_partial_rope(choose, head_dim),
    }
