"""Tensors that stay as they are stored: bit for bit the numbers that the `gguf` package says, and the same text."""

import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
import small_gguf
import torch
from small_gguf import HEADS, HIDDEN, f32, gguf_bytes, llama_tensors, metadata_of, with_experts
from torch_weights import load_weights

from ridgeline import LLM, SamplingParams
from ridgeline.backends.native.settings import prequantized_formats
from ridgeline.backends.reference.tensors import as_tensor
from ridgeline.cli._inspect_stored import stored_tensors
from ridgeline.cli._inspection import examine
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.quant import dequantize
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.reader import GgufTensor
from ridgeline.weights.load import prequantized

KINDS = {
    "Q8_0": "int8_groups", "Q4_0": "int4", "Q4_1": "int4_minima", "Q5_0": "int8_groups", "Q5_1": "int8_minima",
    "MXFP4": "mxfp4",
}  # fmt: skip
EXPERTS = {"expert_count": 3, "expert_used_count": 2}


def quantized(kind, *, only=lambda name: True, experts=False):
    """A small llama whose matrices are of type `kind`, each with another offset: minima differ from all zeros."""
    tensors = with_experts(llama_tensors(), 3, 96) if experts else llama_tensors()
    for seed, (name, (shape, _, raw)) in enumerate(tensors.items()):
        if len(shape) > 1 and only(name):
            values = np.frombuffer(raw, dtype=np.float32).reshape(shape) + np.float32(0.02 * (seed % 5))
            tensors[name] = as_type(kind, values)
    return gguf_bytes(metadata_of("llama", **(EXPERTS if experts else {})), tensors)


def as_type(kind, values):
    number = gguf.GGMLQuantizationType[kind]
    return values.shape, number.value, gguf.quantize(values, number).tobytes()


ZEROS = {"Q8_0": 128, "Q4_0": 8, "Q4_1": 0, "Q5_0": 128, "Q5_1": 0, "MXFP4": 0}


def meaning(stored, zero):
    """What the codes are, by the formula."""
    is_float = stored.format.code == "e2m1"
    codes = stored.codes.view(ml_dtypes.float4_e2m1fn) if is_float else stored.codes
    scaled = (codes.astype(np.float32) - np.float32(zero)) * np.repeat(stored.scales, 32, axis=1)
    return as_tensor(scaled if stored.minima is None else scaled + np.repeat(stored.minima, 32, axis=1))


def opened(path):
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec)
    return folder, spec, program, prequantized(folder, spec, program)


def kinds(stored, program):
    """The native kinds of the matrices that stay."""
    return {name: form.kind for name, form in prequantized_formats(stored.formats, program, "int16", "float32").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_are_the_dequantized_ones(kind, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind))
    folder, spec, program, stored = opened(path)
    matrices = {name for name, shape in program.weights.items() if len(shape) == 2}
    assert kinds(stored, program) == dict.fromkeys(matrices, KINDS[kind])
    weights = load_weights(folder, spec, program, torch.float32)
    for name in matrices:
        assert torch.equal(meaning(stored.matrix(name), ZEROS[kind]), weights[name])


@pytest.mark.parametrize("kind", KINDS)
def test_kept_experts_are_the_dequantized_ones(kind, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind, experts=True))
    folder, spec, program, stored = opened(path)
    weights = load_weights(folder, spec, program, torch.float32)
    names = [name for name, shape in program.weights.items() if len(shape) == 3]
    assert len(names) == 6
    for name in names:
        for expert in range(3):
            assert torch.equal(meaning(stored.matrix(name, expert), ZEROS[kind]), weights[name][expert])
    assert "layers.0.ffn.router.weight" not in kinds(stored, program)


