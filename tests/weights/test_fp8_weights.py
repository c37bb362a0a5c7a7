"""FP8 weights in blocks: the same as multiplied out number by number, and clear errors where scales do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import described, write
from torch_weights import StreamedWeights, load_weights

from ridgeline.core.errors import ConfigError, ModelLoadError

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 19,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 6]}
PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight")  # what is published in fp8
EXAMPLE = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture
def tensors(tmp_path):
    """A checkpoint whose projections became fp8 with random scales; the file is written by `stored`."""
    write(tmp_path, DEEPSEEK)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith(PROJECTIONS):
            tensors[name] = (8 * tensor).to(torch.float8_e4m3fn)
            blocks = (-(-tensor.shape[0] // 8), -(-tensor.shape[1] // 6))
            tensors[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.1
    return tensors


def stored(folder, tensors, **settings):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK | {"quantization_config": FP8 | settings}))
    return folder


def multiplied_out(tensors, name):
    numbers, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    return torch.stack(
        [
            torch.stack([numbers[o, i] * scales[o // 8, i // 6] for i in range(numbers.shape[1])])
            for o in range(numbers.shape[0])
        ]
    )


def test_blocks_are_multiplied_by_their_scales(tmp_path, tensors):
    spec, program = described(DEEPSEEK)
    folder = stored(tmp_path, tensors)
    weights = load_weights(folder, spec, program, torch.float32)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == program.weights
    for name, stored_as in {
        "layers.0.attn.o.weight": EXAMPLE,
        "layers.1.attn.kv_down.weight": "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.ffn.gate.weight": "model.layers.0.mlp.gate_proj.weight",
    }.items():
        assert torch.equal(weights[name], multiplied_out(tensors, stored_as))
    for expert in range(4):
        expected = multiplied_out(tensors, f"model.layers.1.mlp.experts.{expert}.down_proj.weight")
        assert torch.equal(weights["layers.1.ffn.down.weight"][expert], expected)
    assert torch.equal(weights["layers.1.ffn.router.weight"], tensors["model.layers.1.mlp.gate.weight"])
    streamed = StreamedWeights(folder, spec, program, torch.bfloat16)["layers.0.attn.o.weight"]
    assert torch.equal(streamed, weights["layers.0.attn.o.weight"].bfloat16())


def test_layers_that_predict_further_tokens_are_not_read(tmp_path, tensors):
    spec, program = described(DEEPSEEK)
    tensors |= {"model.layers.2.eh_proj.weight": torch.zeros(24, 48), "model.layers.2.enorm.weight": torch.zeros(24)}
    assert load_weights(stored(tmp_path, tensors), spec, program, torch.float32).keys() == program.weights.keys()
    with pytest.raises(ModelLoadError, match="unexpected"):
        load_weights(
            stored(tmp_path, tensors | {"model.layers.3.enorm.weight": torch.zeros(24)}), spec, program, torch.float32
        )


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (None, "has no .*_scale_inv"),
        (torch.ones(3, 3), "blocks of 8 x 6"),
        (torch.ones(0, 0), "blocks of 8 x 6"),
        (torch.ones(6), "blocks of 8 x 6"),
        (torch.ones(2**20), "blocks of 8 x 6"),
        (torch.ones(3, 2, dtype=torch.float8_e4m3fn), "has no .*_scale_inv|blocks of 8 x 6"),
        (torch.ones(3, 2, dtype=torch.int64), "blocks of 8 x 6"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, tensors, broken, words):
    spec, program = described(DEEPSEEK)
    assert tensors[f"{EXAMPLE}_scale_inv"].shape == (3, 2)
    del tensors[f"{EXAMPLE}_scale_inv"]
    if broken is not None:
        tensors[f"{EXAMPLE}_scale_inv"] = broken
    with pytest.raises(ModelLoadError, match=words):
        load_weights(stored(tmp_path, tensors), spec, program, torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": "128"},
        {"fmt": "e5m2"},
        {"activation_scheme": "sometimes"},
        {"scale_bits": 3},
    ],
)
def test_settings_that_are_not_known_are_refused(tmp_path, tensors, settings):
    spec, program = described(DEEPSEEK)
    with pytest.raises(ConfigError):
        load_weights(stored(tmp_path, tensors, **settings), spec, program, torch.float32)


def test_a_number_that_is_not_one_is_refused(tmp_path, tensors):
    spec, program = described(DEEPSEEK)
    tensors[EXAMPLE][0, 0] = float("nan")
    with pytest.raises(ModelLoadError, match=f"{EXAMPLE!r} has NaN or infinity"):
        load_weights(stored(tmp_path, tensors), spec, program, torch.float32)
