"""Phi 3, 3.5 and 4-mini: Llama with fused projections, partial rotation and LongRoPE."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import llama_renames, read_head_dim, read_llama, rms_norm
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.families.glm import GATE_UP
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LongRope, PlainRope, Rename

QKV = Rename("model.layers.{i}.self_attn.qkv_proj.weight", tuple(f"layers.{{i}}.attn.{x}.weight" for x in "qkv"))


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


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames(QKV, GATE_UP)
