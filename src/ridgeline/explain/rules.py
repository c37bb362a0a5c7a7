"""The doctor's rules, a row for each fault, in the order in which to look. Must not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np

from ridgeline.core.config import EngineConfig
from ridgeline.core.words import counted
from ridgeline.engine.journal import load_of
from ridgeline.explain.evidence import Evidence
from ridgeline.explain.exploration import Provenance
from ridgeline.program.op import dims_of
from ridgeline.program.pricing import Load

Area = Literal["machine", "batching", "memory", "precision", "speculation", "clients"]
AREAS: tuple[Area, ...] = get_args(Area)
Effect = Literal["requests end sooner", "gaps between tokens are shorter", "more tokens a second"]
WAITS, STOLEN, RECOMPUTED, REPEATED, SAMPLING, LATE = 0.2, 0.05, 0.05, 0.1, 0.2, 0.1  # shares from which on it is wrong
LOW_BUDGET = 256  # tokens: prompts in smaller steps read the weights for few tokens each
BUDGET = 512  # tokens that streams beside prompts bear
SLOWER = 1.3  # than predicted: what a calibration and a minute's weather do not explain
ALONE, AT_ONCE = 0.9, 16  # share of the time with one sequence; as many as would read the weights together
BUSY = 0.75  # share of the time that one client keeps the engine busy, if it asks again as each completion ends
KV_SHARE, SHARED_KEYS = 0.6, 8  # of a step's bytes; query heads of one key, with which int8 gains nothing
LARGE_BYTES, FAULTS_PER_S = 64 << 20, 10.0
PASSAGES = 3  # of a request through the event loop: as it comes, is prepared, and as its last token leaves
UNPRICED = ("no_native", "threads_many")  # of which ceilings tell nothing, only a calibration
DISTURBED = ("throttled", "stolen", "thermal", "swap", "page_faults", "memory_slow")  # by what is beside the engine


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one fault: `gain` is how many times the `effect` comes, None where it is not known; what is lossy, of
    unknown gain, or not the engine's own, is only tried."""

    id: str
    area: Area
    sentence: str
    evidence: str
    flag: str
    gain: float | None = None
    severity: Literal["FIX", "try"] = "FIX"
    provenance: Provenance = "measured"
    effect: Effect = "requests end sooner"


Other = Literal["prompts sorted", "all at once"]
Cure = EngineConfig | Other | float | None


class Sign(NamedTuple):
    """Says what shows a fault and mends it. `cure` tells the gain: a configuration, or other requests, to simulate, or
    the gain itself; None: nothing tells."""

    evidence: str
    flag: str
    cure: Cure


class Rule(NamedTuple):
    """Looks for one fault."""

    id: str
    area: Area
    sentence: str
    look: Callable[[Evidence], Sign | None]
    severity: Literal["FIX", "try"] = "FIX"
    effect: Effect = "requests end sooner"


def _without(share: float) -> float:
    """Return the gain of not losing a share of the time."""
    return 1 / max(0.05, 1 - share)


def _changed(e: Evidence, part: str, **options: object) -> EngineConfig:
    return replace(e.config, **{part: replace(getattr(e.config, part), **options)})


def _no_native(e: Evidence) -> Sign | None:
    chosen = e.setup.choices.get("backend", "")
    changed = _changed(e, "backend", backend="auto")
    return Sign(chosen, "--backend auto", changed) if chosen.startswith("reference") else None


def _isa(e: Evidence) -> Sign | None:
    isa = e.config.backend.isa
    return None if isa is None else Sign(f"--isa {isa}", "no --isa", _changed(e, "backend", isa=None))


def _threads(e: Evidence, *, few: bool) -> Sign | None:
    threads, cores = e.config.num_threads, e.setup.num_cores
    if threads is None or cores is None or threads == cores or (threads < cores) is not few:
        return None
    return Sign(
        f"{counted(threads, 'thread')} on {counted(cores, 'core')}",
        f"--num-threads {cores}",
        replace(e.config, num_threads=cores),
    )


