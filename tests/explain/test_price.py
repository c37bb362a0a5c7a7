"""Prices of whole steps against the account of the same model, and bad input."""

import json

import pytest

from ridgeline import explain
from ridgeline.cli import main
from ridgeline.core.errors import ConfigError
from ridgeline.explain.limits import MODELS, lowered
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from walked import account_groups


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


def test_ways_over_devices_share_the_weights_and_pay_for_what_they_send():
    found = explain.devices("llama-3-8b", card="a100-80", count=4, batch=8, context=2048)
    replicas, tensor, pipeline = found.ways
    one = explain.price("llama-3-8b", card="a100-80", batch=2, context=2048)
    assert (replicas.step_s, replicas.tokens_per_s) == pytest.approx((one.limit_s, 8 / one.limit_s))
    assert pipeline.step_s == pytest.approx(one.limit_s + 3 * 2 * 4096 * 2 / 300e9)
    assert tensor.weight_bytes == pipeline.weight_bytes == pytest.approx(replicas.weight_bytes / 4)
    sums, logits = 64 * 2 * 3 / 4 * 2 * 4096 * 8, 3 / 4 * 2 * 128256 * 8
    assert tensor.sent_bytes == pytest.approx(sums + logits)
    all_at_once = explain.price("llama-3-8b", card="a100-80:4", batch=8, context=2048).limit_s
    assert tensor.step_s == pytest.approx(all_at_once + (sums + logits) / 300e9)


def test_a_slow_link_makes_sums_one_message_and_a_large_model_fits_in_parts_only():
    near, far = (explain.devices("llama-3-70b", link_s=link_s).ways for link_s in (0.0, 20e-6))
    assert [way.fits for way in near] == [False, True, True]
    assert near[1].num_messages == 160 * 14 + 1 and far[1].num_messages == 160 + 1
    assert far[1].network_s > 161 * 20e-6


def test_what_does_not_fit_is_said():
    """Experts that no token of the step is sent to are held as well, and so is all that is cached."""
    assert "fit" not in explain.price("llama-3-8b").sentence
    large = explain.price("llama-3-70b", batch=8, context=8192)
    assert "it does not fit: weights and cache are 162.6 GB" in large.sentence
    assert (large.weight_bytes, large.kv_bytes) == pytest.approx(
        (70.55e9 * 2, 8 * 8192 * 80 * 2 * 8 * 128 * 2), rel=1e-3
    )
    assert not large.fits and explain.price("llama-3-70b", card="h100-sxm:3", batch=8, context=8192).fits
    replicas, tensor, pipeline = explain.devices("mixtral-8x7b", count=2, batch=2).ways
    assert replicas.weight_bytes == pytest.approx(93.4e9, rel=1e-3) == 2 * tensor.weight_bytes
    assert (replicas.fits, tensor.fits, pipeline.fits) == (False, True, True)
    many = explain.devices("llama-3-70b", count=2, batch=64, context=8000)
    assert not any(way.fits for way in many.ways) and "weights and cache fit no way" in many.sentence
    assert explain.price("python-1m", card="ryzen-7950x", context=1 << 20).fits  # its owner chooses the memory


def test_what_no_datasheet_tells_is_unknown():
    found = explain.devices("llama-3-8b", card="epyc-9654", count=2, batch=2)
    assert [way.network_s for way in found.ways] == [0.0, None, None] and "unknown" in found.sentence
    assert found._repr_html_().count("<tr>") == 4


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


def test_the_command_prints_the_ways(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "devices", "llama-3-70b", "--count", "4"])
    assert "4 replicas: too large" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["explain", "devices", "llama-3-8b", "--count", "20"])
    assert ended.value.code == 2 and "count must be between 2 and the batch of 16" in capsys.readouterr().err


def test_a_size_that_cannot_be():
    with pytest.raises(ConfigError, match="prompt must be between"):
        explain.price("llama-3-8b", prompt=-1)
