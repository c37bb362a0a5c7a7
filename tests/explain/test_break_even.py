"""From which acceptance drafts pay: against the closed form, steps priced one by one, and what must not be priced."""

import json
from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.rounds import BATCHES, DRAFTS, break_even
from ridgeline.program.pricing import Load

CARD, MODELS = "h100-sxm", ("python-1m", "python-9m")


def rounds_of(model, method, hardware="this", **options):
    says, rounds = break_even(EngineConfig.of(model, speculate=method, **options), hardware, 256)
    return {(r.weights, r.batch, r.drafts): r for r in rounds}, says


def test_the_acceptance_is_where_the_closed_form_gains_the_cost():
    """And by kα + 1 it seems to be less."""
    rounds, _ = rounds_of("python-9m", "ngram")
    for (_, _, drafts), found in rounds.items():
        share = found.acceptance
        if share is None:
            assert found.ratio > drafts + 1 and found.textbook is None
            continue
        assert (1 - share ** (drafts + 1)) / (1 - share) == pytest.approx(found.ratio, abs=0.03)
        assert found.textbook == pytest.approx((found.ratio - 1) / drafts)
        assert found.textbook <= share
        assert found.speedup(share) >= 1 > found.speedup(share - 0.002)


def test_what_costs_more_than_all_its_tokens_never_pays():
    rounds, _ = rounds_of("python-1m", "draft:python-9m")
    assert {found.acceptance for found in rounds.values()} == {None}


@pytest.mark.parametrize("hardware", ["this", CARD])
def test_a_round_is_priced_as_its_steps_are(hardware):
    rounds, says = rounds_of("python-9m", "ngram", hardware)
    weights = list(dict.fromkeys(name for name, _, _ in rounds))
    assert weights[1:] == ["int8", "int4"]
    assert list(rounds) == [(w, b, k) for w in weights for b in BATCHES for k in DRAFTS]
    for scheme in (None, "int8"):
        config = EngineConfig.of("python-9m", **({} if scheme is None else {"quantize": scheme}))
        time = simulated_machine(config, hardware).step_time
        for batch, drafts in ((1, 1), (4, 8), (32, 4)):
            plain_s = time.seconds(Load.decode(batch, 256))
            round_s = time.seconds(Load(((drafts + 1, 256 + drafts),) * batch, batch * (drafts + 1)))
            assert rounds[scheme or weights[0], batch, drafts].ratio == pytest.approx(round_s / plain_s)
    assert says.startswith("python-9m on ") and "256 tokens" in says


def test_a_draft_model_s_steps_are_part_of_a_round():
    free, _ = rounds_of("python-9m", "ngram")
    drafted, _ = rounds_of("python-9m", "draft:python-1m")
    time, target = (simulated_machine(EngineConfig.of(name, quantize="int8"), "this") for name in MODELS)
    for batch in BATCHES:
        step = Load.decode(batch, 256)
        more = time.step_time.seconds(step) / target.step_time.seconds(step)
        for drafts in DRAFTS:
            expected = free["int8", batch, drafts].ratio + drafts * more
            assert drafted["int8", batch, drafts].ratio == pytest.approx(expected)


@pytest.mark.parametrize("method", ["auto", "auto,eagle", "auto,draft:python-1m"])
def test_what_looks_text_up_and_what_computes_are_priced_apart(method):
    """And so is the head that `auto` finds beside a model's files."""
    computes = "draft" if "draft" in method else "eagle"
    both = break_even(EngineConfig.of("python-9m", speculate=method), context=256).rounds
    alone = break_even(EngineConfig.of("python-9m", speculate=method.removeprefix("auto,")), context=256).rounds
    looks_up = break_even("python-9m", context=256, speculate="forced,prediction,suffix").rounds
    by_names = {each.proposers for each in both}
    assert by_names == {"forced, prediction, suffix", computes}
    if method != "auto":
        assert [each for each in both if each.proposers == computes] == alone
    free = [replace(each, proposers="forced, prediction, suffix") for each in looks_up]
    assert [each for each in both if each.proposers == "forced, prediction, suffix"] == free
    elsewhere = break_even("python-9m", CARD, 256, speculate="auto").rounds
    assert {each.proposers for each in elsewhere} == {"forced, prediction, suffix"}, (
        "a head is priced on this machine alone"
    )


def test_experts_make_drafts_dearer(tmp_path):
    """A round's tokens read more experts than one token does: at batch 1 a mixture needs a higher acceptance."""
    dense = {
        "model_type": "qwen3_moe",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }
    needed = []
    for name, layers in (("dense", list(range(8))), ("mixture", [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(dense | {"mlp_only_layers": layers}))
        rounds, _ = rounds_of(str(tmp_path / name), "ngram", CARD)
        needed.append(rounds["as stored", 1, 4].acceptance)
    assert needed[0] < 0.1 < 0.4 < needed[1]


@pytest.mark.parametrize(
    ("method", "hardware", "words"),
    [
        ("off", "this", "drafts nothing"),
        ("nonsense", "this", "speculate must be"),
        ("draft", "this", "lacks its model"),
        ("draft:nowhere", "this", "nowhere"),
        ("draft:python-1m", CARD, "on this machine alone"),
        ("ngram", "no-such-card", "no-such-card"),
    ],
)
def test_what_cannot_be_priced_is_refused_in_one_line(method, hardware, words):
    with pytest.raises((ConfigError, ModelLoadError), match=words) as caught:
        rounds_of("python-9m", method, hardware)
    assert "\n" not in str(caught.value)
