"""Diagnose an engine by its recording: what makes it slow, which option to change, and what that would gain.

In this order: the machine itself, then batching, KV memory, precision. A gain is a counterfactual: the recorded
requests are simulated as they were and with the change; of an engine that drafts, no gain is known. Must not import
torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.engine.journal import WAIT_REASONS
from ridgeline.engine.priced import load_of
from ridgeline.engine.recording import Recording, recording_of
from ridgeline.explain.exploration import Provenance, frame, html_table
from ridgeline.explain.machine import SimulatedMachine, simulated_machine
from ridgeline.explain.replaying import REPLAYED, RecordedTokens, recorded_requests
from ridgeline.explain.simulation import run_simulated

Area = Literal["machine", "batching", "memory", "precision"]
AREAS: tuple[Area, ...] = ("machine", "batching", "memory", "precision")
HEAD = ("", "", "finding", "evidence", "change", "requests end sooner")
FIX_GAIN = 1.15  # below it a change is not worth a line
WAITS, STOLEN, RECOMPUTED, REPEATED, SAMPLING = 0.2, 0.05, 0.05, 0.1, 0.2  # shares from which on something is wrong
LOW_BUDGET = 256  # tokens: prompts in smaller steps read the weights for few tokens each


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one fault: `gain` is how many times sooner requests would end at the mean, None where it is not known; what
    is lossy, or of unknown gain, is only tried."""

    id: str
    area: Area
    sentence: str
    evidence: str
    flag: str
    gain: float | None = None
    severity: Literal["FIX", "try"] = "FIX"
    provenance: Provenance = "measured"


Suspicion = tuple[Finding, EngineConfig | None]
"""What the records show, and the configuration that tells what changing it gains; None where they tell that too."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Holds the findings in the order in which to look at them; `match` is simulated ÷ measured time of the steps, or
    predicted ÷ measured where nothing is simulated: `is_simulated`."""

    num_steps: int
    num_requests: int
    match: float
    findings: Sequence[Finding]
    is_simulated: bool = True

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        sure = "" if abs(self.match - 1) <= 0.15 else "; low confidence, the simulation is not what was measured"
        found = f"{len(self.findings)} findings" if self.findings else "nothing to change"
        how = "simulated as it was, steps take"
        if not self.is_simulated:
            how, sure = "it drafts, and that is not simulated: no gains are known; steps are predicted to take", ""
        return (
            f"{self.num_steps:,} steps of {self.num_requests:,} requests: {found} "
            f"({how} {self.match:.2f} of the measured time{sure})"
        )

    def lines(self) -> Sequence[Sequence[str]]:
        """Return the cells of a table with the columns HEAD: every area has a row."""
        rows: list[Sequence[str]] = []
        for area in AREAS:
            here = [each for each in self.findings if each.area == area]
            gains = ["unknown" if f.gain is None else f"{f.gain:.2f}×" for f in here]
            rows += [(area, f.severity, f.sentence, f.evidence, f.flag, gain) for f, gain in zip(here, gains)]
            if not here:
                rows.append((area, "ok", "", "", "", ""))
        return rows

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "sentence": self.sentence}

    def to_pandas(self) -> Any:
        """Return the findings as a pandas.DataFrame. Raises ConfigError without pandas."""
        return frame([asdict(each) for each in self.findings])

    def _repr_html_(self) -> str:
        return html_table(self.sentence, HEAD, self.lines())


def doctor(journal: Recording | Path | str) -> Diagnosis:
    """Return what makes an engine slow, by a recording or a file of `--journal`.

    Raises ConfigError for one that is broken, holds no finished request, or is not of one that continues text.
    """
    recording = recording_of(journal)
    setup = recording.setup
    if setup is None or not len(recording.outputs):
        raise ConfigError("the recording holds no finished request: there is nothing to examine")
    if setup.strategy not in REPLAYED:
        raise ConfigError(f"only engines that decode one token at a time can be examined; this one is {setup.strategy}")
    requests, measured_s = _requests(recording, setup.layout.block_size), recording.steps["run_s"].sum()
    config = replace(setup.config, speculation=SpeculationConfig())
    machine = simulated_machine(config)
    drafts = setup.strategy == "speculative" and bool((recording.spans["num_rows"] > 1).any())
    if drafts:
        seconds = machine.step_time.seconds
        match = float(sum(seconds(load_of(recording.spans_of(step))) for step in recording.steps) / measured_s)
    else:
        match = float(run_simulated(machine, requests).recording.steps["run_s"].sum() / measured_s)

    def mean_e2e(machine: SimulatedMachine) -> float:
        """Run the requests, which came at the pace of this machine."""
        latency = run_simulated(machine, requests, slower=1 / match).results.latencies.e2el_ms
        return latency.mean if latency is not None else float("nan")

    now_s = None if drafts else mean_e2e(machine)
    findings: list[Finding] = []
    suspicions = (_of_machine, _of_batching, _of_memory, _of_precision)
    for found, change in (each for look in suspicions for each in look(recording, config)):
        if change is not None and now_s is not None:
            changed = simulated_machine(change)
            found = replace(found, gain=now_s / mean_e2e(changed), provenance=changed.provenance)
        if found.gain is None:
            found = replace(found, severity="try")
        if found.gain is None or found.gain >= FIX_GAIN:
            findings.append(found)
    findings.sort(key=lambda each: AREAS.index(each.area))
    return Diagnosis(len(recording.steps), len(requests), match, findings, not drafts)


