"""Which backend is chosen, what it may be asked for, and the reference as the oracle of quantized models."""

import sys
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch

from families import tiny
from ridgeline import LLM, SamplingParams, quant
from ridgeline.backends.base import ModelSource
from ridgeline.backends.native.backend import NativeBackend
from ridgeline.backends.native.settings import MatrixFormat
from ridgeline.backends.probe import NativeModule, find_native
from ridgeline.backends.reference.backend import ReferenceBackend
from ridgeline.backends.select import names, offers, select
from ridgeline.core.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import KvState, LatentState
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.spec import families

HERE = find_native()
BEST, LEVELS = (HERE.module.best_level(), HERE.module.runnable_levels()) if HERE.module else ("", [])
ABSENT = NativeModule(None, "it was not built")


def config(*, backend=None, quantize=None, kv_dtype="auto", num_threads=None):
    return EngineConfig(
        model=ModelConfig(model="any"),
        cache=CacheConfig(kv_dtype=kv_dtype),
        quantize=QuantizeConfig(**(quantize or {})),
        backend=BackendConfig(**(backend or {})),
        num_threads=num_threads,
    )


def model(dtype, states=None, family="llama"):
    """A model whose checkpoint has a dtype; `states` in the place of what its program keeps."""
    spec = families.read_spec(tiny(family, lambda *options: options[0]))
    program = lower(spec)
    program = program if states is None else replace(program, states=tuple(states))
    return ModelSource(SimpleNamespace(config={"dtype": dtype}, gguf=None), spec, program, program)


def choose(config, model, support=HERE):
    """The backend that is chosen, its plan, and the reason."""
    asked = config.backend.backend
    offered = [backend for backend in (NativeBackend(support), ReferenceBackend()) if asked in ("auto", backend.name)]
    backend, why = select(model, config, offered)
    return backend.name, backend.plan(model, config), why.reason


def test_native_where_it_runs():
    name, plan, why = choose(config(), model("bfloat16"))
    assert (name, plan.settings.level, plan.settings.kv) == ("native", BEST, "bf16")
    chosen = {name: choice.value for name, choice in plan.choices.items() if name not in ("threads", "kernels")}
    assert chosen == {"isa": BEST, "kv_dtype": "bfloat16", "quantize": "none", "dtype": "bfloat16"}
    assert why == "this machine runs it"
    assert all(choice.reason for choice in plan.choices.values())


@pytest.mark.skipif(HERE.module is None, reason="the native module is not built")
def test_reference_where_an_op_has_no_kernel():
    asked = model("float32")
    toy = replace(asked.program.ops[0], kind="toy_double", label="twice")
    program = replace(asked.program, ops=(*asked.program.ops, toy))
    assert "it has no kernel for this model's toy_double" in choose(config(), replace(asked, program=program))[2]


def test_reference_where_native_does_not_run_says_what_is_lost():
    name, plan, why = choose(config(), model("float32"), ABSENT)
    assert (name, plan.choices["kv_dtype"].value) == ("reference", "float32")
    assert "isa" not in plan.choices
    assert "no native code" in why and "slower" in why
    assert choose(config(backend={"backend": "reference"}), model("float32"))[::2] == ("reference", "as asked")


def test_float16_is_never_native():
    half = replace(config(), model=ModelConfig(model="any", dtype="float16"))
    assert choose(half, model("float16"))[0] == "reference"
    assert choose(config(), model("float32", [KvState(2, 640, None)]))[0] == "reference"
    with pytest.raises(ConfigError, match="float16"):
        choose(replace(half, backend=BackendConfig(backend="native")), model("float16"))


def test_latents_are_kept_as_floats():
    states = [LatentState(512, 64)]
    name, plan, _ = choose(config(), model("bfloat16", states))
    assert name == "native"
    assert plan.state_size(states[0]).bytes_per_token == 1152
    assert choose(config(), model("float32", [LatentState(1024, 64)]))[0] == "reference"
    for state in (*states, KvState(2, 512, None)):
        for kv_dtype in ("int8", "fp8", "int4"):
            for support in (HERE, ABSENT):
                with pytest.raises(ConfigError, match=f"kv_dtype={kv_dtype}"):
                    choose(config(kv_dtype=kv_dtype), model("bfloat16", [state]), support)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_that_runs_may_be_asked_for(level):
    _, plan, _ = choose(config(backend={"isa": level, "deterministic": True}), model("float32"))
    assert (plan.settings.level, plan.choices["isa"].reason, plan.choices["deterministic"].value) == (
        level,
        "as asked",
        "on",
    )


