"""Mutated folders of quantized weights, loaded as an engine does: each loads or is one typed error, quickly.

usage: python -m benchmarks.fuzz_quantized FOLDER [--files 10000] [--seed 0]

Tensors lose rows, change their type, their shape or their numbers, or are gone; settings get other values. Any other
exception than ModelLoadError and ConfigError, or a second too many, ends the run with the number of the folder, which
--seed and that number make again. tests/weights/test_fuzz_quantized.py runs a few of every format.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ridgeline.core.dtypes import FLOAT32, Array
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights, prequantized

MAX_SECONDS = 2.0
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
    """The tensor with another shape, type or numbers; None: it is gone."""
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


def load(path: Path) -> None:
    """What an engine does with the folder before it computes."""
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec, min(spec.max_positions, 4096))
    with np.errstate(all="ignore"):
        weights = load_weights(folder, spec, program, FLOAT32)
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == program.weights
        stored = prequantized(folder, spec, program)
        for name in stored.formats if stored is not None else ():
            for expert in range(program.weights[name][0] if len(program.weights[name]) == 3 else 1):
                stored.matrix(name, expert)


def fuzz(source: Path, *, num_files: int, seed: int) -> Counter[str]:
    """How many of the mutated folders loaded and how many were refused. Raises RuntimeError for the first defect."""
    checkpoint, counts = Checkpoint.open(source), Counter[str]()
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries}
    config = json.loads((source / "config.json").read_text())
    place = "quantization" if "quantization" in config else "quantization_config"
    # Plain tensors are not what this is about: three of four changes are of those that only a quantized folder has.
    names = sorted(tensors)
    special = [name for name in names if not name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight"))]
    load(source)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "mutated"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        for number in range(num_files):
            rng = random.Random(f"{seed} {number}")
            changed, settings = dict(tensors), json.loads(json.dumps(config))
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                if rng.random() < 0.3:
                    mutated_settings(settings[place], rng)
                elif name := rng.choice(
                    [name for name in (special if rng.random() < 0.8 else names) if name in changed]
                ):
                    found = mutated_tensor(changed[name], rng)
                    changed = {key: value for key, value in changed.items() if key != name}
                    changed |= {} if found is None else {name: np.ascontiguousarray(found)}
            save_file(changed, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(settings))
            counts[_outcome(folder, number)] += 1
    return counts


def _outcome(folder: Path, number: int) -> str:
    started = time.process_time()
    try:
        load(folder)
        outcome = "loaded"
    except (ModelLoadError, ConfigError) as error:
        if len(str(error)) < 20 or "\n" in str(error):
            raise RuntimeError(f"folder {number}: the error says too little: {error}") from error
        outcome = "refused"
    except Exception as error:
        raise RuntimeError(f"folder {number}: {type(error).__name__}: {error}") from error
    if (elapsed_s := time.process_time() - started) > MAX_SECONDS:
        raise RuntimeError(f"folder {number} took {elapsed_s:.1f} s")
    return outcome


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    counts = fuzz(options.folder, num_files=options.files, seed=options.seed)
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(f"{options.files:,} folders: {told}; {time.monotonic() - started:.0f} s; no defect")


if __name__ == "__main__":
    main()
