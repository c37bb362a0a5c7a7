"""What the scripts here share: the facts of a report, options that all have, processes of their own, random models.

A script has a Report with fields of its own, a function that measures, one that shows a table, and a `main`:

    parser = option_parser(__doc__)
    parser.add_argument(...)
    options = parser.parse_args()
    report = measure(options)
    show(report)
    save(options.out, report)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.backends.probe import Moment, ceilings, find_native
from ridgeline.bench.calibrate import MAX_BATCH, MAX_PROMPT, calibration
from ridgeline.bench.profile import Profiler, scheduler_config
from ridgeline.bench.report import Report, save_report
from ridgeline.core.config import EngineConfig
from ridgeline.core.machine import usable_cores
from ridgeline.cost.efficiency import Calibration
from ridgeline.cost.hardware import save_calibration
from ridgeline.engine.build import build_engine

RESULTS = Path(__file__).parent / "results"
STREAM_BYTES = 2**30


def option_parser(doc: str, *, out: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser with --threads and --out; without `out` a result is written only where it is asked for."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, default=out, help="folder that the result is written to")
    return parser


def text_parser(doc: str) -> argparse.ArgumentParser:
    """Return the parser of `option_parser` with the options of what is measured on held-out text, in windows."""
    parser = option_parser(doc)
    parser.add_argument("--model", default="python-9m", help="folder, .gguf file, hub id or bundled model")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="held-out text, UTF-8")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most")
    parser.add_argument("--window", type=int, default=512, help="tokens that the model sees at most")
    return parser


def save(out: Path | None, report: Report) -> None:
    """Write the result into `out` and say where."""
    if out:
        print(f"written: {save_report(out, report)}")


def in_own_process(module: str, *more: str) -> dict:
    """Run the script once more with this one's arguments and `more`; return the JSON object of its last line."""
    command = [sys.executable, "-m", module, *sys.argv[1:], *more]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def model_folder(chosen: Path | None, write: Callable[[Path], None]) -> Iterator[Path]:
    """Give the chosen folder, or a temporary one; `write` fills it where it has no model yet."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen or Path(temporary)
        if not (folder / "config.json").exists():
            write(folder)
        yield folder


def write_random(folder: Path, model_class: str, **config: object) -> None:
    """Write a model of transformers with random weights in bfloat16, without a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    family = model_class.removesuffix("ForCausalLM")
    made = getattr(transformers, f"{family}Config")(**config, bos_token_id=None, eos_token_id=None)
    getattr(transformers, model_class)(made).save_pretrained(folder)


def model_of_format(name: str, formats: Mapping[str, Any], model: str, int16: Any) -> tuple[str, Any]:
    """Return the model and the options of a format: one of `formats`, or a quantized folder or GGUF file instead.

    `:int16` behind its path: with inputs of 16 bits, which are the options `int16`. Exits for anything else.
    """
    if name in formats:
        return model, formats[name]
    path = name.removesuffix(":int16")
    if not Path(path).exists():
        raise SystemExit(f"{name!r} is no folder, no file and none of {', '.join(formats)}")
    return path, int16 if path != name else type(int16)()


def stream_bytes_per_s(threads: int) -> float:
    """Return what `threads` threads of this process read from memory together, measured now."""
    from ridgeline import _native

    return statistics.median(_native.read_bandwidth(_native.best_level(), threads, STREAM_BYTES, 5))


def step_s(llm: LLM, prompt: list[int], steps: int) -> float:
    """Return the seconds between consecutive tokens behind a prompt: the median of `steps` of them."""
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    times = [time.perf_counter() for _ in llm.stream(prompt, params)]
    return statistics.median(after - before for before, after in zip(times, times[1:]))


def calibrate(config: EngineConfig) -> Calibration:
    """Fit the efficiencies of a model's ops on this machine, keep them, and return them."""
    threads = config.num_threads or usable_cores()
    config = replace(config, cache=replace(config.cache, prefix_caching=False))
    config = replace(config, scheduler=scheduler_config(MAX_BATCH, MAX_PROMPT))
    hardware = ceilings(find_native())
    level = hardware.machine.isa_level
    moment = Moment(find_native(), level, threads) if level else None
    profiler = Profiler(build_engine(config, lambda deltas: None), hardware, threads, moment=moment)
    found = calibration(profiler, threads)
    save_calibration(hardware.machine, found)
    return found


def spread(values: Sequence[float], form: str) -> str:
    """Format a median and what it lies between: `0.97 (0.95 to 1.01)`."""
    median, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"
