"""OLMoE: sixty-four small experts in every layer; queries and keys are normalised before they are cut into heads."""

from ridgeline.spec.common import even_head_dim, read_llama, read_moe, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("clip_qkv", None)
    norm = rms_norm(config, 1e-5)
    return read_llama(
        config,
        norm,
        head_dim=even_head_dim(config),
        bias=config.flag("attention_bias", False),
        qk_norm=norm,
        qk_norm_over="row",
        ffn=read_moe(config, num_experts=64, size=2048, top_k=8, size_key="intermediate_size"),
        positions=4096,
    )
