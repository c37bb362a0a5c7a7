"""Write a model folder as one GGUF file with its tokenizer: Llama, Qwen2 and Qwen3 with byte-level BPE.

Matrices that a folder stores in groups of 32 stay what they are to the bit, as Q8_0, Q4_0 or Q4_1; other matrices have
the dtype of config.json, and vectors are F32, as llama.cpp wants them.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ridgeline.core.dtypes import DTYPES, Array, contiguous, to_dtype
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quant.stored import StoredFormat
from ridgeline.spec import gguf
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import GroupedQueryAttention
from ridgeline.text.gguf import metadata_of_tokenizer
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.reader import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, STRING, VERSIONS
from ridgeline.weights.gguf.types import TYPES
from ridgeline.weights.load import StreamedWeights

ARCHITECTURES = ("llama", "qwen2", "qwen3")
BY_NAME = {kind.name: number for number, kind in TYPES.items()}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
OF_FORM = {cast("StoredFormat", TYPES[BY_NAME[name]].form): name for name in ("Q4_0", "Q4_1", "Q8_0")}
UINT32, INT32, FLOAT = 4, 5, 6
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


class GgufWriter:
    """Writes one model; what a file cannot say is found before any weight is read."""

    def __init__(self, folder: ModelFolder) -> None:
        """Raises ConfigError for a model, an option of it or a tokenizer that a file has no way to say."""
        self._folder, config = folder, folder.config
        self._spec = read_spec(config)
        self._program = lower(self._spec)
        mixer = self._spec.layers[0].mixer
        self._head_dim = mixer.head_dim if isinstance(mixer, GroupedQueryAttention) else 0
        self._dtype = str(config.get("dtype", config.get("torch_dtype")) or "float32")
        name = self._spec.model_type
        if name not in ARCHITECTURES or self._dtype not in NAMES:
            known = f"written are {', '.join(ARCHITECTURES)} in {', '.join(NAMES)}"
            raise ConfigError(f"{folder.name} is {name} in {self._dtype}, which is not written as GGUF; {known}")
        self._stored = {
            item.rename.source.replace("{i}", str(layer)): (target, item)
            for item in gguf.tensors(name)
            for layer in range(0 if item.rename.experts or item.rename.targets[1:] else len(self._spec.layers))
            if (target := item.rename.targets[0].replace("{i}", str(layer))) in self._program.weights
        }
        own = self._own_metadata(config)
        shapes = {source: self._program.weights[target] for source, (target, _) in self._stored.items()}
        # What is read again is what was meant, but for numbers that lose bits as float32.
        meant = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in config.items()}
        same = {target for target, _ in self._stored.values()} == set(self._program.weights)
        if not same or read_spec(gguf.read_config(name, own, shapes)) != read_spec(meant):
            raise ConfigError(
                f"{folder.name}: GGUF cannot say all that its config.json does, such as its rope or biases"
            )
        ends = folder.generation_config.eos_token_ids
        self._metadata: dict[str, object] = {
            "general.architecture": name,
            "general.name": folder.name,
            "general.alignment": DEFAULT_ALIGNMENT,
            **{f"{name}.{key}": value for key, value in own.items()},
            **metadata_of_tokenizer(folder.text_tokenizer(), self._spec.vocab_size, ends[0] if ends else None),
        }

    def _own_metadata(self, config: Mapping[str, object]) -> dict[str, object]:
        rope = cast("dict[str, object]", config.get("rope_parameters") or {})
        hidden, heads = (cast("int", config[key]) for key in ("hidden_size", "num_attention_heads"))
        head_dim = config.get("head_dim") or hidden // heads
        found = {key: config.get(theirs, heads) for key, theirs in SIZES.items()}
        found |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head_dim)
        theta = cast("float", config.get("rope_theta", rope.get("rope_theta", 10000.0)))
        eps = cast("float", config.get("rms_norm_eps", 1e-6))
        numbers = {"rope.freq_base": theta, "attention.layer_norm_rms_epsilon": eps}
        return {**found, **{key: float(np.float32(value)) for key, value in numbers.items()}}

    def write(self, quantized: ModelFolder, path: Path) -> None:
        """Write the file, with the weights of a folder of the same model; it appears when it is whole."""
        weights = StreamedWeights(quantized, self._spec, self._program, DTYPES[self._dtype])
        kinds = {source: self._type(weights, target) for source, (target, _) in self._stored.items()}
        infos, offset = b"", 0
        for source, (target, _) in self._stored.items():
            shape, kind = self._program.weights[target], TYPES[BY_NAME[kinds[source]]]
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos += _text(source) + dims + struct.pack("<IQ", BY_NAME[kind.name], offset)
            offset += kind.num_bytes(shape) + -kind.num_bytes(shape) % DEFAULT_ALIGNMENT
        head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(kinds), len(self._metadata))
        head += b"".join(_text(key) + _value(value) for key, value in self._metadata.items()) + infos
        partial = path.with_name(path.name + ".writing")
        with partial.open("wb") as file:
            file.write(head + bytes(-len(head) % DEFAULT_ALIGNMENT))
            for source, (target, item) in self._stored.items():
                data = _bytes_of(weights, target, kinds[source], self._head_dim if item.change else 0)
                file.write(data + bytes(-len(data) % DEFAULT_ALIGNMENT))
        partial.replace(path)

    def _type(self, weights: StreamedWeights, target: str) -> str:
        form = weights.formats.get(target)
        if len(self._program.weights[target]) == 1:
            return "F32"
        return OF_FORM.get(form, NAMES[self._dtype]) if form is not None else NAMES[self._dtype]


def _bytes_of(weights: StreamedWeights, target: str, kind: str, paired_rows: int) -> bytes:
    if kind in NAMES.values():
        dtype = next(name for name, each in NAMES.items() if each == kind)
        return contiguous(_paired(to_dtype(weights[target], DTYPES[dtype]), paired_rows)).tobytes()
    stored = weights.matrix(target)
    parts = (stored.codes, stored.scales, *([] if stored.minima is None else [stored.minima]))
    codes, *scales = (_paired(part, paired_rows) for part in parts)
    blocks = codes.reshape(-1, 32)
    data = blocks ^ np.uint8(128) if kind == "Q8_0" else blocks[:, :16] | blocks[:, 16:] << np.uint8(4)
    heads = [each.reshape(-1, 1).astype(np.float16).view(np.uint8) for each in scales]
    return np.concatenate([*heads, data], axis=1).tobytes()


def _paired(rows: Array, paired_rows: int) -> Array:
    """Return rows as the file has them: those of both halves of a head in turns, where it has pairs."""
    if not paired_rows:
        return rows
    return rows.reshape(-1, 2, paired_rows // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT, value)
        case str():
            return struct.pack("<I", STRING) + _text(value)
        case _:
            items = cast("Sequence[Any]", value)
            if isinstance(items[0], str):
                return struct.pack("<IIQ", ARRAY, STRING, len(items)) + b"".join(map(_text, items))
            return struct.pack(f"<IIQ{len(items)}i", ARRAY, INT32, len(items), *items)


def check_form(form: StoredFormat) -> None:
    """Raise ConfigError for matrices of a form that GGUF has no type for."""
    if form not in OF_FORM:
        has = "groups of 32 without zero points, or of method hqq: give --group-size 32"
        raise ConfigError(f"GGUF has no {form}; it has {has}")