def test_the_bytes_that_are_saved(tmp_path):
    """The file's are all that stay of stored weights."""
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized("Q4_1", experts=True))
    folder, _, program, stored = opened(path)
    for name, form in stored.formats.items():
        num_bytes = sum(folder.gguf.tensors[tensor].num_bytes for tensor in stored.tensors(name))
        assert form.num_bytes(program.weights[name]) == num_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_native_matrices_hold_them_exactly(kind, tmp_path):
    """What the packed matrix gives back is the oracle's dequantization, bitwise, rows of heads in their order."""
    native = pytest.importorskip("ridgeline._native", reason="the native module is not built")
    from ridgeline.backends.native.settings import MatrixFormat
    from ridgeline.backends.native.weights import NativeWeights

    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind))
    stored = opened(path)[3]
    number = gguf.GGMLQuantizationType[kind]
    form = MatrixFormat(kind=KINDS[kind], inputs="int16", group=32, stored=True)
    weights = NativeWeights(dict, native.best_level(), 1, None, stored)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for source, target in [("attn_q", "attn.q"), ("attn_v", "attn.v"), ("ffn_down", "ffn.down")]:
        expected = gguf.dequantize(raw[f"blk.1.{source}.weight"].data, number)
        if source == "attn_q":
            expected = expected.reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2).reshape(expected.shape)
        name = f"layers.1.{target}.weight"
        matrix = weights.matrix(name, [name], expected.shape, form)
        found = np.stack([native.unpack_output(native.best_level(), matrix, n) for n in range(len(expected))])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("inputs", ["int16", "int8"])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_both_backends_say_the_same(kind, experts, inputs, tmp_path):
    """The native one computes with the integers, the reference with what they mean, in float32."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind, experts=experts))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    completions, choices = {}, {}
    for backend in ("native", "reference"):
        llm = LLM(str(path), backend=backend, dtype="float32", quantize_inputs=inputs, num_threads=1)
        assert llm.engine.info.choices["quantize_inputs"].value == inputs
        completions[backend] = llm.generate([[1, 5, 9, 20]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        choices[backend] = llm.engine.info.choices["quantize"]
    assert completions["native"] == completions["reference"]
    assert choices["native"].value == "as stored"
    assert choices["reference"].value == "none"
    requantized = LLM(str(path), backend="native", quantize="int8", num_threads=1)
    assert requantized.engine.info.choices["quantize"].value == "int8"


def test_keys_of_plain_numbers_keep_nothing_else_from_staying(tmp_path):
    """Queries, keys and values are one matrix where they are stored alike, else each runs by itself."""
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized("Q8_0", only=lambda name: name != "blk.0.attn_k.weight"))
    stored = kinds(*opened(path)[:1:-1])
    assert "layers.0.attn.k.weight" not in stored
    assert {f"layers.0.attn.{letter}.weight" for letter in "qv"} <= set(stored)
    assert {f"layers.1.attn.{letter}.weight" for letter in "qkv"} <= set(stored)


def test_experts_of_two_types(tmp_path):
    """Gate and up are one matrix, down is another: each stays as it is, and a router is never stored."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    path = tmp_path / "model.gguf"
    tensors = with_experts(llama_tensors(), 3, 96)
    for i, (gate_up, down) in enumerate([("Q8_0", "Q4_1"), ("Q4_0", "Q5_1")]):
        for matrix, kind in (("gate", gate_up), ("up", gate_up), ("down", down)):
            shape, _, raw = tensors[f"blk.{i}.ffn_{matrix}_exps.weight"]
            values = np.frombuffer(raw, dtype=np.float32).reshape(shape)
            tensors[f"blk.{i}.ffn_{matrix}_exps.weight"] = as_type(kind, values)
    path.write_bytes(gguf_bytes(metadata_of("llama", **EXPERTS), tensors))
    found = {name.removeprefix("layers."): kind for name, kind in kinds(*opened(path)[:1:-1]).items()}
    assert found == {
        "0.ffn.gate.weight": "int8_groups",
        "0.ffn.up.weight": "int8_groups",
        "0.ffn.down.weight": "int4_minima",
        "1.ffn.gate.weight": "int4",
        "1.ffn.up.weight": "int4",
        "1.ffn.down.weight": "int8_minima",
    }
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    completions = [
        LLM(str(path), backend=backend, dtype="float32", quantize_inputs="int16", num_threads=1).generate(
            [[1, 5, 9]], greedy, use_tqdm=False
        )
        for backend in ("native", "reference")
    ]
    assert completions[0][0].outputs[0].token_ids == completions[1][0].outputs[0].token_ids


