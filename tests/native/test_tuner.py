"""The tuner: short real runs, planted speeds, what is cached between starts, and what the option says."""

import json
from collections.abc import Mapping

import pytest

from ridgeline import _native
from ridgeline.backends.native.settings import MatrixFormat, kind_name
from ridgeline.backends.native.tuning import choose, tuner
from ridgeline.backends.native.tuning.choose import Chooser, bandwidth_changed, parse_pins, pinned, product_of
from ridgeline.backends.native.tuning.tuner import TRIES, WORKLOADS, Effort, Tuner, tune_all
from ridgeline.backends.native.tuning.workload import Bench, Workload, empty_matrix
from ridgeline.core.errors import ConfigError
from ridgeline.cost.hardware import KernelTuning, TunedChoice

BF16 = MatrixFormat(kind="bf16", inputs="bf16")
INT4 = MatrixFormat(kind="int4", inputs="int8", group=128)
INT8 = MatrixFormat(kind="int8", inputs="int16")
BUFFER_BYTES = 48 << 20
SHORT = Effort(0.05, BUFFER_BYTES, num_rounds=2)
FOREVER = 1e6  # a busy machine cuts no test short
LEVEL = _native.best_level()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuner, "OVERRUN", FOREVER)


@pytest.fixture
def short(monkeypatch) -> list[list[str]]:
    """Tuning that measures nothing; returns the kinds of each run."""
    runs: list[list[str]] = []

    def tune(level, num_threads, kinds, effort, kernels, product=None):
        runs.append([kind_name(form) for form in kinds])
        return [tuning(form, defaults, num_threads, kernels) for form, defaults in kinds.items()], 0.1

    monkeypatch.setattr(choose, "tune_all", tune)
    return runs


def defaults_of(form: MatrixFormat) -> dict[str, str]:
    return _native.default_variants(LEVEL, empty_matrix(form, 32, 32), _native.cpu_family())


def tuning(form: MatrixFormat, choices: Mapping[str, str], num_threads: int, kernels: str) -> KernelTuning:
    """What a tuner would say that took the last variant of every choice."""
    there = dict(_native.variants_of(LEVEL, empty_matrix(form, 32, 32)))
    return KernelTuning(
        kind=kind_name(form),
        num_threads=num_threads,
        kernels=kernels,
        measured_at="2026-11-22T12:00:00+00:00",
        read_bytes_per_s=2e10,
        choices=tuple(
            TunedChoice(choice=name, variant=there[name], default=default, score=1.2, rounds_won=6, num_rounds=7)
            for name, default in choices.items()
        ),
    )


def test_every_choice_of_the_table_has_a_workload() -> None:
    for level in _native.runnable_levels():
        for form in (BF16, INT4, INT8):
            choices = {choice for choice, _ in _native.variants_of(level, empty_matrix(form, 32, 32))}
            assert choices <= set(WORKLOADS)


@pytest.mark.parametrize("form", [BF16, INT4, INT8], ids=kind_name)
def test_a_short_run_decides_every_choice(form: MatrixFormat) -> None:
    defaults = defaults_of(form)
    (found,), seconds = tune_all(LEVEL, 2, {form: defaults}, SHORT, "a build")
    assert seconds > 0 and found.kind == kind_name(form) and found.num_threads == 2 and found.kernels == "a build"
    assert found.read_bytes_per_s > 0
    there = _native.variants_of(LEVEL, empty_matrix(form, 32, 32))
    several = {name for name, _ in there if sum(choice == name for choice, _ in there) > 1}
    assert {each.choice for each in found.choices} == several
    for each in found.choices:
        assert (each.choice, each.variant) in there and each.default == defaults[each.choice]
        assert each.num_rounds == 2 and each.score >= 1.0


def test_a_run_is_of_the_weights_that_were_asked_for() -> None:
    bench = Bench(LEVEL, 2, BUFFER_BYTES)
    for workload in (Workload(1, cached=False), Workload(16, cached=False), Workload(3, cached=True)):
        run = bench.product_run(INT4, defaults_of(INT4), workload, 20 << 20)
        assert run() > 0 and run() > 0
    assert bench.read_run(1 << 20)() > 0


