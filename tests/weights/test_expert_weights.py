"""Experts as checkpoints store them: one by one, all in one tensor, or in MXFP4; and what does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoint import LLAMA, described, rewrite, shard, write
from torch_weights import StreamedWeights, load_weights

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError

QWEN = LLAMA | {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "mlp_only_layers": [1],
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
EXPERT = "model.layers.0.mlp.experts"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def load(folder, config, dtype=torch.float32):
    return load_weights(folder, *described(config), dtype)


def refusal(folder, config) -> str:
    """The one error, which a streamed checkpoint raises before anything is read."""
    messages = []
    for read in (load_weights, StreamedWeights):
        with pytest.raises(ModelLoadError) as caught:
            read(folder, *described(config), torch.float32)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_experts_as_mlx_has_them(tmp_path):
    """Each matrix of all experts in a tensor, outputs before inputs."""
    for config, experts in ((QWEN, "switch_mlp"), (GPT_OSS, "experts")):
        expected = write(tmp_path, config)

        def change(tensors, experts=experts, expected=expected):
            kept = {name: tensor for name, tensor in tensors.items() if "experts." not in name or "shared" in name}
            for name, weight in expected.items():
                _, layer, _, matrix, part = [*name.split("."), "", "", ""][:5]
                if matrix in ("gate", "up", "down") and weight.ndim == 2 + (part == "weight"):
                    kept[f"model.layers.{layer}.mlp.{experts}.{matrix}_proj.{part}"] = weight
            return kept

        rewrite(tmp_path, change)
        loaded = load(tmp_path, config)
        assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["one by one", "in one tensor"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_saved_is_loaded_and_streamed(tmp_path, config, wanted, sharded):
    expected = write(tmp_path, config)
    if sharded:
        shard(tmp_path)
    loaded = load(tmp_path, config, wanted)
    streamed = StreamedWeights(tmp_path, *described(config), wanted)
    assert loaded.keys() == expected.keys() == set(streamed)
    for name, weight in expected.items():
        for actual in (loaded[name], streamed[name]):
            assert actual.is_contiguous() and torch.equal(actual, weight.to(wanted)), name


def test_names_on_disk(tmp_path):
    """Dense layers among layers with experts keep the names of dense layers."""
    weights = write(tmp_path, QWEN)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored[f"{EXPERT}.2.down_proj.weight"], weights["layers.0.ffn.down.weight"][2])
    assert torch.equal(stored["model.layers.1.mlp.up_proj.weight"], weights["layers.1.ffn.up.weight"])
    assert (
        "model.layers.0.mlp.up_proj.weight" not in stored
        and f"{EXPERT.replace('0', '1')}.0.up_proj.weight" not in stored
    )
    weights = write(tmp_path, GPT_OSS)
    stored = load_file(tmp_path / "model.safetensors")
    gate_up = stored[f"{EXPERT}.gate_up_proj"]
    assert torch.equal(gate_up[1, :, ::2], weights["layers.0.ffn.gate.weight"][1].t())
    assert torch.equal(gate_up[1, :, 1::2], weights["layers.0.ffn.up.weight"][1].t())
    assert torch.equal(stored[f"{EXPERT}.gate_up_proj_bias"][:, 1::2], weights["layers.0.ffn.up.bias"])


def without(name):
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{EXPERT}.1.up_proj.weight"), f"1 missing: {EXPERT}.1.up_proj.weight"),
        (
            lambda t: t | {f"{EXPERT}.1.up_proj.weight": torch.zeros(6, 7)},
            f"1 of another shape: {EXPERT}.1.up_proj.weight [6, 7] instead of [6, 8]",
        ),
        (
            lambda t: t | {f"{EXPERT}.3.up_proj.weight": torch.zeros(6, 8)},
            f"1 unexpected: {EXPERT}.3.up_proj.weight",
        ),
        (
            lambda t: t | {f"{EXPERT}.0.up_proj.weight": torch.zeros(6, 8, dtype=torch.uint8)},
            f"1 of a type other than f32, f16, bf16: {EXPERT}.0.up_proj.weight U8",
        ),
    ],
)
def test_experts_that_do_not_fit(tmp_path, change, said):
    write(tmp_path, QWEN)
    rewrite(tmp_path, change)
    assert refusal(tmp_path, QWEN).endswith(f"config.json. {said}")


def test_a_stack_of_too_few_experts(tmp_path):
    write(tmp_path, GPT_OSS)
    assert "gate_up_proj [3, 64, 64] instead of [4, 64, 64]" in refusal(tmp_path, GPT_OSS | {"num_local_experts": 4})


def quantized(folder, seed=0):
    """GPT_OSS with experts in MXFP4; returns what they are, worked out number by number."""
    write(folder, GPT_OSS)
    generator = torch.Generator().manual_seed(seed)
    expected = {}

    def pack(tensors):
        for layer in range(2):
            for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
                source = f"model.layers.{layer}.mlp.experts.{name}"
                shape = (3, rows, columns // 32)
                blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
                scales = torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)
                del tensors[source]
                tensors |= {f"{source}_blocks": blocks, f"{source}_scales": scales}
                expected[layer, name] = torch.tensor(
                    [
                        [
                            [
                                FP4[byte >> shift & 15] * 2.0 ** (scale - 127)
                                for block, scale in zip(row, row_scales)
                                for byte in block
                                for shift in (0, 4)
                            ]
                            for row, row_scales in zip(expert, expert_scales)
                        ]
                        for expert, expert_scales in zip(blocks.tolist(), scales.tolist())
                    ]
                )
        return tensors

    rewrite(folder, pack)
    (folder / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": MXFP4}))
    return expected


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_mxfp4_is_dequantized_exactly(tmp_path, wanted):
    expected = quantized(tmp_path)
    loaded = load(tmp_path, GPT_OSS, wanted)
    streamed = StreamedWeights(tmp_path, *described(GPT_OSS), wanted)
    for (layer, stored), matrices in expected.items():
        parts = {"gate": matrices[:, ::2], "up": matrices[:, 1::2]} if stored == "gate_up_proj" else {"down": matrices}
        for name, matrix in parts.items():
            weight = f"layers.{layer}.ffn.{name}.weight"
            assert loaded[weight].dtype == wanted and loaded[weight].is_contiguous()
            assert torch.equal(loaded[weight].float(), matrix), weight  # bfloat16 holds them exactly
            assert torch.equal(streamed[weight], loaded[weight])


def test_mxfp4_as_transformers_dequantizes_it(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantized(tmp_path, seed=1)
    stored = load_file(tmp_path / "model.safetensors")
    gate_up_EHF = convert_moe_packed_tensors(
        stored[f"{EXPERT}.gate_up_proj_blocks"], stored[f"{EXPERT}.gate_up_proj_scales"], dtype=torch.float32
    )
    loaded = load(tmp_path, GPT_OSS)
    assert torch.equal(loaded["layers.0.ffn.gate.weight"], gate_up_EHF[:, :, ::2].transpose(1, 2))
    assert torch.equal(loaded["layers.0.ffn.up.weight"], gate_up_EHF[:, :, 1::2].transpose(1, 2))


@pytest.mark.parametrize("inputs", ["int16", "int8"])
def test_mxfp4_is_multiplied_as_it_is(tmp_path, inputs):
    """The native backend computes with the 4-bit floats, the reference with what they mean, in float32."""
    native = pytest.importorskip("ridgeline._native", reason="the native module is not built")
    assert native.best_level()
    quantized(tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t // 16 + 110 if n.endswith("_scales") else t for n, t in tensors.items()})
    greedy, outputs = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2), {}
    for backend in ("native", "reference"):
        llm = LLM(str(tmp_path), backend=backend, dtype="float32", quantize_inputs=inputs, num_threads=1)
        outputs[backend] = llm.generate([[1, 5, 9, 10]], greedy, use_tqdm=False)[0].outputs[0]
        assert llm.engine.info.choices["quantize"].value == ("as stored" if backend == "native" else "none")
    assert outputs["native"].token_ids == outputs["reference"].token_ids
    found, expected = (torch.tensor([x.logprob for x in outputs[name].logprobs]) for name in ("native", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 if inputs == "int16" else 0.1)


def test_mxfp4_extremes(tmp_path):
    """The least scale is exact in float32; the largest is not a number, as the format has it, and refused."""
    quantized(tmp_path)

    def extreme(tensors):
        tensors[f"{EXPERT}.down_proj_blocks"][:] = 0x71  # 0.5 and 6
        tensors[f"{EXPERT}.down_proj_scales"][:] = 0
        return tensors

    def no_number(tensors):
        tensors[f"{EXPERT}.down_proj_scales"][0, 0, 0] = 255
        return tensors

    rewrite(tmp_path, extreme)
    down = load(tmp_path, GPT_OSS)["layers.0.ffn.down.weight"]
    assert down[1, 0, :2].tolist() == [0.5 * 2.0**-127, 6 * 2.0**-127]
    rewrite(tmp_path, no_number)
    with pytest.raises(ModelLoadError, match=r"down_proj_blocks' has NaN or infinity"):
        load(tmp_path, GPT_OSS)


BLOCKS, SCALES = f"{EXPERT}.down_proj_blocks", f"{EXPERT}.down_proj_scales"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(SCALES), "has no .*down_proj_scales"),
        (without(BLOCKS), "1 missing: .*; 1 unexpected: .*down_proj_scales"),
        (lambda t: t | {BLOCKS: t[BLOCKS][..., :15]}, r"MXFP4 has U8 \[.., rows, blocks, 16\]"),
        (lambda t: t | {BLOCKS: t[BLOCKS][0, 0]}, "MXFP4 has"),
        (lambda t: t | {BLOCKS: t[BLOCKS].flatten()}, "MXFP4 has"),
        (lambda t: t | {BLOCKS: t[BLOCKS].to(torch.int32)}, "MXFP4 has"),
        (lambda t: t | {SCALES: t[SCALES].float()}, "MXFP4 has"),
        (lambda t: t | {SCALES: t[SCALES][:, :2]}, "MXFP4 has"),
        (
            lambda t: t | {BLOCKS: t[BLOCKS][:2], SCALES: t[SCALES][:2]},
            r"1 of another shape: .*down_proj_blocks \[2, 64, 32\] instead of \[3, 64, 32\]",
        ),
        (
            lambda t: t | {BLOCKS: t[BLOCKS][:, :, :0], SCALES: t[SCALES][:, :, :0]},
            r"down_proj_blocks \[3, 64, 0\] instead of",
        ),
        (lambda t: t | {BLOCKS.removesuffix("_blocks"): torch.zeros(3, 32, 64)}, "1 unexpected: .*down_proj_blocks"),
        (
            lambda t: t | {"model.surprise_blocks": t[BLOCKS].clone(), "model.surprise_scales": t[SCALES].clone()},
            "1 unexpected",
        ),
    ],
)
def test_hostile_mxfp4(tmp_path, change, said):
    quantized(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError, match=said):
        load(tmp_path, GPT_OSS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("mxfp4", "must be an object"),
        ({}, "quant_method"),
        ({"quant_method": "../mxfp4"}, "supported: .*mxfp4"),
        (MXFP4 | {"block_size": 16}, "block_size"),
    ],
)
def test_unknown_quantization_is_refused(tmp_path, settings, said):
    quantized(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, GPT_OSS)