@pytest.mark.parametrize(
    ("settings", "support", "words"),
    [
        ({"backend": {"backend": "native"}}, ABSENT, "cannot be used: this installation has no native code"),
        (
            {"backend": {"isa": "sse9"}},
            HERE,
            f"isa 'sse9' is not one that this machine runs: {', '.join(LEVELS)}",
        ),
        ({"backend": {"isa": "avx2"}}, ABSENT, "isa=avx2 needs the native backend"),
        ({"backend": {"isa": "avx2"}}, ABSENT, "this installation has no native code"),
        ({"backend": {"backend": "reference", "isa": "avx2"}}, HERE, "reference backend cannot be used: isa=avx2"),
        ({"backend": {"deterministic": True}}, ABSENT, "deterministic needs the native backend"),
        ({"kv_dtype": "float32"}, ABSENT, "kv_dtype=float32 needs the native backend"),
        ({"quantize": {"inputs": "int8"}}, HERE, "quantize_inputs=int8 is for matrices of integers"),
        ({"quantize": {"inputs": "int16"}}, ABSENT, "no matrix of this model is quantized; add quantize=int8"),
    ],
)
def test_what_cannot_be_had_is_refused(settings, support, words):
    with pytest.raises(ConfigError) as refused:
        choose(config(**settings), model("bfloat16"), support)
    assert words in str(refused.value)


@pytest.mark.parametrize("support", [HERE, ABSENT], ids=["native", "reference"])
@pytest.mark.parametrize(("asked", "inputs"), [("auto", "int8"), ("int8", "int8"), ("int16", "int16")])
def test_inputs_of_integers_have_8_bits_unless_asked_otherwise(asked, inputs, support):
    _, plan, _ = choose(config(quantize={"scheme": "int4", "inputs": asked}), model("bfloat16"), support)
    assert plan.choices["quantize_inputs"].value == inputs
    assert (plan.choices["quantize_inputs"].reason == "as asked") == (asked != "auto")


def test_names_are_those_of_the_folders():
    assert names() == ["native", "reference"]
    assert [backend.name for backend in offers()] == ["native", "reference"], "the preferred one first"
    assert [backend.name for backend in offers("reference")] == ["reference"]
    with pytest.raises(ConfigError, match="backend must be one of auto, native, reference, got 'cuda'"):
        offers("cuda")


def test_missing_native_code_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ridgeline._native", None)
    assert find_native().module is None and "was not built" in find_native().reason


@pytest.mark.parametrize(
    ("kv_dtype", "num_bytes"),
    [
        ("float32", 2 * 3 * 20 * 4),
        ("bfloat16", 240),
        ("int8", 2 * 3 * 22),
        ("fp8", 2 * 3 * 22),
        ("int4", int(3 * (15 + 2 + 11.25 + 2))),
    ],
)
def test_bytes_of_keys_and_values(kv_dtype, num_bytes):
    _, plan, _ = choose(config(kv_dtype=kv_dtype), model("bfloat16"))
    size = plan.state_size(KvState(num_heads=3, head_dim=20, window=7))
    assert (size.bytes_per_token, size.window) == (num_bytes, 7)


def test_the_reference_keeps_rounded_keys_and_values_as_float32():
    name, plan, _ = choose(config(kv_dtype="int4"), model("bfloat16"), ABSENT)
    assert (name, plan.choices["kv_dtype"].value) == ("reference", "int4")
    assert plan.state_size(KvState(num_heads=3, head_dim=20, window=7)).bytes_per_token == 2 * 3 * 20 * 4


