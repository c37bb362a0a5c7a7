"""Falcon: multi-query (7B), grouped (40B, 180B, Falcon 2), or a key for each query and ALiBi (RW)."""

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import ACTIVATIONS, TIED, alibi_slopes, decoder, even_head_dim, multi_head
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.families import bloom
from ridgeline.spec.parts import LayerNorm, Mlp
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import AnyLayer, DecoderSpec, GroupedQueryAttention, Layer, ParallelLayer, Renames


def read(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("bias", False)
    config.expect("apply_residual_connection_post_layernorm", False)
    attention = _read_attention(config, bias)
    size = config.optional_integer("ffn_hidden_size") or config.integer("hidden_size") * config.integer("ff_factor", 4)
    mlp = Mlp(size, config.choice("activation", ACTIVATIONS, "gelu"), bias)
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    return decoder(config, _read_layer(config, attention, mlp, norm), norm, positions=2048, head=TIED)


def _read_attention(config: ConfigReader, bias: bool) -> GroupedQueryAttention:
    heads, head_dim = config.integer("num_attention_heads"), even_head_dim(config)
    kv_heads = config.integer("num_kv_heads", heads)
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
    rope = None if alibi else rope
    return multi_head(config, num_kv_heads=kv_heads, rope=rope, alibi=alibi, qkv_bias=bias, out_bias=bias)


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


def renames(spec: DecoderSpec) -> Renames:
    first = spec.layers[0]
    two_norms = isinstance(first, ParallelLayer) and first.ffn_norm is not None
    return bloom.renames(spec, "ln_attn", "ln_mlp") if two_norms else bloom.renames(spec)
