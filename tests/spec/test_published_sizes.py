"""Families with parallel layers, one key for all queries, or ALiBi: published configs and the sizes on their cards."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.spec import families

COMMON = {
    "architectures": ["ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
}
FALCON_7B = COMMON | {
    "model_type": "falcon",
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "bias": False,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
PUBLISHED = {
    6_921_720_704: FALCON_7B,
    70_426_624: COMMON
    | {  # Pythia 70M
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    2_779_683_840: COMMON
    | {  # Phi-2
        "model_type": "phi",
        "embd_pdrop": 0.0,
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    559_214_592: COMMON
    | {  # BLOOM 560M
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "n_embed": 1024,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "pretraining_tp": 1,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
        "vocab_size": 250880,
    },
    1_124_886_528: COMMON
    | {  # SantaCoder
        "model_type": "gpt_bigcode",
        "activation_function": "gelu_pytorch_tanh",
        "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
        "n_embd": 2048,
        "n_head": 16,
        "n_inner": 8192,
        "n_layer": 24,
        "n_positions": 2048,
        "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "vocab_size": 49280,
    },
    1_644_515_328: COMMON
    | {  # StableLM 2 1.6B
        "model_type": "stablelm",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_qkv_bias": True,
        "vocab_size": 100352,
    },
}


@pytest.mark.parametrize("num_parameters", PUBLISHED, ids=[config["model_type"] for config in PUBLISHED.values()])
def test_parameters_are_those_of_the_model_card(num_parameters):
    assert lower(families.read_spec(PUBLISHED[num_parameters])).num_parameters == num_parameters


def test_one_key_for_all_queries():
    """Falcon 7B keeps 1/71 of what it would with a key for each query."""
    states = lower(families.read_spec(FALCON_7B)).states
    assert {(state.num_heads, state.head_dim) for state in states} == {(1, 64)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"multi_query": False, "num_kv_heads": 8}, "new_decoder_architecture"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"n_head": 71}, "n_head"),
    ],
)
def test_falcon_refuses_what_was_never_published(changes, named):
    with pytest.raises(ConfigError, match=named):
        families.read_spec(FALCON_7B | changes)
