"""Gemma 2: norms before and after each block, capped logits, alternating local and global attention."""

from dataclasses import replace
from typing import Any

from ridgeline.spec import common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, GatedMlp, Renames

NORMS = {  # Llama's name of the second norm is the first block's post-norm here
    "post_attention_layernorm": "mixer_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def read(config: ConfigReader) -> DecoderSpec:
    window = config.optional_integer("sliding_window", 4096)
    return read_gemma(
        config,
        softcaps=(50.0, 30.0),
        head_dim=config.integer("head_dim", 256, high=1024),
        windows=common.read_windows(config, window, lambda index: index % 2 == 0),
        num_kv_heads=config.integer("num_key_value_heads"),
        positions=8192,
    )


def read_gemma(config: ConfigReader, *, softcaps: tuple[float | None, float | None], **own: Any) -> DecoderSpec:
    """Read a model of Gemma 2's shape as read_llama does; `softcaps`: those of attention and head that none says."""
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation counts; how transformers keeps its cache
    activation = config.choice("hidden_activation", common.ACTIVATIONS, "gelu_pytorch_tanh")
    head_cap = config.optional_number("final_logit_softcapping", softcaps[1], low=1e-6)
    return common.read_llama(
        config,
        common.rms_norm(config, unit_offset=True),
        bias=config.flag("attention_bias", False),
        scale=config.number("query_pre_attn_scalar", 256, low=1e-6) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", softcaps[0], low=1e-6),
        ffn=GatedMlp(config.integer("intermediate_size"), activation),
        layer=common.four_norms,
        head=replace(common.TIED, softcap=head_cap),
        embedding=Embedding(scale=config.integer("hidden_size") ** 0.5),
        **own,
    )


def renames(spec: DecoderSpec) -> Renames:
    return common.llama_renames(*common.layer_renames(NORMS))
