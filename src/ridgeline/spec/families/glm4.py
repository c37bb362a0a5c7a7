"""GLM-4-0414: GLM with norms behind each block too."""

from ridgeline.spec.common import four_norms, layer_renames
from ridgeline.spec.families import glm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames


def read(config: ConfigReader) -> DecoderSpec:
    return glm.read_glm(config, four_norms)


def renames(spec: DecoderSpec) -> Renames:
    norms = {"post_self_attn_layernorm": "mixer_post_norm", "post_mlp_layernorm": "ffn_post_norm"}
    return [*glm.renames(spec), *layer_renames(norms)]
