"""GLM-4-0414: GLM with norms behind each block too."""

from collections.abc import Sequence

from ridgeline.spec.common import four_norms, module_renames
from ridgeline.spec.families import glm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def read(config: ConfigReader) -> DecoderSpec:
    return glm.read_glm(config, four_norms)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    names = {"post_self_attn_layernorm": "mixer_post_norm", "post_mlp_layernorm": "ffn_post_norm"}
    return [*glm.renames(spec), *module_renames({f"model.{prefix}.{x}": f"{prefix}.{y}" for x, y in names.items()})]
