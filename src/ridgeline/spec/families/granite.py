"""Granite 3: Llama with four factors, on the embedding, on what each block adds, on attention and on the logits."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer


def read(config: ConfigReader) -> DecoderSpec:
    added = config.number("residual_multiplier", 1.0)
    return read_llama(
        config,
        rms_norm(config),
        bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        scale=config.number("attention_multiplier", 1.0),
        layer=lambda attention, ffn, norm: Layer(attention, ffn, norm, norm, residual_scale=added),
        positions=2048,
        head=Head(tied=False, scale=1.0 / config.number("logits_scaling", 1.0, low=1e-6)),
        embedding=Embedding(scale=config.number("embedding_multiplier", 1.0)),
    )
