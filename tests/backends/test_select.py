"""Which backend is chosen, what it may be asked for, and the reference as the oracle of quantized models."""

import sys
from math import prod

import pytest
import torch

from ridgeline import LLM, SamplingParams, quant
from ridgeline.backends.select import NativeSupport, choose_backend, native_support
from ridgeline.core.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import KvState, LatentState
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.spec import families

HERE = NativeSupport(levels=("portable", "avx2", "avx512", "amx_emulated"), best="avx512")
ABSENT = NativeSupport(missing="this installation has no native code")


def config(*, backend=None, quantize=None, kv_dtype="auto"):
    return EngineConfig(
        model=ModelConfig(model="any"),
        cache=CacheConfig(kv_dtype=kv_dtype),
        quantize=QuantizeConfig(**(quantize or {})),
        backend=BackendConfig(**(backend or {})),
    )


def test_native_where_it_runs():
    chosen = choose_backend(config(), "bfloat16", HERE)
    assert (chosen.backend, chosen.level, chosen.kv_dtype) == ("native", "avx512", "bfloat16")
    assert {name: choice.value for name, choice in chosen.choices.items()} == {
        "backend": "native",
        "isa": "avx512",
        "kv_dtype": "bfloat16",
        "quantize": "none",
    }
    assert all(choice.reason for choice in chosen.choices.values())


def test_reference_where_native_does_not_run_says_what_is_lost():
    chosen = choose_backend(config(), "float32", ABSENT)
    assert (chosen.backend, chosen.level, chosen.kv_dtype) == ("reference", "", "float32")
    reason = chosen.choices["backend"].reason
    assert "no native code" in reason and "slower" in reason
    assert (
        choose_backend(config(backend={"backend": "reference"}), "float32", HERE).choices["backend"].reason
        == "as asked"
    )


def test_float16_is_never_native():
    assert choose_backend(config(), "float16", HERE).backend == "reference"
    assert choose_backend(config(), "float32", HERE, [KvState(2, 640, None)]).backend == "reference"
    with pytest.raises(ConfigError, match="float16"):
        choose_backend(config(backend={"backend": "native"}), "float16", HERE)


def test_latents_are_kept_as_floats():
    states = [LatentState(512, 64)]
    chosen = choose_backend(config(), "bfloat16", HERE, states)
    assert chosen.backend == "native"
    assert chosen.state_size(states[0]).bytes_per_token == 1152
    assert choose_backend(config(), "float32", HERE, [LatentState(1024, 64)]).backend == "reference"
    for state in (*states, KvState(2, 512, None)):
        with pytest.raises(ConfigError, match="kv_dtype=int8"):
            choose_backend(config(kv_dtype="int8"), "bfloat16", HERE, [state])


@pytest.mark.parametrize("level", HERE.levels)
def test_every_level_that_runs_may_be_asked_for(level):
    chosen = choose_backend(config(backend={"isa": level, "deterministic": True}), "float32", HERE)
    assert (chosen.level, chosen.choices["isa"].reason, chosen.choices["deterministic"].value) == (
        level,
        "as asked",
        "on",
    )


@pytest.mark.parametrize(
    ("settings", "support", "words"),
    [
        ({"backend": {"backend": "native"}}, ABSENT, "cannot be used: this installation has no native code"),
        ({"backend": {"isa": "amx"}}, HERE, "isa 'amx' is not one that this machine runs: portable, avx2, avx512"),
        ({"backend": {"isa": "avx2"}}, ABSENT, "isa=avx2 needs the native backend"),
        ({"backend": {"backend": "reference", "isa": "avx2"}}, HERE, "(as asked)"),
        ({"backend": {"deterministic": True}}, ABSENT, "deterministic needs the native backend"),
        ({"kv_dtype": "int8"}, ABSENT, "kv_dtype=int8 needs the native backend"),
        ({"kv_dtype": "float32"}, ABSENT, "kv_dtype=float32 needs the native backend"),
        ({"quantize": {"scheme": "int8", "inputs": "int8"}}, ABSENT, "quantize_inputs=int8 needs the native backend"),
    ],
)
def test_what_cannot_be_had_is_refused(settings, support, words):
    with pytest.raises(ConfigError) as refused:
        choose_backend(config(**settings), "bfloat16", support)
    assert words in str(refused.value)


def test_missing_native_code_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ridgeline._native", None)
    support = native_support()
    assert support.levels == () and "no native code" in support.missing


