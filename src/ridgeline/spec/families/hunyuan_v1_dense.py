"""Hunyuan dense, 0.5 B to 7 B: Llama with queries and keys normalised once rotated."""

from ridgeline.spec.common import read_head_dim, read_llama, rms_norm
from ridgeline.spec.common_rope import read_alpha_rope
from ridgeline.spec.families import hunyuan
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

renames = hunyuan.renames


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("eod_token_id")
    norm, bias = rms_norm(config, 1e-5), config.flag("attention_bias", False)
    rope = read_alpha_rope(config, read_head_dim(config))
    return read_llama(config, norm, rope=rope, bias=bias, qk_norm=norm, qk_norm_over="rotated head", positions=2048)
