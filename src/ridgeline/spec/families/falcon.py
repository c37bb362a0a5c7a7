"""Falcon: multi-query (7B), grouped (40B, 180B, Falcon 2), or a key for each query and ALiBi (RW)."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_LAYERS,
    alibi_slopes,
    fused_qkv,
    head_size,
    module_renames,
    read_rope,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    AnyLayer,
    DecoderSpec,
    GroupedQueryAttention,
    Head,
    Layer,
    LayerNorm,
    Mlp,
    ParallelLayer,
    Rename,
)
from ridgeline.spec.tiny import Choose, tiny_rope


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("hidden_size")
    bias = config.flag("bias", False)
    config.expect("apply_residual_connection_post_layernorm", False)
    attention = _read_attention(config, hidden, bias)
    size = config.optional_integer("ffn_hidden_size") or hidden * config.integer("ff_factor", 4)
    mlp = Mlp(size, config.choice("activation", ACTIVATIONS, "gelu"), bias)
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    layer = _read_layer(config, attention, mlp, norm)
    return DecoderSpec(
        model_type="falcon",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
    )


def _read_attention(config: ConfigReader, hidden: int, bias: bool) -> GroupedQueryAttention:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_kv_heads", heads)
    head_dim = head_size(hidden, heads)
    if not config.flag("new_decoder_architecture", False):
        multi_query = config.flag("multi_query", True)
        if not multi_query and kv_heads != heads:
            raise ConfigError(f"config.json: num_kv_heads={kv_heads} needs new_decoder_architecture")
        kv_heads = 1 if multi_query else heads
    config.ignore("multi_query")
    rope = read_rope(config, head_dim)
    alibi = None
    if config.flag("alibi", False):
        alibi = tuple(slope * head_dim**-0.5 for slope in alibi_slopes(heads))  # added before the logits are scaled
    return GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None if alibi else rope,
        alibi=alibi,
        qkv_bias=bias,
        out_bias=bias,
    )


def _read_layer(config: ConfigReader, attention: GroupedQueryAttention, mlp: Mlp, norm: LayerNorm) -> AnyLayer:
    is_new = config.flag("new_decoder_architecture", False)
    norms = config.optional_integer("num_ln_in_parallel_attn", high=2) or (2 if is_new else 1)
    parallel = config.flag("parallel_attn", True)
    if (is_new and not parallel) or (norms == 2 and not is_new):
        raise ConfigError(
            f"config.json: new_decoder_architecture={is_new} with parallel_attn={parallel} and "
            f"num_ln_in_parallel_attn={norms} is no published kind of layer"
        )
    if not parallel:
        return Layer(attention, mlp, norm, norm)
    return ParallelLayer(attention, mlp, norm, norm if norms == 2 else None)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    layer = spec.layers[0]
    assert isinstance(layer.mixer, GroupedQueryAttention)
    two_norms = isinstance(layer, ParallelLayer) and layer.ffn_norm is not None
    at, to = "transformer.h.{i}", "layers.{i}"
    return [
        *module_renames(
            {
                "transformer.word_embeddings": "embed",
                "transformer.ln_f": "final_norm",
                "lm_head": "head",
                f"{at}.{'ln_attn' if two_norms else 'input_layernorm'}": f"{to}.mixer_norm",
                f"{at}.{'ln_mlp' if two_norms else 'post_attention_layernorm'}": f"{to}.ffn_norm",
                f"{at}.self_attention.dense": f"{to}.attn.o",
                f"{at}.mlp.dense_h_to_4h": f"{to}.ffn.up",
                f"{at}.mlp.dense_4h_to_h": f"{to}.ffn.down",
            }
        ),
        *module_renames({f"{at}.self_attention.query_key_value": fused_qkv(to)}, groups=layer.mixer.num_kv_heads),
    ]


def tiny(choose: Choose) -> dict[str, object]:
    kv_heads = choose(1, 2)
    heads, head_dim = kv_heads * choose(1, 2, 3, 4), choose(8, 20, 64)  # whose ALiBi slopes are exact in bfloat16
    kind = choose("multi query", "grouped", "one norm", "alibi", "alibi, multi query")
    shapes: dict[str, dict[str, object]] = {
        "multi query": {"multi_query": True, "parallel_attn": choose(True, False)},
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": kv_heads},
        "one norm": {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 1},
        "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
        "alibi, multi query": {"alibi": True, "multi_query": True},
    }
    return {
        "model_type": "falcon",
        "vocab_size": choose(97, 131, 256),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": choose(1, 2, 3),
        "bias": choose(False, True),
        "activation": choose("gelu", "relu"),
        "ffn_hidden_size": choose(None, 40),
        "layer_norm_epsilon": choose(1e-5, 1e-3),
        "max_position_embeddings": choose(24, 128),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **tiny_rope(choose, head_dim),
        **shapes[kind],
    }