def _lost_time(e: Evidence, counters: Sequence[str], flag: str) -> Sign | None:
    share = max(e.share_of_time(name) or 0.0 for name in counters)
    return Sign(f"{share:.0%} of the time", flag, _without(share)) if share > STOLEN else None


_throttled = partial(_lost_time, counters=("throttled_s",), flag="raise its quota")
_stolen = partial(_lost_time, counters=("run_delay_s", "steal_s"), flag="free them")


def _thermal(e: Evidence) -> Sign | None:
    events, frequency = e.grown("thermal_events"), e.recording.host["frequency_hz"]
    if not events:
        return None
    told = frequency[~np.isnan(frequency)]
    clock = f", {told.mean() / 1e9:.1f} of {told.max() / 1e9:.1f} GHz" if len(told) else ""
    cure = float(told.max() / told.mean()) if len(told) else None
    return Sign(f"throttled {counted(round(events), 'time')}{clock}", "cool it", cure)


def _faults(e: Evidence, *, swapped: bool) -> Sign | None:
    faults, host = e.grown("major_faults") or 0.0, e.recording.host
    swap_bytes = float(np.nan_to_num(host["swap_bytes"]).max(initial=0.0))
    if faults < FAULTS_PER_S * e.busy_s or (swap_bytes > 0) is not swapped:
        return None
    stalled = e.share_of_time("memory_stall_s" if swapped else "io_stall_s")
    out = f", {swap_bytes / 1e6:,.0f} MB are swapped out" if swapped else ""
    flag = "give it memory: a smaller --kv-cache-bytes, --quantize, or fewer neighbours"
    return Sign(
        f"{counted(round(faults), 'page')} read from a disk{out}", flag, None if stalled is None else _without(stalled)
    )


def _numa(e: Evidence) -> Sign | None:
    share = e.last_around("remote_share") or 0.0
    flag = "numactl --cpunodebind=0 --membind=0"
    return Sign(f"{share:.0%} of its memory is on another node", flag, None) if share > WAITS else None


def _huge_pages(e: Evidence) -> Sign | None:
    huge, weights = e.last_around("huge_page_bytes"), e.machine.plan.weight_bytes
    if huge is None or weights < LARGE_BYTES or huge > 0.1 * weights:
        return None
    flag = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Sign(f"{huge / 1e6:,.0f} MB in huge pages, {weights / 1e6:,.0f} MB of weights", flag, None)


def _memory_slow(e: Evidence) -> Sign | None:
    """Compare steps that memory bounds with the others: a machine that is slow in all of them has another fault."""
    seconds_N2 = np.array([(step.measured_s, step.predicted_s) for step in e.priced])
    is_bound = np.array([step.bound == "memory" for step in e.priced])
    sums = seconds_N2[is_bound].sum(0).tolist(), seconds_N2[~is_bound].sum(0).tolist()
    (measured, predicted), (others_measured, others_predicted) = sums
    if e.machine.provenance != "calibrated" or not predicted or not others_predicted:
        return None
    slower, others = measured / predicted, others_measured / others_predicted
    if others > SLOWER or slower < SLOWER * max(1.0, others):
        return None
    evidence = f"steps bound by memory take {slower:.2f}× what is predicted, others {others:.2f}×"
    cure = (measured + others_measured) / (others_measured + predicted * max(1.0, others))
    return Sign(evidence, "move what streams memory beside it", cure)


def _sampling(e: Evidence) -> Sign | None:
    """Take sampling for what it costs: a step that is computed meanwhile has a thread less for as long."""
    steps, sample_s = e.recording.steps, np.nan_to_num(e.recording.steps["sample_s"])
    others = (e.config.num_threads or e.setup.num_cores or 1) if e.setup.depth > 1 else 1
    lost_s = float(np.where(steps["span_shift"] > 0, sample_s / others, sample_s).sum())
    share = float(sample_s.sum() / e.busy_s)
    cure = _without(lost_s / e.busy_s)
    return Sign(f"{share:.0%} of the steps", "ask for less", cure) if share > SAMPLING else None


