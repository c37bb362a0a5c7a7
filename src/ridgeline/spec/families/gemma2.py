"""Gemma 2: norms before and after each block, capped logits, alternating local and global attention."""

from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    TIED,
    four_norms,
    layer_renames,
    llama_renames,
    read_llama,
    read_windows,
    rms_norm,
)
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, Renames

NORMS = {  # Llama's name of the second norm is the first block's post-norm here
    "post_attention_layernorm": "mixer_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation counts; how transformers keeps its cache
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    return read_llama(
        config,
        rms_norm(config, unit_offset=True),
        head_dim=config.integer("head_dim", 256, high=1024),
        windows=read_windows(config, config.optional_integer("sliding_window", 4096), lambda index: index % 2 == 0),
        bias=config.flag("attention_bias", False),
        num_kv_heads=config.integer("num_key_value_heads"),
        scale=config.number("query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", 50.0, low=1e-6),
        ffn=GatedMlp(config.integer("intermediate_size"), activation),
        layer=four_norms,
        positions=8192,
        head=replace(TIED, softcap=config.optional_number("final_logit_softcapping", 30.0, low=1e-6)),
        embedding=Embedding(scale=config.integer("hidden_size") ** 0.5),
    )


def renames(spec: DecoderSpec) -> Renames:
    return llama_renames(*layer_renames(NORMS))
