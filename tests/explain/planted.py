"""Recordings to diagnose: simulated runs on a machine of our own making, and what was done to them."""

from dataclasses import replace

import numpy as np

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.core.machine import usable_cores
from ridgeline.cost.hardware import INPUT_KINDS, PROBE_VERSION, Ceiling, Hardware, Machine
from ridgeline.engine.journal import HOST_FIELDS
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.simulation import run_simulated

KV = 81920  # bytes of a block of python-9m


def requests(count=24, prompt=60, output=20, gap_s=0.0, shared=0):
    return [
        BenchRequest(
            prompt=[7] * shared + [number % 400 + 9, *range(10, 9 + prompt)],
            max_tokens=output,
            arrival_s=number * gap_s,
        )
        for number in range(count)
    ]


def recorded(asked, max_concurrency=None, **options):
    base = {"dtype": "bfloat16", "max_model_len": 512, "num_threads": usable_cores(), "quantize": "int8"}
    config = EngineConfig.of("python-9m", **base | options)
    return run_simulated(simulated_machine(config), asked, max_concurrency=max_concurrency).recording


def ceilings(native, isa=None):
    """A machine on which reading the weights takes most of a step, as it does with a large model."""
    return Hardware(
        machine=Machine(cpu_model="Some CPU", num_cores=2, memory_bytes=2**34, isa_level=None),
        probe_version=PROBE_VERSION,
        measured_at="",
        stream_buffer_bytes=2**28,
        cache_bytes=2**22,
        cached_buffer_bytes=2**9,
        stream_bytes_per_s={1: Ceiling.of([2e8])},
        cached_bytes_per_s={1: Ceiling.of([1e12])},
        reread_bytes_per_s={2**22: {1: Ceiling.of([1e12])}},
        ops_per_s={kind: {1: Ceiling.of([2e12])} for kind in INPUT_KINDS},
        scalar_per_cycle=None,
    )


def host(recording, **growing):
    """The machine's counters at the start and at the end of a run."""
    seconds = float(recording.steps["run_s"].sum())
    samples = np.zeros(4, [(name, "<" + kind) for name, kind in HOST_FIELDS])
    for name in samples.dtype.names:
        samples[name] = np.nan
    samples["time_s"] = np.linspace(0, seconds, 4)
    for name, share in growing.items():
        samples[name] = np.linspace(3, 3 + share * seconds, 4)
    return replace(recording, host=samples)