def test_planted_speeds_are_found_and_the_default_stays_without_them(monkeypatch) -> None:
    planted = {"stream": "1x2048", "turns": "panel"}
    defaults = defaults_of(INT8) | {"stream": "1x384", "turns": "group"}  # whatever this machine's are

    def product_run(self, form, variants, workload, num_bytes):
        fast = any(variants.get(choice) == name for choice, name in planted.items() if WORKLOADS[choice] == workload)
        return lambda: 0.5 if fast else 1.0

    monkeypatch.setattr(Bench, "product_run", product_run)
    (found,), _ = tune_all(LEVEL, 1, {INT8: defaults}, SHORT, "a build")
    assert {name: found.variants[name] for name in planted} == planted
    assert all(each.score == 2.0 and each.rounds_won == 2 for each in found.choices if each.choice in planted)
    planted.clear()
    (found,), _ = tune_all(LEVEL, 1, {INT8: defaults}, SHORT, "a build")
    assert found.variants.items() <= defaults.items()


def test_a_winner_that_does_not_win_again_is_not_taken(monkeypatch) -> None:
    calls: dict[str, int] = {}

    def product_run(self, form, variants, workload, num_bytes):
        name = variants["stream"]

        def run() -> float:
            calls[name] = calls.get(name, 0) + 1
            return 0.5 if name == "1x8192" and calls[name] <= TRIES * (SHORT.num_rounds + 1) else 1.0

        return run

    monkeypatch.setattr(Bench, "product_run", product_run)
    (found,), _ = tune_all(LEVEL, 1, {BF16: defaults_of(BF16)}, SHORT, "a build")
    assert found.variants["stream"] == defaults_of(BF16)["stream"] and calls["1x8192"] > TRIES * (SHORT.num_rounds + 1)


def test_when_the_time_is_over_the_default_stays(monkeypatch) -> None:
    monkeypatch.setattr(tuner, "OVERRUN", 0.0)
    assert tune_all(LEVEL, 1, {INT8: defaults_of(INT8)}, SHORT, "a build")[0] == []
    found = Tuner(LEVEL, 1, SHORT, "a build").tune(INT8, defaults_of(INT8), 0.05)
    assert found.variants.items() <= defaults_of(INT8).items()
    assert all(each.num_rounds == 0 for each in found.choices)


def test_the_effort_stays_within_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(tuner, "memory_bytes", lambda: 1 << 30)
    assert Effort.of(2).buffer_bytes == 128 << 20
    monkeypatch.setattr(tuner, "memory_bytes", lambda: 1 << 40)
    assert Effort.of(1).buffer_bytes == 256 << 20 and Effort.of(64).buffer_bytes == 1 << 30


LARGE = 1 << 30


def test_kinds_are_measured_once(short) -> None:
    chooser = Chooser(LEVEL, 2)
    variants, why = chooser.choose("auto", {INT4: LARGE}, deterministic=False)
    assert short == [["int4.g128/int8"]] and why.reason == "measured 2026-11-22T12:00:00+00:00"
    assert f"stream={variants['int4.g128/int8']['stream']}" in why.value
    assert Chooser(LEVEL, 2).choose("auto", {INT4: LARGE}, deterministic=False) == (variants, why)
    chooser.choose("auto", {INT4: LARGE, INT8: LARGE}, deterministic=False)
    assert short[1:] == [["int8/int16"]], "what is known is not measured again"
    Chooser(LEVEL, 1).choose("auto", {INT4: LARGE}, deterministic=False)
    assert short[2:] == [["int4.g128/int8"]], "another number of threads"
    assert len(chooser.cached()) == 3
    chooser.forget()
    chooser.choose("auto", {INT4: LARGE}, deterministic=False)
    assert len(short) == 4


def test_another_build_is_measured_again(short, monkeypatch) -> None:
    Chooser(LEVEL, 2).choose("auto", {INT4: LARGE}, deterministic=False)
    monkeypatch.setattr(choose, "kernels_build", lambda: "another")
    Chooser(LEVEL, 2).choose("auto", {INT4: LARGE}, deterministic=False)
    assert len(short) == 2 and len(Chooser(LEVEL, 2).cached()) == 1


