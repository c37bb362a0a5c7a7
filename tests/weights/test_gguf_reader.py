"""GGUF files that nobody vouches for: each broken one is one ModelLoadError that names the file."""

import os
import random
import struct

import gguf
import numpy as np
import pytest
import torch
from small_gguf import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    UINT8,
    UINT64,
    Typed,
    f32,
    gguf_bytes,
    info,
    llama_tensors,
    metadata_of,
    small_llama,
)
from torch_weights import load_weights

from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.reader import GgufFile


def test_reads_what_the_package_writes(tmp_path):
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.negative", -(1 << 40))
    writer.add_array("a.texts", ["ä", "", "b"])
    writer.add_array("a.numbers", [3, -1, 2])
    writer.add_custom_alignment(64)
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.ones((2, 3, 4), dtype=np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(path)
    own = {key: value for key, value in file.metadata.items() if key.startswith(("a.", "llama."))}
    assert own == {
        "llama.context_length": 77,
        "a.float": 0.5,
        "a.flag": True,
        "a.negative": -(1 << 40),
        "a.texts": ["ä", "", "b"],
        "a.numbers": [3, -1, 2],
    }
    for name, array in arrays.items():
        assert file.tensors[name].shape == array.shape
        assert file.tensors[name].read().tobytes() == array.tobytes()


HUGE = (1 << 64) - 1
X = {"x": f32((4, 8))}
KEYS = {"general.name": "n"}
HOSTILE = {
    "empty": (b"", "no GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(100), "no GGUF file"),
    "version 1": (gguf_bytes(KEYS, X, version=1), "version is 1"),
    "big-endian": (gguf_bytes(KEYS, X, version=3 << 24), "version is 50331648"),
    "huge tensor count": (gguf_bytes(KEYS, X, num_tensors=HUGE), f"declares {HUGE} tensors"),
    "huge key count": (gguf_bytes(KEYS, X, num_keys=1 << 31), "declares 2147483648 metadata keys"),
    "more keys than there are": (gguf_bytes(KEYS, X, num_keys=2), "bytes"),
    "key twice": (gguf_bytes([("a", 1), ("a", 2)], X), "metadata key 'a' is there twice"),
    "empty key": (gguf_bytes([("", 1)], X), "metadata key '' is empty"),
    "key not UTF-8": (gguf_bytes([(b"\xff\xfe", 1)], X), "a metadata key is not UTF-8"),
    "text not UTF-8": (gguf_bytes({"a": Typed(STRING, struct.pack("<Q", 1) + b"\xff")}, X), "'a' is not UTF-8"),
    "text too long": (gguf_bytes({"a": Typed(STRING, struct.pack("<Q", HUGE))}, X), f"'a' has {HUGE} bytes"),
    "unknown value type": (gguf_bytes({"a": Typed(13, bytes(8))}, X), "'a' has a value of type 13"),
    "array of arrays": (gguf_bytes({"a": Typed(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16))}, X), "type 9"),
    "array too long": (
        gguf_bytes({"a": Typed(ARRAY, struct.pack("<IQ", UINT8, 1 << 40))}, X),
        "declares 1099511627776 items of 'a'",
    ),
    "array of texts too long": (
        gguf_bytes({"a": Typed(ARRAY, struct.pack("<IQ", STRING, 100))}, X),
        "declares 100 items of 'a'",
    ),
    "wide array beyond the file": (gguf_bytes({"a": Typed(ARRAY, struct.pack("<IQ", UINT64, 90))}, X), "cut off"),
    "boolean 2": (gguf_bytes({"a": Typed(BOOL, b"\x02")}, X), "'a' has the boolean 2"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, X), "general.alignment is 0"),
    "alignment no power of two": (gguf_bytes({"general.alignment": 24}, X), "general.alignment is 24"),
    "alignment a text": (gguf_bytes({"general.alignment": "32"}, X), "general.alignment is 32"),
    "alignment too large": (gguf_bytes({"general.alignment": 1 << 30}, X), "general.alignment is 1073741824"),
    "negative tensor type": (gguf_bytes(KEYS, {"x": ((4,), (1 << 32) - 1, bytes(16))}), "has type 4294967295"),
    "tensor type of no such": (gguf_bytes(KEYS, {"x": ((4,), 4, bytes(16))}), "has type 4, which is not supported"),
    "tensor type with a name": (
        gguf_bytes(KEYS, {"x": ((64,), 40, bytes(36))}),
        "has type NVFP4, which .* BF16, .*take",
    ),
    "tensor type not read": (gguf_bytes(KEYS, {"x": ((256,), 9, bytes(36))}), "not supported; supported: BF16, F16"),
    "no dims": (gguf_bytes(KEYS, {"x": ((), F32, bytes(4))}), "has 0 dims"),
    "five dims": (gguf_bytes(KEYS, {"x": ((1,) * 5, F32, bytes(4))}), "has 5 dims"),
    "a dim of 0": (gguf_bytes(KEYS, {"x": ((4, 0), F32, b"")}), r"has dims \(0, 4\)"),
    "dims that overflow": (gguf_bytes(KEYS, {"x": ((1 << 33, 1 << 33), F32, b"")}), "has dims"),
    "dims of 2^63": (gguf_bytes(KEYS, {"x": ((1 << 63, 2), F32, b"")}), "has dims"),
    "rows that are no blocks": (gguf_bytes(KEYS, {"x": ((2, 48), 8, bytes(102))}), "no multiple of the 32 of Q8_0"),
    "tensor twice": (gguf_bytes(KEYS, X, infos=[info("x", (8,), F32, 0), info("x", (8,), F32, 64)]), "is there twice"),
    "tensor without a name": (gguf_bytes(KEYS, X, infos=[info("", (8,), F32, 0)]), "1 to 4 dims"),
    "overlap": (
        gguf_bytes(KEYS, X, infos=[info("x", (16,), F32, 0), info("y", (8,), F32, 32)]),
        "tensors 'x' and 'y' overlap",
    ),
    "misaligned": (gguf_bytes(KEYS, X, infos=[info("x", (8,), F32, 4)]), "is at 4, no multiple of the alignment 32"),
    "outside of the file": (gguf_bytes(KEYS, X, infos=[info("x", (8,), F32, 1 << 20)]), "it was cut off or damaged"),
    "offset that overflows": (gguf_bytes(KEYS, X, infos=[info("x", (8,), F32, HUGE - 31)]), "cut off or damaged"),
    "longer than the file": (gguf_bytes(KEYS, X, infos=[info("x", (1 << 40,), F32, 0)]), "cut off or damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name, tmp_path):
    content, match = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=match) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)


