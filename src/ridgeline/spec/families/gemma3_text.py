"""Gemma 3, text alone: five local layers to a global one, a rope for each kind, RMSNorm on queries and keys."""

from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, TIED, four_norms, read_llama, read_pattern_windows, rms_norm
from ridgeline.spec.common_rope import read_local_global_ropes
from ridgeline.spec.families import gemma2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp

renames = gemma2.renames


def read(config: ConfigReader) -> DecoderSpec:
    config.assume(
        model_type="gemma3_text", hidden_size=2304, num_attention_heads=8, num_key_value_heads=4, intermediate_size=9216
    )
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation counts; how transformers keeps its cache
    config.ignore("_sliding_window_pattern")  # written by transformers beside the layer_types that it made of it
    head_dim, norm = config.integer("head_dim", 256, high=1024), rms_norm(config, unit_offset=True)
    local_rope, global_rope = read_local_global_ropes(config, head_dim, local_theta=1e4, global_theta=1e6)
    windows = read_pattern_windows(config, config.optional_integer("sliding_window", 4096), 6)
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    return read_llama(
        config,
        norm,
        head_dim=head_dim,
        rope=global_rope,
        ropes=[local_rope if window else global_rope for window in windows],
        windows=windows,
        bias=config.flag("attention_bias", False),
        qk_norm=norm,
        scale=config.number("query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", low=1e-6),
        ffn=GatedMlp(config.integer("intermediate_size"), activation),
        layer=four_norms,
        vocab_size=262_208,
        positions=131_072,
        head=replace(TIED, softcap=config.optional_number("final_logit_softcapping", low=1e-6)),
        embedding=Embedding(scale=config.integer("hidden_size") ** 0.5),
    )