def test_rows_of_all_experts_are_read_alone(tmp_path, monkeypatch):
    """What is decoded of a stack takes the memory of the rows that are asked for, not of the stack."""
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized("Q8_0", experts=True))
    stored = opened(path)[3]
    name, seen, read = "layers.1.ffn.down.weight", [], GgufTensor.read
    monkeypatch.setattr(GgufTensor, "read", lambda tensor: seen.append(tensor.num_bytes) or read(tensor))
    part = stored.rows(name, slice(8, 12))
    assert sum(seen) == 3 * 4 * 96 // 32 * 34
    assert np.array_equal(part, stored[name][:, 8:12]) and part.shape == (3, 4, 96)
    whole = gguf.GGUFReader(path).tensors
    (data,) = [tensor.data for tensor in whole if tensor.name == "blk.1.ffn_down_exps.weight"]
    assert np.array_equal(stored[name], gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0))


def test_a_damaged_scale_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    content = quantized("Q8_0")
    path.write_bytes(content)
    tensor = ModelFolder.open(path).gguf.tensors["blk.1.ffn_down.weight"]
    path.write_bytes(content[: tensor.offset] + b"\x00\x7c" + content[tensor.offset + 2 :])  # infinity
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor 'blk.1.ffn_down.weight': a scale is NaN or inf"):
        opened(path)[3].matrix("layers.1.ffn.down.weight")


def test_a_file_without_such_tensors_keeps_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata_of("llama"), llama_tensors() | {"output.weight": f32((40, 64), 3)}))
    assert opened(path)[3] is None


def random_blocks(kind, shape):
    """Any integers, behind scales of usual sizes."""
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng([*shape, number.value])
    data = rng.integers(0, 256, (shape[0], shape[1] // block, block_bytes), dtype=np.uint8)
    floats = (rng.random((*data.shape[:2], 2)) * 4e-4 + 1e-5).astype(np.float16)
    places = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q2_K": (80, 4), "Q6_K": (208, 2), "Q3_K": (108, 2)}
    places |= {"TQ1_0": (52, 2), "TQ2_0": (64, 2)}
    at, num_bytes = places.get(kind, (0, 2))
    if kind == "IQ1_M":  # four bits in each of four words
        words = data[..., 48:].view(np.uint16)
        words &= 0xFFF
        words |= floats[..., :1].view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) << 12
    else:
        data[..., at : at + num_bytes] = floats.view(np.uint8)[..., :num_bytes]
    return shape, number.value, data.tobytes()


@pytest.fixture
def of_superblocks(tmp_path, monkeypatch):
    """Writes a small llama with rows of 256 inputs, of blocks of a type."""

    def written(kind, others=()):
        for size in ("HIDDEN", "FFN"):
            monkeypatch.setattr(small_gguf, size, 256)
        tensors = llama_tensors(64)
        for name, (shape, _, _) in tensors.items():
            if len(shape) > 1 and shape[1] == 256:
                tensors[name] = random_blocks(dict(others).get(name, kind), shape)
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf_bytes(metadata_of("llama"), tensors))
        return path

    return written


SUPER_KINDS = {
    "Q2_K": "int8_super_minima", "Q3_K": "int8_super", "Q4_K": "int4_super_minima", "Q5_K": "int8_super_minima",
    "Q6_K": "int8_super", "IQ4_XS": "int8_super", "IQ4_NL": "int8_groups", "Q5_0": "int8_groups",
    "IQ3_S": "int8_super", "TQ1_0": "int4", "TQ2_0": "int4",
}  # fmt: skip


@pytest.mark.parametrize("kind", SUPER_KINDS)
def test_native_matrices_hold_superblocks_exactly(kind, of_superblocks):
    """What the packed matrix gives back is the oracle's dequantization, bitwise: its scales have up to 17 bits."""
    native = pytest.importorskip("ridgeline._native", reason="the native module is not built")
    from ridgeline.backends.native.weights import NativeWeights

    path = of_superblocks(kind)
    _, _, program, stored = opened(path)
    assert set(kinds(stored, program).values()) == {SUPER_KINDS[kind]}
    formats = prequantized_formats(stored.formats, program, "int16", "float32")
    weights = NativeWeights(dict, native.best_level(), 1, None, stored)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for source, name in [("ffn_down", "layers.0.ffn.down.weight"), ("attn_v", "layers.1.attn.v.weight")]:
        layer = name.split(".")[1]
        expected = gguf.dequantize(raw[f"blk.{layer}.{source}.weight"].data, gguf.GGMLQuantizationType[kind])
        matrix = weights.matrix(name, [name], expected.shape, formats[name])
        found = np.stack([native.unpack_output(native.best_level(), matrix, n) for n in range(len(expected))])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", SUPER_KINDS)
