"""GLM-4 9B and its like: Llama with pairs of the first half of each head rotated, gate and up in one matrix."""

from ridgeline.spec.common import MakeLayer, layer_renames, llama_renames, pre_norms, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames

GATE_UP = {"mlp.gate_up_proj": ["ffn.gate", "ffn.up"]}


def read(config: ConfigReader) -> DecoderSpec:
    return read_glm(config, pre_norms)


def read_glm(config: ConfigReader, layer: MakeLayer) -> DecoderSpec:
    """Read a model of GLM's shape, whose layers `layer` puts together."""
    norm, bias = rms_norm(config, 1.5625e-7), config.flag("attention_bias", True)
    return read_llama(config, norm, partial=0.5, interleaved=True, qkv_bias=bias, layer=layer, positions=131072)


def renames(spec: DecoderSpec) -> Renames:
    return llama_renames(*layer_renames(GATE_UP))
