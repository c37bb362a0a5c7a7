"""Write a journal as a trace in Chrome's JSON, which ui.perfetto.dev opens: steps, counters, and a track a request.

Ops have no times in a journal. Must not import torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.engine.journal import FINISH_REASONS, KINDS, WAIT_REASONS
from ridgeline.engine.recording import Recording, recording_of
from ridgeline.explain.machine import SimulatedMachine, recorded_machine

ENGINE, REQUESTS = 1, 2  # processes
MODEL, LOOP = 1, 2  # threads of the engine: what is computed, and what is decided and told beside it
NAMES = {(ENGINE, 0): "engine", (ENGINE, MODEL): "steps", (ENGINE, LOOP): "loop", (REQUESTS, 0): "requests"}
Event = dict[str, Any]


def trace(journal: Recording | Path | str) -> Mapping[str, Any]:
    """Return a journal as a trace that begins at 0 µs.

    Slices of a thread nest: what would overlap the next one is cut. Raises ConfigError for a journal that is broken.
    """
    recording = recording_of(journal)
    steps, outputs = recording.steps, recording.outputs
    origin_s = min([*steps["start_s"][:1].tolist(), *outputs["arrival_s"].tolist()], default=0.0)
    events = [*_steps(recording, origin_s), *_requests(recording, origin_s)]
    events.sort(key=lambda event: event["ts"])  # stable: what nests at one time stays in order
    meta = [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name" if tid else "process_name", "args": {"name": name}}
        for (pid, tid), name in NAMES.items()
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*meta, *events]}


def _slices(tid: int, slices: list[tuple[int, int, str, Event]]) -> Iterator[Event]:
    """Yield slices (begin, end, name, arguments) in ns of a thread; none overlaps: each ends before the next begins."""
    slices.sort(key=lambda each: each[:2])
    for number, (begin, end, name, args) in enumerate(slices):
        if number + 1 < len(slices):
            end = min(end, slices[number + 1][0])
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "pid": ENGINE, "tid": tid, "name": name, "cat": "step", **times, "args": args}


def _steps(recording: Recording, origin_s: float) -> Iterator[Event]:
    machine = _priced(recording)
    inside: list[tuple[int, int, str, Event]] = []
    beside: list[tuple[int, int, str, Event]] = []
    whole: list[tuple[int, int, str, Event]] = []
    for step, (load, behind, seconds) in zip(recording.steps, recording.timed()):
        start, planned, ran, committed, rendered = (
            _ns(step["start_s"] + sum(step[name] for name in names), origin_s)
            for names in ((), *(("plan_s", "run_s", "commit_s", "render_s")[:n] for n in (1, 2, 3, 4)))
        )
        spans, args = recording.spans_of(step), {"step": int(step["step"])}
        prompts = int((spans["num_tokens"] > spans["num_rows"]).sum())
        counts = {name: int(step[name]) for name in ("num_tokens", "num_spans", "num_rows", "num_copies")}
        args |= counts | {"head_waits": WAIT_REASONS[step["head_waits"]], "measured_ms": 1e3 * seconds}
        if machine is not None:
            limit_s, predicted_s = machine.step_time.bounds(load)[0], machine.step_time.seconds(load, behind)
            args |= {"predicted_ms": 1e3 * predicted_s, "limit_ms": 1e3 * sum(limit_s.values())}
            args |= {"bound": max(limit_s, key=lambda name: limit_s[name]), "predicted_by": machine.provenance}
        whole.append((planned, ran, "prompts and tokens" if prompts else "tokens", args))
        batch, sample = (0 if np.isnan(step[name]) else _ns(step[name], 0.0) for name in ("batch_s", "sample_s"))
        inside.append((planned, min(ran, planned + batch), "lay out", {}))
        inside.append((max(planned + batch, ran - sample), ran, "sample", {}))
        beside += [(start, planned, "plan", {}), (ran, committed, "commit", {}), (committed, rendered, "render", {})]
        at = {"ph": "C", "pid": ENGINE, "tid": 0, "ts": planned / 1e3}
        yield {**at, "name": "in the step", "args": {"sequences": counts["num_spans"], "tokens": counts["num_tokens"]}}
        groups = range(sum(name.startswith("used_") for name in step.dtype.names or ()))
        for group in groups:
            blocks = {state: int(step[f"{state}_{group}"]) for state in ("used", "cached", "free")}
            yield {**at, "name": f"KV blocks of group {group}", "args": blocks}
    yield from _slices(MODEL, whole)
    yield from _slices(MODEL, [each for each in inside if each[0] < each[1]])
    yield from _slices(LOOP, beside)


def _priced(recording: Recording) -> SimulatedMachine | None:
    """Return what prices the steps; None where they cannot be priced here."""
    try:
        return recording.setup and recorded_machine(recording.setup)
    except (ConfigError, ModelLoadError):
        return None


def _requests(recording: Recording, origin_s: float) -> Iterator[Event]:
    preempted = recording.decisions[recording.decisions["kind"] == KINDS.index("preempted")]
    starts_s = dict(zip(recording.steps["step"].tolist(), recording.steps["start_s"].tolist()))
    for output in recording.outputs:
        seq_id, latency_s = int(output["seq_id"]), float(output["latency_s"])
        first_s = latency_s if np.isnan(output["ttft_s"]) else float(output["ttft_s"])
        ends_s = min(float(output["queue_s"]), first_s), first_s, latency_s
        begin, *ends = (_ns(output["arrival_s"] + seconds, origin_s) for seconds in (0.0, *ends_s))
        counts = {name: int(output[name]) for name in ("num_prompt", "num_cached", "num_output", "num_preemptions")}
        about = {"cat": "request", "id2": {"local": str(seq_id)}, "pid": REQUESTS, "tid": 0}
        name = f"sequence {seq_id}"
        args = counts | {"end": FINISH_REASONS[output["reason"]]}
        yield {"ph": "b", "name": name, "ts": begin / 1e3, "args": args, **about}
        at = begin
        for part, end in zip(("queue", "prefill", "decode"), ends):
            if end > at:
                yield {"ph": "b", "name": part, "ts": at / 1e3, **about}
                yield {"ph": "e", "name": part, "ts": end / 1e3, **about}
                at = end
        yield {"ph": "e", "name": name, "ts": ends[-1] / 1e3, **about}
        for step in preempted["step"][preempted["seq_id"] == seq_id].tolist():
            if step in starts_s:
                yield {"ph": "n", "name": "preempted", "ts": _ns(starts_s[step], origin_s) / 1e3, **about}


def _ns(seconds: float, origin_s: float) -> int:
    return round(1e9 * (float(seconds) - origin_s))
