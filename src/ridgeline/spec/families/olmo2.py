"""OLMo 2: norms behind each block and none before, RMSNorm over all queries together and over all keys."""

from ridgeline.spec.common import layer_renames, llama_renames, post_norms, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames


def read(config: ConfigReader) -> DecoderSpec:
    norm, bias = rms_norm(config, 1e-5), config.flag("attention_bias", False)
    return read_llama(config, norm, bias=bias, qk_norm=norm, qk_norm_over="row", layer=post_norms, positions=2048)


def renames(spec: DecoderSpec) -> Renames:
    norms = {"post_attention_layernorm": "mixer_post_norm", "post_feedforward_layernorm": "ffn_post_norm"}
    return llama_renames(*layer_renames(norms))
