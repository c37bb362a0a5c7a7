"""Diagnose an engine by its recording: what makes it slow, which option to change, and what that would gain.

In the order of `rules.py`. A gain is a counterfactual: the recorded requests are simulated as they were and with the
change; those of an engine that drafts without drafts, both. Must not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.bench.metrics import Results
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted
from ridgeline.engine.journal import step_seconds
from ridgeline.engine.recording import Recording, recording_of
from ridgeline.explain.evidence import SAMPLES, Evidence
from ridgeline.explain.exploration import Provenance, frame, html_table
from ridgeline.explain.machine import SimulatedMachine, recorded_machine, simulated_machine
from ridgeline.explain.pace import RecordedPace, at_its_pace
from ridgeline.explain.recorded_workload import RecordedWorkload
from ridgeline.explain.replaying import REPLAYED
from ridgeline.explain.rules import AREAS, AT_ONCE, DISTURBED, RULES, UNPRICED, Effect, Finding, Other, Rule, Sign

HEAD = ("", "", "finding", "evidence", "change", "gain", "effect")
FEW = 32  # steps that tell what of a machine is calibrated
FIX_GAIN = 1.15  # below it a change is not worth a line


def _mean_ms(found: Results) -> float | None:
    return found.latencies.e2el_ms and found.latencies.e2el_ms.mean


_MEASURES: Mapping[Effect, Callable[[Results], float | None]] = {
    "requests end sooner": _mean_ms,
    "gaps between tokens are shorter": lambda found: found.latencies.itl_ms and found.latencies.itl_ms.mean_over_time,
    "more tokens a second": lambda found: found.duration_s,
}


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
        found = counted(len(self.findings), "finding") if self.findings else "nothing to change"
        how = "simulated as it was, steps take"
        if not self.is_simulated:
            how, sure = "it drafts, and gains are those without drafts; steps are predicted to take", ""
        return (
            f"{counted(self.num_steps, 'step')} of {counted(self.num_requests, 'request')}: {found} "
            f"({how} {self.match:.2f} of the measured time{sure})"
        )

    def lines(self) -> Sequence[Sequence[str]]:
        """Return the cells of a table with the columns HEAD: every area has a row."""
        rows: list[Sequence[str]] = []
        for area in AREAS:
            here = [each for each in self.findings if each.area == area]
            gains = ["unknown" if f.gain is None else f"{f.gain:.2f}×" for f in here]
            rows += [(area, f.severity, f.sentence, f.evidence, f.flag, gain, f.effect) for f, gain in zip(here, gains)]
            if not here:
                rows.append((area, "ok", "", "", "", "", ""))
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
    if setup is None or not len(recording.outputs) or not len(recording.steps):
        raise ConfigError("the recording holds no finished request, or no step: there is nothing to examine")
    if setup.strategy not in REPLAYED:
        raise ConfigError(f"only engines that decode one token at a time can be examined; this one is {setup.strategy}")
    workload = RecordedWorkload.of(recording, setup.layout.block_size)
    measured_s = step_seconds(recording.steps, setup.depth).sum()
    machine = recorded_machine(setup)
    drafts = setup.strategy == "speculative" and bool((recording.spans["num_rows"] > 1).any())
    if drafts:
        seconds = machine.step_time.mean_seconds
        match = float(sum(seconds(load, behind) for load, behind, _ in recording.timed()) / measured_s)
    else:
        match = float(workload.run(machine).recording.steps["run_s"].sum() / measured_s)
    evidence = Evidence(recording, setup, machine.setup.config, machine, drafts)
    gains = _Gains(evidence, workload)
    found = [_found(rule, sign, gains) for rule in RULES if (sign := rule.look(evidence)) is not None]
    worth = [each for each in found if each.gain is None or each.gain >= FIX_GAIN]
    return Diagnosis(len(recording.steps), len(workload.whole), match, worth, not drafts)


def _found(rule: Rule, sign: Sign, gains: "_Gains") -> Finding:
    gain, provenance = None, "measured"
    if rule.id in DISTURBED and (undisturbed := gains.undisturbed()) is not None:
        gain, provenance = max(undisturbed, sign.cure if isinstance(sign.cure, float) else 1.0), "calibrated"
    elif isinstance(sign.cure, int | float):
        gain = sign.cure
    elif sign.cure is not None:
        gain, provenance = gains.of(sign.cure, rule)
    severity = "try" if gain is None else rule.severity
    return Finding(rule.id, rule.area, rule.sentence, sign.evidence, sign.flag, gain, severity, provenance, rule.effect)


class _Gains:
    """Simulates the requests as they were, and with a change: with what was around ops, at the pace of the machine."""

    def __init__(self, evidence: Evidence, workload: RecordedWorkload) -> None:
        self._evidence, self._workload = evidence, workload
        self._was: dict[bool, tuple[SimulatedMachine, RecordedPace, Results]] = {}

    def undisturbed(self) -> float | None:
        """Return how much sooner requests would end at the pace that was calibrated; None where none was."""
        machine = self._evidence.machine
        if not machine.step_time.is_rest_fitted:
            return None
        _, _, was = self._as_it_was(is_prior=False)
        now, then = _mean_ms(was), _mean_ms(self._workload.run(machine).results)
        return now / then if now and then else None

    def of(self, cure: EngineConfig | Other, rule: Rule) -> tuple[float | None, Provenance]:
        """Return how many times the rule's effect comes, and where that is from."""
        here, workload, most = self._evidence.machine, self._workload, None
        machine = simulated_machine(cure) if isinstance(cure, EngineConfig) else here
        if cure == "all at once":
            workload, most = workload.at_once(), AT_ONCE
        elif cure == "prompts sorted":
            workload = workload.sorted_prompts(self._evidence)
        for load, behind, _ in self._evidence.recording.timed(FEW):
            machine.step_time.seconds(load, behind)  # tells what is not calibrated of it
        unfitted, was_unfitted = machine.step_time.unfitted, here.step_time.unfitted
        has_own_pace = len(unfitted) < len(was_unfitted)
        # Else what is known of the one is not set against a guess of the other.
        is_prior = not has_own_pace and not unfitted <= was_unfitted
        was, pace, before = self._as_it_was(is_prior=is_prior)
        if has_own_pace:
            then = workload.run(machine).results
        else:
            time = machine.step_time.uncalibrated() if is_prior else machine.step_time
            time = time.with_rest(was.step_time.rest).with_pace(*was.step_time.pace)
            machine = replace(machine, step_time=time)
            then = workload.run(machine, pace, most).results
            if then.duration_s < before.duration_s:  # else the beginning alone would tell the pace
                then = workload.run(machine, pace.within(then.duration_s / before.duration_s), most).results
        now, later = _MEASURES[rule.effect](before), _MEASURES[rule.effect](then)
        gain = now / later if now and later else None
        return (None if rule.id in UNPRICED and not machine.step_time.is_rest_fitted else gain), machine.provenance

    def _as_it_was(self, *, is_prior: bool) -> tuple[SimulatedMachine, RecordedPace, Results]:
        """Return the machine with what was around ops, calibrated or of the prior, its pace, and the run simulated."""
        if is_prior not in self._was:
            machine, recording = self._evidence.machine, self._evidence.recording
            time = machine.step_time.uncalibrated() if is_prior else machine.step_time
            fitted = replace(machine, step_time=time.fitted(recording.timed(SAMPLES), with_ops=False))
            fitted = at_its_pace(fitted, recording)
            pace = RecordedPace(fitted, recording)
            results = self._workload.run(fitted, pace).results
            self._was[is_prior] = fitted, pace, results
        return self._was[is_prior]
