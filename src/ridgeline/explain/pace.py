"""The pace of a machine in the hour of a recording: what its steps took of what is predicted, and when. No torch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ridgeline.engine.recording import Recording
from ridgeline.explain.evidence import SAMPLES
from ridgeline.explain.machine import SimulatedMachine

SecondsArray = npt.NDArray[np.float64]
Pace = Callable[[float, float], float]  # when a step begins, and what is predicted of it: its seconds
SOME = 0.05  # of the time that was predicted: with less of a bound nothing tells its pace


def as_predicted(begin_s: float, predicted_s: float) -> float:
    """Return what is predicted."""
    return predicted_s


def at_its_pace(machine: SimulatedMachine, recording: Recording) -> SimulatedMachine:
    """Return a machine whose memory and whose arithmetic are as fast as a recording tells of each.

    A neighbour that streams memory slows down steps of few sequences, and those of many hardly: what a change of their
    number brings is not what one pace for all steps would say. Where one of both is not told, the other's counts.
    """
    told = list(recording.timed(SAMPLES))
    limits = [machine.step_time.bounds(load)[0] for load, _, _ in told]
    moving_N = np.array([each.get("memory", 0.0) + each.get("cache", 0.0) for each in limits])
    is_moving_N = moving_N / np.array([sum(each.values()) for each in limits])
    measured_N = np.array([measured_s for _, _, measured_s in told])
    predicted_N = np.array([machine.step_time.mean_seconds(load, behind) for load, behind, _ in told])
    of_each = [(float(w @ measured_N), float(w @ predicted_N)) for w in (1 - is_moving_N, is_moving_N)]
    known = [measured / predicted for measured, predicted in of_each if predicted > SOME * predicted_N.sum()]
    compute, moving = known if len(known) == 2 else known * 2
    return replace(machine, step_time=machine.step_time.with_pace(compute, moving))


class RecordedPace:
    """Lets steps take as long as others, predicted to take as long, took at the same time of a recording.

    So what else a machine does at a time makes many short steps, or few long ones, longer by as much in all. Where a
    recording had no steps its mean counts; behind its end it comes again.
    """

    def __init__(self, machine: SimulatedMachine, recording: Recording) -> None:
        steps, seconds = recording.steps, machine.step_time.mean_seconds
        timed = list(recording.timed())
        predicted_N = np.array([seconds(load, behind) for load, behind, _ in timed]) * steps["num_rounds"]
        measured_N = np.array([measured_s for _, _, measured_s in timed]) * steps["num_rounds"]
        end_N = steps["start_s"] + steps["plan_s"] + steps["run_s"]
        if recording.setup is None or recording.setup.depth == 1:
            end_N = end_N + steps["commit_s"] + steps["render_s"]
        between_N = np.maximum(np.diff(end_N, prepend=recording.began_s) - measured_N, 0.0)
        share = float(predicted_N.sum() / measured_N.sum())
        # Two points a step: its beginning and its end.
        self._at_s = np.append(0.0, np.cumsum(np.stack([between_N, measured_N], 1)))
        self._predicted_s = np.append(0.0, np.cumsum(np.stack([between_N * share, predicted_N], 1)))

    def __call__(self, begin_s: float, predicted_s: float) -> float:
        """Return the seconds of a step that begins at `begin_s` of the recording."""
        until_s = _passed(begin_s, self._at_s, self._predicted_s) + predicted_s
        return _passed(until_s, self._predicted_s, self._at_s) - begin_s

    def within(self, share: float) -> Pace:
        """Return the pace of a run that takes such a share of the recording's time, and meets all of it so."""
        return lambda begin_s, predicted_s: share * self(begin_s / share, predicted_s / share)


def _passed(at: float, ats_N: SecondsArray, values_N: SecondsArray) -> float:
    """Return the value at a point of a line that begins at 0 and is repeated behind its end."""
    rounds, rest = divmod(at, float(ats_N[-1]))
    return rounds * float(values_N[-1]) + float(np.interp(rest, ats_N, values_N))
