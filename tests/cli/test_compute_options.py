"""The options of how a model is computed, on every command that runs one."""

import inspect
from dataclasses import fields

import pytest

from ridgeline.cli._compute import Compute
from ridgeline.cli.bench import latency, offline
from ridgeline.cli.chat import chat
from ridgeline.cli.generate import generate
from ridgeline.cli.serve import serve
from ridgeline.engine.llm import LLM


@pytest.mark.parametrize("command", [chat, generate, latency, offline, serve], ids=lambda command: command.__name__)
def test_every_command_has_every_option(command):
    parameters = inspect.signature(command).parameters
    assert "compute" not in parameters
    for field in fields(Compute):
        assert parameters[field.name].default == field.default


def test_the_python_api_has_them_too_and_agrees_on_defaults():
    keywords = inspect.signature(LLM).parameters
    for field in fields(Compute):
        name = {"lora": "adapters"}.get(field.name, field.name.removeprefix("no_"))
        if name == "adapters":
            assert keywords[name].default is field.default is None
            continue
        assert keywords[name].default == (field.default if name == field.name else not field.default)


def test_packed_weights_are_kept_unless_told_otherwise():
    assert Compute().backend_config().pack_cache
    assert not Compute(no_pack_cache=True).backend_config().pack_cache


def test_options_reach_the_engine(ridgeline, model_folder):
    options = ("--quantize", "int4", "--quantize-group-size", 32, "--quantize-zero-points", "--no-quantize-embeddings")
    done = ridgeline("-v", "generate", "def", "-m", model_folder, "--max-tokens", 1, "--backend", "reference", *options)
    assert done.code == 0, done.err
    done = ridgeline("generate", "def", "-m", model_folder, "--backend", "reference", "--kv-dtype", "int8")
    assert (done.code, done.out) == (2, "")
    assert "kv_dtype=int8 needs the native backend" in done.err


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
@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench offline"])
def test_wrong_options_are_one_line(ridgeline, model_folder, command, options, words):
    target = (model_folder, "--port", 0) if command == "serve" else ("-m", model_folder)
    done = ridgeline(*command.split(), *target, *options)
    assert done.code == 2
    assert words in done.err