def test_small_models_and_deterministic_ones_are_not_measured(short) -> None:
    small, why = Chooser(LEVEL, 2).choose("auto", {INT4: 1 << 20}, deterministic=False)
    assert small == {"int4.g128/int8": defaults_of(INT4)} and why.reason.startswith("too small to measure")
    exact, why = Chooser(LEVEL, 2).choose("auto", {INT4: LARGE}, deterministic=True)
    assert exact == small and why.reason.startswith("deterministic")
    asked, why = Chooser(LEVEL, 2).choose("default", {INT4: LARGE}, deterministic=False)
    assert asked == small and why.reason.startswith("as asked")
    assert not short


def test_the_product_of_bfloat16_is_decided_once(short) -> None:
    def of(product: str) -> KernelTuning:
        choice = TunedChoice(choice="product", variant=product, default="x", score=1.1, rounds_won=7, num_rounds=7)
        return KernelTuning(
            kind="bf16", num_threads=1, kernels="k", measured_at="", read_bytes_per_s=1.0, choices=(choice,)
        )

    assert product_of([]) is None and product_of([tuning(INT4, defaults_of(INT4), 1, "k")]) is None
    assert product_of([tuning(INT4, defaults_of(INT4), 1, "k"), of("float32"), of("pairs")]) == "float32"


def test_another_bandwidth_is_another_machine() -> None:
    assert not bandwidth_changed(20e9, 30e9) and not bandwidth_changed(30e9, 20e9) and not bandwidth_changed(1.0, 1.0)
    assert bandwidth_changed(20e9, 30.1e9) and bandwidth_changed(30.1e9, 20e9)


def test_variants_are_pinned(short, tmp_path) -> None:
    chooser, kinds = Chooser(LEVEL, 2), {INT4: LARGE, INT8: LARGE, BF16: LARGE}
    variants, why = chooser.choose("stream=1x2048, int8/int16:turns=panel", kinds, deterministic=True)
    assert {choices["stream"] for choices in variants.values()} == {"1x2048"} and why.reason == "as asked"
    assert variants["int8/int16"]["turns"] == "panel"
    assert variants["int4.g128/int8"]["turns"] == defaults_of(INT4)["turns"]
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"variants": {**variants, "int4.g32/int16": {"stream": "1x384"}}, "more": 1}))
    assert chooser.choose(str(path), kinds, deterministic=False)[0] == variants
    assert not short


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("fastest", "tuning='fastest' is no file and names no variant; give auto, default, a file"),
        ("stream=", r"tuning='stream=': 'stream=' is not \[KIND:\]CHOICE=VARIANT"),
        ("=1x384", r"'=1x384' is not \[KIND:\]CHOICE=VARIANT"),
        ("stream=1x384,", r"'' is not \[KIND:\]CHOICE=VARIANT"),
        ("stream=9x9", "tuning: there is no stream=9x9 here; there is .*stream=1x2048"),
        ("bf16:stream=1x384", "tuning: this model has no matrices of kind 'bf16', but int4.g128/int8"),
        ("int4.g128/int8:stream=1x0", "tuning: there is no stream=1x0 here; there is .*stream=1x384"),
    ],
)
def test_what_is_not_there_is_refused(asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chooser(LEVEL, 2).choose(asked, {INT4: LARGE}, deterministic=False)


@pytest.mark.parametrize("content", ["", "[]", '{"variants": 3}', '{"variants": {"bf16": "1x0"}}', "{}"])
def test_a_file_that_is_none_is_refused(tmp_path, content: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="it is not JSON with an object of variants by kind"):
        parse_pins(str(path))


def test_pins_leave_the_defaults_alone() -> None:
    defaults = {"a": {"stream": "1", "turns": "g"}}
    there = {"a": [("stream", "1"), ("stream", "2"), ("turns", "g")]}
    assert pinned([(None, "stream", "2")], defaults, there, other_kinds=False) == {"a": {"stream": "2", "turns": "g"}}
    assert defaults["a"]["stream"] == "1"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (BF16, "bf16"),
        (MatrixFormat(kind="f32", inputs="f32"), "f32"),
        (INT8, "int8/int16"),
        (MatrixFormat(kind="int8", inputs="int8", group=256), "int8/int8"),
        (MatrixFormat(kind="int8_groups", inputs="int8", group=32), "int8_groups.g32/int8"),
        (MatrixFormat(kind="int4", inputs="int16", group=64, zero_points=True), "int4.g64.z/int16"),
    ],
)
def test_kinds_have_names(form: MatrixFormat, name: str) -> None:
    assert kind_name(form) == name
