"""Model files that nobody vouches for: every broken one ends in one typed error that names the file."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import LLAMA, described, shard, write
from torch_weights import load_weights, save_weights

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.spec import families
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.renames import expand

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


def open_and_load(folder):
    """As an engine does: the config decides what is loaded."""
    opened = ModelFolder.open(folder)
    spec, program = described(dict(opened.config))
    return load_weights(opened, spec, program, torch.float32), program


def loads_or_refuses(folder) -> bool:
    """True where the folder is refused; what loads has every shape that the program declares."""
    try:
        weights, program = open_and_load(folder)
    except (ModelLoadError, ConfigError):
        return True
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == program.weights
    return False


def raw_safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_truncated_anywhere(tmp_path):
    write(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    points = {0, 1, 7, 8, 9, len(content) - 1} | set(random.Random(0).sample(range(len(content)), 120))
    for point in sorted(points):
        file.write_bytes(content[:point])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            open_and_load(tmp_path)


def test_flipped_bits_of_the_header(tmp_path):
    write(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    rng, refused = random.Random(0), 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        refused += loads_or_refuses(tmp_path)
    assert refused > 150  # the rest hit blanks and metadata


def test_flipped_bits_of_the_json_files(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    rng, refused = random.Random(0), 0
    for name in ("config.json", INDEX):
        content = (tmp_path / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            (tmp_path / name).write_bytes(damaged)
            refused += loads_or_refuses(tmp_path)
        (tmp_path / name).write_bytes(content)
    assert refused > 80
    assert not loads_or_refuses(tmp_path)


HUGE = 2**63
HOSTILE = {
    "length of 2^64 - 1": raw_safetensors({}, length=2**64 - 1),
    "length of 2^63": raw_safetensors({}, length=HUGE),
    "length 0": raw_safetensors(b""),
    "list": raw_safetensors([]),
    "not UTF-8": raw_safetensors(b"{\xff}"),
    "deeply nested": raw_safetensors(b'{"a":' + b"[" * 200_000),
    "out of the file": raw_safetensors({"a": entry([4], 0, 16)}, b"\0" * 8),
    "overlapping": raw_safetensors({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, b"\0" * 24),
    "gap": raw_safetensors({"a": entry([4], 0, 16), "b": entry([4], 24, 40)}, b"\0" * 40),
    "end before start": raw_safetensors({"a": entry([4], 16, 0)}, b"\0" * 16),
    "negative offset": raw_safetensors({"a": entry([4], -16, 0)}, b"\0" * 16),
    "shape larger than data": raw_safetensors({"a": entry([1 << 31, 1 << 31], 0, 16)}, b"\0" * 16),
    "shape overflows": raw_safetensors({"a": entry([1 << 33, 1 << 33], 0, 0)}),
    "negative shape": raw_safetensors({"a": entry([-4], 0, 16)}, b"\0" * 16),
    "unknown dtype": raw_safetensors({"a": entry([4], 0, 16, "F33")}, b"\0" * 16),
    "bytes after the tensors": raw_safetensors({"a": entry([4], 0, 16)}, b"\0" * 32),
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors(tmp_path, name):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[name])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a valid"):
        open_and_load(tmp_path)


HOSTILE_JSON = {
    "empty": b"",
    "not UTF-8": b'{"model_type": "\xff"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "list": b"[]",
    "string": b'"llama"',
    "cut": b'{"model_type": "llama"',
    "deeply nested": b'{"a":' + b"[" * 500_000,
    "key twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "NaN": b'{"rms_norm_eps": NaN}',
    "endless integer": b'{"vocab_size": ' + b"9" * 100_000 + b"}",
    "above the limit": b"{" + b" " * (16 << 20) + b"}",
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json(tmp_path, file, name):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    (tmp_path / file).write_bytes(HOSTILE_JSON[name])
    with pytest.raises(ModelLoadError, match=file):
        open_and_load(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        "model.safetensors",
        {"a": 1},
        {"a": "../outside.safetensors"},
        {"a": "/etc/outside.safetensors"},
        {"a": "sub/model.safetensors"},
        {"a": "sub\\model.safetensors"},
        {"a": ".."},
        {"a": "weights.bin"},
        {"a": "nul\0.safetensors"},
    ],
)
def test_index_with_a_bad_map(tmp_path, weight_map):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path.parent / "outside.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        open_and_load(tmp_path)


def test_missing_shard(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    (tmp_path / SHARD).unlink()
    with pytest.raises(ModelLoadError, match=f"{SHARD} is missing"):
        open_and_load(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    save_file({name: torch.zeros(1) for name in weight_map}, tmp_path / SHARD)
    with pytest.raises(ModelLoadError, match=r"is in model-00001.* and in model-00002"):
        open_and_load(tmp_path)


def test_index_and_shards_disagree(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if file != SHARD)
    index["weight_map"][name] = SHARD
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="and it is not"):
        open_and_load(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_fifo_does_not_block(tmp_path, file):
    write(tmp_path, LLAMA)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(ModelLoadError, match="not a regular file"):
        open_and_load(tmp_path)


def test_directory_in_place_of_a_file(tmp_path):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelLoadError, match="not a regular file"):
        open_and_load(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.Q4_K_M.gguf"])
def test_other_formats_are_named(tmp_path, file):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(ModelLoadError, match=f"{file}; convert them to safetensors"):
        open_and_load(tmp_path)


def test_folder_without_weights(tmp_path):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        open_and_load(tmp_path)


def test_two_files_and_no_index(tmp_path):
    write(tmp_path, LLAMA)
    shard(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelLoadError, match="which belong together"):
        open_and_load(tmp_path)


def test_one_file_of_any_name(tmp_path):
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert not loads_or_refuses(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["final_norm.weight", "layers.1.attn.q.weight", "embed.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, name, value):
    spec = families.read_spec(LLAMA)
    weights = write(tmp_path, LLAMA)
    weights[name].view(-1)[-1] = float(value)
    save_weights(tmp_path, spec, weights, torch.float32)
    stored = next(rename.source for rename in expand(families.renames(spec), spec) if rename.targets == (name,))
    with pytest.raises(ModelLoadError, match=f"{stored}' has NaN or infinity"):
        open_and_load(tmp_path)
