"""Share among backends on the CPU: the memory that the process may still take, its threads, the choice of a dtype."""

import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from ridgeline.core.config import Choice, Dtype, EngineConfig, InputBits, QuantizeConfig
from ridgeline.core.machine import cgroup_folders, numbers, usable_cores
from ridgeline.quant import chosen_format
from ridgeline.weights.quality import AS_STORED, MAX_INPUT_COST, Quality

DtypeName = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_MEMINFO = Path("/proc/meminfo")

# glibc's parameters for mallopt, and the largest threshold that it accepts
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_HEAP_BYTES = 32 << 20
_RETAINED_BYTES = 512 << 20


def choose_dtype(asked: Dtype, model_config: Mapping[str, object]) -> tuple[DtypeName, Choice]:
    """Return the dtype of what is not quantized, the checkpoint's unless CPUs are slow in it, and why."""
    if asked != "auto":
        return asked, Choice(asked, "as asked")
    match model_config.get("dtype", model_config.get("torch_dtype")):
        case "float16":
            return "bfloat16", Choice("bfloat16", "the checkpoint is float16, which CPUs compute slowly")
        case "bfloat16":
            return "bfloat16", Choice("bfloat16", "the checkpoint's dtype")
        case "float32":
            return "float32", Choice("float32", "the checkpoint's dtype")
        case _:
            return "float32", Choice("float32", "config.json names no dtype")


def choose_threads(config: EngineConfig) -> tuple[int, Choice]:
    """Return the number of threads to compute with, and why."""
    if config.num_threads is not None:
        return config.num_threads, Choice(str(config.num_threads), "as asked")
    return (cores := usable_cores()), Choice(str(cores), "the cores this process may use")


def describe_quantize(quantize: QuantizeConfig) -> Choice:
    """Return the quantization that was asked for, in words."""
    if quantize.scheme is None:
        return Choice("none", "not asked for")
    parts, form = [quantize.scheme], chosen_format(quantize)
    if form.group:
        parts.append(f"groups of {form.group}{' with zero points' if form.zero == 'points' else ''}")
    if not quantize.embeddings:
        parts.append("but for embeddings and head")
    return Choice(", ".join(parts), "as asked")


def choose_inputs(config: EngineConfig, quality: Quality, *, encodes: bool) -> tuple[EngineConfig, Choice]:
    """Return the configuration with the type of integer matrices' inputs, and why.

    8 bits, but where they were measured to cost this model more than MAX_INPUT_COST, and not in a model that `encodes`.
    """
    quantize = config.quantize
    if quantize.inputs != "auto":
        return config, Choice(quantize.inputs, "as asked")
    cost = quality.inputs.get(quantize.scheme or AS_STORED)
    measured = "" if cost is None else f"; measured to cost {cost}"
    chosen = Choice("int8", f"faster than int16 where many rows are computed{measured}")
    if encodes:
        chosen = Choice("int16", "an encoder's vectors are compared with those that others computed")
    if cost is not None and not cost.upper <= MAX_INPUT_COST:
        chosen = Choice("int16", f"int8 was measured to cost {cost}, above the {MAX_INPUT_COST:g} that auto takes")
    return replace(config, quantize=replace(quantize, inputs=cast("InputBits", chosen.value))), chosen


def retain_freed_memory() -> None:
    """Let malloc retain up to 512 MiB of what is freed; does nothing where the C library is not glibc.

    By default glibc gives every large temporary tensor back to the kernel and takes it anew, page by page, on the next
    step: a tenth to a quarter of a prompt's time, by the luck of what the process allocated before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping; the physical memory where the system does not tell."""
    limits = [*_machine_bytes(), *_cgroup_bytes()]
    return int(min(limits)) if limits else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_bytes() -> Iterator[float]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return
    yield from (1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _cgroup_bytes() -> Iterator[float]:
    """Yield what each enclosing cgroup leaves, with what the kernel gives back of files that were read."""
    for folder in cgroup_folders("memory"):
        limit = numbers(folder / "memory.max") or numbers(folder / "memory.limit_in_bytes")
        used = numbers(folder / "memory.current") or numbers(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] < math.inf:
            yield max(0.0, limit[0] - used[0] + _file_bytes(folder / "memory.stat"))


def _file_bytes(stat: Path) -> float:
    try:
        rows = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0.0
    return sum(float(value) for name, value in rows if name in ("active_file", "inactive_file"))
