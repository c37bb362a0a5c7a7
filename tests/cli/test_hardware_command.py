"""`ridgeline hardware`: what it measures with and without the native module, and what it keeps."""

import json

import pytest

from ridgeline.backends import probe
from ridgeline.backends.probe import NativeModule, find_native, numpy_stream, thread_counts


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Small buffers, few repeats, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(probe, "REPEATS", 2)
    monkeypatch.setattr(probe, "PEAK_S", 0.001)
    monkeypatch.setattr(probe, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(probe, "MIN_STREAM_BYTES", 1 << 22)


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setattr(probe, "find_native", lambda: NativeModule(None, "it was not built: there is no C++ compiler"))


def test_with_the_native_module(ridgeline):
    if find_native().module is None:
        pytest.skip("the native module is not built")
    done = ridgeline("hardware", "--json")
    found = json.loads(done.out)
    cores = found["machine"]["num_cores"]
    assert found["machine"]["isa_level"] == found["isa_levels"][-1]
    assert "amx_emulated" not in found["isa_levels"] and "portable" in found["isa_levels"]
    for streams in (found["stream_bytes_per_s"], found["cached_bytes_per_s"]):
        assert set(streams) == {str(count) for count in thread_counts(cores)}
        assert all(ceiling["per_s"] >= ceiling["median_per_s"] > 0 for ceiling in streams.values())
    for by_threads in found["reread_bytes_per_s"].values():
        assert set(by_threads) == {"1", str(cores)} and all(ceiling["per_s"] > 0 for ceiling in by_threads.values())
    assert set(found["ops_per_s"]) == {"f32", "bf16", "int16", "int8", "int4"}
    for kind, peaks in found["ops_per_s"].items():
        ridge = peaks[str(cores)]["per_s"] / found["stream_bytes_per_s"][str(cores)]["per_s"]
        assert found["ridge_ops_per_byte"][kind] == pytest.approx(ridge)
    text = ridgeline("hardware").out
    assert "bf16" in text and "ridge, op/byte" in text and found["measured_at"] in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 200


def test_without_the_native_module(ridgeline, without_native):
    text = ridgeline("hardware").out
    assert "it was not built: there is no C++ compiler" in text and "reference backend" in text
    assert "memory" in text and "op/byte" not in text
    found = json.loads(ridgeline("hardware", "--json").out)
    assert found["ops_per_s"] == {} and found["isa_levels"] == [] and found["machine"]["isa_level"] is None
    assert found["native_module"] == {"available": False, "reason": "it was not built: there is no C++ compiler"}


def test_kept_until_asked_again(ridgeline, without_native, monkeypatch):
    def measured():
        return json.loads(ridgeline("hardware", "--json").out)

    first = measured()
    monkeypatch.setattr(probe, "ROUNDS", 3)
    assert measured() == first
    assert json.loads(ridgeline("hardware", "--json", "--again").out) != first


def test_what_cannot_be_kept_is_shown_all_the_same(ridgeline, without_native, tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    done = ridgeline("hardware")
    assert done.code == 0 and "memory" in done.out
    assert "could not be cached" in caplog.text


def test_thread_counts():
    assert [thread_counts(cores) for cores in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_the_reason_names_the_compiler(monkeypatch):
    def no_module(name):
        raise ModuleNotFoundError(name)

    def broken(name):
        raise ImportError("undefined symbol: xyz")

    monkeypatch.setattr(probe.importlib, "import_module", no_module)
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    assert "there is no C++ compiler" in find_native().reason
    monkeypatch.setattr(probe.shutil, "which", lambda name: "found" if name == "g++" else None)
    assert "there is a compiler (g++)" in find_native().reason
    monkeypatch.setattr(probe.importlib, "import_module", broken)
    assert find_native() == NativeModule(None, "it cannot be loaded: undefined symbol: xyz")


def test_numpy_reads_with_several_threads():
    readings = numpy_stream(3, 1 << 20, 2)
    assert len(readings) == 2 and min(readings) > 0
