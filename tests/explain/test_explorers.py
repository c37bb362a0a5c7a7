"""Explorers: their first answers, that every input matters, bad input, and the same from Python and the shell."""

import json
import sys
import types
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import explain
from ridgeline.cli import main
from ridgeline.core.errors import ConfigError
from ridgeline.explain import explorers
from ridgeline.explain.exploration import Exploration, Figure, Provenance

# What each shows first, worked out apart from the code.
FIRST = {
    "batching": {"tpot": 15.773e-3, "throughput": 2029, "fits": 64, "limit": 3993.5},
    "cache": {"naive_tokens": 1_081_216, "cached_tokens": 4351},
    "dtypes": {"bfloat16": 0.10009765625, "float16": 0.0999755859375, "int8": 13 / 127, "int4": 1 / 7}
    | {"outlier_step": 1000 / 127},
    "fit": {"all": 79.687e9, "most": 32, "ttft": 55.58e-3, "tpot": 23.787e-3, "throughput": 1345.3},
    "growth": {"per_token": 131_072, "all": 131_072 * 1024, "read": 131_072 * 1024 / 3.35e12},
    "kv": {"per_token": 327_680, "all": 1_342_177_280},
    "moe": {"read": 7.19910, "rows": 16 / 7.19910},
    "paging": {"reserved_waste": 0.80469, "paged_waste": 0.018405, "copies": 2, "shared_blocks": 9}
    | {"unshared_blocks": 21},
    "pipeline": {"full": 4 / 7, "hops": 3, "all_reduces": 160, "link_time": None},
    "prefix": {"computed": 100, "ratio": 11, "whole_blocks": 992, "branch": 496},
    "pruning": {"parameters": 4_540_469_248, "kv_per_token": 65_536, "gain": 1.870, "zeros": 1},
    "roofline": {"intensity": 0.99967, "ridge": 295.22, "share": 0.0033861},
    "scheduling": {"static_busy": 160 / (4 * 64), "continuous_busy": 160 / (4 * 48)},
    "speculation": {"tokens": 3.3616, "speedup": 2.33444, "best_drafts": 6},
    "stack": {"kv_cache": 124.816, "batching": 2028.8, "kv_cache_gain": 3.35985, "drafts_gain": 2.33444},
    "timeline": {"ttft": 7.7612e-3, "passes": 16, "total": 0.12425},
    "variants": {"mha": 32_768, "gqa": 4096, "mqa": 512, "mla": 1152, "sliding_share": 0.125}
    | {"mixed_share": 0.25, "shared_layers": 2048},
}


@pytest.mark.parametrize("name", explorers.names())
def test_what_is_shown_first(name):
    result = explain.explore(name)
    for figure, right in FIRST[name].items():
        assert result[figure] == (None if right is None else pytest.approx(right, rel=3e-4)), figure
    assert result.sentence.endswith(".")
    assert {figure.provenance for figure in result.figures} <= set(get_args(Provenance))
    assert all(figure.formula for figure in result.figures)


CHANGED = {"card": "h200", "element_bytes": 4, "hit": 0.5, "acceptance": 0.5, "kv_heads": 4, "value": 0.3}
CHANGED |= {"model": "llama-2-13b", "block": 128, "layers_left": 0.25, "neurons_left": 0.5}
INPUTS = [(name, field) for name in explorers.names() for field in explorers.inputs_of(name)]


@pytest.mark.parametrize(("name", "field"), INPUTS)
def test_every_input_is_used(name, field):
    default = explorers.inputs_of(name)[field].default
    other = explain.explore(name, **{field: CHANGED.get(field, default * 2 if default != "h100-sxm" else None)})
    first = explain.explore(name)
    assert [figure.value for figure in other.figures] != [figure.value for figure in first.figures]