def _slots(e: Evidence) -> Sign | None:
    limits, share = e.config.scheduler, e.waits("slots")
    more = min(256, max(4 * limits.max_num_seqs, 16))
    room = max(limits.max_num_batched_tokens, more)
    changed = _changed(e, "scheduler", max_num_seqs=more, max_num_batched_tokens=room)
    most = int(e.recording.steps["num_spans"].max())
    evidence = f"the queue waits for slots {share:.0%} of the time, {counted(most, 'sequence')} at most"
    return Sign(evidence, f"--max-num-seqs {more}", changed) if share > WAITS else None


def _with_budget(e: Evidence, evidence: str) -> Sign:
    changed = _changed(e, "scheduler", max_num_batched_tokens=BUDGET)
    return Sign(evidence, f"--max-num-batched-tokens {BUDGET}", changed)


def _budget_low(e: Evidence) -> Sign | None:
    steps, budget = e.recording.steps, e.config.scheduler.max_num_batched_tokens
    full = steps["run_s"][steps["num_tokens"] >= budget].sum() / e.busy_s
    evidence = f"steps are full {full:.0%} of the time, at {counted(budget, 'token')}"
    return _with_budget(e, evidence) if budget < LOW_BUDGET and full > WAITS else None


def _prefill_stalls(e: Evidence) -> Sign | None:
    limits, steps, (owners, spans) = e.config.scheduler, e.recording.steps, e.expanded
    is_small, is_bounded = limits.max_num_batched_tokens <= BUDGET, bool(limits.max_itl_s or limits.max_itl_ratio)
    if is_small or is_bounded or limits.max_num_seqs > BUDGET:
        return None
    decodes = np.isin(np.arange(len(steps)), owners[spans["num_tokens"] == spans["num_rows"]])
    long = decodes & (steps["num_tokens"] > BUDGET)
    share = steps["run_s"][long].sum() / (steps["run_s"][decodes].sum() or 1e-12)
    most = steps["num_tokens"][long].max(initial=0)
    evidence = f"{share:.0%} of the time between tokens passes in steps with up to {most:,} tokens of others' prompts"
    return _with_budget(e, evidence) if share > WAITS else None


def _larger_cache(e: Evidence, evidence: str) -> Sign:
    size = 4 * e.setup.layout.total_bytes
    return Sign(evidence, f"--kv-cache-bytes {size}", _changed(e, "cache", kv_cache_bytes=size))


def _preemption(e: Evidence) -> Sign | None:
    outputs, (_, spans) = e.recording.outputs, e.expanded
    needed = int((outputs["num_tokens"] - 1 - outputs["num_cached"]).sum())
    again = int(spans["num_tokens"][np.isin(spans["seq_id"], outputs["seq_id"])].sum()) / max(1, needed) - 1
    preemptions = int((e.recording.decisions["kind"] == 1).sum())
    evidence = f"{again:.0%} of the tokens are computed again, {counted(preemptions, 'preemption')}"
    return _larger_cache(e, evidence) if preemptions and again > RECOMPUTED else None


def _kv_full(e: Evidence) -> Sign | None:
    share = e.waits("blocks", "just_preempted")
    evidence = f"the queue waits for blocks {share:.0%} of the time"
    other = _preemption(e) or _prefix_evicted(e)  # which say more of the same cache
    return _larger_cache(e, evidence) if share > WAITS and other is None else None


def _prefix_off(e: Evidence) -> Sign | None:
    if e.config.cache.prefix_caching or (repeated := e.repeated()) <= REPEATED:
        return None
    changed = _changed(e, "cache", prefix_caching=True)
    return Sign(f"{repeated:.0%} of the prompts' tokens begin as an earlier one", "--prefix-caching", changed)


def _prefix_evicted(e: Evidence) -> Sign | None:
    outputs, repeated = e.recording.outputs, e.repeated()
    hit = int(outputs["num_cached"].sum()) / max(1, int(outputs["num_prompt"].sum()))
    evidence = f"{hit:.0%} of the prompts' tokens are served, {repeated:.0%} were there once"
    return _larger_cache(e, evidence) if e.config.cache.prefix_caching and repeated - hit > WAITS else None


