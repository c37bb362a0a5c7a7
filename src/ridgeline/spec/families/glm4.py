"""GLM-4-0414: GLM with norms behind each block too."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.families import glm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, Rename


def read(config: ConfigReader) -> DecoderSpec:
    plain = glm.read(config)
    layer = plain.layers[0]  # as all of them
    assert isinstance(layer, Layer)
    layer = replace(layer, mixer_post_norm=layer.mixer_norm, ffn_post_norm=layer.ffn_norm)
    return replace(plain, layers=(layer,) * len(plain.layers))


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    return [
        *glm.renames(spec),
        Rename(f"model.{prefix}.post_self_attn_layernorm.weight", (f"{prefix}.mixer_post_norm.weight",)),
        Rename(f"model.{prefix}.post_mlp_layernorm.weight", (f"{prefix}.ffn_post_norm.weight",)),
    ]