def test_truncated_anywhere(tmp_path):
    content, path = small_llama(), tmp_path / "cut.gguf"
    for point in [*range(64), *random.Random(0).sample(range(len(content) - 64), 200), len(content) - 64]:
        path.write_bytes(content[:point])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            GgufFile.open(path)


def test_a_file_that_shrinks(tmp_path):
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(small_llama())
    folder = ModelFolder.open(path)
    os.truncate(path, path.stat().st_size // 2)
    spec = read_spec(folder.config)
    with pytest.raises(ModelLoadError, match="has become shorter"):
        load_weights(folder, spec, lower(spec), torch.float32)


def test_a_scale_that_is_no_number(tmp_path):
    path = tmp_path / "damaged.gguf"
    block = struct.pack("<e", float("nan")) + bytes(32)
    tensors = llama_tensors() | {"blk.1.ffn_up.weight": ((96, 64), 8, block * (96 * 64 // 32))}
    path.write_bytes(gguf_bytes(metadata_of("llama"), tensors))
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    with pytest.raises(ModelLoadError, match=r"damaged\.gguf: tensor 'blk.1.ffn_up.weight': a scale is NaN"):
        load_weights(folder, spec, lower(spec), torch.float32)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo, lambda path: None])
def test_what_is_no_file(make, tmp_path):
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ModelLoadError):
        GgufFile.open(path)
    with pytest.raises(ModelLoadError):
        ModelFolder.open(path)
