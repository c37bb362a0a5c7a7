"""OLMo 2: norms behind each block and none before, RMSNorm over all queries together and over all keys."""

from collections.abc import Sequence

from ridgeline.spec.common import llama_renames, module_renames, post_norms, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def read(config: ConfigReader) -> DecoderSpec:
    norm, bias = rms_norm(config, 1e-5), config.flag("attention_bias", False)
    return read_llama(config, norm, bias=bias, qk_norm=norm, qk_norm_over="row", layer=post_norms, positions=2048)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    names = {"post_attention_layernorm": "mixer_post_norm", "post_feedforward_layernorm": "ffn_post_norm"}
    return llama_renames(*module_renames({f"model.{prefix}.{x}": f"{prefix}.{y}" for x, y in names.items()}))
