"""The fuzzer of quantized weights: tensors change their type, shape or numbers, or are gone; settings change.

The bytes of an input are the choices that are made.
"""

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
from quantized_folder import LLAMA
from safetensors.numpy import save_file
from test_awq import awq
from test_gptq import gptq
from test_hqq_torchao import hqq, torchao
from test_more_formats import auto_round, eight_bits, fbgemm, four_bits, fp8, mlx, modelopt
from tests.fuzz.files import loaded
from tests.fuzz.harness import Drawn, Target, refusing

from ridgeline.core.dtypes import Array
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights.checkpoint import Checkpoint, metadata_of

SMALL = LLAMA | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1}


def compressed(folder: Path, form: str, **args: object) -> None:
    from test_compressed_tensors import compressed  # skips where the library is not installed

    compressed(folder, form, SMALL, **args)


def mxfp4(folder: Path) -> None:
    from test_expert_weights import quantized

    quantized(folder)


def rounded(folder: Path) -> None:
    gptq(folder, SMALL, sym=False)
    auto_round(folder, "auto_round:auto_gptq", sym=False)


MAKERS: Mapping[str, Callable[[Path], object]] = {
    "awq": lambda folder: awq(folder, SMALL),
    "gptq": lambda folder: gptq(folder, SMALL, sym=False, order="shuffled"),
    "modelopt": lambda folder: modelopt(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, SMALL),
    "bitsandbytes-4": lambda folder: four_bits(folder, config=SMALL),
    "bitsandbytes-8": lambda folder: eight_bits(folder),
    "mlx": lambda folder: mlx(folder, config=SMALL),
    "hqq": lambda folder: hqq(folder, config=SMALL),
    "torchao-4": lambda folder: torchao(folder, config=SMALL),
    "torchao-8": lambda folder: torchao(folder, "IntxUnpackedToInt8Tensor", config=SMALL),
    "fp8": lambda folder: fp8(folder, config=SMALL),
    "fbgemm": lambda folder: fbgemm(folder, config=SMALL),
    "mxfp4": mxfp4,
    "auto-round": rounded,
    "pack": lambda folder: compressed(
        folder, "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "int": lambda folder: compressed(folder, "int-quantized", num_bits=8, strategy="channel"),
    "block": lambda folder: compressed(
        folder, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32]
    ),
    "nvfp4": lambda folder: compressed(
        folder, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
}
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    5,
    7,
    31,
    64,
    1 << 40,
    0.5,
    "",
    "int",
    "gemm",
    "re:(a+)+",
    [],
    [0],
    {},
    {"bits": 3},
)
TYPES = (np.uint8, np.int8, np.int16, np.float16, np.int32, np.uint32, np.float32, np.int64, np.float64)


def mutated_tensor(tensor: Array, rng: random.Random) -> Array | None:
    """Return the tensor with another shape, type or numbers; None: it is gone."""
    flat = np.ascontiguousarray(tensor).reshape(-1)
    match rng.randrange(8):
        case 0:
            return None
        case 1:
            return tensor[: rng.randrange(len(tensor) + 1)] if tensor.ndim else tensor.reshape(1)
        case 2:
            return tensor[..., : rng.randrange(tensor.shape[-1] + 1)] if tensor.ndim else tensor.reshape(1, 1)
        case 3:
            data, dtype = flat.view(np.uint8), np.dtype(rng.choice(TYPES))
            return data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
        case 4:
            dtype = np.dtype(rng.choice(TYPES))
            return np.zeros(tensor.shape, dtype) if rng.random() < 0.5 else np.full(tensor.shape, 1, dtype)
        case 5:
            return tensor.reshape(rng.choice([(-1,), (1, -1), (-1, 1), (1, *tensor.shape), tensor.shape[::-1]]))
        case 6:
            return np.concatenate([tensor, tensor]) if tensor.ndim else tensor
        case _:
            noise = np.frombuffer(rng.randbytes(flat.nbytes), flat.dtype).copy()
            keep = np.frombuffer(rng.randbytes(flat.size), np.uint8) > rng.randrange(256)
            return np.where(keep, flat, noise).astype(flat.dtype).reshape(tensor.shape)


def mutated_settings(settings: dict[str, object], rng: random.Random) -> None:
    """Change one value, wherever it is, in place."""
    key = rng.choice(list(settings) or ["bits"])
    inner = settings.get(key)
    if isinstance(inner, dict) and inner and rng.random() < 0.8:
        mutated_settings(inner, rng)
    elif rng.random() < 0.2:
        settings.pop(key, None)
    else:
        settings[key] = deepcopy(rng.choice(VALUES))


def quantized(folder: Path, formats: tuple[str, ...] = tuple(MAKERS)) -> Target:
    """The first byte chooses the format."""
    for name in formats:
        (folder / name).mkdir()
        MAKERS[name](folder / name)
    return of_folders(folder / "changed", [folder / name for name in formats])


def of_folders(changed: Path, sources: list[Path]) -> Target:
    """Return the fuzzer of folders with quantized weights, each changed in the folder `changed`."""
    changed.mkdir()
    stored, configs, said = list[dict[str, Array]](), list[dict[str, object]](), list[Mapping[str, str]]()
    for source in sources:
        checkpoint = Checkpoint.open(source)
        stored.append({name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries})
        configs.append(json.loads((source / "config.json").read_text()))
        said.append(metadata_of(source / "model.safetensors"))

    def run(data: bytes) -> bool:
        rng = Drawn(data[1:])
        number = data[0] % len(sources)
        tensors, config, about = dict(stored[number]), deepcopy(configs[number]), dict(said[number])
        for _ in range(1 + rng.randrange(3)):
            if rng.random() < 0.3:
                mutated_settings(config["quantization" if "quantization" in config else "quantization_config"], rng)
            elif about and rng.random() < 0.3:
                key = rng.choice(sorted(about))
                settings = {key: json.loads(about[key])}
                mutated_settings(settings, rng)
                about[key] = json.dumps(settings.get(key))
            elif tensors:
                name = rng.choice(sorted(tensors, key=_is_plain)[: 1 + rng.randrange(len(tensors))])
                found = mutated_tensor(tensors.pop(name), rng)
                tensors |= {} if found is None else {name: np.ascontiguousarray(found)}
        save_file(tensors, changed / "model.safetensors", about or None)
        (changed / "config.json").write_text(json.dumps(config))
        with refusing(ModelLoadError, ConfigError) as refused:
            loaded(changed)
        return not refused

    rng = random.Random(0)
    seeds = [bytes([number]) + rng.randbytes(60) for number in range(len(sources)) for _ in range(8)]
    return Target(run, seeds, head=12)


def _is_plain(name: str) -> bool:
    """Tell whether a tensor is as in other folders: these are changed less often."""
    return name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight"))