def _requests(recording: Recording, block_size: int) -> list[BenchRequest]:
    """Return the recorded requests, each as long as its first output was."""
    made = recorded_requests(recording, RecordedTokens(recording, block_size))
    start_s = min(request.arrival_s for _, request in made)
    found = [
        BenchRequest(
            prompt=list(request.prompt_ids),
            max_tokens=max(1, int(output["num_tokens"]) - int(output["num_prompt"])),
            arrival_s=request.arrival_s - start_s,
        )
        for output, request in made
    ]
    return sorted(found, key=lambda request: request.arrival_s)


def _of_machine(recording: Recording, config: EngineConfig) -> Iterator[Suspicion]:
    assert recording.setup is not None
    backend, cores = config.backend, recording.setup.num_cores
    chosen = recording.setup.choices.get("backend", "")
    if chosen.startswith("reference"):
        changed = replace(config, backend=replace(backend, backend="auto"))
        yield Finding("no_native", "machine", "the reference backend computes", chosen, "--backend auto"), changed
    if backend.isa is not None:
        changed = replace(config, backend=replace(backend, isa=None))
        yield Finding("isa", "machine", f"only {backend.isa} is used", f"--isa {backend.isa}", "no --isa"), changed
    threads = config.num_threads
    if threads is not None and cores is not None and threads != cores:
        name, word = ("threads_few", "idle") if threads < cores else ("threads_many", "shared")
        sentence, changed = f"cores are {word}", replace(config, num_threads=cores)
        evidence = f"{threads} threads on {cores} cores"
        yield Finding(name, "machine", sentence, evidence, f"--num-threads {cores}"), changed
    counters = {"run_delay_s": "waits for a core", "steal_s": "is stolen", "throttled_s": "is throttled by the cgroup"}
    for name, word in counters.items():
        share = _share_of_time(recording, name)
        if share is not None and share > STOLEN:
            gain, what = 1 / max(0.05, 1 - share), "stolen" if name != "throttled_s" else "throttled"
            evidence = f"{share:.0%} of the time"
            yield Finding(what, "machine", f"the engine {word}", evidence, "free the machine", gain), None
    seconds = recording.steps["run_s"].sum()
    sampling = float(np.nansum(recording.steps["sample_s"]) / seconds) if seconds else 0.0
    if sampling > SAMPLING:
        words = "sampling takes long: log-probabilities, penalties and biases are computed in Python"
        evidence = f"{sampling:.0%} of the steps"
        yield Finding("sampling", "machine", words, evidence, "ask for less", 1 / max(0.05, 1 - sampling)), None


def _share_of_time(recording: Recording, counter: str) -> float | None:
    """Return how much a counter of seconds grew in a second; None where the machine does not tell, or not often."""
    host = recording.host
    if len(host) < 3 or np.isnan(host[counter][[0, -1]]).any():
        return None
    busy_s = float(recording.steps["run_s"].sum())
    return min(1.0, float(host[counter][-1] - host[counter][0]) / busy_s) if busy_s else None