def test_bytes_of_weights():
    source = model("bfloat16")
    program = source.program
    int4 = config(quantize={"scheme": "int4", "group_size": 32})
    assert choose(config(), source)[1].weight_bytes == 2 * program.num_parameters
    matrices = quant.quantized_names(program, embeddings=True)
    stored = sum(quant.scheme("int4").stored_format(32, False).num_bytes(program.weights[name]) for name in matrices)
    rest = sum(shape[0] for shape in program.weights.values() if len(shape) == 1)
    assert choose(int4, source)[1].weight_bytes == stored + 2 * rest
    assert choose(int4, source, ABSENT)[1].weight_bytes == 2 * program.num_parameters


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_native_settings(scheme):
    plain = MatrixFormat(kind="bf16", inputs="bf16")
    group = 64 if scheme == "int4" else 0
    chosen_format = MatrixFormat(kind=scheme, inputs="int8", group=group)
    options = {"scheme": scheme, "inputs": "int8", **({"group_size": 64} if scheme == "int4" else {})}
    for embeddings in (True, False):
        asked = config(quantize={**options, "embeddings": embeddings}, kv_dtype="int8", num_threads=3)
        settings = choose(asked, model("bfloat16"))[1].settings
        assert (settings.level, settings.num_threads, settings.dtype, settings.kv) == (
            BEST,
            3,
            "bfloat16",
            "int8",
        )
        assert settings.matrices == chosen_format
        assert settings.head == (chosen_format if embeddings else plain)
        assert settings.embeddings == (chosen_format if embeddings else None)
    settings = choose(config(), model("float32"))[1].settings
    assert settings.matrices == settings.head == MatrixFormat(kind="f32", inputs="f32")


def logprobs(shared_data, **options):
    """Of a greedy output of the small story model in float32, and its text."""
    path = str(shared_data / "models/stories260K")
    llm = LLM(path, dtype="float32", num_threads=1, max_model_len=64, **options)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    return torch.tensor([entry.logprob for entry in output.outputs[0].logprobs]), output.outputs[0].text


def test_the_reference_computes_with_what_the_integers_mean(shared_data):
    """int8 answers nearly as float32 does, int4 less nearly."""
    plain, text = logprobs(shared_data, backend="reference")
    int8, text_int8 = logprobs(shared_data, backend="reference", quantize="int8", quantize_inputs="int16")
    int4, _ = logprobs(
        shared_data, backend="reference", quantize="int4", quantize_group_size=32, quantize_inputs="int16"
    )
    rounded, _ = logprobs(shared_data, backend="reference", quantize="int8")
    assert 0 < (rounded - int8).abs().max() < 0.05
    assert text_int8 == text
    assert 0 < (int8 - plain).abs().max() < 0.05
    assert (int4 - plain).abs().max() > (int8 - plain).abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"},
        {"quantize": "int4", "quantize_group_size": 32},
        {"quantize": "int4", "quantize_group_size": 64, "quantize_zero_points": True},
        {"quantize": "int4", "quantize_embeddings": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_native_quantization_is_that_of_the_reference(shared_data, options):
    """Within the rounding of the layers' inputs to 16 bits."""
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    options = {**options, "quantize_inputs": "int16"}
    expected, text = logprobs(shared_data, backend="reference", **options)
    actual, native_text = logprobs(shared_data, backend="native", **options)
    assert native_text == text
    assert (actual - expected).abs().max() < 2e-3


PROMPTS = ["Once upon a time", "The dog", "Lily was", "A big red ball", "Tom and", "One day a cat", "She", "He ran"]


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "quantize_group_size": 32}])
def test_inputs_of_8_bits_are_those_of_the_reference(shared_data, options):
    """All but the few between two integers: most prompts meet none, and what follows one is off by 1 in 127.

    Where two roundings part, log-probabilities move by up to 0.12 here.
    """
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    path, params = (
        str(shared_data / "models/stories260K"),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )
    logprobs = {}
    for backend in ("reference", "native"):
        llm = LLM(path, dtype="float32", num_threads=1, max_model_len=64, backend=backend, **options)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        logprobs[backend] = [torch.tensor([x.logprob for x in out.prompt_logprobs[1:]]) for out in outputs]
    errors = torch.stack([(a - b).abs().max() for a, b in zip(logprobs["native"], logprobs["reference"])])
    assert errors.median() < 1e-4 and errors.max() < 0.2


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_what_is_absorbed_counts_again(scheme):
    """W_k is there a second time, in the model's dtype whatever the rest is stored as."""
    source = model("bfloat16", family="deepseek_v2")
    program = source.program
    sizes = [LatentSizes.of_op(program, op) for op in program.ops if op.kind == "latent_attention"]
    again = sum(each.num_heads * each.nope_dim * each.latent_dim for each in sizes)
    small = quant.quantized_names(program, embeddings=True) if scheme else frozenset()
    shapes = [program.weights[name] for name in small]
    stored = sum(quant.scheme("int8").stored_format(None, False).num_bytes(s) for s in shapes)
    rest = sum(prod(shape) for name, shape in program.weights.items() if name not in small)
    plan = choose(config(quantize={"scheme": scheme}), source)[1]
    assert plan.weight_bytes == stored + 2 * (rest + again) > 2 * again > 0
