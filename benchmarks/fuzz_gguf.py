"""Mutated GGUF files, opened and loaded as an engine does: each loads or is one ModelLoadError, quickly and in bounds.

usage: python -m benchmarks.fuzz_gguf MODEL.gguf [--files 10000] [--seed 0]

Most mutations hit the header. Any other exception, a second too many or a gigabyte too many ends the run with the
number of the file, which --seed and that number make again. tests/weights/test_gguf_reader.py runs the first 200.
"""

import argparse
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.reader import GgufFile
from ridgeline.weights.load import load_weights, prequantized

MAX_SECONDS = 2.0
MAX_MORE_BYTES = 256 << 20  # of resident memory, beyond what the whole file takes several times over
NASTY = (0, 1, 2, 3, 7, 8, 13, 31, 33, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)


def mutated(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four changes, nine of ten within the header."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(header_bytes if rng.random() < 0.9 else len(data))
        match rng.randrange(7):
            case 0:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NASTY))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(NASTY) & 0xFFFFFFFF)
            case 4:
                del data[at : len(data) if rng.random() < 0.3 else at + rng.randrange(1, 40)]
            case 5:
                data[at:at] = rng.randbytes(rng.randrange(1, 40))
            case _:
                source = rng.randrange(header_bytes)
                length = rng.randrange(1, 64)
                data[at : at + length] = data[source : source + length]
        if not data:
            return b""
    return bytes(data)


def load(path: Path) -> None:
    """What an engine does with the file before it computes."""
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec, min(spec.max_positions, 4096))
    weights = load_weights(folder, spec, program, FLOAT32)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == program.weights
    assert folder.gguf is not None
    stored = prequantized(folder, spec, program)
    for name in stored.formats if stored is not None else ():
        for expert in range(program.weights[name][0] if len(program.weights[name]) == 3 else 1):
            stored.matrix(name, expert)
    tokenizer = folder.tokenizer()
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("Once upon a time 12 \n"))


def fuzz(folder: Path, content: bytes, *, num_files: int, seed: int) -> Counter[str]:
    """How many of the mutated files loaded and how many were refused. Raises RuntimeError for the first defect."""
    path = folder / "mutated.gguf"
    path.write_bytes(content)
    header_bytes = min(tensor.offset for tensor in GgufFile.open(path).tensors.values())
    load(path)
    max_bytes = _peak_bytes() + MAX_MORE_BYTES + 4 * len(content)
    counts: Counter[str] = Counter()
    for number in range(num_files):
        path.write_bytes(mutated(content, header_bytes, random.Random(f"{seed} {number}")))
        started = time.process_time()
        try:
            load(path)
            counts["loaded"] += 1
        except ModelLoadError as error:
            if str(path) not in str(error):
                raise RuntimeError(f"file {number}: the error does not name the file: {error}") from error
            counts["refused"] += 1
        except Exception as error:
            raise RuntimeError(f"file {number}: {type(error).__name__}: {error}") from error
        if (elapsed_s := time.process_time() - started) > MAX_SECONDS:
            raise RuntimeError(f"file {number} took {elapsed_s:.1f} s")
        if _peak_bytes() > max_bytes:
            raise RuntimeError(f"file {number} took more than {MAX_MORE_BYTES >> 20} MiB")
    return counts


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    before, started = _peak_bytes(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = fuzz(Path(folder), options.model.read_bytes(), num_files=options.files, seed=options.seed)
    elapsed_s, more = time.monotonic() - started, _peak_bytes() - before
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(f"{options.files:,} files: {told}; {elapsed_s:.0f} s, {more / 2**20:.0f} MiB more at the peak; no defect")


if __name__ == "__main__":
    main(sys.argv[1:])
