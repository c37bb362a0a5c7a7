"""Predicted steps against pieces that are priced one by one, and what is fitted around the ops."""

from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from families import tiny_config
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.efficiency import (
    COLD,
    MANY,
    VERSION,
    Behind,
    Calibration,
    Efficiency,
    OpTiming,
    Rest,
    TimedStep,
    fit_rest,
    key_of,
)
from ridgeline.cost.prices import SHORT
from ridgeline.cost.roofline import Roofline, costs_of
from ridgeline.cost.steptime import PRIOR, PRIOR_REST, StepTime
from ridgeline.explain.pricing import spec_of
from ridgeline.program.lower import lower
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load
from ridgeline.spec.families import read_spec

MODELS = ("python-1m", "mixtral-8x7b")
LOADS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=6)


class Cached:
    """A machine whose cache holds all of a step, or nothing."""

    def __init__(self, cache_bytes):
        self.cache_bytes = cache_bytes

    def peak(self, kind, num_threads):
        return {"bf16": 4e12, "int8": 8e12}.get(kind, 1e12)

    def stream(self, num_threads):
        return 1e10

    def cached(self, num_threads):
        return 9e10

    def reread(self, num_bytes, num_threads):
        return 9e10 if num_bytes <= self.cache_bytes else 1e10


def pieces_of(program):
    element, narrow = ElementBytes(2, 4, 2), ElementBytes(1.1, 4, 1.1)
    made = [
        OpTiming(
            group.label,
            group.kind,
            tuple(op.label for op in group.ops),
            0.0,
            narrow if number % 3 else element,
            "int8" if number % 3 else "bf16",
        )
        for number, group in enumerate(fuse(program))
    ]
    return [*made, OpTiming("sample", "sample", (), 0.0, element, "f32")]


@settings(max_examples=12, deadline=None)
@given(spans=LOADS, model=st.sampled_from(MODELS), cache_bytes=st.sampled_from([0, 2**21, 2**50]), fitted=st.booleans())
def test_a_step_is_its_pieces_and_what_is_around_them(spans, model, cache_bytes, fitted):
    program, ceilings = lower(spec_of(model)), Cached(cache_bytes)
    pieces = pieces_of(program)
    load = Load(tuple((tokens, tokens + before) for tokens, before in spans), len(spans))
    costs = costs_of(program, [(piece.ops, piece.element) for piece in pieces], load)
    roofline = Roofline(ceilings, 1, sum(c.weight_bytes + c.kv_read_bytes + c.kv_write_bytes for c in costs))
    keys = [key_of(piece) + roofline.where for piece in pieces]
    known = dict.fromkeys(keys[::2], Efficiency(0.5, 0.7, 2.0, 3e-6))
    calibration = Calibration(
        version=VERSION,
        num_threads=1,
        measured_at="",
        efficiencies=known,
        held_out_error=None,
        rest=Rest(1e-4, 1e-5),
    )
    predicted = StepTime(program, pieces, ceilings, 1, calibration if fitted else None)
    around = Rest(1e-4, 1e-5) if fitted else PRIOR_REST
    expected = around.step_s + around.sequence_s * len(spans)
    for piece, key, cost in zip(pieces, keys, costs):
        limit = roofline.predict(cost, piece.inputs)
        efficiency = known.get(key, PRIOR) if fitted else PRIOR
        expected += efficiency.predict(limit.compute_s, limit.moving_s)
    assert predicted.seconds(load) == pytest.approx(expected, rel=1e-9)
    assert predicted.seconds(load) == pytest.approx(expected, rel=1e-9)  # from what it keeps
    missing = {*keys} - (known.keys() if fitted else set())
    assert predicted.unfitted == missing


def test_a_recurrence_takes_span_by_span_short_ones_in_another_way_than_long_ones():
    program = lower(read_spec(tiny_config("mamba2", 0)))
    pieces = [piece for piece in pieces_of(program) if piece.kind in ("ssd", "causal_conv")]
    known = {}
    for piece in pieces:
        if piece.kind == "ssd":
            known[f"{key_of(piece)} short"] = Efficiency(0.2, 0.9, 1.0, 0.0, token_s=3e-6)
            known[f"{key_of(piece)} long"] = Efficiency(0.8, 0.9, 1.0, 5e-6)
    calibration = Calibration(
        version=VERSION, num_threads=1, measured_at="", efficiencies=known, held_out_error=None, rest=Rest(0.0, 0.0)
    )
    recurrence = [piece for piece in pieces if piece.kind == "ssd"]
    predicted = StepTime(program, recurrence, Cached(0), 1, calibration)
    short, long = ((1, 100), (SHORT, 40), (1, 9)), ((SHORT + 1, 60), (200, 200))
    parts = [predicted.seconds(Load(spans, len(spans))) for spans in (short, long)]
    assert predicted.seconds(Load((*long[:1], *short, *long[1:]), 5)) == pytest.approx(sum(parts))
    assert parts[0] > 3e-6 * 10 * len(recurrence) and parts[1] > 5e-6 * len(recurrence)
    assert not predicted.unfitted
    others = StepTime(program, pieces, Cached(0), 1, calibration)
    others.seconds(Load(short, 3))
    assert {(key.split()[0], key.split()[-1]) for key in others.unfitted} == {("causal_conv", "short")}
    kernel = Path(__file__).parents[2] / "native" / "kernels" / "recurrent" / "recurrence.h"
    assert f"kFewTokens = {SHORT};" in kernel.read_text()


