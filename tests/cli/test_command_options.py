"""Every option of every command, away from its default, is what arrives in the engine, the sampler and the server."""

import inspect
import json
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from away_from_default import away, typed
from ridgeline import LLM, SamplingParams
from ridgeline.bench import offline
from ridgeline.cli.bench import latency as bench_latency
from ridgeline.cli.bench import offline as bench_offline
from ridgeline.cli.chat import chat
from ridgeline.cli.generate import generate
from ridgeline.cli.profile import SETTLED, profile
from ridgeline.cli.serve import serve
from ridgeline.core.config import EngineConfig
from ridgeline.core.options import table
from ridgeline.engine import build, thread_engine
from ridgeline.engine import llm as llm_module
from ridgeline.engine.intake import Intake
from ridgeline.engine.process import client as process_client
from ridgeline.explain import start
from ridgeline.server import app
from ridgeline.server.settings import ServerSettings

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "profile": profile,
    "bench offline": bench_offline,
    "bench latency": bench_latency,
}
# What a command decides itself, or what has no meaning for it.
QUEUE = {"task", "scheduling_policy", "max_itl_s", "max_itl_ratio"}
WITHOUT = {
    "generate": QUEUE | {"seed"},  # --seed is the sampling parameter
    "chat": QUEUE | {"seed"},
    "serve": set(),
    "profile": QUEUE | {"seed", *SETTLED},
    "bench offline": QUEUE,
    "bench latency": QUEUE,
}


class ArrivedError(Exception):
    """Ends a command where its engine would be built."""


@pytest.fixture
def arrived(monkeypatch):
    """The configurations with which engines were to be built."""
    configs = []

    def build_engine(config, deliver):
        configs.append(config)
        raise ArrivedError

    for module in (llm_module, thread_engine, offline, build):
        monkeypatch.setattr(module, "build_engine", build_engine)
    monkeypatch.setattr(process_client, "ProcessEngine", lambda config: build_engine(config, None))
    return configs


def identifier(row):
    return row.flag.removeprefix("--").replace("-", "_")


def rows_of(command):
    """All but speculative_config, which stands in place of other options."""
    without = WITHOUT[command] | {"speculative_config"}
    return [row for row in table(EngineConfig) if identifier(row) not in without]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_every_option_of_the_engine_but_those_it_decides(command):
    taken = set(inspect.signature(COMMANDS[command]).parameters)
    missing = {identifier(row) for row in table(EngineConfig)} - taken
    assert missing == WITHOUT[command] - taken


@pytest.mark.parametrize("command", COMMANDS)
def test_every_engine_option_arrives(command, ridgeline, arrived):
    options = {row.name: away(row) for row in rows_of(command)} | {"quantize": "int4", "speculate": "ngram"}
    words = [word for row in rows_of(command) for word in typed(row, options[row.name])]
    port = ["--port", "0"] if command == "serve" else []
    with pytest.raises(ArrivedError):
        ridgeline(*command.split(), "some-model", *port, *words)
    expected = EngineConfig.of("some-model", **options)
    if command == "profile":
        assert [arrived[0].model.max_model_len, arrived[0].cache.prefix_caching] == [256, False]
        scheduler = arrived[0].scheduler
        expected = replace(
            expected,
            model=replace(expected.model, max_model_len=256),
            cache=replace(expected.cache, prefix_caching=False),
            scheduler=scheduler,
        )
    assert arrived == [expected]


def test_a_speculative_config_arrives(ridgeline, arrived):
    with pytest.raises(ArrivedError):
        ridgeline("generate", "some-model", "--speculative-config", '{"method": "suffix", "adaptive": false}')
    assert arrived == [EngineConfig.of("some-model", speculate="suffix", adaptive_speculation=False)]


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_typed_is_the_default(command, ridgeline, arrived):
    with pytest.raises(ArrivedError):
        ridgeline(*command.split(), "-m", "some-model", *(["--port", "0"] if command == "serve" else []))
    if command != "profile":
        default = EngineConfig.of("some-model")
        served = default.served() if command == "serve" else default
        assert arrived == [served.drafting() if command in ("serve", "generate", "chat") else served]
        assert (arrived[0].speculation.speculate is None) == (command not in ("serve", "generate", "chat"))
        assert (arrived[0].scheduler.max_itl_ratio is None) == (command != "serve")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_arrives(command, ridgeline, model_folder, monkeypatch):
    without = {"json", "json_object", "choice", "grammar"}  # a request has one of them: regex
    without |= {"n", "logprobs", "prompt_logprobs"} if command == "chat" else set()
    rows = [row for row in table(SamplingParams) if row.name not in without]
    words = [word for row in rows for word in typed(row, away(row))]
    params = []

    def request(self, prompt_ids, given, **others):
        params.append(given)
        raise ArrivedError

    monkeypatch.setattr(Intake, "request", request)
    place = {"generate": ("a b",), "chat": ()}[command]
    with pytest.raises(ArrivedError):
        ridgeline(command, model_folder, *place, *words, stdin="a b\n")
    (given,) = params
    for row in rows:
        owner = given if row.part is None else getattr(given, row.part)
        assert getattr(owner, row.field) == away(row) != row.default, row.flag


