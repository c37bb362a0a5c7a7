"""Follow one request through a recording: where its time went, and each of its steps. Must not import torch."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.engine.journal import FINISH_REASONS, WAIT_REASONS, load_of
from ridgeline.engine.recording import Recording, recording_of
from ridgeline.explain.exploration import frame, html_table
from ridgeline.explain.machine import recorded_machine

HEAD = ("step", "at_ms", "kind", "tokens", "start", "sequences", "limit_ms", "predicted_ms", "measured_ms")
DECODING = ("alone", "batch-mates", "others' prefill", "unexplained")


class Life(dict[str, Any]):
    """Holds plain data by name. In a notebook it shows itself as a table of its steps."""

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a record for each step. Raises ConfigError without pandas."""
        return frame([dict(zip(HEAD, step)) for step in self["steps"]])

    def _repr_html_(self) -> str:
        rows = [[f"{each:,.3f}" if isinstance(each, float) else str(each) for each in step] for step in self["steps"]]
        return html_table(self["sentence"], HEAD, rows)


def life(journal: Recording | Path | str, seq_id: int) -> Life:
    """Return what a sequence went through, in milliseconds since it came; `steps` has the columns `head`.

    Measured: `parts`, `waits`, `between steps`, where drafts are made; `unexplained` is measured less predicted; the
    rest of `decoding` is predicted, of that `provenance`. Raises ConfigError for one that did not end, and for steps
    that have no prediction.
    """
    recording = recording_of(journal)
    found = recording.outputs[recording.outputs["seq_id"] == seq_id]
    if recording.setup is None or not len(found):
        raise ConfigError(f"no sequence {seq_id} ended in the recording")
    output, machine = found[0], recorded_machine(recording.setup)
    predict, bounds = machine.step_time.seconds, machine.step_time.bounds
    waits, steps, made = dict[str, float](), list[tuple[Any, ...]](), False
    decoding: dict[str, float] = dict.fromkeys(DECODING, 0.0)
    first, end = int(output["first_step"]), int(output["last_step"]) + 1
    for step, (load, behind, measured_s) in islice(zip(recording.steps, recording.timed()), first, end):
        if step["start_s"] > output["arrival_s"] + output["latency_s"]:
            break  # it was ended from outside, between two steps
        spans, ms = recording.spans_of(step), 1e3 * int(step["num_rounds"])  # those of all rounds
        measured_ms = ms * measured_s
        own, at_ms = spans[spans["seq_id"] == seq_id], 1e3 * float(step["start_s"] - output["arrival_s"])
        if not len(own):
            reason = WAIT_REASONS[step["head_waits"]] or "the step under way"
            waits[reason] = waits.get(reason, 0.0) + min(measured_ms, max(0.0, at_ms + measured_ms))
            continue
        (tokens, start), predicted_ms = own[["num_tokens", "start"]][0].tolist(), ms * predict(load, behind)
        made = made or start >= output["num_prompt"]  # it was forked from the one whose prompt it shares
        kind = "prefill" if not made else "decode" if tokens == own["num_rows"][0] else "recompute"
        if made:
            together = spans[spans["num_tokens"] == spans["num_rows"]] if kind == "decode" else spans
            alone_ms, together_ms = (ms * predict(load_of(part), behind) for part in (own, together))
            parts_ms = (alone_ms, together_ms - alone_ms, predicted_ms - together_ms, measured_ms - predicted_ms)
            decoding = {name: decoding[name] + ms for name, ms in zip(DECODING, parts_ms)}
        made = made or start + tokens >= output["num_prompt"]
        times_ms = (ms * sum(bounds(load)[0].values()), predicted_ms, measured_ms)
        steps.append((int(step["step"]), at_ms, kind, tokens, start, len(spans), *times_ms))
    queue_ms, first_ms, end_ms = (1e3 * float(output[name]) for name in ("queue_s", "ttft_s", "latency_s"))
    first_ms = end_ms if np.isnan(first_ms) else first_ms
    parts = {"queue": queue_ms, "prefill": first_ms - queue_ms, "decode": end_ms - first_ms}
    between_ms = end_ms - first_ms - sum(decoding.values())
    decoding["unexplained"] += min(between_ms, 0.0)
    decoding["between steps"] = max(between_ms, 0.0)
    said = f"{_words(parts)}. It waited for: {_words(waits) or 'nothing'}. Decode: {_words(decoding)}"
    plain = {
        "sentence": f"Sequence {seq_id} took {end_ms:,.1f} ms: {said} [{machine.provenance}].",
        "provenance": machine.provenance,
        "tokens": {name: int(output[f"num_{name}"]) for name in ("prompt", "cached", "output", "preemptions")},
        "end": FINISH_REASONS[output["reason"]],
        "parts": parts,
        "waits": waits,
        "decoding": decoding,
        "head": HEAD,
        "steps": steps,
    }
    return Life(plain)


def _words(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {round(ms, 1) + 0.0:,.1f} ms" for name, ms in times.items())
