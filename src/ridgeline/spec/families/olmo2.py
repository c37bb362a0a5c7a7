"""OLMo 2: norms behind each block and none before, RMSNorm over all queries together and over all keys."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import decoder, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, Rename, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        qk_norm=norm,
        qk_norm_over="row",
    )
    mlp = read_gated_mlp(config)
    layer = Layer(attention, mlp, mixer_post_norm=norm, ffn_post_norm=norm)
    return decoder(config, layer, norm, positions=2048)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    return llama_renames(
        Rename(f"model.{prefix}.post_attention_layernorm.weight", (f"{prefix}.mixer_post_norm.weight",)),
        Rename(f"model.{prefix}.post_feedforward_layernorm.weight", (f"{prefix}.ffn_post_norm.weight",)),
    )
