"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in a few, a gated MLP in all."""

from ridgeline.core.errors import ConfigError
from ridgeline.spec import common
from ridgeline.spec.common_recurrent import check_inner, hybrid_renames, mamba2_renames
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GroupedQueryAttention, Layer, Mamba2, Renames, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
    norm = common.rms_norm(config, 1e-5)
    mamba, attention = _mamba(config, norm), _attention(config)
    num_layers = config.integer("num_hidden_layers", high=common.MAX_LAYERS)
    attending = config.integers("attn_layer_indices", high=num_layers - 1)
    mlp = common.read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    layers = [Layer(attention if i in attending else mamba, mlp, norm, norm) for i in range(num_layers)]
    return common.decoder(config, layers, norm, positions=262144)


def _attention(config: ConfigReader) -> GroupedQueryAttention:
    heads = config.integer("num_attention_heads")
    head_dim = common.even_head_dim(config)
    rotary_dim = config.optional_integer("attn_rotary_emb", head_dim // 2)
    if rotary_dim != head_dim // 2:
        raise ConfigError(f"config.json: attn_rotary_emb={rotary_dim}; Bamba rotates half of {head_dim} entries")
    bias = config.flag("attention_bias", False)
    kv_heads = config.optional_integer("num_key_value_heads", 8) or heads
    rope = read_rope(config, head_dim, default_partial=0.5)
    return common.read_attention(config, head_dim, rope, bias=bias, num_kv_heads=kv_heads)


def _mamba(config: ConfigReader, norm: RmsNorm) -> Mamba2:
    inner = config.integer("hidden_size") * config.integer("mamba_expand", 2, high=64)
    heads = config.integer("mamba_n_heads", 128)
    mixer = Mamba2(
        num_heads=heads,
        head_dim=config.integer_or_auto("mamba_d_head", inner // heads),
        num_groups=config.integer("mamba_n_groups", 1),
        state_size=config.integer("mamba_d_state", 256),
        conv_taps=config.integer("mamba_d_conv", 4, high=64),
        activation=config.choice("hidden_act", common.ACTIVATIONS, "silu"),
        norm_eps=norm.eps,
        dt_limits=config.limits("time_step_limit"),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )
    check_inner(inner, heads, mixer.head_dim)
    return mixer


def renames(spec: DecoderSpec) -> Renames:
    return common.llama_renames(*hybrid_renames(), *mamba2_renames("model.layers.{i}.mamba"))
