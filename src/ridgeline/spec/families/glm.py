"""GLM-4 9B and its like: Llama with pairs of the first half of each head rotated, gate and up in one matrix."""

from collections.abc import Sequence

from ridgeline.spec.common import MakeLayer, llama_renames, pre_norms, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename

GATE_UP = Rename("model.layers.{i}.mlp.gate_up_proj.weight", ("layers.{i}.ffn.gate.weight", "layers.{i}.ffn.up.weight"))


def read(config: ConfigReader) -> DecoderSpec:
    return read_glm(config, pre_norms)


def read_glm(config: ConfigReader, layer: MakeLayer) -> DecoderSpec:
    """Read a model of GLM's shape, whose layers `layer` puts together."""
    norm, bias = rms_norm(config, 1.5625e-7), config.flag("attention_bias", True)
    return read_llama(config, norm, partial=0.5, interleaved=True, qkv_bias=bias, layer=layer, positions=131072)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames(GATE_UP)
