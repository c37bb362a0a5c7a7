"""GPTQ folders: bit for bit the format's formula, integers that stay integers natively, and clear refusals."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from small_checkpoint import described, write

from ridgeline import LLM, SamplingParams, quant
from ridgeline.core.dtypes import BFLOAT16, FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import StreamedWeights, load_weights
from ridgeline.weights.stored import prequantized

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
EXAMPLE = "model.layers.1.mlp.down_proj"


def pack(integers_XY, bits):
    """Along the first dimension into words, by the definition: integer j of a word at its bit j * bits."""
    per_word = 32 // bits
    lanes = integers_XY.astype(np.uint64).reshape(-1, per_word, integers_XY.shape[1])
    shifts = (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))[:, None]
    return (lanes << shifts).sum(axis=1).astype(np.uint32).view(np.int32)


def gptq(folder, config=LLAMA, *, bits=4, group=32, sym=True, version=1, scales=np.float16, changed=()):
    """Writes a model whose layers are random GPTQ matrices; returns what those are, by the formula, one by one."""
    write(folder, config)
    rng, tensors, expected = np.random.default_rng(bits + group), load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        (num_outputs, num_inputs), layer = tensors.pop(name).shape, name.removesuffix(".weight")
        size = num_inputs if group == -1 else group
        groups = np.arange(num_inputs) // size
        q_KN = rng.integers(0, 1 << bits, (num_inputs, num_outputs))
        z_GN = rng.integers(0, 1 << bits, (groups[-1] + 1, num_outputs))
        if sym:
            z_GN[:] = 1 << (bits - 1)
        s_GN = (rng.random(z_GN.shape) / (1 << bits) / 8).astype(np.float32).astype(scales)
        stored_zeros = (z_GN - 1) % (1 << bits) if version == 1 else z_GN
        tensors |= {
            f"{layer}.qweight": pack(q_KN, bits),
            f"{layer}.qzeros": np.ascontiguousarray(pack(stored_zeros.T, bits).T),
            f"{layer}.scales": s_GN,
            f"{layer}.g_idx": groups.astype(np.int32),
        }
        expected[name] = ((q_KN - z_GN[groups]).astype(np.float32) * s_GN.astype(np.float32)[groups]).T
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False}
    settings |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings | dict(changed)}))
    return expected


def change(folder, name, make):
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: make(tensors.pop(name))}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")


CASES = [
    {"bits": 4, "group": 32},
    {"bits": 4, "group": 64, "version": 2},
    {"bits": 4, "group": 128, "sym": False},
    {"bits": 4, "group": 32, "sym": False, "version": 2},
    {"bits": 4, "group": -1},
    {"bits": 4, "group": -1, "sym": False},
    {"bits": 8, "group": 32},
    {"bits": 8, "group": 128, "sym": False},
    {"bits": 8, "group": -1, "version": 2},
    {"bits": 4, "group": 32, "scales": np.dtype(BFLOAT16)},
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_bits_are_those_of_the_formula(tmp_path, case):
    expected, (spec, program) = gptq(tmp_path, **case), described(LLAMA)
    weights = load_weights(tmp_path, spec, program, FLOAT32)
    stored = prequantized(ModelFolder.open(tmp_path), spec, program)
    for layer in (0, 1):
        for source, name in {
            "self_attn.q_proj": "attn.q",
            "self_attn.o_proj": "attn.o",
            "mlp.down_proj": "ffn.down",
        }.items():
            name, matrix = f"layers.{layer}.{name}.weight", expected[f"model.layers.{layer}.{source}.weight"]
            assert np.array_equal(weights[name], matrix), name
            assert np.array_equal(quant.dequantize(stored.read(name)), matrix), name
            assert np.array_equal(quant.dequantize(stored.read(name, part=slice(8, 24))), matrix[8:24])
    assert "embed.weight" not in stored.formats and len(stored.formats) == 14


def test_a_tensor_of_several_weights_is_cut_into_their_rows(tmp_path):
    expected, (spec, program) = gptq(tmp_path, PHI3), described(PHI3)
    stored, fused = (
        prequantized(ModelFolder.open(tmp_path), spec, program),
        expected["model.layers.1.self_attn.qkv_proj.weight"],
    )
    cut = [quant.dequantize(stored.read(f"layers.1.attn.{letter}.weight")) for letter in "qkv"]
    assert np.array_equal(np.concatenate(cut), fused)
    streamed = StreamedWeights(tmp_path, spec, program, FLOAT32)
    assert np.array_equal(streamed.rows("layers.1.attn.k.weight", slice(5, 40)), fused[128 + 5 : 128 + 40])


@every_case
@pytest.mark.parametrize("config", [LLAMA, PHI3], ids=["llama", "phi3"])
def test_native_computes_with_the_integers(tmp_path, case, config):
    """The reference computes with what they mean, in float32; integers of the inputs lose next to nothing."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    gptq(tmp_path, config, **case)
    completions, choices = {}, {}
    decodes = case.get("scales", np.float16) is not np.float16 or (case["bits"] == 8 and not case.get("sym", True))
    inputs = "auto" if decodes else "int16"
    for backend in ("native", "reference"):
        llm = LLM(str(tmp_path), backend=backend, dtype="float32", quantize_inputs=inputs, num_threads=1)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
        completions[backend] = llm.generate([[1, 5, 9, 20]], params, use_tqdm=False)[0].outputs[0]
        choices[backend] = llm.engine.info.choices["quantize"].value
    assert completions["native"].token_ids == completions["reference"].token_ids
    found, expected = (
        torch.tensor([x.logprob for x in completions[name].logprobs]) for name in ("native", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert choices == {"native": "none" if decodes else "as stored", "reference": "none"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bits": 3}, "bits=3"),
        ({"bits": 2}, "bits=2"),
        ({"group_size": 16}, "group_size=16"),
        ({"group_size": 0}, "group_size=0"),
        ({"desc_act": True}, "desc_act=true .* desc_act=false"),
        ({"pack_dtype": "int16"}, "pack_dtype"),
        ({"dynamic": {"-:.*": {}}}, "dynamic"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, changed, said):
    gptq(tmp_path, changed=changed)
    with pytest.raises(ConfigError, match=said):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize(
    ("part", "make", "said"),
    [
        ("qzeros", lambda x: None, "has no .*qzeros"),
        ("scales", lambda x: None, "has no .*scales"),
        ("qweight", lambda x: x[:, 0].copy(), "must be a matrix"),
        ("qweight", lambda x: x[:-1].copy(), "beside"),
        ("qweight", lambda x: x.astype(np.int64), "beside"),
        ("qzeros", lambda x: x[:, :-1].copy(), "beside"),
        ("scales", lambda x: x[:-1].copy(), "beside"),
        ("scales", lambda x: x.astype(np.int32), "beside"),
        ("g_idx", lambda x: x[:-1].copy(), "beside"),
        ("g_idx", lambda x: x[::-1].copy(), "reorders"),
        ("qzeros", lambda x: np.where(np.arange(x.shape[1]) == 3, 0, x).astype(np.int32), "qzeros differ"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, part, make, said):
    gptq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.{part}", make)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {EXAMPLE}.*{said}|{said}"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    gptq(tmp_path)
    change(tmp_path, f"{EXAMPLE}.scales", lambda x: np.full_like(x, np.inf))
    stored = prequantized(ModelFolder.open(tmp_path), *described(LLAMA))
    with pytest.raises(ModelLoadError, match=rf"{EXAMPLE}\.weight': a scale is NaN or infinite"):
        stored.read("layers.1.ffn.down.weight")
