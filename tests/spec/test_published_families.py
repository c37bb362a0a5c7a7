"""Published configs of families whose models mix kinds of layers: what becomes of each key that matters."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.spec import families
from ridgeline.spec.parts import LinearRope, PlainRope
from ridgeline.spec.spec import MixtureOfExperts

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "cache_implementation": "hybrid",
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "vocab_size": 256000,
}
HUNYUAN_LARGE = {
    "architectures": ["HunYuanForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 6400,
    "initializer_range": 0.02,
    "intermediate_size": 18304,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "hunyuan",
    "moe_topk": 1,
    "norm_type": "rms",
    "num_attention_heads": 80,
    "num_experts": 16,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "num_shared_expert": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": True,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 128512,
}


def test_gemma_3_4b():
    spec = families.read_spec(GEMMA_3_4B)
    mixers = [layer.mixer for layer in spec.layers]
    assert [number for number, mixer in enumerate(mixers) if mixer.window is None] == [5, 11, 17, 23, 29]
    assert {(mixer.window, mixer.rope.theta, mixer.rope.scaling) for mixer in mixers} == {
        (1024, 1e4, PlainRope()),
        (None, 1e6, LinearRope(8.0)),
    }
    assert 3.87e9 < lower(spec, 1024).num_parameters < 3.89e9
    with pytest.raises(ConfigError, match="text_config: not understood: frobnication_rate"):
        families.read_spec(GEMMA_3_4B | {"text_config": GEMMA_3_4B["text_config"] | {"frobnication_rate": 1}})
    with pytest.raises(ConfigError, match="text_config is missing"):
        families.read_spec({"model_type": "gemma3"})


def test_command_r7b():
    spec = families.read_spec(COMMAND_R7B)
    mixers = [layer.mixer for layer in spec.layers]
    assert [(mixer.window, mixer.rope is not None) for mixer in mixers[:4]] == [(4096, True)] * 3 + [(None, False)]
    assert 8.02e9 < lower(spec, 1024).num_parameters < 8.04e9
    with pytest.raises(ConfigError, match="position_embedding_type"):
        families.read_spec(COMMAND_R7B | {"position_embedding_type": "rope_neox"})


def test_hunyuan_large_has_389_billion_parameters_and_half_the_keys_and_values():
    spec = families.read_spec(HUNYUAN_LARGE)
    assert [layer.mixer.kv_from for layer in spec.layers[:4]] == [None, 0, None, 2]
    assert all(isinstance(layer.feed_forward, MixtureOfExperts) for layer in spec.layers)
    program = lower(spec, 1024)
    assert 388e9 < program.num_parameters < 390e9
    assert sum(state.bytes_per_token(2) for state in program.states) == 64 * 2 * 8 * 80 * 2 // 2


def test_an_alpha_for_heads_too_small_for_it_is_refused():
    with pytest.raises(ConfigError, match=r"rope_scaling.alpha needs heads of more than 2 entries, got 2"):
        families.read_spec(HUNYUAN_LARGE | {"hidden_size": 160})
