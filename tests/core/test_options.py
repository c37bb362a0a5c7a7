"""The table of options: every stated range at its edges, one clear error, and the names that callers see."""

import inspect
from collections.abc import Mapping
from typing import get_type_hints

import pytest

from away_from_default import away
from ridgeline import LLM
from ridgeline.core.config import EngineConfig, EngineOptions, ModelConfig
from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.core.options import Option, Row, table
from ridgeline.core.params import DiffusionParams, SamplingParams, StructuredOutputsParams
from ridgeline.engine import llm as llm_module
from ridgeline.server.settings import ServerSettings

# What else must be said for a value at an edge to make sense.
COMPANIONS: Mapping[str, Mapping[str, object]] = {
    "max_num_seqs": {"max_num_batched_tokens": 1},
    "max_num_batched_tokens": {"max_num_seqs": 1},
    "quantize_group_size": {"quantize": "int4"},
    "min_tokens": {"max_tokens": None},
    "prompt_lookup_min": {"prompt_lookup_max": 64},
    "prompt_lookup_max": {"prompt_lookup_min": 1},
}


def engine(row: Row, value: object) -> object:
    return EngineConfig.of("any", **{row.name: value}, **COMPANIONS.get(row.name, {}))


def sampling(row: Row, value: object) -> object:
    owner = {None: SamplingParams, "diffusion": DiffusionParams, "structured_outputs": StructuredOutputsParams}[
        row.part
    ]
    return owner(**{row.field: value}, **COMPANIONS.get(row.name, {}))


def settings(row: Row, value: object) -> object:
    return ServerSettings(**{row.field: value})


BUILDERS = {EngineConfig: engine, SamplingParams: sampling, ServerSettings: settings}
ROWS = [pytest.param(build, row, id=row.flag) for owner, build in BUILDERS.items() for row in table(owner)]
SCALARS = [case for case in ROWS if case.values[1].type in (bool, int, float, str)]
NUMBERS = [case for case in ROWS if case.values[1].type in (int, float)]


def name(row: Row) -> str:
    """As callers of Python and HTTP know it."""
    return row.field if row.part == "diffusion" else row.name


def edges(row: Row) -> tuple[list[float], list[float]]:
    """(values that are allowed, values just outside)."""
    option, step = row.option, 1 if row.type is int else 1e-9
    if option.choices:
        return list(option.choices), [min(option.choices) - 1, max(option.choices) + 1]
    inside = [bound for bound in (option.low, option.high) if bound is not None]
    outside = [] if option.low is None else [option.low - step]
    outside += [] if option.high is None else [option.high + step]
    if option.above is not None:
        inside, outside = [*inside, option.above + step], [*outside, option.above]
    if row.type is float:
        outside += [float("nan"), float("inf")]
    return inside, outside


@pytest.mark.parametrize(("build", "row"), NUMBERS)
def test_a_range_holds_at_its_edges(build, row):
    inside, outside = edges(row)
    assert inside and outside, f"{row.flag} states no range"
    for value in inside:
        build(row, value)
    for value in outside:
        with pytest.raises((ConfigError, RequestError)) as refused:
            build(row, value)
        message = str(refused.value)
        assert message.startswith(f"{name(row)} must be ") and message.endswith(f"got {value!r}"), message
        assert getattr(refused.value, "param", name(row)) == name(row)


@pytest.mark.parametrize(("build", "row"), SCALARS)
def test_a_value_of_another_type_is_one_clear_error(build, row):
    for wrong in (object(), [], "3" if row.type is not str else 3, True if row.type is not bool else 1):
        with pytest.raises((ConfigError, RequestError), match=f"^{name(row)} must be "):
            build(row, wrong)


@pytest.mark.parametrize(("build", "row"), ROWS)
def test_help_is_a_sentence(build, row):
    assert row.option.help[0].isupper() or row.option.help.startswith("int4: ")
    assert row.option.help.endswith(".") and not row.option.help.startswith(("Of ", "What "))
    assert row.panel


def test_type_checkers_see_every_option_with_its_type():
    declared = get_type_hints(EngineOptions)
    rows = {row.name: row.type | None if row.optional else row.type for row in table(EngineConfig)}
    assert declared == rows


def test_help_shows_every_option_with_its_default():
    shown = inspect.signature(LLM).parameters
    assert list(shown) == ["model", *(row.name for row in table(EngineConfig))]
    assert all(shown[row.name].default == row.default for row in table(EngineConfig))


def test_every_option_of_the_python_api_arrives(monkeypatch):
    arrived = []
    monkeypatch.setattr(llm_module, "build_engine", lambda config, deliver: arrived.append(config))
    rows = [row for row in table(EngineConfig) if row.name != "speculative_config"]  # stands in place of others
    options = {row.name: away(row) for row in rows} | {"quantize": "int4", "speculate": "ngram"}
    LLM("some-model", **options)
    (config,) = arrived
    assert config.model.model == "some-model"
    for row in rows:
        owner = config if row.part is None else getattr(config, row.part)
        assert getattr(owner, row.field) == options[row.name] != row.default


def test_options_left_out_have_their_defaults():
    assert EngineConfig.of("m") == EngineConfig(model=ModelConfig(model="m"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_seqs", "max_num_seqs"),
        ("kv_cache_dtype", "kv_dtype"),  # vLLM
        ("quantization", "quantize"),
        ("gpu_memory_utilization", "kv_cache_bytes"),
        ("n_ctx", "max_model_len"),  # llama.cpp
        ("n_threads", "num_threads"),
        ("prefix_caching", "enable_prefix_caching"),
    ],
)
def test_an_unknown_option_is_told_which_was_meant(name, meant):
    with pytest.raises(ConfigError, match=rf"^unknown option {name}; did you mean {meant}\?$"):
        LLM("python-9m", **{name: 1})
    with pytest.raises(ConfigError, match="unknown option zzz; there is adapters, adaptive_speculation, backend"):
        LLM("python-9m", zzz=1)


def test_a_range_in_words():
    assert Option(help="").range == ""
    assert Option(help="", low=1).range == "at least 1"
    assert Option(help="", high=2.5).range == "at most 2.5"
    assert Option(help="", above=0.0, high=1.0).range == "greater than 0 and at most 1"
    assert Option(help="", choices=(32, 64)).range == "one of 32, 64"