def test_a_limit_is_the_price_on_the_card():
    from ridgeline import explain

    program = lower(spec_of("llama-3-8b"))
    element = ElementBytes()
    pieces = [OpTiming(g.label, g.kind, tuple(op.label for op in g.ops), 0.0, element, "bf16") for g in fuse(program)]
    predicted = StepTime(program, pieces, datasheet("h100-sxm"), 1, is_limit=True)
    for batch, context in ((1, 100), (32, 2048)):
        price = explain.price("llama-3-8b", batch=batch, context=context)
        assert predicted.seconds(Load.decode(batch, context)) == pytest.approx(price.limit_s, rel=1e-9)
    assert not predicted.unfitted


TRUE_REST = Rest(
    50e-6, 20e-6, 100e-6, 5e-6, came_s=30e-6, gone_s=200e-6, plans_s=80e-6, cold_s=2e-6, ops=1.4, few_ops=0.7
)


def timed_steps(noise):
    """Steps as the true rest makes them, of some kinds, each times something."""
    random = np.random.default_rng(0)
    found = []
    for number in range(1200):
        num_seqs, came, tokens = (int(random.integers(low, high)) for low, high in ((1, 17), (0, 3), (1, 300)))
        behind = Behind(number % 4, number % 16 == 0, number % 3 == 0, came, tokens)
        num_tokens = num_seqs + number % 8 // 4 * (number % 4 == 0) * int(random.integers(1, 64))
        step = TimedStep(float(random.uniform(2e-4, 2e-3)), num_tokens, num_seqs, behind, 0.0)
        found.append(step._replace(seconds=TRUE_REST.of(step) * noise(random)))
    return found


@pytest.mark.parametrize("noise", [lambda random: 1.0, lambda random: 1 + 20 * (random.random() < 0.2)])
def test_what_is_around_ops_is_found_also_where_a_fifth_of_the_steps_were_disturbed(noise):
    found = fit_rest(timed_steps(noise), Rest(40e-6, 5e-6, 60e-6, 10e-6, 20e-6, 90e-6, 50e-6, 1e-6))
    for num_seqs, more, behind in product(
        (1, 12), (0, 50), (Behind(), Behind(0, came=2), Behind(0, gone=True), Behind(2, plans=True, tokens=200))
    ):
        step = TimedStep(1e-3, num_seqs + more, num_seqs, behind, 0.0)
        assert found.of(step) == pytest.approx(TRUE_REST.of(step), rel=0.05)


def test_steps_behind_one_that_is_laid_out_anew_take_less_and_less_more():
    rest = Rest(50e-6, 20e-6, 100e-6, 5e-6)
    later = TimedStep(1e-3, 4, 4, Behind(), 0.0)
    more = [rest.of(later._replace(behind=Behind(age))) - rest.of(later) for age in range(4)]
    assert more == pytest.approx([120e-6, 60e-6, 30e-6, 15e-6])
    assert rest.of(later._replace(behind=Behind(5000))) == pytest.approx(rest.of(later))
    random, steps = np.random.default_rng(0), list[TimedStep]()
    for age in (0, 1, 2, 3, 4, 5, 6, 7) * 20:
        num_seqs, ops_s = int(random.integers(1, 17)), float(random.uniform(2e-4, 1e-3))
        step = TimedStep(ops_s, num_seqs, num_seqs, Behind(age), 0.0)
        steps.append(step._replace(seconds=rest.of(step)))
    found = fit_rest(steps, Rest(40e-6, 5e-6, 60e-6, 10e-6))
    assert found.of(later._replace(behind=Behind(1))) - found.of(later) == pytest.approx(60e-6, rel=0.2)


