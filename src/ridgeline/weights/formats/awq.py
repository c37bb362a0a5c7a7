"""AWQ, as AutoAWQ's "gemm" version writes it: integers of 4 bits, packed in 32-bit words along the outputs.

For a layer X with N outputs and K inputs, in groups of g inputs:

    X.qweight int32 [K, N / 8]    X.qzeros int32 [K / g, N / 8]    X.scales [K / g, N]

are together the tensor [N, K] called `X.weight`: w[o, k] = (q[k, o] - z[k / g, o]) * s[k / g, o]. Nibble i of a word,
low bits first, is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. https://arxiv.org/abs/2306.00978
"""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.dtypes import Array, contiguous
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import Bytes, StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor, without_effect
from ridgeline.weights.packing.bits import covering, unpacked
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, matrix_entry, scale_type

PER_WORD = 8
NIBBLE_OF_OUTPUT = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*without_effect("awq"))
    settings.flag("zero_point", True)  # whether there are zero points, the tensors say
    settings.expect("rotation", None)  # inputs would be turned as well, at run time
    for key in ("version", "format", "checkpoint_format"):
        version = settings.text(key, "gemm").lower()
        if version != "gemm":
            why = f"{key}={version!r} is not supported: its words are arranged for a kernel of another program"
            advice = "take a model of version \"gemm\", or one in GPTQ's or compressed-tensors' format"
            raise ConfigError(f"quantization_config: {why}; {advice}")
    bits = settings.integer(settings.spelling("bits", "w_bit"))
    group = settings.integer(settings.spelling("group_size", "q_group_size"), low=-1)
    if bits != 4 or group == 0:
        raise ConfigError(f"quantization_config: bits={bits} with group_size={group} is not supported; AWQ has 4 bits")
    layers = [name.removesuffix(".qweight") for name in checkpoint.entries if name.endswith(".qweight")]
    return [_packed(layer, checkpoint, max(group, 0)) for layer in layers]


def _packed(layer: str, checkpoint: Checkpoint, group: int) -> PackedTensor:
    words, zeros, scales = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))
    num_inputs, num_words = matrix_entry(checkpoint.entries, words).shape
    groups, num_outputs = Groups(num_inputs, group), num_words * PER_WORD
    wanted: Wanted = {words: (("I32",), (num_inputs, num_words)), scales: (FLOATS, (groups.count, num_outputs))}
    has_zeros = zeros in checkpoint.entries
    if has_zeros:
        wanted[zeros] = ("I32",), (groups.count, num_words)
    names = checked(checkpoint.entries, wanted, f"AWQ in groups of {groups.stored} inputs")
    integers = Integers.of(groups, 4, "points" if has_zeros else "fixed", scale_type(checkpoint, scales))

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        points = _outputs(parts[2], rows) if has_zeros else None
        return integers.matrix(_outputs(parts[0], rows), parts[1][:, rows].T, points)

    return PackedTensor(f"{layer}.weight", (num_outputs, num_inputs), names, integers.form, matrix)


def _outputs(words_XW: Array, rows: slice) -> Bytes:
    """Return the integers [N, X] of the outputs `rows` of words [X, N / 8]."""
    words, within = covering(rows, words_XW.shape[1] * PER_WORD, PER_WORD)
    nibbles_XWI = unpacked(words_XW[:, words], 4).reshape(len(words_XW), -1, PER_WORD)
    return contiguous(nibbles_XWI[:, :, NIBBLE_OF_OUTPUT].reshape(len(words_XW), -1)[:, within].T)
