"""Ceilings: what they say between thread counts, and when cached ones are used."""

import dataclasses

import msgspec
import pytest

from ridgeline.cost import hardware
from ridgeline.cost.hardware import Ceiling, Hardware, KernelTuning, Machine, Spread, TunedChoice

MACHINE = Machine(cpu_model="Some CPU", num_cores=8, memory_bytes=2**34, isa_level="avx2")


def ceiling(per_s, median_per_s):
    return Ceiling(per_s, median_per_s, p10_per_s=median_per_s, best_per_s=per_s)


def measured(machine=MACHINE, **changes):
    values = {
        "machine": machine,
        "probe_version": hardware.PROBE_VERSION,
        "measured_at": "2026-11-21T12:00:00+00:00",
        "stream_buffer_bytes": 2**28,
        "cache_bytes": 2**25,
        "cached_buffer_bytes": 2**19,
        "stream_bytes_per_s": {1: ceiling(10e9, 9e9), 2: ceiling(20e9, 20e9), 8: ceiling(32e9, 32e9)},
        "cached_bytes_per_s": {1: ceiling(50e9, 50e9)},
        "reread_bytes_per_s": {2**25: {1: ceiling(40e9, 40e9)}},
        "ops_per_s": {"f32": {1: ceiling(100e9, 50e9), 8: ceiling(800e9, 800e9)}},
        "scalar_per_cycle": Spread(p10=3.9, median=4.0, p90=4.0),
    }
    return Hardware(**values | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ridgeline" / "hardware"


def test_a_ceiling_is_the_90th_percentile():
    assert Ceiling.of([float(value) for value in range(11)]) == Ceiling(9.0, 5.0, 1.0, 10.0)
    assert Ceiling.of([3.0]) == Ceiling(3.0, 3.0, 3.0, 3.0)


def test_between_thread_counts_on_a_line():
    machine = measured()
    assert [machine.stream(threads) / 1e9 for threads in (1, 2, 5, 8, 64)] == [10, 20, 26, 32, 32]
    assert machine.peak("f32", 2) == pytest.approx(200e9)
    assert machine.ridge("f32", 8) == pytest.approx(25)
    assert machine.peak("int8", 2) is None and machine.ridge("int8", 2) is None
    assert machine.cached(8) == 50e9
    assert machine.steadiness == pytest.approx(0.5) and machine.was_busy
    assert not measured(ops_per_s={}).was_busy


def test_kept_ceilings_come_back(cache):
    assert hardware.load(MACHINE) is None
    path = hardware.save(measured())
    assert path == hardware.cache_path(MACHINE) and list(cache.iterdir()) == [path], "no temporary file is left"
    assert hardware.load(MACHINE) == measured()


@pytest.mark.parametrize(
    "change", [{"cpu_model": "Other CPU"}, {"num_cores": 4}, {"isa_level": "avx512"}, {"isa_level": None}]
)
def test_another_machine_has_other_ceilings(change):
    other = dataclasses.replace(MACHINE, **change)
    hardware.save(measured())
    assert hardware.load(other) is None
    hardware.cache_path(MACHINE).rename(hardware.cache_path(other))
    assert hardware.load(other) is None, "the file says which machine it is of"


def test_another_probe_measured_something_else(monkeypatch):
    hardware.save(measured())
    path = hardware.cache_path(MACHINE)
    monkeypatch.setattr(hardware, "PROBE_VERSION", hardware.PROBE_VERSION + 1)
    assert hardware.cache_path(MACHINE) != path
    hardware.save(measured(probe_version=hardware.PROBE_VERSION - 1))
    assert hardware.load(MACHINE) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"machine": 3}'])
def test_a_broken_file_is_as_none(content, caplog):
    hardware.save(measured())
    hardware.cache_path(MACHINE).write_bytes(content)
    assert hardware.load(MACHINE) is None
    assert "made again" in caplog.text


def test_every_field_is_needed(cache):
    path = hardware.save(measured())
    complete = msgspec.json.decode(path.read_bytes())
    for name in complete:
        path.write_bytes(msgspec.json.encode({key: value for key, value in complete.items() if key != name}))
        assert hardware.load(MACHINE) is None, name
    for name in (ceilings := complete["ceilings"]):
        fewer = {key: value for key, value in ceilings.items() if key != name}
        path.write_bytes(msgspec.json.encode(complete | {"ceilings": fewer}))
        assert hardware.load(MACHINE) is None, name
    for name in ("stream_bytes_per_s", "cached_bytes_per_s"):
        path.write_bytes(msgspec.json.encode(complete | {"ceilings": ceilings | {name: {}}}))
        assert hardware.load(MACHINE) is None, name


def test_a_folder_that_cannot_be_written(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        hardware.save(measured())
    assert hardware.load(MACHINE) is None


def test_ceilings_and_tunings_share_a_file(cache):
    choice = TunedChoice(choice="stream", variant="4x4096", default="1x384", score=1.3, rounds_won=7, num_rounds=7)
    tuning = KernelTuning(
        kind="bf16", num_threads=2, kernels="a build", measured_at="", read_bytes_per_s=2e10, choices=(choice,)
    )
    assert not hardware.cached_tunings(MACHINE)
    assert hardware.save_tunings(MACHINE, [tuning]) == hardware.cache_path(MACHINE)
    assert hardware.load(MACHINE) is None
    hardware.save(measured())
    assert hardware.load(MACHINE) == measured() and list(hardware.cached_tunings(MACHINE)) == [tuning]
    assert tuning.variants == {"stream": "4x4096"}
    hardware.save_tunings(MACHINE, [])
    assert hardware.load(MACHINE) == measured() and not hardware.cached_tunings(MACHINE)
    assert len(list(cache.iterdir())) == 1
    assert not hardware.cached_tunings(dataclasses.replace(MACHINE, microcode="0x2b"))


def test_a_shared_core_does_now_more_now_less():
    assert not measured().is_shared and not measured(scalar_per_cycle=None).is_shared
    assert measured(scalar_per_cycle=Spread(p10=2.4, median=3.4, p90=4.2)).is_shared
    assert Spread.of([float(value) for value in range(11)]) == Spread(p10=1.0, median=5.0, p90=9.0)
