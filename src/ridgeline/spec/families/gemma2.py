"""Gemma 2: norms before and after each block, capped logits, alternating local and global attention."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, TIED, decoder, llama_renames, read_attention, read_rope, read_windows
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, Layer, Rename, RmsNorm

NORMS = {  # Llama's name of the second norm is the first block's post-norm here
    "post_attention_layernorm": "mixer_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = config.integer("head_dim", 256, high=1024)
    bias = config.flag("attention_bias", False)
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation counts; how transformers keeps its cache
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0), unit_offset=True)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads"),
        scale=config.number("query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", 50.0, low=1e-6),
    )
    mlp = GatedMlp(
        config.integer("intermediate_size"), config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    )
    windows = read_windows(config, config.optional_integer("sliding_window", 4096), lambda index: index % 2 == 0)
    layers = [Layer(replace(attention, window=window), mlp, norm, norm, norm, norm) for window in windows]
    head = replace(TIED, softcap=config.optional_number("final_logit_softcapping", 30.0, low=1e-6))
    spec = decoder(config, layers, norm, positions=8192, head=head)
    return replace(spec, embedding=Embedding(scale=spec.hidden_size**0.5))


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames(
        *(Rename(f"model.layers.{{i}}.{x}.weight", (f"layers.{{i}}.{y}.weight",)) for x, y in NORMS.items())
    )
