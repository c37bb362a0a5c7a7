"""bitsandbytes: NF4 and FP4 in blocks of a flat matrix, maybe with scales in 8 bits, and int8 with a scale per output.
NF4 without scales in 8 bits, and int8, are written too.

`X.weight` of 4 bits holds the whole matrix [N, K] flat, two codes in a byte, the earlier in the high half, whatever
type the bytes are stored as. `X.weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON: the shape, the codes of a
block, and of doubly quantized scales the offset. w = level(code) * absmax[block], where absmax is `X.weight.absmax`, or
nested_quant_map[absmax] * nested_absmax[block of 256] + offset. https://arxiv.org/abs/2305.14314

Of 8 bits: `X.weight` int8 [N, K] and `X.SCB` float32 [N], w = q * SCB / 127. https://arxiv.org/abs/2208.07339
`X.outliers` int32, which is our own, names inputs that keep 16 bits; who does not know it finds them in every batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ridgeline.core.dtypes import Array, contiguous, float32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import LEVELS, Bytes, Code, StoredFormat, StoredMatrix, nibbles
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import DTYPES, FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.bits import covering
from ridgeline.weights.packing.outliers import format_of, with_outliers
from ridgeline.weights.packing.parts import Wanted, checked
from ridgeline.weights.packing.scaled import INT8, Blocks, ScaledBytes

STATE = ".quant_state.bitsandbytes__"
CODES: Mapping[str, Code] = {"nf4": "nf4", "fp4": "fp4"}
STORAGE = ("U8", "I8", *FLOATS)
EIGHT_BITS = ScaledBytes("bitsandbytes' int8", INT8, Blocks(1), ("F32",), lambda scb: float32(scb) / np.float32(127))
MAX_STATE_BYTES = 1 << 16
MAX_GROUP = 64  # larger blocks are described as several with one scale
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*(key for key in settings.all_keys() if key.startswith(("bnb_4bit_", "llm_int8_"))))
    settings.ignore("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")  # the tensors say it
    entries, found = checkpoint.entries, list[PackedTensor]()
    for name in entries:
        weight, _, kind = name.partition(STATE)
        if kind:
            found.append(_four_bits(checkpoint, weight, name, kind))
        elif name.endswith(".SCB"):
            layer = name.removesuffix(".SCB")
            arranged = f"{layer}.weight_format"
            if arranged in entries and np.any(checkpoint.tensor(arranged) != 0):
                what = f"{arranged} is not 0: int8 arranged for a GPU is not read"
                raise ModelLoadError(f"{entries[name].file}: {what}; save the model by bitsandbytes 0.43 or later")
            if f"{layer}.weight" not in entries:
                raise ModelLoadError(f"{entries[name].file}: {name} has no {layer}.weight beside it")
            packed = EIGHT_BITS.packed(checkpoint, f"{layer}.weight", f"{layer}.weight", name, unused=[arranged])
            found.append(_with_outliers(checkpoint, packed, f"{layer}.outliers"))
    bare = [name for name, entry in entries.items() if name.endswith(".weight") and entry.dtype in ("U8", "I8")]
    if missing := set(bare) - {tensor.name for tensor in found}:
        name = min(missing)
        raise ModelLoadError(f"{entries[name].file}: {name} is quantized and has no quant_state or SCB; save it again")
    return found


def _with_outliers(checkpoint: Checkpoint, packed: PackedTensor, name: str) -> PackedTensor:
    """Return `packed` with the outliers of tensor `name`, where there are any. Raises ModelLoadError."""
    entry = checkpoint.entries.get(name)
    if entry is None:
        return packed
    num_inputs = packed.shape[1]
    outliers = checkpoint.tensor(name) if entry.dtype == "I32" and len(entry.shape) == 1 else np.zeros(0, np.int32)
    in_order = 0 < len(outliers) < num_inputs and (np.diff(outliers) > 0).all()
    if not in_order or outliers[0] < 0 or outliers[-1] >= num_inputs:
        what = f"{name} must be int32, some but not all of {num_inputs} inputs in order"
        raise ModelLoadError(f"{entry.file}: {what}; save it again")

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        return with_outliers(packed.matrix(parts, rows), outliers)

    form = format_of(packed.format, outliers)
    return PackedTensor(packed.name, packed.shape, (*packed.parts, name), form, matrix)


class _State(msgspec.Struct):
    """Holds what the JSON of a quant_state says."""

    shape: tuple[Count, Count]
    blocksize: Count = 64
    nested_offset: Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)] = 0.0
    nested_blocksize: Count = 256


def _four_bits(checkpoint: Checkpoint, weight: str, state_name: str, kind: str) -> PackedTensor:
    entries = checkpoint.entries
    file = entries[state_name].file
    if kind not in CODES:
        raise ConfigError(f"{file}: {state_name} is not supported; supported: {', '.join(CODES)}")
    if weight not in entries:
        raise ModelLoadError(f"{file}: {state_name} has no {weight} beside it; download the model again")
    state = _read_state(checkpoint, state_name)
    count, dtype = math.prod(state.shape), entries[weight].dtype
    size = DTYPES[dtype].itemsize if dtype in STORAGE else 1
    absmax, levels = f"{weight}.absmax", f"{weight}.quant_map"
    num_items, num_blocks = -(-count // (2 * size)), -(-count // state.blocksize)
    nested = absmax in entries and entries[absmax].dtype == "U8"
    wanted: Wanted = {
        weight: (STORAGE, (num_items, 1) if len(entries[weight].shape) == 2 else (num_items,)),
        absmax: (("U8",) if nested else ("F32",), (num_blocks,)),
        levels: (("F32",), (len(LEVELS[CODES[kind]]),)),
    }
    if nested:
        wanted[f"{weight}.nested_absmax"] = ("F32",), (-(-num_blocks // state.nested_blocksize),)
        wanted[f"{weight}.nested_quant_map"] = ("F32",), (256,)
    checked(entries, wanted, f"{kind} of {list(state.shape)} in blocks of {state.blocksize}")
    if not np.array_equal(checkpoint.tensor(levels), LEVELS[CODES[kind]]):
        raise ModelLoadError(f"{file}: {levels} is not the table of {kind}")
    num_outputs, num_inputs = state.shape
    form = StoredFormat(CODES[kind], 4, math.gcd(MAX_GROUP, state.blocksize, num_inputs), scale="float32")

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        first, end, step = rows.indices(num_outputs)
        flat = slice(first * num_inputs, max(first, end) * num_inputs)
        within_bytes, within = covering(flat, count, 2)
        data: Bytes = contiguous(parts[0]).reshape(-1).view(np.uint8)[within_bytes]
        codes = nibbles(data << np.uint8(4) | data >> np.uint8(4))[within].reshape(-1, num_inputs)
        blocks = np.arange(flat.start, flat.stop, form.group) // state.blocksize
        scales = parts[1][blocks]
        if nested:
            scales = parts[4][scales] * parts[3][blocks // state.nested_blocksize] + np.float32(state.nested_offset)
        return StoredMatrix(form, codes[::step], scales.reshape(len(codes), -1)[::step])

    return PackedTensor(weight, state.shape, (*wanted, state_name), form, matrix)


def _read_state(checkpoint: Checkpoint, name: str) -> _State:
    """Raises ModelLoadError where the JSON of a tensor is not what a quant_state is."""
    entry = checkpoint.entries[name]
    try:
        if entry.dtype != "U8" or entry.num_bytes > MAX_STATE_BYTES:
            raise ValueError(f"it is {entry.dtype} {list(entry.shape)}")
        return msgspec.json.decode(contiguous(checkpoint.tensor(name)).tobytes(), type=_State)
    except (ValueError, RecursionError) as error:
        what = f"{str(error)[:200]}; it must be the JSON of a quant_state"
        raise ModelLoadError(f"{entry.file}: {name}: {what}") from error


def packed_tensors(layer: str, stored: StoredMatrix, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return the tensors of a layer; blocks of 4 bits end with its rows. `dtype` is that of the whole model."""
    weight, form, flat = f"{layer}.weight", stored.format, stored.codes.reshape(-1)
    if form.bits == 8:
        return _eight_bits(layer, stored)
    state = {"quant_type": form.code, "blocksize": form.group, "dtype": dtype.name, "shape": stored.codes.shape}
    return {
        weight: (flat[::2] << np.uint8(4) | flat[1::2])[:, None],
        f"{weight}.absmax": contiguous(stored.scales).reshape(-1),
        f"{weight}.quant_map": LEVELS[form.code],
        f"{weight}{STATE}{form.code}": np.frombuffer(msgspec.json.encode(state), dtype=np.uint8),
    }


