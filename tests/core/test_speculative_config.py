"""vLLM's speculative_config, taken as it is: every key that is known does something, the others are refused by name."""

import json
from importlib.util import find_spec

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculative_config import KNOWN, NEUTRAL, WITHOUT_MEANING

TAKEN = {
    "ngram": ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}, ("ngram",)),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 32}, ("suffix",)),
    "draft_model": ({"method": "draft_model", "model": "python-1m", "num_speculative_tokens": 3}, ("draft",)),
    "medusa": ({"method": "medusa", "model": "folder", "num_speculative_tokens": 3}, ("medusa",)),
    "mtp": ({"method": "mtp", "num_speculative_tokens": 1}, ("mtp",)),
    "deepseek_mtp": ({"method": "deepseek_mtp"}, ("mtp",)),
    "qwen3_next_mtp": ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, ("mtp",)),
    "a model alone": ({"model": "python-1m"}, ("draft",)),
}


@pytest.mark.parametrize(("given", "proposers"), TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("form", [dict, json.dumps], ids=["mapping", "json"])
def test_it_is_the_same_as_the_options(given, proposers, form):
    config = EngineConfig.of("any", speculative_config=form(given)).speculation
    assert config.proposers() == proposers
    assert config.num_speculative_tokens == given.get("num_speculative_tokens")
    if given.get("model"):
        assert config.drafter == (*proposers, given["model"])


@pytest.mark.parametrize("key", KNOWN)
def test_every_key_that_is_known_is_taken(key):
    values = {"method": "ngram", "model": "[ngram]", "adaptive": False, "suffix_decoding_min_token_prob": 0.25}
    values |= {"draft_sample_method": "match", "rejection_sample_method": "block", "lookahead_ngram": 4}
    values |= {"parallel_drafting": True, "quantization": "int4"}
    value = values.get(key, NEUTRAL.get(key, True if key in WITHOUT_MEANING else 3))
    drafts = {"method": "draft_model", "model": "python-1m"} if key == "parallel_drafting" else {"method": "ngram"}
    before = EngineConfig.of("any", speculative_config=drafts).speculation
    after = EngineConfig.of("any", speculative_config=drafts | {key: value}).speculation
    changes = key not in (*WITHOUT_MEANING, *NEUTRAL, "method", "model")
    assert (after != before) == changes


def test_one_bound_of_a_lookup_moves_the_other():
    for key, value in (("prompt_lookup_max", 1), ("prompt_lookup_min", 7)):
        config = EngineConfig.of("any", speculative_config={"method": "ngram", key: value}).speculation
        assert getattr(config, key) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "promt_lookup_max": 4}, "unknown key 'promt_lookup_max'; did you mean prompt_lookup_max"),
        ({"method": "ngram", "xyz": 4}, "unknown key 'xyz'; there is method"),
        ({"method": "mlp_speculator", "model": "x"}, "method must be one of ngram, .*, got 'mlp_speculator'"),
        ({"method": "mtp", "model": "x"}, "method mtp needs no model; leave model 'x' out"),
        ({"method": "eagle3"}, "method eagle3 needs model"),
        ({"method": "medusa"}, "method medusa needs model"),
        ({"method": "medusa", "model": "x", "rejection_sample_method": "loose"}, "must be .*block.*, got 'loose'"),
        ({"method": "draft_model"}, "draft_model needs model"),
        ({"num_speculative_tokens": 4}, "lacks its method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and 64, got 0"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1, got 2"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "'synthetic' accepts wrong tokens"),
        ({"method": ["ngram"]}, "method must be one of"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "must be an object"),
        (3, "must be an object"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of("any", speculative_config=given)


def test_an_option_is_given_once():
    with pytest.raises(ConfigError, match="speculate was given twice"):
        EngineConfig.of("any", speculate="suffix", speculative_config={"method": "ngram"})


def test_auto_is_all_proposers_that_need_no_model_and_goes_with_one():
    auto = EngineConfig.of("any", speculate="auto").speculation
    lookup = "suffix" if find_spec("ridgeline._native") else "ngram"  # which finds all that ngram does, and sooner
    assert set(auto.proposers()) == {"forced", "prediction", lookup}
    both = EngineConfig.of("any", speculate="auto,draft:python-1m").speculation
    assert both.proposers() == (*auto.proposers(), "draft")
    with pytest.raises(ConfigError, match="off, auto or one of"):
        EngineConfig.of("any", speculate="auto:x")
