"""compressed-tensors folders: what the library itself unpacks, bit for bit, and clear refusals."""

import json

import numpy as np
import pytest
import torch
from quantized_folder import (
    EXAMPLE,
    LLAMA,
    PHI3,
    as_stored,
    change,
    check_bits,
    check_logits,
    load,
    loads_or_refuses,
    store,
)
from safetensors.numpy import save_file
from small_checkpoint import described

from ridgeline import LLM, SamplingParams, quant
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights, prequantized

library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402

PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
GROUPED = {"strategy": "group", "group_size": 32}


def scales_of(weight, args, dtype):
    """Scales, zero points and overall scale of a weight, rounded to nearest; not what is tested."""
    rows, columns = weight.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(args.block_structure or ()),
    }.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    most = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).abs().amax((1, 3))
    limit = {("int", b): (1 << b) / 2 - 0.5 for b in range(2, 9)} | {("float", 8): 448, ("float", 4): 6}
    scale, overall = most / limit[args.type, args.num_bits], None
    if args.strategy == "tensor_group":
        overall = torch.tensor([448 * 6 / weight.abs().max()])
        scale = (scale * overall).to(torch.float8_e4m3fn).float()
    elif args.scale_dtype == torch.uint8 or (args.type, args.num_bits) == ("float", 4):
        scale = torch.exp2(torch.floor(torch.log2(scale)) + 1)
    points = None
    if not args.symmetric:
        generator = torch.Generator().manual_seed(rows)
        half = 1 << (args.num_bits - 1)
        points = torch.randint(-half, half, scale.shape, generator=generator, dtype=torch.int8)
    if args.strategy == "tensor":
        scale = scale.flatten()
    return scale.to(dtype), points, overall


def compressed(folder, form, config=LLAMA, *, dtype=torch.float32, changed=(), **args):
    """Writes a model compressed by the library; returns what the library decompresses, from float32 scales."""
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(layer, weight):
        weight = torch.from_numpy(np.ascontiguousarray(weight))
        scale, points, overall = scales_of(weight, args, dtype)
        state = {"weight": weight, "weight_scale": scale.float()}
        state |= {} if points is None else {"weight_zero_point": points}
        state |= {} if overall is None else {"weight_global_scale": overall}
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(stored, scheme)["weight"].float().numpy()
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].to(dtype)
        return {f"{layer}.{name}": as_stored(tensor) for name, tensor in stored.items()}, expected

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": form}
    settings = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    settings |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return store(folder, settings | dict(changed), quantize, config)


STAY = [
    (PACKED, {"num_bits": 4, **GROUPED, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 4, **GROUPED, "symmetric": False, "dtype": torch.float16}),
    (PACKED, {"num_bits": 4, "strategy": "channel", "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 4, "strategy": "channel", "symmetric": False, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 8, **GROUPED, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 8, "strategy": "channel"}),
    (PACKED, {"num_bits": 2, **GROUPED, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 3, "strategy": "group", "group_size": 64, "symmetric": False, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 5, **GROUPED, "dtype": torch.bfloat16}),
    (PACKED, {"num_bits": 6, "strategy": "channel"}),
    (INT, {"num_bits": 8, "strategy": "channel"}),
    (INT, {"num_bits": 8, "strategy": "channel", "dtype": torch.bfloat16}),
    (INT, {"num_bits": 8, "strategy": "tensor"}),
]
DECODED = [
    (PACKED, {"num_bits": 4, **GROUPED}, "float16 cannot hold its scales"),
    (PACKED, {"num_bits": 8, **GROUPED, "symmetric": False}, "8 bits with zero points"),
    (INT, {"num_bits": 8, "strategy": "channel", "symmetric": False}, "8 bits with zero points"),
    (FLOAT, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 40]}, "groups of 40 inputs"),
]
FP8 = [
    (FLOAT, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    (FLOAT, {"num_bits": 8, "type": "float", "strategy": "channel", "dtype": torch.bfloat16}),
    (FLOAT, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 96]}),
    (MXFP8, {"num_bits": 8, "type": "float", **GROUPED, "scale_dtype": torch.uint8}),
]
FP4 = [
    (NVFP4, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    (MXFP4, {"num_bits": 4, "type": "float", **GROUPED}),
]


@pytest.mark.parametrize(("form", "args"), STAY, ids=str)
def test_integers_stay(tmp_path, form, args):
    check_bits(tmp_path, compressed(tmp_path, form, **args))
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=True)


@pytest.mark.parametrize(("form", "args"), FP8, ids=str)
def test_eight_bit_floats_stay(tmp_path, form, args):
    check_bits(tmp_path, compressed(tmp_path, form, **args))
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=True, inputs="auto")