@pytest.mark.parametrize("name", explorers.names())
def test_the_command_prints_the_same(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", name, "--json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(msgspec.json.encode(explain.explore(name).as_json()))


def test_options_reach_the_explorer(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "kv", "--layers", "32", "--kv-heads", "8", "--context", "131072"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("1 × 131,072 tokens keep 17.18 GB")
    assert "[counted]" in out
    with pytest.raises(SystemExit) as ended:
        main(["explain", "kv", "--help"])
    assert ended.value.code == 0
    assert "--kv-heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kv", "--layers", "0"], "--layers"),
        (["kv", "--laers", "3"], "No such option"),
        (["kv", "--element-bytes", "3"], "element_bytes"),
        (["kv", "--card", "h1000"], "there is no datasheet of 'h1000'"),
        (["moe", "--top-k", "9"], "at most as many"),
        (["variants", "--kv-heads", "65"], "at most as many"),
        (["paging", "--mean", "3000"], "reserved"),
        (["roofline", "--tokens", "many"], "--tokens"),
        (["growth", "--model", "llama-9"], "none of llama-2-13b, llama-3-8b"),
        (["pruning", "--model", "llama-9"], "there are llama-2-13b, llama-3-8b"),
        (["stack", "--card", "l4"], "no room"),
        (["stack", "--card", "epyc-9654"], "names no memory"),
        (["prefix", "--block", "12"], "power of two"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line


def test_bad_input_from_python():
    with pytest.raises(ConfigError, match="there is no explorer 'nope'"):
        explain.explore("nope")
    with pytest.raises(ConfigError, match="unknown field"):
        explain.explore("kv", laers=3)
    with pytest.raises(ConfigError, match="layers"):
        explain.explore("kv", layers=0)


def test_what_a_datasheet_does_not_tell_is_unknown():
    result = explain.explore("roofline", card="epyc-9654")
    assert result["ridge"] is None
    assert result["share"] is None
    assert "names no peak of arithmetic" in result.sentence
    assert explain.explore("batching", card="epyc-9654")["fits"] is None
    assert Figure("x", None, "s", "f", "datasheet").text == "unknown"


@given(st.floats(-400, 400, width=32))
def test_rounding_is_within_half_a_step(value):
    result = explain.explore("dtypes", value=value, largest=400.0)
    assert result["float32"] == value
    assert abs(result["bfloat16"] - value) <= max(abs(value) * 2**-8, 2**-133)
    assert abs(result["int8"] - value) <= 400 / 127 / 2 * (1 + 1e-9)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_experts_read_are_at_most_all_and_at_least_those_of_a_token(experts, top_k, batch):
    if top_k > experts:
        return
    read = explain.explore("moe", experts=experts, top_k=top_k, batch=batch)["read"]
    assert top_k - 1e-9 <= read <= experts + 1e-9


def test_results_show_themselves_in_a_notebook(monkeypatch):
    hostile = Exploration("x", {}, "<script>", [Figure("a<b", 1.0, "s", "f & g", "counted")])
    shown = hostile._repr_html_()
    assert "<script>" not in shown
    assert "a&lt;b" in shown
    assert explain.lecture()._repr_html_().count("<tr>") == 57

    frames = types.SimpleNamespace(from_records=lambda records: records)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=frames))
    assert explain.explore("kv").to_pandas()[0]["name"] == "per_token"
    assert len(explain.lecture().to_pandas()) == 56
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        hostile.to_pandas()


def test_a_row_of_the_lecture_by_its_id():
    row = explain.lecture()["kv-70b-prod"]
    assert row.values(batch=1)["kv_bytes"] == 327_680 * 32_768


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0158, "s", "15.8 ms"),
        (2.0, "s", "2 s"),
        (0.5, "share", "50 %"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (2.5, "×", "2.5×"),
        (12345.6, "tokens", "12,346 tokens"),
        (0.1, "", "0.1"),
        (512, "B", "512 B"),
    ],
)
def test_figures_read_well(value, unit, text):
    assert Figure("x", value, unit, "f", "counted").text == text


def test_slots_are_as_busy_as_the_closed_form_says():
    """Of a static batch of two, the simulated engine's steps are those that the lecture's row counts."""
    found = explain.explore("scheduling", slots=2, requests=2, short=50, long=500)
    assert found["static_busy"] == explain.lecture()["static-util"].values()["busy"] == 0.55


def test_cells_are_those_of_the_engine():
    """A row of slots holds a request for as many steps as it has tokens; blocks are shared up to the one written to."""
    static, continuous = explain.explore("scheduling").grids
    for grid in (static, continuous):
        cells = [cell for _, row, _ in grid.rows for cell in row]
        assert [cells.count(str(request)) for request in range(4)] == [4, 16, 4, 16]
    (paging,) = explain.explore("paging", prompt=100, block=16, outputs=3).grids
    assert [kinds for _, _, kinds in paging.rows] == ["0000001"] * 3
    (aligned,) = explain.explore("paging", prompt=96, block=16, outputs=3).grids
    assert explain.explore("paging", prompt=96, block=16)["copies"] == 0
    assert [kinds for _, _, kinds in aligned.rows] == ["0000001"] * 3
    assert explain.explore("prefix", shared=1008, question=100)["whole_blocks"] == 1008
    (pipeline,) = explain.explore("pipeline", stages=3, micro_batches=5).grids
    assert [kinds.count(".") for _, _, kinds in pipeline.rows] == [2, 2, 2]
    assert pipeline.lines[0] == "stage 0  0 1 2 3 4    "


@settings(deadline=None)
@given(st.floats(0.05, 1.0), st.integers(0, 6))
def test_rounds_drawn_by_the_engine_s_rule_have_the_mean_of_the_formula(acceptance, drafts):
    found = explain.explore("speculation", acceptance=acceptance, drafts=drafts)
    assert found["drawn"] == pytest.approx(found["tokens"], abs=0.8)
    (rounds,) = found.grids
    for _, words, kinds in rounds.rows:
        assert kinds.endswith("2") and "1" not in kinds[:-2] and len(words) <= drafts + 1
        assert not any("xyz" in word for word, kind in zip(words, kinds, strict=True) if kind != "1")