@pytest.mark.parametrize(
    ("kv_dtype", "num_bytes"), [("float32", 2 * 3 * 20 * 4), ("bfloat16", 240), ("int8", 2 * 3 * 24)]
)
def test_bytes_of_keys_and_values(kv_dtype, num_bytes):
    chosen = choose_backend(config(kv_dtype=kv_dtype), "bfloat16", HERE)
    size = chosen.state_size(KvState(num_heads=3, head_dim=20, window=7))
    assert (size.bytes_per_token, size.window) == (num_bytes, 7)


def test_bytes_of_weights():
    program = lower(families.read_spec(families.family("llama").tiny(lambda *options: options[0])))
    plain = config()
    int4 = config(quantize={"scheme": "int4", "group_size": 32})
    chosen = choose_backend(plain, "bfloat16", HERE)
    assert chosen.weight_bytes(program, plain.quantize) == 2 * program.num_parameters
    matrices = quant.quantized_names(program, embeddings=True)
    stored = sum(quant.scheme("int4").stored_bytes(program.weights[name], 32, False) for name in matrices)
    rest = sum(shape[0] for shape in program.weights.values() if len(shape) == 1)
    assert chosen.weight_bytes(program, int4.quantize) == stored + 2 * rest
    reference = choose_backend(int4, "bfloat16", ABSENT)
    assert reference.weight_bytes(program, int4.quantize) == 2 * program.num_parameters


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_native_settings(scheme):
    pytest.importorskip("ridgeline._native", reason="the native code is not built")
    from ridgeline.backends.native import MatrixFormat
    from ridgeline.backends.select import native_settings

    plain = MatrixFormat(kind="bf16", inputs="bf16")
    group = 64 if scheme == "int4" else 0
    chosen_format = MatrixFormat(kind=scheme, inputs="int8", group=group)
    options = {"scheme": scheme, "inputs": "int8", **({"group_size": 64} if scheme == "int4" else {})}
    for embeddings in (True, False):
        asked = config(quantize={**options, "embeddings": embeddings}, kv_dtype="int8")
        settings = native_settings(choose_backend(asked, "bfloat16", HERE), asked, 3)
        assert (settings.level, settings.num_threads, settings.dtype, settings.kv) == ("avx512", 3, "bfloat16", "int8")
        assert settings.matrices == chosen_format
        assert settings.head == (chosen_format if embeddings else plain)
        assert settings.embeddings == (chosen_format if embeddings else None)
    unquantized = config()
    settings = native_settings(choose_backend(unquantized, "float32", HERE), unquantized, 1)
    assert settings.matrices == settings.head == MatrixFormat(kind="f32", inputs="f32")


def logprobs(shared_data, **options):
    """Of a greedy answer of the small story model in float32, and its text."""
    path = str(shared_data / "models/stories260K")
    llm = LLM(path, dtype="float32", num_threads=1, max_model_len=64, **options)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    return torch.tensor([entry.logprob for entry in output.outputs[0].logprobs]), output.outputs[0].text


def test_the_reference_computes_with_what_the_integers_mean(shared_data):
    """int8 answers nearly as float32 does, int4 less nearly."""
    plain, text = logprobs(shared_data, backend="reference")
    int8, text_int8 = logprobs(shared_data, backend="reference", quantize="int8")
    int4, _ = logprobs(shared_data, backend="reference", quantize="int4", quantize_group_size=32)
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
    expected, text = logprobs(shared_data, backend="reference", **options)
    actual, native_text = logprobs(shared_data, backend="native", **options)
    assert native_text == text
    assert (actual - expected).abs().max() < 2e-3


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_what_is_absorbed_counts_again(scheme):
    """W_k is there a second time, in the model's dtype whatever the rest is stored as."""
    program = lower(families.read_spec(families.family("deepseek_v2").tiny(lambda *options: options[0])))
    asked = config(quantize={"scheme": scheme})
    sizes = [LatentSizes.of_op(program, op) for op in program.ops if op.kind == "latent_attention"]
    again = sum(each.num_heads * each.nope_dim * each.latent_dim for each in sizes)
    small = quant.quantized_names(program, embeddings=True) if scheme else frozenset()
    shapes = [program.weights[name] for name in small]
    stored = sum(quant.scheme("int8").stored_bytes((prod(s[:-1]), s[-1]), 128, False) for s in shapes)
    rest = sum(prod(shape) for name, shape in program.weights.items() if name not in small)
    chosen = choose_backend(asked, "bfloat16", HERE)
    assert chosen.weight_bytes(program, asked.quantize) == stored + 2 * (rest + again) > 2 * again > 0
