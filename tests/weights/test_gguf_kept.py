"""Tensors that stay as they are stored: bit for bit the numbers that the `gguf` package says, and the same text."""

import gguf
import numpy as np
import pytest
import torch
from small_gguf import HEADS, HIDDEN, f32, gguf_bytes, llama_tensors, metadata_of

from ridgeline import LLM, SamplingParams
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.kept import KeptWeights
from ridgeline.weights.loader import load_weights

KINDS = {"Q8_0": (8, "int8_groups", 128), "Q4_0": (4, "int4", 8)}


def quantized(kind, *, only=lambda name: True):
    """A small llama whose matrices are of type `kind`."""
    number = gguf.GGMLQuantizationType[kind]
    tensors = llama_tensors()
    for name, (shape, _, raw) in tensors.items():
        if len(shape) == 2 and only(name):
            values = np.frombuffer(raw, dtype=np.float32).reshape(shape)
            tensors[name] = (shape, number.value, gguf.quantize(values, number).tobytes())
    return gguf_bytes(metadata_of("llama"), tensors)


def opened(path):
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec)
    return folder, spec, program, KeptWeights(folder.gguf, spec, program)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_are_the_dequantized_ones(kind, tmp_path):
    bits, _, zero = KINDS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind))
    folder, spec, program, kept = opened(path)
    matrices = {name for name, shape in program.weights.items() if len(shape) == 2}
    assert kept.bits == dict.fromkeys(matrices, bits)
    weights = load_weights(folder, spec, program, torch.float32)
    for name in matrices:
        stored = kept.read(name)
        spread = stored.scales.repeat_interleave(32, dim=1)
        assert torch.equal((stored.values.float() - zero) * spread, weights[name])


@pytest.mark.parametrize("kind", KINDS)
def test_native_matrices_hold_them_exactly(kind, tmp_path):
    """What the packed matrix gives back is the oracle's dequantization, bitwise, rows of heads in their order."""
    native = pytest.importorskip("ridgeline._native", reason="the native module is not built")
    from ridgeline.backends.native.settings import MatrixFormat
    from ridgeline.backends.native.weights import NativeWeights, NoStore

    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind))
    kept = opened(path)[3]
    number = gguf.GGMLQuantizationType[kind]
    form = MatrixFormat(kind=KINDS[kind][1], inputs="int16", group=32, stored=True)
    weights = NativeWeights(dict, native.best_level(), 1, NoStore(), kept)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for source, target in [("attn_q", "attn.q"), ("attn_v", "attn.v"), ("ffn_down", "ffn.down")]:
        expected = gguf.dequantize(raw[f"blk.1.{source}.weight"].data, number)
        if source == "attn_q":
            expected = expected.reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2).reshape(expected.shape)
        name = f"layers.1.{target}.weight"
        matrix = weights.matrix(name, [name], expected.shape, form)
        found = np.stack([native.unpack_output(native.best_level(), matrix, n) for n in range(len(expected))])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_say_the_same(kind, tmp_path):
    """The native one computes with the integers, the reference with what they mean, in float32."""
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized(kind))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    answers, choices = {}, {}
    for backend in ("native", "reference"):
        llm = LLM(str(path), backend=backend, dtype="float32", num_threads=1)
        answers[backend] = llm.generate([[1, 5, 9, 20]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        choices[backend] = llm.engine.choices["quantize"]
    assert answers["native"] == answers["reference"]
    assert choices["native"].value == "as stored"
    assert choices["reference"].value == "none"
    requantized = LLM(str(path), backend="native", quantize="int8", num_threads=1)
    assert requantized.engine.choices["quantize"].value == "int8"


def test_what_runs_as_one_matrix_is_kept_as_one(tmp_path):
    """Queries, keys and values are one matrix: keys that are plain numbers keep the others from staying."""
    path = tmp_path / "model.gguf"
    path.write_bytes(quantized("Q8_0", only=lambda name: name != "blk.0.attn_k.weight"))
    kept = opened(path)[3]
    first = {f"layers.0.attn.{letter}.weight" for letter in "qkv"}
    assert not first & set(kept.bits)
    assert {name.replace("layers.0", "layers.1") for name in first} <= set(kept.bits)


def test_a_damaged_scale_is_refused(tmp_path):
    from ridgeline.core.errors import ModelLoadError

    path = tmp_path / "model.gguf"
    content = quantized("Q8_0")
    path.write_bytes(content)
    tensor = ModelFolder.open(path).gguf.tensors["blk.1.ffn_down.weight"]
    path.write_bytes(content[: tensor.offset] + b"\x00\x7c" + content[tensor.offset + 2 :])  # infinity
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor 'blk.1.ffn_down.weight': a scale is NaN or inf"):
        opened(path)[3].read("layers.1.ffn.down.weight")


def test_a_file_without_such_tensors_keeps_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata_of("llama"), llama_tensors() | {"output.weight": f32((40, 64), 3)}))
    assert opened(path)[3].bits == {}