def _prefix_differs(e: Evidence) -> Sign | None:
    begins, has = e.repeated(), e.repeated("own")
    evidence = f"{has:.0%} of the prompts' tokens were in an earlier one, {begins:.0%} at its beginning"
    flag = "put what differs, such as a time, at the end of prompts"
    return Sign(evidence, flag, "prompts sorted") if e.config.cache.prefix_caching and has - begins > WAITS else None


def _precision(e: Evidence) -> Sign | None:
    changed = _changed(e, "model", dtype="bfloat16")
    is_wide = e.config.model.dtype == "float32" and e.config.quantize.scheme is None
    return Sign("4 bytes a weight, where 2 are enough", "--dtype bfloat16", changed) if is_wide else None


def _int8(e: Evidence) -> Sign | None:
    if e.config.quantize.scheme is not None or e.config.model.dtype == "float32":
        return None
    return Sign("2 bytes a weight; int8 has half", "--quantize int8", _changed(e, "quantize", scheme="int8"))


def _kv_precision(e: Evidence) -> Sign | None:
    shapes, ops = e.machine.program.shapes, e.machine.program.ops
    heads = [[dims_of(shapes[name])[0] for name in op.inputs[:2]] for op in ops if op.kind == "attention"]
    bound = [step for step in e.priced if step.bound == "memory"]
    share = sum(step.kv_share * step.measured_s for step in bound) / (sum(step.measured_s for step in bound) or 1e-12)
    is_read_by_few = any(num < SHARED_KEYS * keys for num, keys in heads)
    if e.config.cache.kv_dtype != "auto" or share < KV_SHARE or not is_read_by_few:
        return None
    changed = _changed(e, "cache", kv_dtype="int8")
    return Sign(f"keys and values are {share:.0%} of the bytes that steps read", "--kv-dtype int8", changed)


def _draft_loses(e: Evidence) -> Sign | None:
    """Price the rounds as they were, with what drafting took, and the plain steps that make as many tokens."""
    if not e.drafts:
        return None
    seconds, steps = e.machine.step_time.seconds, e.recording.steps
    owners, spans = e.expanded
    rounds = np.unique(owners[spans["num_rows"] > 1])
    rounds_s = drafting_s = plain_s = drafted = accepted = batch = 0.0
    # What planning alone takes is around ops already, but where others are planned while the step before them runs.
    others_s = np.delete(steps["plan_s"], rounds)
    usual_s = float(np.median(others_s)) if len(others_s) and e.setup.depth == 1 else 0.0
    for step in steps[rounds]:
        told = e.recording.spans_of(step)
        lengths = [(1, int(end)) for end in told["start"] + 1]
        count = int(step["num_rounds"])
        rounds_s += seconds(load_of(told)) * count
        drafting_s += max(0.0, float(step["plan_s"]) - usual_s)
        plain_s += seconds(Load(tuple(lengths), len(lengths))) * float(told["num_final"].mean())
        drafted += float((told["num_rows"] - told["num_further"] - 1).sum()) * count
        accepted += float((told["num_final"] - count).sum())
        batch += len(told) / len(rounds)
    share = accepted / max(1.0, drafted)
    evidence = f"{share:.0%} of {drafted:,.0f} drafted tokens are accepted, at {batch:.1f} sequences"
    all_s = sum(step.predicted_s for step in e.priced) / max(1, len(e.priced)) * len(steps)
    rest_s, rounds_s = max(0.0, all_s - rounds_s), rounds_s + drafting_s
    return Sign(evidence, "--speculate off", (rest_s + rounds_s) / (rest_s + plain_s)) if rounds_s > plain_s else None


def _no_load(e: Evidence) -> Sign | None:
    steps, outputs = e.recording.steps, e.recording.outputs
    alone = float(steps["run_s"][steps["num_spans"] == 1].sum() / e.busy_s)
    lasted_s = float((outputs["arrival_s"] + outputs["latency_s"]).max() - outputs["arrival_s"].min())
    waits = float(steps["run_s"][steps["head_waits"] > 0].sum() / e.busy_s)
    if len(outputs) < 4 or alone < ALONE or waits > STOLEN or e.busy_s < BUSY * lasted_s:
        return None
    evidence = f"one sequence runs {alone:.0%} of the time, and none waits"
    return Sign(evidence, "more requests at once: it is clients that ask one by one", "all at once")


