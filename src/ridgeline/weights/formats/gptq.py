"""GPTQ, as AutoGPTQ and GPTQModel write it: integers of 4 or 8 bits, packed in 32-bit words along the inputs.

For a layer X with N outputs and K inputs, in groups of g inputs, with n = 32 / bits integers in a word, low bits first:

    X.qweight int32 [K / n, N]    X.scales [K / g, N]    X.qzeros int32 [K / g, N / n]    X.g_idx int32 [K]

are together the tensor [N, K] called `X.weight`: w[o, k] = (q[k, o] - z[k / g, o]) * s[k / g, o]. The first version of
the format stores z - 1; of a symmetric model z is 2^(bits-1), and what is stored tells the version. Inputs in another
order than stored (`desc_act`) are refused. https://arxiv.org/abs/2210.17323
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import Bytes, StoredFormat, StoredMatrix, nibbles
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, TensorEntry
from ridgeline.weights.formats import PackedTensor

MAX_GROUP = 128  # larger groups are described as several with one scale
# Keys about how the model was made, or which kernels another program would run.
WITHOUT_EFFECT = (
    "lm_head", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "mse", "meta",
    "quantizer", "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "model_seqlen",
    "batch_size", "pad_token_id", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "cache_block_outputs", "max_input_length", "use_cuda_fp16", "use_exllama",
    "disable_exllama", "exllama_config", "backend",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Settings:
    bits: int
    group: int  # inputs that share a scale; 0: all
    symmetric: bool
    stores_less: bool  # zeros are stored as z - 1


def find(entries: Mapping[str, TensorEntry], settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*WITHOUT_EFFECT)
    settings.expect("pack_dtype", "int32", None)
    settings.expect("dynamic", {}, None)
    settings.expect("is_marlin_format", False)
    if settings.flag("desc_act", False):
        raise ConfigError(
            "quantization_config: desc_act=true stores inputs in the order of their importance, which is not supported "
            "yet; take a model that was quantized with desc_act=false"
        )
    bits = settings.integer("bits")
    group = settings.integer("group_size", low=-1)
    if bits not in (4, 8) or (group < 32 and group != -1):
        raise ConfigError(
            f"quantization_config: bits={bits} with group_size={group} is not supported; GPTQ has 4 or 8 bits here, "
            "and groups of at least 32 inputs or -1"
        )
    versions = {"gptq": True, "gptq_v2": False}
    stores_less = settings.choice(settings.spelling("checkpoint_format", "format"), versions, "gptq")
    chosen = _Settings(bits, max(group, 0), settings.flag("sym", True), stores_less)
    layers = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
    return [_packed(layer, entries, chosen) for layer in layers]


def _packed(layer: str, entries: Mapping[str, TensorEntry], settings: _Settings) -> PackedTensor:
    """Check that the parts of a layer fit together, and return them as one tensor."""
    names = tuple(f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    words, per_word = entries[names[0]], 32 // settings.bits
    missing = [name for name in names[:3] if name not in entries]
    if missing:
        raise ModelLoadError(f"{words.file}: {layer} has no {', '.join(missing)}; download the model again")
    if len(words.shape) != 2:
        raise ModelLoadError(f"{words.file}: {names[0]} is {list(words.shape)}; it must be a matrix")
    num_inputs, num_outputs = words.shape[0] * per_word, words.shape[1]
    group = settings.group or num_inputs
    num_groups = -(-num_inputs // group)
    wanted = {
        names[0]: (("I32",), words.shape),
        names[1]: (("I32",), (num_groups, num_outputs // per_word)),
        names[2]: (tuple(FLOATS), (num_groups, num_outputs)),
        names[3]: (("I32",), (num_inputs,)),
    }
    parts = [name for name in names if name in entries]
    for name in parts:
        dtypes, shape = wanted[name]
        if entries[name].shape != shape or entries[name].dtype not in dtypes or num_outputs % per_word:
            raise ModelLoadError(
                f"{words.file}: {name} is {entries[name].dtype} {list(entries[name].shape)}; {settings.bits} bits in "
                f"groups of {group} need {' or '.join(dtypes)} {list(shape)} beside {names[0]} {list(words.shape)}"
            )
    is_cut = group > MAX_GROUP and group % MAX_GROUP == 0
    form = StoredFormat(
        "uniform",
        8 if settings.bits == 8 else 4,
        MAX_GROUP if is_cut else group,
        "fixed" if settings.symmetric else "points",
        "float16" if entries[names[2]].dtype == "F16" else "float32",
    )
    return PackedTensor(
        f"{layer}.weight",
        (num_outputs, num_inputs),
        tuple(parts),
        form,
        _Reader(f"{words.file}: {layer}", group, settings, form),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Make stored matrices of a layer's parts. `where` begins its errors, `group` is the file's."""

    where: str
    group: int
    settings: _Settings
    form: StoredFormat

    def __call__(self, parts: Sequence[Array], rows: slice) -> StoredMatrix:
        qweight, qzeros, scales = parts[:3]
        num_inputs = qweight.shape[0] * 32 // self.settings.bits
        if len(parts) > 3 and not np.array_equal(parts[3], np.arange(num_inputs) // self.group):
            raise ModelLoadError(f"{self.where}.g_idx reorders the inputs, which desc_act=false says it does not")
        codes = self._integers(np.ascontiguousarray(qweight[:, rows].T))
        points = self._zeros(self._integers(qzeros))[:, rows].T
        scales_NG = float32(scales[:, rows].T)
        if self.form.group != self.group:
            times, num_groups = self.group // self.form.group, self.form.num_groups(num_inputs)
            points = np.repeat(points, times, axis=1)[:, :num_groups]
            scales_NG = np.repeat(scales_NG, times, axis=1)[:, :num_groups]
        return StoredMatrix(self.form, codes, scales_NG, None if self.settings.symmetric else points)

    def _integers(self, words: Array) -> Bytes:
        """Unpack the integers of every word [.., n], [.., n * 32 / bits]."""
        data: Bytes = words.view(np.uint8)
        return data if self.settings.bits == 8 else nibbles(data)

    def _zeros(self, stored: Bytes) -> Bytes:
        """Return the zero points. Raises ModelLoadError where a symmetric model's are not all the same."""
        middle = self.form.fixed_zero
        if not self.settings.symmetric:
            return (stored + np.uint8(self.settings.stores_less)) & np.uint8(2 * middle - 1)
        if not ((stored == middle - 1).all() or (stored == middle).all()):
            raise ModelLoadError(f"{self.where}.qzeros differ, but quantization_config says sym=true")
        return np.full_like(stored, middle)
