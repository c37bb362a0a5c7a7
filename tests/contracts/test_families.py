"""The family contract on every file of spec/families, and sizes of published models."""

from typing import get_args

import pytest
import torch
from family_contract import NUM_CONFIGS, check_family, check_unknown_keys
from tiny_models import LONG_PROMPT, SHORT_PROMPT

from families import names as names_of_small_configs
from families import tiny_config
from ridgeline.program.lower import lower
from ridgeline.spec import families
from ridgeline.spec.parts import RopeScaling
from ridgeline.spec.spec import GroupedQueryAttention

VARIETY_SEEDS = range(30)  # reading a config is cheap, computing it is not


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices this small are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
@pytest.mark.parametrize("name", families.names())
def test_family_matches_its_oracle(name, seed, tmp_path):
    check_family(name, seed, tmp_path)


@pytest.mark.parametrize("name", families.names())
def test_unknown_key_is_refused(name):
    check_unknown_keys(name)


def test_every_family_has_small_configs():
    missing = sorted(set(families.names()) - set(names_of_small_configs()))
    assert not missing, f"add tests/families/<name>.py with tiny(choose) for {', '.join(missing)}"


def test_every_file_of_small_configs_has_its_family():
    missing = sorted(set(names_of_small_configs()) - set(families.names()))
    assert not missing, f"there is no spec/families/<name>.py for {', '.join(missing)}"


def test_a_family_without_small_configs_is_told_which_file_to_write():
    with pytest.raises(LookupError, match=r"tests/families/starcoder2\.py is missing.* tiny\(choose\)"):
        tiny_config("starcoder2", 0)


def test_generated_configs_vary():
    """What the seeds above cover, over all families: without this a narrow generator would pass unseen."""
    configs = [tiny_config(name, seed) for name in families.names() for seed in VARIETY_SEEDS]
    specs = [families.read_spec(config) for config in configs]
    mixers = [layer.mixer for s in specs for layer in s.layers if isinstance(layer.mixer, GroupedQueryAttention)]
    assert {mixer.num_heads // mixer.num_kv_heads for mixer in mixers} >= {1, 2, 3, 8}
    assert {mixer.head_dim for mixer in mixers} >= {8, 20, 64, 256}
    assert {type(mixer.rope.scaling) for mixer in mixers if mixer.rope} == set(get_args(RopeScaling))
    assert any(mixer.rope and mixer.rope.rotary_dim < mixer.head_dim for mixer in mixers)
    windows = {mixer.window or 0 for mixer in mixers}
    assert 0 in windows and any(0 < w < SHORT_PROMPT for w in windows) and any(w > LONG_PROMPT for w in windows)
    assert {spec.head.tied for spec in specs if spec.head} == {False, True}
    assert {mixer.qkv_bias for mixer in mixers} == {False, True}
    assert any(spec.vocab_size % 2 for spec in specs)
    assert {"rope_parameters", "rope_scaling", "rope_theta"} <= {key for config in configs for key in config}


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_70B = {
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_sizes_of_llama_3_8b():
    program = lower(families.read_spec(LLAMA_3_8B))
    assert program.num_parameters == 8_030_261_248
    assert sum(state.bytes_per_token(2) for state in program.states) == 131_072


def test_sizes_of_llama_2_70b():
    program = lower(families.read_spec(LLAMA_2_70B))
    assert program.num_parameters == 68_976_648_192
    assert 4096 * sum(state.bytes_per_token(2) for state in program.states) == 1_342_177_280