def _client_slow(e: Evidence) -> Sign | None:
    held_s, all_s = e.held_s()
    share = held_s / (all_s or 1e-12)
    evidence = f"requests stand still {share:.0%} of the time, with nothing to wait for but their readers"
    flag = "read faster: a proxy that buffers, a thin line, a busy client"
    return Sign(evidence, flag, _without(share)) if share > WAITS else None


def _loop_lag(e: Evidence) -> Sign | None:
    """Look at how late the loop's ticks were: what passes through it at any moment waits as long, at the mean.

    Requests are timed as they come, so what they wait behind it is part of the time before their first step.
    """
    told = e.around("loop_lag_s")
    if len(told) < 3:
        return None
    late_s, time_s = (float(told[name][-1] - told[name][0]) for name in ("loop_lag_s", "time_s"))
    outputs, wait_s = e.recording.outputs, late_s / (len(told) - 1)
    queue_s, latency_s = (float(np.nan_to_num(outputs[name]).mean()) for name in ("queue_s", "latency_s"))
    engine_s = max(latency_s - min(wait_s, queue_s), 1e-3)  # all were given up in the queue
    flag = "take what blocks it off the event loop, or leave it a core: --num-threads"
    evidence = f"it is late {late_s / time_s:.0%} of the time, {1e3 * wait_s:,.0f} ms at the mean"
    gain = 1 + PASSAGES * wait_s / engine_s
    return Sign(evidence, flag, gain) if late_s > LATE * time_s else None


_GAPS: Effect = "gaps between tokens are shorter"
RULES: Sequence[Rule] = (
    Rule("no_native", "machine", "the reference backend computes", _no_native),
    Rule("isa", "machine", "not the widest instructions are used", _isa),
    Rule("threads_few", "machine", "cores are idle", partial(_threads, few=True)),
    Rule("threads_many", "machine", "cores are shared", partial(_threads, few=False)),
    Rule("throttled", "machine", "the cgroup throttles it", _throttled),
    Rule("swap", "machine", "its memory is swapped out", partial(_faults, swapped=True)),
    Rule("page_faults", "machine", "weights are read from a disk in steps", partial(_faults, swapped=False)),
    Rule("stolen", "machine", "others take its cores", _stolen),
    Rule("thermal", "machine", "cores are slowed down for their heat", _thermal),
    Rule("numa", "machine", "memory is far from the cores", _numa),
    Rule("huge_pages", "machine", "weights are in small pages", _huge_pages),
    Rule("memory_slow", "machine", "memory is slow, arithmetic is not", _memory_slow),
    Rule("sampling", "machine", "log-probabilities, penalties and biases take long", _sampling),
    Rule("slots", "batching", "too few sequences run at once", _slots),
    Rule("budget_low", "batching", "prompts are cut in small chunks", _budget_low),
    Rule("prefill_stalls", "batching", "streams wait for others' prompts", _prefill_stalls, effect=_GAPS),
    Rule("preemption", "memory", "the KV cache is too small", _preemption),
    Rule("kv_full", "memory", "the KV cache is full", _kv_full),
    Rule("prefix_off", "memory", "prefixes are computed again", _prefix_off),
    Rule("prefix_evicted", "memory", "cached prefixes are evicted", _prefix_evicted),
    Rule("prefix_differs", "memory", "prompts differ before what they share", _prefix_differs),
    Rule("precision", "precision", "weights are float32", _precision),
    Rule("int8", "precision", "weights are 16 bits", _int8, "try"),
    Rule("kv_precision", "precision", "keys and values are 16 bits", _kv_precision, "try"),
    Rule("draft_loses", "speculation", "drafts cost more than they bring", _draft_loses),
    Rule("loop_lag", "clients", "the server's event loop is blocked", _loop_lag),
    Rule("client_slow", "clients", "clients read slowly", _client_slow),
    Rule("no_load", "clients", "requests come one at a time", _no_load, "try", "more tokens a second"),
)