def test_every_option_of_the_server_arrives(ridgeline, monkeypatch):
    arrived = []
    monkeypatch.setattr(thread_engine, "build_engine", lambda config, deliver: MagicMock(tokenizer=None))
    monkeypatch.setattr(process_client, "ProcessEngine", lambda config: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(start, "planned", lambda config, slos, left_open: config)  # for --slo

    def create_app(engine, tokenizer, settings):
        arrived.append(settings)
        raise ArrivedError

    monkeypatch.setattr(app, "create_app", create_app)
    words = [word for row in table(ServerSettings) for word in typed(row, away(row))]
    with pytest.raises(ArrivedError):
        ridgeline("serve", "some-model", "--port", 0, "--api-key", "k", "--kv-dtype", "int8", *words)  # for --kv-canary
    expected = {row.field: away(row) for row in table(ServerSettings)}
    assert arrived == [ServerSettings(api_key="k", **expected)]
    assert {row.field for row in table(ServerSettings)} | {"api_key"} == {
        field.name for field in fields(ServerSettings)
    }


def as_toml(words):
    """What was typed, as a file of --config has it: by names without dashes at the front."""
    values = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            follows = words[index + 1 : index + 2]
            is_flag = not follows or follows[0].startswith("--")
            name = word.removeprefix("--no-") if word.startswith("--no-") else word.removeprefix("--")
            values.setdefault(name, []).append(not word.startswith("--no-") if is_flag else follows[0])
    several = {"lora", "served-model-name", "allowed-host", "cors-origin"}
    lines = [f"{name} = {json.dumps(given if name in several else given[-1])}" for name, given in values.items()]
    return "\n".join(lines)


def test_every_option_arrives_from_a_file(ridgeline, arrived, monkeypatch, tmp_path):
    options = {row.name: away(row) for row in rows_of("serve")} | {"quantize": "int4", "speculate": "ngram"}
    engine = [word for row in rows_of("serve") for word in typed(row, options[row.name])]
    server = [word for row in table(ServerSettings) for word in typed(row, away(row))]
    (tmp_path / "all.toml").write_text(f'model = "some-model"\nport = 0\n{as_toml(engine)}\n{as_toml(server)}\n')
    settings = []
    monkeypatch.setattr(app, "create_app", lambda engine, tokenizer, given: settings.append(given))
    with pytest.raises(ArrivedError):
        ridgeline("serve", "--config", tmp_path / "all.toml", "--engine-process")  # what is typed comes first
    assert arrived == [EngineConfig.of("some-model", **options)]
    monkeypatch.setattr(process_client, "ProcessEngine", lambda config: SimpleNamespace(tokenizer=None))
    with pytest.raises(AttributeError):  # there is no app to run
        ridgeline("serve", "--config", tmp_path / "all.toml", "--engine-process", "--api-key", "k")
    expected = {row.field: away(row) for row in table(ServerSettings)} | {"engine_process": True}
    assert settings == [ServerSettings(api_key="k", **expected)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope = 1", "there is no option nope"),
        ("[server]\nport = 0", "there is no option server"),
        ("port = ", "cannot be read"),
        ("port = 70000", "65535"),
        ('kv-dtype = "nope"', "--kv-dtype"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_refused(ridgeline, tmp_path, text, words):
    if text is not None:
        (tmp_path / "some.toml").write_text(text)
    ran = ridgeline("serve", "some-model", "--config", tmp_path / "some.toml")
    assert ran.code == 2 and words in ran.err and len(ran.err.splitlines()) == 1, ran.err


@pytest.mark.parametrize("command", ["generate", "chat", "bench latency"])
def test_packed_weights_are_not_kept_if_told_so(command, ridgeline, arrived):
    with pytest.raises(ArrivedError):
        ridgeline(*command.split(), "some-model", "--no-pack-cache")
    assert not arrived[0].backend.pack_cache


def test_short_names_are_those_of_llama_cpp(ridgeline, arrived):
    with pytest.raises(ArrivedError):
        ridgeline("generate", "-m", "some-model", "-p", "text", "-c", 100, "-t", 2, "-n", 5)
    assert (arrived[0].model.max_model_len, arrived[0].num_threads) == (100, 2)


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["generate", "some/model", "a b"], "some/model"),
        (["generate", "-m", "some/model", "a b"], "some/model"),
        (["generate", "a b", "-m", "some/model"], "some/model"),
        (["generate", "-m", "some/model", "-p", "a b"], "some/model"),
        (["chat", "some/model"], "some/model"),
        (["serve", "--port", "0", "-m", "some/model"], "some/model"),
        (["profile", "--model", "some/model"], "some/model"),
        (["bench", "latency", "some/model"], "some/model"),
        (["bench", "offline", "-m", "some/model"], "some/model"),
    ],
)
def test_the_model_is_given_alike(words, model, ridgeline, arrived):
    with pytest.raises(ArrivedError):
        ridgeline(*words)
    assert arrived[0].model.model == model


