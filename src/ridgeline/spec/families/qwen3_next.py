"""Qwen 3 Next: gated delta nets, every fourth layer gated attention, and experts with a gated shared one."""

from dataclasses import replace

from ridgeline.spec import common
from ridgeline.spec.common_recurrent import read_attending
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedDeltaNet, GroupedQueryAttention, Layer, Predictor, Rename, Renames


def read(config: ConfigReader) -> DecoderSpec:
    norm = common.rms_norm(config, unit_offset=True)
    head_dim, bias = config.integer("head_dim", 256, high=1024), config.flag("attention_bias", False)
    attention = common.read_attention(
        config,
        head_dim,
        read_rope(config, head_dim, default_partial=0.25),
        bias=bias,
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
        output_gate=True,
    )
    delta = GatedDeltaNet(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128, high=1024),
        value_dim=config.integer("linear_value_head_dim", 128, high=1024),
        conv_taps=config.integer("linear_conv_kernel_dim", 4, high=64),
        activation=config.choice("hidden_act", common.ACTIVATIONS, "silu"),
        norm_eps=norm.eps,
    )
    experts = common.read_moe(config, num_experts=512, size=512, top_k=10, shared_size=512, normalize=True)
    interval = config.integer("full_attention_interval", 4)
    attends = read_attending(config, lambda index: (index + 1) % interval == 0)
    mixers = [attention if attending else delta for attending in attends]
    ffns = common.read_sparse(config, experts, dense_size=5632)
    layers = [Layer(mixer, ffn, norm, norm) for mixer, ffn in zip(mixers, ffns, strict=True)]
    guess = Predictor(Layer(attention, experts, norm, norm), norm, returns_normed=True)  # where the checkpoint has one
    return replace(common.decoder(config, layers, norm), predictor=guess)


def renames(spec: DecoderSpec) -> Renames:
    mixers = [layer.mixer for layer in spec.layers]
    heads = next((mixer.num_heads for mixer in mixers if isinstance(mixer, GroupedQueryAttention)), 1)
    key_heads = next((mixer.num_key_heads for mixer in mixers if isinstance(mixer, GatedDeltaNet)), 1)
    source, to = "model.layers.{i}.linear_attn", "layers.{i}.delta"
    fused = {"in_proj_qkvz": [f"delta.{name}" for name in "qkvz"], "in_proj_ba": ["delta.b", "delta.a"]}
    attention = common.layer_renames({"self_attn.q_proj": ["attn.q", "attn.gate"]}, groups=heads)
    usual = [*common.llama_renames(*attention), *common.expert_renames()]
    modules = {"pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "join"}
    modules = {f"mtp.{module}": to for module, to in (modules | {"norm": "final_norm"}).items()}
    return [
        *usual,
        *common.predictor_renames(spec, usual, "mtp.layers.0", modules),
        *common.layer_renames(fused, source, groups=key_heads),
        *common.layer_renames({"norm": "delta.norm", "out_proj": "delta.out"}, source),
        Rename(f"{source}.conv1d.weight", tuple(f"{to}.conv_{name}.weight" for name in "qkv"), depthwise=True),
        Rename(f"{source}.A_log", (f"{to}.A_log",)),
        Rename(f"{source}.dt_bias", (f"{to}.dt_bias",)),
        Rename("mtp.", ()),
    ]