def test_what_steps_do_not_tell_stays_as_it_was():
    steps = timed_steps(lambda random: 1.0)
    alone = [step._replace(num_tokens=1, num_seqs=1, behind=Behind()) for step in steps]
    prior = Rest(60e-6, 18e-6, 90e-6, 7e-6, 11e-6, 13e-6)
    assert astuple(fit_rest(alone, prior))[2:6] == pytest.approx(astuple(prior)[2:6], rel=1e-3)
    slow = fit_rest([step._replace(seconds=100 * step.seconds) for step in alone], Rest(60e-6, 18e-6))
    assert slow.sequence_s < slow.step_s  # one at a time: nothing says that others would take so long
    falling = [TimedStep(1e-3, count, count, Behind(), 5e-3 / count) for count in (1, 2, 4, 8, 16) * 20]
    assert fit_rest(falling, PRIOR_REST).sequence_s == 0  # noise: more sequences do not take less


def test_steps_of_one_size_leave_what_ops_take_to_the_prior():
    """Else what ops take could go into what is around them, and larger steps would take next to nothing."""
    step = TimedStep(3e-4, 16, 1, Behind(0), 4e-4)
    held = fit_rest([step] * 400, TRUE_REST, with_ops=False)
    assert (held.ops, held.few_ops) == (TRUE_REST.ops, TRUE_REST.few_ops)
    assert held.of(step) == pytest.approx(4e-4, rel=0.05)
    larger = TimedStep(8e-3, 512, 4, Behind(0), 0.0)
    assert held.of(larger) == pytest.approx(TRUE_REST.of(larger), rel=0.1)


def test_a_step_that_is_laid_out_anew_takes_more():
    rest = Rest(50e-6, 20e-6, 100e-6, 5e-6, came_s=30e-6, gone_s=70e-6, plans_s=25e-6, cold_s=1e-6)
    assert rest.of(TimedStep(0.0, 8, 8, Behind(), 0.0)) == pytest.approx(210e-6)
    assert rest.of(TimedStep(0.0, 8, 8, Behind(0), 0.0)) == pytest.approx(350e-6)
    program = lower(spec_of("python-1m"))
    known = Calibration(version=VERSION, num_threads=1, measured_at="", efficiencies={}, held_out_error=None, rest=rest)
    predicted = StepTime(program, pieces_of(program), Cached(0), 1, known)
    load, prompt = Load.decode(4, 100), Load(((4, 4),), 1)
    assert predicted.seconds(load, Behind(0)) - predicted.seconds(load) == pytest.approx(120e-6)
    assert predicted.seconds(load, Behind(0, gone=True)) - predicted.seconds(load) == pytest.approx(190e-6)
    assert predicted.seconds(load, Behind(plans=True)) - predicted.seconds(load) == pytest.approx(25e-6)
    colder = [
        predicted.seconds(load, Behind(1, tokens=n)) - predicted.seconds(load, Behind(1)) for n in (40, COLD, 9999)
    ]
    assert colder == pytest.approx([20e-6, COLD / 2 * 1e-6, COLD / 2 * 1e-6])
    assert predicted.seconds(load, Behind(came=3)) - predicted.seconds(load) == pytest.approx(90e-6)
    assert predicted.seconds(prompt) - predicted.seconds(prompt, Behind()) == pytest.approx(135e-6)
    drafts, prompts = Load(((4, 104),) * 2, 8), Load(((4, 4), (5, 5), (3, 70)), 3)  # of three, two come
    ops_s = [predicted.with_rest(Rest(0.0, 0.0)).seconds(each) for each in (drafts, prompts)]
    around_s = [predicted.seconds(each) - seconds for each, seconds in zip((drafts, prompts), ops_s)]
    assert around_s == pytest.approx([200e-6, 285e-6])
    slower = predicted.with_rest(replace(rest, ops=2.0, few_ops=3.0))
    ops_s = predicted.seconds(load) - 130e-6
    few = 1 - np.log2(4) / np.log2(MANY)
    assert slower.seconds(load) == pytest.approx((2 + few) * ops_s + 130e-6)


def test_steps_that_were_timed_are_predicted_after_a_fit():
    program = lower(spec_of("python-1m"))
    predicted = StepTime(program, pieces_of(program), Cached(0), 1)
    loads = [Load(((number % 7 + 1, 50),) * (number % 3 + 1), number % 3 + 1) for number in range(60)]
    steps = [(load, Behind(), 1.7 * predicted.seconds(load, Behind())) for load in loads]
    fitted = predicted.fitted(steps, with_ops=True)
    for load, behind, seconds in steps:
        assert fitted.seconds(load, behind) == pytest.approx(seconds, rel=0.03)
    assert fitted.is_rest_fitted and not predicted.is_rest_fitted