def _of_batching(recording: Recording, config: EngineConfig) -> Iterator[Suspicion]:
    steps, limits = recording.steps, config.scheduler
    slots = _wait_share(recording, "slots")
    if slots > WAITS:
        more = min(256, max(4 * limits.max_num_seqs, 16))
        room = max(limits.max_num_batched_tokens, more)
        changed = replace(config, scheduler=replace(limits, max_num_seqs=more, max_num_batched_tokens=room))
        evidence = f"the queue waits for slots {slots:.0%} of the time, {steps['num_spans'].max()} sequences at most"
        flag = f"--max-num-seqs {more}"
        yield Finding("slots", "batching", "too few sequences run at once", evidence, flag), changed
    full = steps["run_s"][steps["num_tokens"] >= limits.max_num_batched_tokens].sum() / steps["run_s"].sum()
    if limits.max_num_batched_tokens < LOW_BUDGET and full > WAITS:
        changed = replace(config, scheduler=replace(limits, max_num_batched_tokens=512))
        evidence = f"steps are full {full:.0%} of the time, at {limits.max_num_batched_tokens} tokens"
        flag = "--max-num-batched-tokens 512"
        yield Finding("budget_low", "batching", "prompts are cut in small chunks", evidence, flag), changed


def _wait_share(recording: Recording, *reasons: str) -> float:
    steps = recording.steps
    waits = np.isin(steps["head_waits"], [WAIT_REASONS.index(reason) for reason in reasons])
    return float(steps["run_s"][waits].sum() / max(1e-12, steps["run_s"].sum()))


def _of_memory(recording: Recording, config: EngineConfig) -> Iterator[Suspicion]:
    assert recording.setup is not None
    outputs, cache = recording.outputs, config.cache
    size = recording.setup.layout.total_bytes
    larger, flag = replace(config, cache=replace(cache, kv_cache_bytes=4 * size)), f"--kv-cache-bytes {4 * size}"
    needed = int((outputs["num_tokens"] - 1 - outputs["num_cached"]).sum())
    spans, steps = recording.spans, recording.steps
    ended = np.cumsum([0, *(spans["num_tokens"] * np.isin(spans["seq_id"], outputs["seq_id"]))])
    computed = int((ended[steps["first_span"] + steps["num_spans"]] - ended[steps["first_span"]]).sum())
    again = computed / max(1, needed) - 1
    blocks = _wait_share(recording, "blocks", "just_preempted")
    preemptions = int((recording.decisions["kind"] == 1).sum())
    if preemptions and again > RECOMPUTED:
        evidence = f"{again:.0%} of the tokens are computed again, {preemptions} preemptions"
        yield Finding("preemption", "memory", "the KV cache is too small", evidence, flag), larger
    elif blocks > WAITS:
        evidence = f"the queue waits for blocks {blocks:.0%} of the time"
        yield Finding("kv_full", "memory", "the KV cache is full", evidence, flag), larger
    repeated, hit = _repeated(recording), int(outputs["num_cached"].sum()) / max(1, int(outputs["num_prompt"].sum()))
    if not cache.prefix_caching and repeated > REPEATED:
        changed = replace(config, cache=replace(cache, prefix_caching=True))
        evidence = f"{repeated:.0%} of the prompts' tokens begin as an earlier one"
        yield Finding("prefix_off", "memory", "prefixes are computed again", evidence, "--prefix-caching"), changed
    elif cache.prefix_caching and repeated - hit > WAITS:
        evidence = f"{hit:.0%} of the prompts' tokens are served, {repeated:.0%} were there once"
        yield Finding("prefix_evicted", "memory", "cached prefixes are evicted", evidence, flag), larger


def _repeated(recording: Recording) -> float:
    """Return the share of the prompts' tokens in whole blocks that an earlier prompt began with."""
    assert recording.setup is not None
    size, seen = recording.setup.layout.block_size, set[int]()
    repeated = total = 0
    for output in sorted(recording.outputs, key=lambda each: float(each["arrival_s"])):
        if not output["index"]:
            blocks = recording.hashes_of(output)[: int(output["num_prompt"]) // size]
            repeated += size * sum(block in seen for block in blocks)
            total += int(output["num_prompt"])
            seen.update(blocks)
    return repeated / max(1, total)


def _of_precision(_: Recording, config: EngineConfig) -> Iterator[Suspicion]:
    if config.model.dtype == "float32":
        changed = replace(config, model=replace(config.model, dtype="bfloat16"))
        evidence = "4 bytes a weight, where 2 are enough"
        yield Finding("precision", "precision", "weights are float32", evidence, "--dtype bfloat16"), changed
    elif config.quantize.scheme is None:
        changed = replace(config, quantize=replace(config.quantize, scheme="int8"))
        evidence = "2 bytes a weight; int8 has half"
        yield Finding("int8", "precision", "weights are 16 bits", evidence, "--quantize int8", severity="try"), changed
