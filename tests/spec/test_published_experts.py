"""Configs of published mixtures of experts: understood as they stand, and of the size that their authors state."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.cost.account import active_parameters, weight_bytes
from ridgeline.program.lower import lower
from ridgeline.program.pricing import Load
from ridgeline.spec import families
from ridgeline.spec.spec import GatedMlp, MixtureOfExperts, Routing
from walked import account, total

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
SIZES = {
    "olmoe": (OLMOE, 6_919_161_856, 1_282_017_280),
    "mixtral": (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
    "qwen3_moe": (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
    "qwen2_moe": (QWEN15_MOE, 14_315_784_192, 2_689_173_504),
    "gpt_oss": (GPT_OSS_20B, 20_914_757_184, 4_187_440_704),
}


@pytest.mark.parametrize("name", SIZES)
def test_total_and_active_parameters(name):
    config, total_parameters, active = SIZES[name]
    program = lower(families.read_spec(config), 4096)
    assert program.num_parameters == total_parameters
    assert active_parameters(program) == active


def test_active_is_total_without_experts():
    config = {key: value for key, value in MIXTRAL_8X7B.items() if "expert" not in key and "router" not in key}
    program = lower(families.read_spec(config | {"model_type": "mistral"}), 4096)
    assert active_parameters(program) == program.num_parameters


def test_a_decoded_token_reads_the_active_weights():
    """But for the embedding's other rows; a long prompt reads nearly every expert."""
    program = lower(families.read_spec(MIXTRAL_8X7B), 4096)
    table = program.weights["embed.weight"]
    step = total(account(program, Load.decode(1, 100)))
    assert step.weight_bytes == 2 * (active_parameters(program) - (table[0] - 1) * table[1])
    assert total(account(program, Load.decode(64, 100))).weight_bytes > 0.99 * weight_bytes(program, 2)


def test_dense_layers_among_layers_with_experts():
    layers = families.read_spec(QWEN3_30B_A3B | {"mlp_only_layers": [1], "decoder_sparse_step": 2}).layers
    kinds = [type(layer.feed_forward) for layer in layers[:6]]
    assert kinds == [GatedMlp, GatedMlp, GatedMlp, MixtureOfExperts, GatedMlp, MixtureOfExperts]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 10**6}, "num_local_experts"),
        ("mixtral", {"num_local_experts": 8.0}, "num_local_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("gpt_oss", {"rope_scaling": None}, "rope_scaling"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_broken_configs_are_refused_by_name(name, changes, named):
    with pytest.raises(ConfigError, match=named):
        families.read_spec(SIZES[name][0] | changes)


@pytest.mark.parametrize(
    ("num_experts", "routing", "said"),
    [
        (8, Routing(2, num_groups=3), "3 groups"),
        (8, Routing(2, num_groups=4, top_groups=5), "5 of 4 groups"),
        (8, Routing(5, num_groups=4, top_groups=2), "4 of 8"),
        (4, Routing(2, num_groups=4, top_groups=2, group_score="top2_sum"), "two best"),
    ],
)
def test_routing_that_cannot_be_is_refused(num_experts, routing, said):
    with pytest.raises(ConfigError, match=said):
        MixtureOfExperts(num_experts, 16, "silu", routing)


def test_a_gate_needs_what_it_gates():
    with pytest.raises(ConfigError, match="shared expert"):
        MixtureOfExperts(4, 16, "silu", Routing(2), shared_gate=True)