def test_eight_bit_floats_that_are_no_numbers(tmp_path):
    compressed(tmp_path, *FP8[0][:1], **FP8[0][1])
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    change(
        tmp_path,
        f"{EXAMPLE}.weight",
        lambda x: np.where(np.arange(x.size).reshape(x.shape) == 7, np.nan, x.astype(np.float32)).astype(x.dtype),
    )
    with pytest.raises(ModelLoadError, match=r"has a NaN, which no kernel holds"):
        LLM(str(tmp_path), backend="native", dtype="float32", num_threads=1)


@pytest.mark.parametrize(("form", "args", "why"), DECODED, ids=str)
def test_others_are_decoded_with_a_reason(tmp_path, form, args, why):
    check_bits(tmp_path, compressed(tmp_path, form, **args))
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    assert why in check_logits(tmp_path, stays=False)


@pytest.mark.parametrize(("form", "args"), FP4, ids=str)
def test_four_bit_floats_stay(tmp_path, form, args):
    """The library rounds these to bfloat16 at the end."""
    expected, (spec, program) = compressed(tmp_path, form, **args), described(LLAMA)
    found = load_weights(tmp_path, spec, program, FLOAT32)["layers.1.ffn.down.weight"]
    assert np.array_equal(torch.from_numpy(found).bfloat16().float().numpy(), expected[EXAMPLE])
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    check_logits(tmp_path, stays=True)


def test_settings_under_the_key_of_older_writers(tmp_path):
    expected = compressed(tmp_path, PACKED, num_bits=4, **GROUPED)
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = ModelFolder.open(tmp_path)
    stored = prequantized(folder, *described(folder.config))
    assert np.array_equal(quant.dequantize(stored.matrix("layers.1.ffn.down.weight")), expected[EXAMPLE])


