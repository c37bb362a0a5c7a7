"""The probe kernels at every ISA level: the stream reads every byte, peaks come, wrong arguments are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

LEVELS = native.runnable_levels()
KINDS = ("f32", "bf16", "int16", "int8", "int4")


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(num_bytes=st.integers(0, 3000), offset=st.integers(0, 64), seed=st.integers(0, 2**32 - 1))
def test_the_stream_reads_every_byte_once(level, num_bytes, offset, seed):
    memory = np.random.default_rng(seed).integers(0, 256, offset + num_bytes, dtype=np.uint8)
    padded = np.zeros(-(-num_bytes // 8) * 8, np.uint8)
    padded[:num_bytes] = memory[offset:]
    assert native.read_words(level, memory[offset:]) == np.bitwise_xor.reduce(padded.view(np.uint64), initial=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_reading_per_repeat(level):
    for num_threads, num_bytes in ((1, 64), (3, 100_000)):
        rates = native.read_bandwidth(level, num_threads, num_bytes, 2)
        assert len(rates) == 2 and min(rates) > 0
    for kind in KINDS:
        rates = native.peak(level, kind, 2, 0.001, 3)
        assert len(rates) == 3 and min(rates) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sse9", 1, 1 << 20, 1), "ISA level 'sse9' does not run here"),
        (("portable", 0, 1 << 20, 1), "num_threads"),
        (("portable", 1, 63, 1), "buffer_bytes"),
        (("portable", 1, -1, 1), "buffer_bytes"),
        (("portable", 1, 2**63 - 1, 1), "buffer_bytes"),
        (("portable", 1, 1 << 20, 0), "repeats"),
    ],
)
def test_wrong_streams_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        native.read_bandwidth(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("portable", "f16", 1, 0.1, 1), "kind"),
        (("portable", "f32", 2000, 0.1, 1), "num_threads"),
        (("portable", "f32", 1, 0.0, 1), "seconds"),
        (("portable", "f32", 1, float("nan"), 1), "seconds"),
    ],
)
def test_wrong_peaks_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        native.peak(*arguments)


def test_a_wrong_array_is_an_exception():
    for wrong in (np.zeros(8, np.float32), np.zeros((2, 8), np.uint8), np.zeros(16, np.uint8)[::2], "text"):
        with pytest.raises(TypeError):
            native.read_words("portable", wrong)
