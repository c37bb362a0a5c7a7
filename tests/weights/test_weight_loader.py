"""load_weights and save_weights: names, cuts, transposes, dtypes, and one clear error for all that does not fit."""

import mmap

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_checkpoint import GPT2, LLAMA, PHI3, described, rewrite, shard, write
from torch_weights import StreamedWeights, load_weights, save_weights

from families import tiny
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.program.opset import float32_weights
from ridgeline.weights import load as package
from ridgeline.weights.folder import ModelFolder

TIED = LLAMA | {"tie_word_embeddings": True}


def load(folder, config, dtype=torch.float32):
    return load_weights(folder, *described(config), dtype)


def refusal(folder, config) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, config)
    return str(caught.value)


@pytest.mark.parametrize("config", [LLAMA, TIED, PHI3, GPT2], ids=["llama", "tied", "phi3", "gpt2"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_loaded_is_saved_in_every_dtype(tmp_path, config, stored, wanted):
    expected = write(tmp_path, config, stored)
    actual = load(tmp_path, config, wanted)
    assert list(actual) == list(described(config)[1].weights)
    for name, weight in expected.items():
        assert actual[name].dtype == wanted and actual[name].is_contiguous()
        assert torch.equal(actual[name], weight.to(stored).to(wanted)), name


@pytest.mark.parametrize("config", [LLAMA, TIED, PHI3, GPT2], ids=["llama", "tied", "phi3", "gpt2"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_streamed_is_loaded(tmp_path, config, sharded, wanted):
    write(tmp_path, config)
    if sharded:
        shard(tmp_path)
    expected = load(tmp_path, config, wanted)
    streamed = StreamedWeights(tmp_path, *described(config), wanted)
    assert list(streamed) == list(expected) and len(streamed) == len(expected)
    for name, weight in expected.items():
        assert streamed[name].is_contiguous() and torch.equal(streamed[name], weight)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "deepseek_v3"])
def test_what_ops_compute_in_float32_is_not_rounded(tmp_path, family):
    config = tiny(family, lambda *options: options[0]) | {"model_type": family}
    expected, (spec, program) = write(tmp_path, config), described(config)
    wide = float32_weights(program)
    assert wide and all(len(program.weights[name]) == 1 or "A_log" in name for name in wide)
    for weights in (
        load_weights(tmp_path, spec, program, torch.bfloat16),
        StreamedWeights(tmp_path, spec, program, torch.bfloat16),
    ):
        for name, weight in expected.items():
            dtype = torch.float32 if name in wide else torch.bfloat16
            assert weights[name].dtype == dtype and torch.equal(weights[name], weight.to(dtype)), name


def test_streamed_is_checked_before_anything_is_read(tmp_path):
    write(tmp_path, LLAMA)
    with pytest.raises(ModelLoadError, match="do not fit"):
        StreamedWeights(tmp_path, *described(GPT2 | {"model_type": "gpt2"}), torch.float32)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_shards_load_like_one_file(tmp_path, config):
    expected = write(tmp_path, config)
    shard(tmp_path)
    actual = load(tmp_path, config)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_fused_and_transposed_names_on_disk(tmp_path):
    weights = write(tmp_path, PHI3)
    stored = load_file(tmp_path / "model.safetensors")
    fused = torch.cat([weights[f"layers.1.attn.{x}.weight"] for x in "qkv"])
    assert torch.equal(stored["model.layers.1.self_attn.qkv_proj.weight"], fused)
    write(tmp_path, GPT2)
    assert load_file(tmp_path / "model.safetensors")["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert not list(tmp_path.glob("*.partial"))


def test_stored_dtype_is_not_copied(tmp_path):
    """Views of one mapping: the fused tensor's three pieces lie one after another in it."""
    write(tmp_path, PHI3)
    weights = package.load_weights(tmp_path, *described(PHI3), FLOAT32)
    q, k = (weights[f"layers.0.attn.{name}.weight"] for name in "qk")
    assert k.ctypes.data == q.ctypes.data + q.nbytes
    assert isinstance(memory_of(q), mmap.mmap) and memory_of(k) is memory_of(q)


def memory_of(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_loaded_weights_are_private(tmp_path):
    write(tmp_path, LLAMA)
    load(tmp_path, LLAMA)["embed.weight"].zero_()
    assert load(tmp_path, LLAMA)["embed.weight"].any()


@pytest.mark.parametrize(("config", "prefix"), [(TIED, "model."), (GPT2, "transformer.")], ids=["llama", "gpt2"])
def test_base_model_checkpoint_without_prefix(tmp_path, config, prefix):
    expected = write(tmp_path, config)
    rewrite(tmp_path, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    actual = load(tmp_path, config)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_buffers_are_ignored_by_name(tmp_path):
    write(tmp_path, GPT2)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    buffers = {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)}
    rewrite(tmp_path, lambda t: {name.removeprefix("transformer."): x for name, x in t.items()} | buffers)
    assert load(tmp_path, GPT2)
    write(tmp_path, LLAMA)
    rewrite(tmp_path, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert load(tmp_path, LLAMA)
    rewrite(tmp_path, lambda t: t | {"model.layers.0.self_attn.surprise": torch.ones(2)})
    assert "1 unexpected: model.layers.0.self_attn.surprise" in refusal(tmp_path, LLAMA)


def test_tied_head_may_be_stored_again_if_equal(tmp_path):
    write(tmp_path, TIED)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert "head.weight" not in load(tmp_path, TIED)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    assert "tie_word_embeddings" in refusal(tmp_path, TIED)


def test_untied_head_must_be_there(tmp_path):
    write(tmp_path, TIED)
    assert "1 missing: lm_head.weight" in refusal(tmp_path, LLAMA)


def test_all_problems_in_one_error(tmp_path):
    write(tmp_path, LLAMA)

    def damage(tensors):
        del tensors["model.norm.weight"]
        tensors["model.embed_tokens.weight"] = torch.zeros(5, 8)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].double()
        return tensors | {"visual.patch": torch.zeros(1), "audio.patch": torch.zeros(1)}

    rewrite(tmp_path, damage)
    message = refusal(tmp_path, LLAMA)
    assert "1 missing: model.norm.weight" in message
    assert "2 unexpected: audio.patch, visual.patch" in message
    assert "model.embed_tokens.weight [5, 8] instead of [11, 8]" in message
    assert "lm_head.weight F64" in message


def test_long_lists_are_cut(tmp_path):
    write(tmp_path, LLAMA | {"num_hidden_layers": 1})
    deeper = LLAMA | {"num_hidden_layers": 40}
    message = refusal(tmp_path, deeper)
    assert "351 missing" in message and "and 341 more" in message and len(message) < 1500


def test_quantized_model_is_refused(tmp_path):
    config = LLAMA | {"quantization_config": {"quant_method": "aqlm", "bits": 4}}
    write(tmp_path, config)
    with pytest.raises(ConfigError, match="quantization_config"):
        load(tmp_path, config)


def test_load_takes_an_opened_folder(tmp_path):
    expected = write(tmp_path, LLAMA)
    actual = load(ModelFolder.open(tmp_path), LLAMA)
    assert torch.equal(actual["embed.weight"], expected["embed.weight"])


def test_weight_without_a_name_is_not_dropped_in_saving(tmp_path):
    spec, program = described(LLAMA)
    weights = {name: torch.zeros(shape) for name, shape in program.weights.items()} | {"extra": torch.zeros(1)}
    with pytest.raises(ModelLoadError, match="extra"):
        save_weights(tmp_path, spec, weights, torch.float32)
    assert not (tmp_path / "model.safetensors").exists()