@pytest.mark.parametrize(
    ("words", "response"),
    [
        (
            ["generate", "def f(): pass"],
            "no model. To continue it as a prompt: ridgeline generate MODEL 'def f(): pass'",
        ),
        (["generate", "a/b", "text", "-m", "c/d"], "two models were given, 'a/b' and --model 'c/d'; give one"),
        (["chat", "a/b", "-m", "c/d"], "two models were given"),
        (["inspect"], "no model was given: ridgeline inspect MODEL"),
        (["generate", "-m", "python-9m", "a", "-p", "b"], "two prompts were given, 'a' and --prompt 'b'; give one"),
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'? Try: ridgeline --help"),
        (
            ["generate", "--temp", "0"],
            "No such option: --temp. Did you mean --temperature? Try: ridgeline generate --help",
        ),
        (
            ["serve", "--ctx-size", "9"],
            "No such option: --ctx-size. Did you mean --max-model-len? Try: ridgeline serve",
        ),
        (["serve", "--kv-cache-dtype", "int8"], "Did you mean --kv-dtype?"),
        (["generate", "--quantize", "int3"], "'int3'"),
        (["generate", "--max-tokens", "many"], "Invalid value for '--max-tokens' / '-n'"),
        (["bench", "latency", "--prefil", "5"], "No such option: --prefil"),
        (["bench", "ablate", "python-1m", "--out", __file__], "no result can be written to"),
        (["bench", "ablate", "python-1m", "--name", "a/b"], "a result's name may hold"),
        (["chat", "a/b", "--lora", "folder"], "--lora takes NAME=FOLDER, each NAME once; got 'folder'"),
        (["chat", "a/b", "--lora", "a=x", "--lora", "a=y"], "--lora takes NAME=FOLDER, each NAME once"),
        (["generate", "--lora", "a=x", "--lora", "b=y"], "this command runs one adapter, got a, b"),
        (["generate", "--logit-bias", "x=1"], "--logit-bias takes ID=BIAS"),
        (["generate", "--quantize-group-size", "64"], "without a scheme"),
        (["serve", "--max-prompts", "0", "--port", "0"], "max_prompts must be at least 1, got 0"),
    ],
)
def test_a_wrong_line_is_answered_in_one_line(words, response, ridgeline):
    done = ridgeline(*words)
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert done.code in (2, 3)
    head, *tail = response.split("MODEL ") if "ridgeline generate MODEL" in response else (response,)
    assert head in done.err and all(part in done.err for part in tail)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench offline"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quantize", "int3"), "int3"),
        (("--quantize-group-size", 64), "without a scheme"),
        (("--quantize", "int8", "--quantize-zero-points"), "options of int4"),
        (("--backend", "reference", "--isa", "avx2"), "isa=avx2 needs the native backend"),
        (("--backend", "reference", "--deterministic"), "deterministic needs the native backend"),
    ],
)
def test_wrong_options_are_one_line(ridgeline, model_folder, command, options, words):
    done = ridgeline(*command.split(), model_folder, *(["--port", 0] if command == "serve" else []), *options)
    assert done.code == 2
    assert words in done.err and done.err.count("\n") == 1


def test_options_reach_the_engine(ridgeline, model_folder):
    options = ("--quantize", "int4", "--quantize-group-size", 32, "--quantize-zero-points", "--no-quantize-embeddings")
    done = ridgeline("-v", "generate", model_folder, "def", "--max-tokens", 1, "--backend", "reference", *options)
    assert done.code == 0, done.err
    done = ridgeline("generate", model_folder, "def", "--backend", "reference", "--kv-dtype", "bfloat16")
    assert (done.code, done.out) == (2, "")
    assert "kv_dtype=bfloat16 needs the native backend" in done.err


def test_help_groups_the_options(ridgeline):
    text = ridgeline("serve", "--help").out
    titles = ["Server", "Model", "Quantization", "KV cache", "Scheduling", "Execution"]
    places = [text.index(f"─ {title} ─") for title in titles]
    assert places == sorted(places)


def test_the_python_api_opens_a_configuration(arrived):
    with pytest.raises(ArrivedError):
        LLM.from_config(EngineConfig.of("m", seed=3))
    assert arrived[0].seed == 3