def test_a_tensor_of_several_weights_is_cut_into_their_rows(tmp_path):
    args = {"num_bits": 3, **GROUPED, "symmetric": False, "dtype": torch.bfloat16}
    fused = compressed(tmp_path, PACKED, PHI3, **args)["model.layers.1.self_attn.qkv_proj"]
    stored = prequantized(ModelFolder.open(tmp_path), *described(PHI3))
    cut = [quant.dequantize(stored.matrix(f"layers.1.attn.{letter}.weight")) for letter in "qkv"]
    assert np.array_equal(np.concatenate(cut), fused)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_lanes_of_older_writers(tmp_path, bits):
    """Before they were dense, words held 32 // bits integers each; the number of words tells."""
    expected = compressed(tmp_path, PACKED, num_bits=bits, **GROUPED, dtype=torch.bfloat16)

    def lanes(words):
        spread = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        num_inputs = {16: 128, 32: 256}.get(words.shape[1] * 4 // bits)
        values = (spread[:, : num_inputs * bits].reshape(len(words), -1, bits) << np.arange(bits)).sum(-1)
        per_word = 32 // bits
        padded = np.pad(values, ((0, 0), (0, -num_inputs % per_word))).reshape(len(words), -1, per_word)
        return (padded.astype(np.uint32) << np.arange(per_word, dtype=np.uint32) * bits).sum(-1).astype(np.int32)

    for layer in expected:
        change(tmp_path, f"{layer}.weight_packed", lanes)
    check_bits(tmp_path, expected)


def test_zero_points_of_older_writers_are_not_packed(tmp_path):
    expected = compressed(tmp_path, PACKED, num_bits=4, **GROUPED, symmetric=False, dtype=torch.bfloat16)
    for layer, weight in expected.items():

        def plain(packed, shape=weight.shape):
            nibbles = np.ascontiguousarray(packed.T).view(np.uint8)
            return (np.stack([nibbles & 15, nibbles >> 4], -1).reshape(len(nibbles), -1).T[: shape[0]] - 8).view(
                np.int8
            )

        change(tmp_path, f"{layer}.weight_zero_point", plain)
    check_bits(tmp_path, expected)


def test_an_order_of_inputs(tmp_path):
    """`weight_g_idx` of older writers names the group of each input, whose codes stay where they were."""
    compressed(tmp_path, PACKED, num_bits=4, **GROUPED, dtype=torch.bfloat16)
    before = load_weights(tmp_path, *described(LLAMA), FLOAT32)["layers.1.ffn.down.weight"]
    tensors = {}
    change(tmp_path, f"{EXAMPLE}.weight_scale", lambda x: tensors.setdefault("scale", x))
    groups = np.random.default_rng(0).permutation(np.arange(256) // 32)
    save_file(load(tmp_path) | {f"{EXAMPLE}.weight_g_idx": groups.astype(np.int32)}, tmp_path / "model.safetensors")
    after = load_weights(tmp_path, *described(LLAMA), FLOAT32)["layers.1.ffn.down.weight"]
    scale = tensors["scale"].astype(np.float32)
    integers = np.rint(before / np.repeat(scale, 32, axis=1))
    assert np.array_equal(after, integers.astype(np.float32) * scale[:, groups])


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def groups(*each):
    return {"config_groups": {f"group_{i}": {"targets": targets, "weights": w} for i, (targets, w) in enumerate(each)}}


INT3 = INT4 | {"num_bits": 3}


@pytest.mark.parametrize(
    "described_as",
    [
        groups((["Linear"], INT3), (["re:.*proj"], INT4)),
        groups((["re:.*"], INT3), ([f"model.layers.{i}.{n}_proj" for i in (0, 1) for n in
            ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")], INT4)),
        groups((["re:.*layers.0"], INT4), (["re:model.layers.1.*"], INT4)) | {"ignore": ["re:.*norm", "lm_head"]},
    ],
)  # fmt: skip
def test_names_are_before_patterns_before_classes(tmp_path, described_as):
    check_bits(
        tmp_path, compressed(tmp_path, PACKED, num_bits=4, **GROUPED, dtype=torch.bfloat16, changed=described_as)
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantization_status": "frozen"}, "quantization_status"),
        ({"format": "marlin-24"}, "2:4 sparse"),
        ({"format": "mxfp6-pack-quantized"}, "6-bit floats"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"v": {}}}}, "transform_config"),
        ({"config_groups": None}, "config_groups is missing"),
        ({"ignore": ["re:.*down"]}, "ignore names .*mlp.down_proj"),
        (groups((["re:.*q_proj"], INT4)), "no group of config_groups names"),
        (groups((["re:(x+x+)+y"], INT4)), "no repetition of a repetition"),
        (groups((["Linear"], INT4 | {"num_bits": 1})), "num_bits=1"),
        (groups((["Linear"], INT4 | {"strategy": "attn_head"})), "strategy"),
        (groups((["Linear"], INT4 | {"group_size": None})), "group_size=0"),
        (groups((["Linear"], INT4 | {"dynamic": True})), "dynamic"),
        (groups((["Linear"], INT4 | {"unheard_of": True})), "unheard_of"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, changed, said):
    compressed(tmp_path, PACKED, num_bits=4, **GROUPED, dtype=torch.bfloat16, changed=changed)
    with pytest.raises(ConfigError, match=said):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize(
    ("part", "make", "said"),
    [
        ("weight_scale", lambda x: None, "has no .*weight_scale"),
        ("weight_shape", lambda x: None, "has no .*weight_shape"),
        ("weight_zero_point", lambda x: None, "has no .*weight_zero_point"),
        ("weight_shape", lambda x: x * 0, "weight_shape is"),
        ("weight_shape", lambda x: -x, "weight_shape is"),
        ("weight_shape", lambda x: x + np.array([0, 8]), "needs I32"),
        ("weight_shape", lambda x: x[:1], "beside"),
        ("weight_packed", lambda x: x[:, :-1], "needs I32"),
        ("weight_packed", lambda x: x[0], "must be a matrix"),
        ("weight_packed", lambda x: x.view(np.uint8), "U8; quantization_config says that it has 4 bits of type int"),
        ("weight_scale", lambda x: x[:, :-1], "beside"),
        ("weight_scale", lambda x: x.astype(np.int32), "needs F32 or F16"),
        ("weight_zero_point", lambda x: x[:-1], "beside"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, part, make, said):
    compressed(tmp_path, PACKED, num_bits=4, **GROUPED, symmetric=False, dtype=torch.bfloat16)
    change(tmp_path, f"{EXAMPLE}.{part}", make)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {EXAMPLE}.*{said}"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


def test_an_overall_scale_that_is_upside_down(tmp_path):
    compressed(tmp_path, NVFP4, **FP4[0][1])
    change(tmp_path, f"{EXAMPLE}.weight_global_scale", lambda x: 1 / (x * 100))
    with pytest.raises(ModelLoadError, match=r"weight_global_scale is .*is it the reciprocal"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)
    change(tmp_path, f"{EXAMPLE}.weight_global_scale", lambda x: x * np.nan)
    assert not loads_or_refuses(tmp_path)


@pytest.mark.parametrize(
    ("form", "args"), [STAY[0], STAY[10], (FLOAT, {"num_bits": 8, "type": "float", "strategy": "channel"})], ids=str
)
def test_logits_are_those_of_transformers(tmp_path, form, args):
    """Of the same folder, which transformers decompresses as it loads."""
    from transformers import AutoModelForCausalLM

    compressed(tmp_path, form, **args)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[1, 5, 9, 20]])).logits[0, -1].float(), -1)
    bits = "auto" if form == FLOAT else "int16"
    llm = LLM(str(tmp_path), backend="reference", dtype="float32", quantize_inputs=bits)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    found = llm.generate([[1, 5, 9, 20]], params, use_tqdm=False)[0].outputs[0].logprobs[0].top
    assert found
    for token, logprob in found:
        assert abs(logprob - float(expected[token])) < 2e-4