def test_both_backends_say_the_same_of_superblocks(kind, of_superblocks):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    path = of_superblocks(kind)
    assert exactly_stored(path)
    agree(path)


DECODED = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"]


@pytest.mark.parametrize("kind", DECODED)
def test_what_the_library_decodes_says_what_its_numbers_say(kind, of_superblocks, tmp_path, monkeypatch):
    path, twin = of_superblocks(kind), tmp_path / "twin.gguf"
    folder = ModelFolder.open(path)
    (row,) = [row for row in stored_tensors(folder, examine(dict(folder.config))) if row.type == kind]
    assert row.becomes == f"dequantized to bfloat16: no kernel multiplies {kind}"
    raw = gguf.GGUFReader(path).tensors
    decoded = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in raw}
    tensors = {name: (values.shape, 0, values.astype(np.float32).tobytes()) for name, values in decoded.items()}
    twin.write_bytes(gguf_bytes(metadata_of("llama"), tensors))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options = {"dtype": "float32", "num_threads": 1}
    one, other = (LLM(str(each), **options).generate([[1, 5, 9]], greedy, use_tqdm=False) for each in (path, twin))
    assert one[0].outputs[0].token_ids == other[0].outputs[0].token_ids
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ModelLoadError, match=rf"type {kind} are decoded by the gguf .* pip install 'ridgeline\[gguf\]'"
    ):
        LLM(str(path), **options)


def test_members_of_one_product_that_are_stored_otherwise_run_apart(of_superblocks, monkeypatch):
    """As in files of mixed types (Q4_K_M): queries and keys of four bits, values of six, in every other layer."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    path = of_superblocks("Q4_K", {"blk.0.attn_v.weight": "Q6_K", "blk.1.ffn_up.weight": "Q5_K"})
    _, _, program, stored = opened(path)
    found = kinds(stored, program)
    assert found["layers.0.attn.q.weight"] == found["layers.1.attn.v.weight"] == "int4_super_minima"
    assert found["layers.0.attn.v.weight"] == "int8_super"
    assert found["layers.1.ffn.up.weight"] == "int8_super_minima"
    agree(path)
    from ridgeline.backends.native.compile import Compiler

    multiplied, matrix = set(), Compiler.matrix

    def spied(self, ops, **options):
        multiplied.add(tuple(op.weights[0].removesuffix(".weight") for op in ops))
        return matrix(self, ops, **options)

    monkeypatch.setattr(Compiler, "matrix", spied)
    LLM(str(path), backend="native", quantize_inputs="int16", num_threads=1)
    assert {("layers.0.attn.q",), ("layers.0.attn.v",), ("layers.1.ffn.gate",), ("layers.1.ffn.up",)} <= multiplied
    assert {tuple(f"layers.1.attn.{x}" for x in "qkv"), ("layers.0.ffn.gate", "layers.0.ffn.up")} <= multiplied


def agree(path):
    """Checks that both backends generate the same text with the same probabilities."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    found = {}
    for backend in ("native", "reference"):
        llm = LLM(str(path), backend=backend, dtype="float32", quantize_inputs="int16", num_threads=1)
        found[backend] = llm.generate([[1, 5, 9, 20]], params, use_tqdm=False)[0].outputs[0]
        if backend == "native":
            assert llm.engine.info.choices["quantize"].value == "as stored"
    assert found["native"].token_ids == found["reference"].token_ids
    logprobs = [[x.logprob for x in found[backend].logprobs] for backend in ("native", "reference")]
    np.testing.assert_allclose(*logprobs, rtol=0, atol=5e-3)


def exactly_stored(path):
    """Tells whether what stays means the numbers that are decoded."""
    folder, spec, program, stored = opened(path)
    weights = load_weights(folder, spec, program, torch.float32)
    return all(torch.equal(as_tensor(dequantize(stored.matrix(name))), weights[name]) for name in stored.formats)