def _eight_bits(layer: str, stored: StoredMatrix) -> dict[str, Array]:
    codes, scales, form = stored.codes, stored.scales[:, 0], stored.format
    scb = scales * np.float32(127)
    for _ in range(2):  # a last bit more or less, until readers find these scales
        found = scb / np.float32(127)
        scb = np.where(found == scales, scb, np.nextafter(scb, np.where(found < scales, np.inf, 0), dtype=np.float32))
    tensors: dict[str, Array] = {f"{layer}.SCB": scb, f"{layer}.weight_format": np.zeros((), np.uint8)}
    if stored.order is not None:
        codes = codes[:, np.argsort(stored.order)]
        tensors[f"{layer}.outliers"] = contiguous(stored.order[-form.outliers :])
    return tensors | {f"{layer}.weight": contiguous(codes ^ np.uint8(form.fixed_zero)).view(np.int8)}


def quantization_config(form: StoredFormat, ignored: Sequence[str], others: Mapping[Any, Any]) -> dict[str, object]:
    """Return config.json's quantization_config of a model of which all linear layers but `ignored` are so stored."""
    assert not others, "a model of bitsandbytes has one format"
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": form.bits == 4,
        "load_in_8bit": form.bits == 8,
        "llm_int8_threshold": 6.0,
        "bnb_4bit_quant_type": form.code if form.bits == 4 else "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignored),
    }
