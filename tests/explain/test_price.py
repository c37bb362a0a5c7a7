"""Prices of whole steps against the account of the same model, and bad input."""

import json

import pytest

from ridgeline import explain
from ridgeline.cli import main
from ridgeline.core.errors import ConfigError
from ridgeline.cost.account import account_groups
from ridgeline.explain.limits import MODELS, lowered
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost


@pytest.mark.parametrize("model", MODELS)
def test_a_step_costs_what_its_groups_cost(model):
    found = explain.price(model, batch=4, context=2048)
    load = Load.decode(4, 2048)
    walked = sum(account_groups(lowered(model), fuse(lowered(model)), load, ElementBytes()), OpCost())
    assert found.cost.flops == pytest.approx(walked.flops, rel=1e-12)
    assert found.cost.num_bytes == pytest.approx(walked.num_bytes, rel=1e-12)
    assert found.limit_s >= walked.num_bytes / 3.35e12 * (1 - 1e-12)  # each group takes at least its bytes
    assert found.limit_s == pytest.approx(sum(group.limit_s for group in found.groups))


def test_decode_is_bound_by_memory_and_a_long_prompt_by_arithmetic():
    decode, prefill = explain.price("llama-3-8b"), explain.price("llama-3-8b", prompt=4096)
    slow = max(prefill.groups, key=lambda group: group.limit_s)
    assert {group.bound for group in decode.groups} == {"memory"}
    assert slow.bound == "compute"
    assert decode.limit_s == pytest.approx(16.06e9 / 3.35e12, rel=0.08)  # the weights but the embedding, and the cache


def test_two_cards_halve_and_float32_doubles():
    one = explain.price("llama-3-8b")
    assert explain.price("llama-3-8b", card="h100-sxm:2").limit_s == pytest.approx(one.limit_s / 2)
    assert explain.price("llama-3-8b", dtype="float32").limit_s == pytest.approx(2 * one.limit_s, rel=1e-3)


def test_a_bundled_model_and_a_config_are_priced_alike(tmp_path):
    bundled = explain.price("python-1m", card="ryzen-7950x", context=64)
    assert "unknown and not counted" in bundled.sentence
    config = {"hidden_act": "silu", "rms_norm_eps": 1e-5, **MODELS["llama-3-8b"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert explain.price(str(tmp_path)).limit_s == explain.price(config).limit_s
    assert explain.price(str(tmp_path / "config.json")).limit_s == explain.price("llama-3-8b").limit_s


def test_it_shows_itself():
    found = explain.price("llama-3-8b")
    assert found._repr_html_().count("<tr>") == len(found.groups) + 1
    assert found.as_json()["provenance"] == "datasheet"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "'nothing' is no config.json"),
        (["llama-3-8b", "--card", "h1"], "there is no datasheet"),
        (["llama-3-8b", "--dtype", "int3"], "dtype must be"),
        (["llama-3-8b", "--context", "9999999999"], "context must be between"),
        (["llama-3-8b", "--batch", "0"], "--batch"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "price", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_command_prints_the_same(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "price", "llama-3-8b", "--json"])
    assert json.loads(capsys.readouterr().out)["limit_s"] == explain.price("llama-3-8b").limit_s
    with pytest.raises(SystemExit):
        main(["explain", "price", "llama-3-8b"])
    assert "norm_gated" in capsys.readouterr().out


def test_a_size_that_cannot_be():
    with pytest.raises(ConfigError, match="prompt must be between"):
        explain.price("llama-3-8b", prompt=-1)
