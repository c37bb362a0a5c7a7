"""Phi 3, 3.5 and 4-mini: Llama with fused projections, partial rotation and LongRoPE."""

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import layer_renames, llama_renames, read_head_dim, read_llama, rms_norm
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.families.glm import GATE_UP
from ridgeline.spec.parts import LongRope, PlainRope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames


def read(config: ConfigReader) -> DecoderSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini writes these and computes nothing with them
        config.expect(key, 1)
    rope = read_rope(config, read_head_dim(config))
    if not isinstance(rope.scaling, (PlainRope, LongRope)):
        raise ConfigError("config.json: phi3 has rope type default or longrope; its other types have another meaning")
    window = config.optional_integer("sliding_window")
    return read_llama(config, rms_norm(config, 1e-5), rope=rope, window=window)


def renames(spec: DecoderSpec) -> Renames:
    return llama_renames(*layer_renames(GATE_UP | {"self_attn.qkv_proj": ["attn.q", "attn.k", "attn.v"]}))
