"""Granite 3: Llama with four factors, on the embedding, on what each block adds, on attention and on the logits."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer, RmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        scale=config.number("attention_multiplier", 1.0),
    )
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    layer = Layer(attention, mlp, norm, norm, residual_scale=config.number("residual_multiplier", 1.0))
    head = Head(tied=False, scale=1.0 / config.number("logits_scaling", 1.0, low=1e-6))
    spec = decoder(config, layer, norm, positions=2048, head=head)
    return replace(spec, embedding=Embedding(scale=config.number("embedding_multiplier", 1.0)))
