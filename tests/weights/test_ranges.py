"""Ranges of a weight's rows: the same numbers as of the whole, read without touching the rest of the file."""

import re
from pathlib import Path

import numpy as np
import pytest
from small_checkpoint import GPT2, LLAMA, PHI3, described, write

from families import names, tiny
from ridgeline.core.dtypes import BFLOAT16, FLOAT32, equal
from ridgeline.weights.load import StreamedWeights

SMAPS = Path("/proc/self/smaps")


def every_family():
    for name in names():
        yield name, tiny(name, lambda *options: options[-1]) | {"model_type": name}


@pytest.mark.parametrize("config", [LLAMA, PHI3, GPT2, *(c for _, c in every_family())], ids=lambda c: c["model_type"])
def test_ranges_are_those_of_the_whole(tmp_path, config):
    """Fused, interleaved, turned around, stacked, one by one: whatever the family's names are."""
    write(tmp_path, config)
    spec, program = described(config)
    weights, rng = StreamedWeights(tmp_path, spec, program, BFLOAT16), np.random.default_rng(0)
    for name in weights:
        whole = weights[name]
        _, source = weights._sources[name][0]
        stacked = source.rename.experts or source.expert is not None
        rows = whole.shape[1] if stacked else whole.shape[0]
        begin = int(rng.integers(rows))
        end = int(rng.integers(begin, rows)) + 1
        assert equal(weights.rows(name, slice(begin, end)), whole[:, begin:end] if stacked else whole[begin:end]), name


def mapped_bytes(file):
    """What of the file this process has touched through mappings of it."""
    found = re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", SMAPS.read_text())
    return sum(int(kib) << 10 for kib in found)


@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel does not say which pages are mapped")
def test_what_is_outside_is_not_read(tmp_path):
    """A kernel maps more around a page that is read, up to a huge page of 2 MiB."""
    config = PHI3 | {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 1}
    write(tmp_path, config)
    file, weights = tmp_path / "model.safetensors", StreamedWeights(tmp_path, *described(config), FLOAT32)
    assert file.stat().st_size > 16 << 20
    assert mapped_bytes(file) == 0
    keys = weights.rows("layers.0.attn.k.weight", slice(256, 320))  # of which every number is checked
    assert keys.shape == (64, 1024) and keys.sum() != 0
    assert keys.nbytes <= mapped_bytes(file) <= 4 << 20
    everything = weights.rows("layers.0.attn.k.weight", slice(None))
    assert everything.sum() != 0 and everything.nbytes == 4 << 20
    assert everything.nbytes <= mapped_bytes(file) <= 8 << 20
