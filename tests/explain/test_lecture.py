"""The lecture's numbers against values that were worked out apart from the code, and the page against the rows."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.explain import lectures

TOOL = Path(__file__).parents[2] / "tools" / "numbers_page.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers.md"
ROWS = {row.id: row for row in lectures.rows()}
# What a row has to say: integers exactly, others to their digits.
RIGHT = {
    "decode-floor": {"step_s": 41.79e-3, "tokens_per_s": 23.93},
    "ttft-100": {"floor_s": 41.8e-3, "compute_s": 14.2e-3, "cards": 2, "cards_s": 20.9e-3},
    "thousand-users": {"fit": 536, "step_s": 23.0e-3, "cards": 8, "dollars_per_h": 16, "cards_int4": 8},
    "naive-tokens": {"first": 4096, "last": 4351, "computed": 1_081_216},
    "naive-overhead": {"per_token": 4223.5, "cached": 4351, "saved": 248},
    "naive-order": {"naive": 8.0, "cached": 4.0, "step": 2},
    "ops-at-step": {"computed": 501, "read": 500},
    "decode-steps": {"prefill": 1, "decode": 499, "rounds": 149},
    "e2e-vs-ttft": {"low": 0.0816, "high": 0.1837},
    "short-prompt": {"step_s": 7.76e-3, "decode_s": 7.76e-3, "break_even": 296},
    "prefix": {"most": 101, "least": 11},
    "reasoning": {"short_s": 417.9, "long_s": 11.6 * 3600, "short_bytes": 3.28e9, "long_bytes": 328e9},
    "ridge": {"ridge": 295.2},
    "intensity-1": {"intensity": 0.9997},
    "intensity-4096": {"intensity": 1726.7},
    "intensity-295": {"intensity": 268.5},
    "break-even": {"tokens": 328},
    "b64": {"most": 0.217},
    "attn-prefill": {"unmasked": 2048.0, "causal": 1024.25},
    "attn-decode": {"alone": 4096 / 4097, "shared": 7.98},
    "flash": {"naive_bytes": 138e6, "flash_bytes": 4.19e6, "ratio": 33.0},
    "intensity-n": {"one": 1.0, "many": 62.7, "attention": 1.0},
    "out-vs-in": {"alone": 305.0, "some": 18.8, "many": 14.1},
    "kv-70b-4k": {"kv_bytes": 1_342_177_280, "share": 0.0096},
    "kv-70b-prod": {"kv_bytes": 687.2e9, "times": 4.9, "claimed_bytes": 171.8e9},
    "kv-8b": {"token_bytes": 131_072, "kv_bytes": 17.18e9, "weight_bytes": 16.06e9},
    "kv-70b-mha": {"mha_bytes": 85.9e9, "gqa_bytes": 10.7e9},
    "gqa": {"ratio": 8},
    "gqa-mqa": {"gqa": 8, "mqa": 64},
    "paging": {"reserved": 0.805, "paged": 0.0184, "paged_large": 0.0373},
    "variants": {"mha": 16_384, "mqa": 256, "gqa": 2048, "mla": 576, "mla_ratio": 28.4, "deepseek_ratio": 56.9}
    | {"deepseek_bytes": 69_120, "sliding": 0.25},
    "table-13b-1": {"kv_bytes": 0.839e9, "all_bytes": 26.84e9, "step_s": 8.01e-3, "tokens_per_s": 124.8},
    "table-13b-64": {"kv_bytes": 53.69e9, "all_bytes": 79.69e9, "step_s": 23.79e-3, "tokens_per_s": 2690.5}
    | {"largest": 64},
    "table-13b-256": {"kv_bytes": 214.7e9, "all_bytes": 240.7e9, "step_s": 71.87e-3, "tokens_per_s": 3562.0}
    | {"cards": 3.01},
    "table-gain": {"first": 21.6, "then": 1.32},
    "table-why": {"most_per_s": 3993.5},
    "table-config": {"parameters": 13.016e9, "read_bytes": 25.70e9, "one_s": 7.92e-3, "some_s": 23.70e-3}
    | {"many_s": 71.78e-3},
    "batch-cost": {"saved": 0.938, "most": 0.969, "context_85": 4434.0},
    "static-util": {"busy": 0.55},
    "two-h100": {"bf16_batch": 59, "bf16_per_s": 2474.0, "int8_batch": 268, "int8_per_s": 11_228.0, "int4_batch": 369}
    | {"int4_per_s": 14_129.0},
    "tp-pp": {"fill": 4 / 7, "reduces": 160, "reduce_bytes": 16_384},
    "diagnosis": {"batching": 16.26, "draft": 2.33},
    "spec-toy": {"accepted": 0.8, "draws": 100_000},
    "spec-tokens": {"tokens": 4.10, "bound": 4.6},
    "spec-speedup": {"tokens": 3.36, "cost": 1.44, "speedup": 2.33, "best_speedup": 2.38},
    "spec-range": {"low": 2.77, "high": 4.10},
    "spec-cost": {"verified": 5, "plain": 1, "plain_s": 0.04179, "step_s": 0.04179},
    "spec-code": {"sketch": 4, "most": 5},
    "formats-70b": {"f32_bytes": 282.2e9, "bf16_bytes": 141.1e9, "int8_bytes": 70.6e9, "int4_bytes": 36.4e9},
    "latency-formats": {"fp8": 2, "int8": 2.0, "int4": 3.88, "int4_small": 3.56},
    "awq": {"three": 5.12, "three_bare": 5.33, "four": 3.88},
    "outlier": {"step": 7.874, "zeroed": 3.937, "error": 1.0},
    "bf16-small": {"small_bytes": 8.0e9, "large_bytes": 4.125e9},
    "moe": {"one": 2, "some": 7.2, "many": 7.9992, "one_bytes": 25.5e9, "some_bytes": 84.1e9, "many_bytes": 93.1e9},
    "ten-x": {"batching": 16.26},
    "claims": {"low": 0.86, "high": 0.97},
}


@pytest.mark.parametrize("id", ROWS)
def test_the_values_are_right(id):
    values = ROWS[id].values()
    for name, right in RIGHT[id].items():
        exact = isinstance(right, int)
        assert values[name] == (pytest.approx(right, rel=1e-9) if exact else pytest.approx(right, rel=6e-3)), name


def test_every_row_is_there_and_27_are_slips():
    assert len(ROWS) == len(lectures.rows()) == 56
    assert sum(row.status == "✗" for row in ROWS.values()) == 27
    assert set(ROWS) == set(RIGHT)


@pytest.mark.parametrize("id", ROWS)
def test_a_mark_is_what_the_numbers_say(id):
    """What a text claims agrees with what is right for = and ≈, and somewhere does not for ✗."""
    row = ROWS[id]
    values = row.values()
    off = [abs(claim / values[name] - 1) for name, claim in row.claims.items()]
    if row.status in ("=", "≈"):
        assert all(error <= (0.05 if row.status == "=" else 0.15) for error in off)
    if row.status == "✗" and off:
        assert max(off) > 1e-4
    if row.id in ("naive-tokens", "ops-at-step", "decode-steps"):  # off by one
        assert [claim - values[name] for name, claim in row.claims.items()] in ([1, 1], [-1], [1])


@pytest.mark.parametrize(
    ("id", "name"), [(row.id, name) for row in ROWS.values() for name in row.inputs if name not in ("seed", "card")]
)
def test_every_input_is_used(id, name):
    """A row is computed: another input gives other values."""
    row = ROWS[id]
    given = row.inputs[name]
    if isinstance(given, str):
        changed = {"llama-2-13b": "llama-3-8b", "mixtral-8x7b": "llama-3-8b"}.get(given, "llama-2-13b")
    elif isinstance(given, tuple):
        changed = (0.4, 0.6)
    elif isinstance(given, float) and given < 1:
        changed = given * 0.5
    else:
        changed = given * 2
    assert dict(row.values(**{name: changed})) != dict(row.values())


@pytest.mark.parametrize("id", ROWS)
def test_the_sentence_holds_values(id):
    row = ROWS[id]
    assert "{" in row.right
    assert "{" not in row.sentence()
    assert row.derivation


def test_tokens_that_are_drawn_have_the_targets_distribution():
    values = ROWS["spec-toy"].values(q=(0.9, 0.1), p=(0.2, 0.8), seed=3)
    assert values["chi2"] < values["critical"]
    assert values["a"] == pytest.approx(0.9, abs=0.01)
    assert values["measured_accepted"] == pytest.approx(values["accepted"], abs=0.01)


def test_on_other_hardware_the_floor_is_another():
    values = ROWS["decode-floor"].values(card="h200")
    assert values["step_s"] == pytest.approx(140e9 / 4.8e12)


def test_the_page_is_as_computed():
    assert PAGE.read_text(encoding="utf-8") == runpy.run_path(str(TOOL))["page"](), (
        "run: python tools/numbers_page.py --write"
    )


def test_the_claim_that_was_measured_is_that_of_the_readme():
    row = ROWS["claims"]
    shares = f"{row.inputs['low'] * 100:.0f} to {row.inputs['high'] * 100:.0f} % of the memory bandwidth"
    assert shares in (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_json_has_a_row_with_its_inputs(capsys):
    from ridgeline.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["explain", "lecture", "kv-70b-prod", "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"]["kv_bytes"] == 64 * 32_768 * 327_680
    assert document["inputs"]["context"] == 32_768
    assert (document["status"], document["provenance"]) == ("✗", "counted")


def test_an_unknown_row_is_one_line(capsys):
    from ridgeline.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["explain", "lecture", "kv-70b"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "ridgeline: there is no row 'kv-70b': did you mean kv-70b-4k, kv-70b-prod, kv-70b-mha?"
    ]
    with pytest.raises(ConfigError, match="lists them"):
        lectures.find("")


def test_the_command_needs_no_torch_and_no_server():
    code = """
import sys
from ridgeline.cli import main
try:
    main(["explain", "lecture"])
finally:
    assert not {"torch", "transformers", "starlette", "ridgeline._native", "rich.table"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(id in done.stdout for id in ROWS)
