"""Published configs are understood to the last key; broken and hostile ones are refused with the key named."""

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.spec import families
from ridgeline.spec.parts import Llama3Rope, LongRope, YarnRope

COMMON = {
    "architectures": ["ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 1000,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The keys that the model cards' config.json files carry beside those above, with the values that matter.
PUBLISHED = {
    "llama 3.2": COMMON
    | {
        "model_type": "llama",
        "eos_token_id": [128001, 128008, 128009],
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "pretraining_tp": 1,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "smollm2": COMMON
    | {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
    "mistral 7b": COMMON | {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "qwen 2.5": COMMON
    | {
        "model_type": "qwen2",
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "use_mrope": False,
        "rope_theta": 1000000.0,
    },
    "qwen 3": COMMON
    | {
        "model_type": "qwen3",
        "head_dim": 128,
        "attention_bias": False,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "gemma 2": COMMON
    | {
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "unk_token_id": 0,
        "_model_name_or_path": "A model of a GGUF file",
        "query_pre_attn_scalar": 224,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    "phi 3 mini 128k": COMMON
    | {
        "model_type": "phi3",
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": False,
    },
    "gpt 2": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}
LLAMA = PUBLISHED["smollm2"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_understood(name):
    program = lower(families.read_spec(PUBLISHED[name]))
    assert program.num_parameters > 0


def test_gpt2_has_124_million_parameters():
    assert lower(families.read_spec(PUBLISHED["gpt 2"])).num_parameters == 124_439_808


def test_null_and_absent_sliding_window_differ():
    absent = {key: value for key, value in PUBLISHED["mistral 7b"].items() if key != "sliding_window"}
    assert families.read_spec(absent).layers[0].mixer.window == 4096
    assert families.read_spec(absent | {"sliding_window": None}).layers[0].mixer.window is None


def test_gemma_alternates_local_and_global():
    layers = families.read_spec(PUBLISHED["gemma 2"]).layers
    assert [layer.mixer.window for layer in layers] == [4096, None, 4096, None]


def test_qwen_windows_begin_at_max_window_layers():
    config = PUBLISHED["qwen 2.5"] | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert [layer.mixer.window for layer in families.read_spec(config).layers] == [None, None, None, 64]


def test_rope_scalings_are_read():
    scaling = families.read_spec(PUBLISHED["llama 3.2"]).layers[0].mixer.rope.scaling
    assert scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert families.read_spec(LLAMA | {"rope_scaling": yarn}).layers[0].mixer.rope.scaling == YarnRope(4.0, 8192)
    long = families.read_spec(PUBLISHED["phi 3 mini 128k"]).layers[0].mixer.rope.scaling
    assert isinstance(long, LongRope) and long.original_context == 4096 and long.factor == 8.0


def longrope(**changes):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    return {"rope_scaling": rope | {"original_max_position_embeddings": 64} | changes}


BROKEN = [
    ({"model_type": "mamba9"}, "mamba9"),
    ({"model_type": None}, "model_type"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
    ({"hidden_size": "256"}, "hidden_size"),
    ({"hidden_size": 2**63}, "hidden_size"),
    ({"hidden_size": 100}, "multiple"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"hidden_act": "mish"}, "hidden_act"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"head_dim": 7}, "even"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"type": "cubic"}}, "cubic"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "both"),
    ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 0}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 64}, "original_max_position_embeddings"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0}}, "beta_fast"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "theta"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "dynamic"),
    (longrope(short_factor=[1.0] * 15), "short_factor"),
    (longrope(short_factor=[0.0] * 16), "short_factor"),
    (longrope(long_factor=[]), "long_factor"),
    (longrope(long_factor=["1"] * 16), "long_factor"),
    (longrope(original_max_position_embeddings=None), "original_max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "named"), BROKEN)
def test_broken_config_is_refused_by_name(changes, named):
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        lower(families.read_spec(config))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen 3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen 3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("qwen 3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ("qwen 2.5", {"use_mrope": True}, "use_mrope"),
        ("gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma 2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ("phi 3 mini 128k", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "longrope"),
        ("phi 3 mini 128k", {"full_attn_mod": 2}, "full_attn_mod"),
        ("gpt 2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt 2", {"n_head": 7}, "multiple"),
        ("mistral 7b", {"sliding_window": 0}, "sliding_window"),
    ],
)
def test_family_refuses_what_it_does_not_compute(name, changes, named):
    with pytest.raises(ConfigError, match=named):
        families.read_spec(PUBLISHED[name] | changes)


def test_learned_positions_bound_the_context():
    spec = families.read_spec(PUBLISHED["gpt 2"])
    with pytest.raises(ConfigError, match="1024 learned positions"):
        lower(spec, 1025)
