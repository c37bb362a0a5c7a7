"""GLM-4 9B and its like: Llama with pairs of the first half of each head rotated, gate and up in one matrix."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import decoder, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, Rename, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    norm = RmsNorm(config.number("rms_norm_eps", 1.5625e-7, low=0.0))
    rope = replace(read_rope(config, head_dim, default_partial=0.5), interleaved=True)
    attention = replace(read_attention(config, head_dim, rope), qkv_bias=config.flag("attention_bias", True))
    mlp = read_gated_mlp(config)
    return decoder(config, Layer(attention, mlp, norm, norm), norm, positions=131072)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    return llama_renames(
        Rename(f"model.{prefix}.mlp.gate_up_proj.weight", (f"{prefix}.ffn.gate.weight", f"{prefix}.ffn.up.weight")),
    )
