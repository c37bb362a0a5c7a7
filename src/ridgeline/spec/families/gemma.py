"""Gemma 1: Llama with scaled embeddings, norm weights stored from 1 and a GELU gate."""

from ridgeline.spec.common import ACTIVATIONS, TIED, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("use_bidirectional_attention", None, False)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    if activation == "gelu":
        activation = "gelu_tanh"  # the first configs said gelu and meant this
    return read_llama(
        config,
        rms_norm(config, unit_offset=True),
        bias=config.flag("attention_bias", False),
        ffn=GatedMlp(config.integer("intermediate_size"), activation),
        positions=8192,
        head=TIED,
        embedding=Embedding(scale=config.integer("hidden_size") ** 0.5),
    )
