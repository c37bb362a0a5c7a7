"""Phi 3, 3.5 and 4-mini: Llama with fused projections, partial rotation and LongRoPE."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import decoder, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, LongRope, PlainRope, Rename, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini writes these and computes nothing with them
        config.expect(key, 1)
    rope = read_rope(config, head_dim)
    if not isinstance(rope.scaling, (PlainRope, LongRope)):
        raise ConfigError("config.json: phi3 has rope type default or longrope; its other types have another meaning")
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, rope),
        window=config.optional_integer("sliding_window"),
    )
    mlp = read_gated_mlp(config)
    return decoder(config, Layer(attention, mlp, norm, norm), norm)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    return llama_renames(
        Rename(f"model.{prefix}.self_attn.qkv_proj.weight", tuple(f"{prefix}.attn.{x}.weight" for x in "qkv")),
        Rename(f"model.{prefix}.mlp.gate_up_proj.weight", (f"{prefix}.ffn.gate.weight", f"{prefix}.ffn.up.weight")),
    )
