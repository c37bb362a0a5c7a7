"""`ridgeline profile`: tables that fit, JSON whose parts sum up, and clear errors."""

import json

import pytest

from ridgeline.backends import probe
from ridgeline.backends.probe import NativeModule, find_native


@pytest.fixture
def profile(ridgeline, model_folder, tmp_path, monkeypatch):
    """Profiles the small model, on ceilings measured in a moment; JSON is decoded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(probe, "REPEATS", 1)
    monkeypatch.setattr(probe, "PEAK_S", 0.001)
    monkeypatch.setattr(probe, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(probe, "MIN_STREAM_BYTES", 1 << 22)

    def run(*options):
        if "--backend" not in options:
            options = ("--backend", "reference", *options)
        done = ridgeline("profile", model_folder, "--num-threads", 1, "--steps", 1, *options)
        return json.loads(done.out) if "--json" in options and done.code == 0 else done

    return run


def test_a_table_per_kind_of_step(profile):
    text = profile("--batch", 2, "--context", 60, "--prompt", 16).out
    assert "decode of 2 at 60 tokens" in text and "prefill of 16 tokens" in text
    for part in ("attn.q × 2", "lm_head", "all ops", "between ops", "sample", "outside the ops", "100.0%"):
        assert text.count(part) == 2, part
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "…" not in text and "─" not in text
    assert "decode" not in profile("--batch", 0, "--prompt", 8).out
    assert "prefill" not in profile("--context", 40, "--prompt", 0).out


def test_a_narrower_level_has_ceilings_of_its_own(profile):
    """What the widest level can do is kept beside it, and says nothing about it."""
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    steps = ("--backend", "native", "--batch", 0, "--prompt", 8)
    narrow = profile("--json", "--isa", "portable", *steps)["hardware"]
    assert narrow["machine"]["isa_level"] == "portable"
    widest = profile("--json", *steps)["hardware"]
    assert widest["machine"]["isa_level"] == find_native().module.best_level()
    assert profile("--json", "--isa", "portable", *steps)["hardware"] == narrow
    assert "Ceilings of 1 thread at portable: " in profile("--isa", "portable", *steps).out


def test_every_op_has_its_row(profile):
    text = profile("--batch", 0, "--prompt", 8, "--all-ops").out
    assert "layers.0.attn.q" in text and "layers.1.attn.q" in text and " × " not in text


def test_json_sums_up(profile):
    found = profile("--json", "--batch", 2, "--context", 60, "--prompt", 16)
    assert found["model"] == "tiny-model" and found["num_threads"] == 1
    assert found["choices"]["backend"]["value"]
    assert found["hardware"]["machine"]["num_cores"] >= 1
    assert [step["num_tokens"] for step in found["steps"]] == [2, 16]
    for step in found["steps"]:
        parts = sum(op["measured_s"] for op in step["ops"]) + sum(step["rest_s"].values())
        assert parts == pytest.approx(step["step_s"])
        assert step["limit_s"] == pytest.approx(sum(op["limit_s"] for op in step["ops"]))
        for op in step["ops"]:
            if op["efficiency"] is not None:
                assert op["efficiency"] == pytest.approx(op["limit_s"] / op["measured_s"])
            assert (op["bound"] == "nothing") == (op["limit_s"] == 0)


@pytest.mark.parametrize("quantize", [(), ("--quantize", "int4", "--kv-dtype", "int8")])
def test_groups_of_the_native_backend(profile, quantize):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    text = profile("--backend", "native", "--context", 40, "--prompt", 16, *quantize).out
    for group in ("norm_qkv", "attention", "linear_add", "norm_gated", "norm_head", "sample"):
        assert text.count(f" {group} ") >= 2, "in both tables"


def test_decode_steps_are_timed_in_a_row_too(profile):
    pytest.importorskip("ridgeline._native", reason="the native module is not built")
    options = ("--backend", "native", "--num-threads", 2, "--context", 60, "--prompt", 16)
    decode, prefill = profile("--json", *options)["steps"]
    assert decode["successive_step_s"] > 0 and prefill["successive_step_s"] is None
    assert "steps in a row" in profile(*options).out
    alone = profile("--json", *options, "--num-threads", 1)["steps"][0]
    assert alone["successive_step_s"] is None, "nothing runs beside the ops"


def test_without_the_native_module(profile, monkeypatch):
    monkeypatch.setattr(probe, "find_native", lambda: NativeModule(None, "it was not built"))
    assert "No peaks of arithmetic" in profile("--batch", 0, "--prompt", 8).out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", 0, "--prompt", 0), "nothing to profile"),
        (("--context", 4), "do not fit in a context of 4 tokens"),
    ],
)
def test_what_cannot_be_profiled(profile, options, words):
    done = profile(*options)
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1


def test_predictions_are_unknown_until_they_are_calibrated(profile):
    found = profile("--json", "--batch", 1, "--context", 60, "--prompt", 16)
    assert found["calibration"] is None
    assert {step["predicted_s"] for step in found["steps"]} == {None}
    assert "Predictions are unknown" in profile("--batch", 0, "--prompt", 8).out

    steps = ("--batch", 1, "--context", 90, "--prompt", 16)
    found = profile("--json", "--calibrate", *steps)
    assert found["calibration"]["efficiencies"]
    known = [op["predicted_s"] for step in found["steps"] for op in step["ops"] if op["predicted_s"] is not None]
    assert known and min(known) >= 0
    text = profile(*steps).out
    assert "efficiencies of 20" in text and "pred ms" in text
    assert max(map(len, text.splitlines())) <= 100
    assert profile("--json", *steps)["calibration"] == found["calibration"]
