"""DeepSeek's published models: their parameters, what a token keeps, and what decoding reads of it."""

import pytest

from ridgeline.cli._inspection import examine
from ridgeline.core.errors import ConfigError
from ridgeline.cost.account import kv_bytes_per_token
from ridgeline.program.lower import lower
from ridgeline.program.pricing import Load
from ridgeline.spec import families
from walked import account

V2_LITE = {
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = {
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(("config", "parameters"), [(V2_LITE, 15_706_484_224), (V3, 671_026_419_200)])
def test_parameters_and_latents_of_published_models(config, parameters):
    program = lower(families.read_spec(config))
    assert program.num_parameters == parameters
    assert kv_bytes_per_token(program, 2) == config["num_hidden_layers"] * 576 * 2


@pytest.mark.parametrize(("config", "temperature"), [(V2_LITE, 1.2608), (V3, 1.3689)])
def test_yarn_warms_the_logits(config, temperature):
    """(0.1 * mscale_all_dim * ln 40 + 1)^2 on the scale of 192 entries."""
    scale = families.read_spec(config).layers[0].mixer.scale
    assert scale == pytest.approx(192**-0.5 * temperature**2, rel=1e-4)


@pytest.mark.parametrize("config", [V2_LITE, V3])
def test_decoding_reads_the_latents_and_not_the_heads(config):
    context, layers = 8192, config["num_hidden_layers"]
    program = lower(families.read_spec(config), context)
    attention = [cost for op, cost in account(program, Load.decode(1, context)) if op.kind == "latent_attention"]
    assert len(attention) == layers
    assert sum(cost.kv_read_bytes for cost in attention) == layers * context * 576 * 2
    heads = config["num_attention_heads"]
    products = 2 * heads * (context * (576 + 512) + 512 * 256)  # with the latents, W_k and W_v
    assert attention[0].flops == products + 5 * heads * context


def test_a_long_prompt_is_cheaper_than_its_decoding():
    program = lower(families.read_spec(V3), 8192)

    def flops(tokens):
        costs = account(program, Load(((tokens, 8192),), 1))
        return sum(cost.flops for op, cost in costs if op.kind == "latent_attention") / tokens

    assert flops(8192) < flops(512) < flops(1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_key_value_heads": 8},
        {"moe_layer_freq": 2},
        {"scoring_func": "tanh"},
        {"qk_rope_head_dim": 63},
        {"n_group": 7},
        {"num_experts_per_tok": 200},
    ],
)
def test_configs_that_mean_something_else_are_refused(wrong):
    with pytest.raises(ConfigError):
        families.read_spec(V3 | wrong)


def test_latents_are_not_inspected_as_int8():
    with pytest.raises(ConfigError, match="kv_dtype=int8 is for keys and values; this model keeps latents"):
        examine(V2_LITE, kv_dtype="int8")
