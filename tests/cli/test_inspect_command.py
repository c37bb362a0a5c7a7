"""`ridgeline inspect`: the numbers of published models, and output for people and for machines."""

import json
import subprocess
import sys

import pytest

from families import tiny
from ridgeline.cli._inspect_text import _bytes, _flops, _numbers
from ridgeline.program.lower import lower
from ridgeline.program.passes.fuse import GROUP_KINDS
from ridgeline.program.pricing import OpCost
from ridgeline.spec import families

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_2_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
GEMMA_LIKE = {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


@pytest.fixture
def inspect(ridgeline, tmp_path):
    """Inspects a config; JSON is decoded."""

    def run(config, *options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        done = ridgeline("inspect", path, *options)
        assert done.code == 0, done.err
        return json.loads(done.out) if "--json" in options else done.out

    return run


def test_llama_3_8b(inspect):
    found = inspect(LLAMA_3_8B, "--json")
    assert found["parameters"]["total"] == 8_030_261_248
    assert found["parameters"]["num_bytes"] == 2 * 8_030_261_248
    assert found["kv"]["bytes_per_token"] == 131_072
    text = inspect(LLAMA_3_8B)
    assert "8,030,261,248" in text and "131,072" in text


def test_active_parameters(inspect):
    """Of Mixtral 8x7B; a model without experts says nothing of them."""
    config = LLAMA_3_8B | {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
    found = inspect(config, "--json")["parameters"]
    assert (found["total"], found["active"]) == (46_702_792_704, 12_879_925_248)
    assert "active for a token" in inspect(config) and "12,879,925,248" in inspect(config)
    assert inspect(LLAMA_3_8B, "--json")["parameters"]["active"] == 8_030_261_248
    assert "active" not in inspect(LLAMA_3_8B)


def test_llama_2_70b(inspect):
    found = inspect(LLAMA_2_70B, "--json")
    assert found["kv"]["bytes_at_declared_context"] == 1_342_177_280
    assert "1,342,177,280" in inspect(LLAMA_2_70B)
    assert inspect(LLAMA_2_70B, "--json", "--context", 2048)["kv"]["bytes_at_context"] == 1_342_177_280 // 2


def test_sliding_groups_stop_at_their_window(inspect):
    found = inspect(GEMMA_LIKE, "--json", "--dtype", "bfloat16")
    assert [group["kind"] for group in found["kv"]["groups"]] == ["full", "sliding"]
    assert [group["bytes_at_declared_context"] // group["bytes_per_token"] for group in found["kv"]["groups"]] == [
        8192,
        4096,
    ]
    text = inspect(GEMMA_LIKE)
    assert "layer 0-24 by 2" in text and "layer 1-25 by 2" in text
    assert "sliding, window 4,096" in text


@pytest.mark.parametrize("config", [LLAMA_3_8B, LLAMA_2_70B, GEMMA_LIKE], ids=lambda config: config["model_type"])
def test_text_is_plain_and_fits_100_columns_when_piped(inspect, config):
    text = inspect(config, "--batch", 64, "--context", 100_000)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "…" not in text and "─" not in text
    for kind in ("embed", "rmsnorm", "linear", "attention", "gated_activation", "lm_head"):
        assert f" {kind} " in text
    program = text.partition("\nProgram ")[2].partition("\nGroups ")[0]
    assert program.count(" kv_write ") == len(set(families.read_spec(config).layers)), "each distinct layer once"


def test_json_holds_every_op_and_sums_up(inspect):
    found = inspect(GEMMA_LIKE, "--json", "--batch", 3, "--prompt", 50)
    program = lower(families.read_spec(GEMMA_LIKE))
    assert [op["label"] for op in found["ops"]] == [op.label for op in program.ops]
    assert all(op["outputs"] for op in found["ops"] if op["kind"] != "kv_write")
    for step, num_tokens in (("decode", 3), ("prefill", 50)):
        for key in ("flops", "num_bytes", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes"):
            assert found[step][key] == pytest.approx(sum(op[step][key] for op in found["ops"]))
        assert found[step]["flops_per_token"] == pytest.approx(found[step]["flops"] / num_tokens)
        assert found[step]["bytes_per_token"] == pytest.approx(found[step]["num_bytes"] / num_tokens)
    assert OpCost.__dataclass_fields__.keys() <= found["decode"].keys()
    mixer = found["spec"]["layers"][0]["mixer"]
    assert (mixer["type"], mixer["num_heads"], mixer["window"]) == ("GroupedQueryAttention", 8, 4096)


@pytest.mark.parametrize("config", [LLAMA_3_8B, GEMMA_LIKE], ids=lambda config: config["model_type"])
def test_groups_cover_the_ops_and_say_where_they_run(inspect, config):
    found = inspect(config, "--json")
    labels = [label for group in found["groups"] for label in group["ops"]]
    assert sorted(labels) == sorted(op["label"] for op in found["ops"])
    assert all(group["backend"] == "native" for group in found["groups"] if group["kind"] in GROUP_KINDS)
    for key in ("flops", "weight_bytes", "kv_read_bytes"):
        assert sum(group["decode"][key] for group in found["groups"]) == pytest.approx(found["decode"][key])
    assert sum(group["prefill"]["num_bytes"] for group in found["groups"]) < found["prefill"]["num_bytes"]
    rows = {line.split()[0]: line for line in inspect(config).partition("Groups of ops")[2].splitlines() if line}
    assert " native " in rows["norm_qkv"] and " native " in rows["embed"]
    assert f" {config['num_hidden_layers']} " in rows["norm_gated"]


def test_dtypes(inspect):
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "torch_dtype"}
    assert inspect(config, "--json")["dtype"] == "float32"
    assert inspect(config | {"dtype": "float16"}, "--json")["dtype"] == "float16"
    half = inspect(config, "--json", "--dtype", "bfloat16")
    assert (half["kv_dtype"], half["kv"]["bytes_per_token"]) == ("bfloat16", 131_072)
    mixed = inspect(config, "--json", "--dtype", "bfloat16", "--kv-dtype", "float32")
    assert mixed["kv"]["bytes_per_token"] == 2 * 131_072
    assert mixed["decode"]["weight_bytes"] == half["decode"]["weight_bytes"]


def test_int8_keys_and_values_have_scales(inspect):
    """Llama 3 8B: 32 layers of 8 heads of 128 entries, keys and values."""
    found = inspect(LLAMA_3_8B, "--json", "--kv-dtype", "int8", "--context", "100")
    assert found["kv_dtype"] == "int8"
    assert found["kv"]["bytes_per_token"] == 2 * 32 * 8 * (128 + 2)
    assert found["decode"]["kv_read_bytes"] == pytest.approx(100 * found["kv"]["bytes_per_token"])
    assert "KV cache of a sequence, int8" in inspect(LLAMA_3_8B, "--kv-dtype", "int8")


def test_int4_has_keys_of_6_bits_and_values_of_4_and_5(inspect):
    found = inspect(LLAMA_3_8B, "--json", "--kv-dtype", "int4", "--context", "100")
    assert found["kv"]["bytes_per_token"] == 32 * 8 * (128 * 6 // 8 + 2 + 128 * 9 // 16 + 2)
    assert found["kv"]["bytes_per_token"] <= 0.35 * inspect(LLAMA_3_8B, "--json")["kv"]["bytes_per_token"]
    assert found["decode"]["kv_read_bytes"] == pytest.approx(100 * found["kv"]["bytes_per_token"])


def test_folder_and_errors(ridgeline, model_folder, tmp_path):
    done = ridgeline("inspect", model_folder, "--json")
    assert json.loads(done.out)["parameters"]["embedding"] == 300 * 32
    for content, code, words in (
        ("{", 3, "not valid JSON"),
        (json.dumps(LLAMA_3_8B | {"frobnication_rate": 1}), 2, "frobnication_rate"),
        (json.dumps(LLAMA_3_8B | {"model_type": "resnet"}), 2, "'resnet' is not supported"),
    ):
        path = tmp_path / "config.json"
        path.write_text(content)
        done = ridgeline("inspect", path)
        assert (done.code, done.out) == (code, "")
        assert words in done.err and done.err.count("\n") == 1
    assert ridgeline("inspect", tmp_path / "empty").code == 2
    assert ridgeline("inspect", model_folder, "--batch", 0).code == 2


def test_every_family_is_described(inspect):
    for name in families.names():
        for seed in range(3):
            config = tiny(name, lambda *options, seed=seed: options[seed % len(options)])
            text = inspect(config, "--context", 12, "--prompt", 7)
            assert text.partition(" · ")[0].replace("-", "_") == name
            assert max(map(len, text.splitlines())) <= 100


def test_shared_keys_and_values(inspect):
    config = LLAMA_3_8B | {"model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2, "use_qk_norm": True}
    found = inspect(config, "--json")["kv"]
    assert found["bytes_per_token"] == 65_536
    assert found["shared"] == {"num_layers": 16, "spared_bytes_per_token": 65_536}
    assert "16 layers share the KV of others: 65,536 bytes/token instead of 131,072" in inspect(config)
    assert "share the KV" not in inspect(LLAMA_3_8B)
    assert inspect(LLAMA_3_8B, "--json")["kv"]["shared"] == {"num_layers": 0, "spared_bytes_per_token": 0}


def test_needs_no_torch(model_folder):
    code = f"""
import contextlib, sys
from ridgeline.cli import main
for options in ([], ["--json"]):
    with contextlib.suppress(SystemExit):
        main(["inspect", {str(model_folder)!r}, *options])
print([name for name in ("torch", "transformers", "huggingface_hub", "httpx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_numbers_for_people():
    assert [_numbers(n) for n in ([5], [0, 1, 2], [0, 2, 4], [1, 4], [0, 1, 2, 5, 7, 8])] == [
        "5",
        "0-2",
        "0-4 by 2",
        "1, 4",
        "0-2, 5, 7-8",
    ]
    assert [_bytes(n) for n in (0, 1023, 1024, 1536, 100 * 2**20, 2**60)] == [
        "0",
        "1023",
        "1.00 Ki",
        "1.50 Ki",
        "100 Mi",
        "1.00 Ei",
    ]
    assert [_flops(n) for n in (999, 1000, 12_345, 1e12)] == ["999", "1.00 k", "12.3 k", "1.00 T"]


def test_what_becomes_of_a_gguf_files_tensors(ridgeline, shared_data):
    """Where everything is float32 and asked for as bfloat16, everything is converted."""
    path = shared_data / "models" / "stories260K" / "stories260K.gguf"
    (row,) = json.loads(ridgeline("inspect", path, "--json").out)["stored"]
    sizes = {"num_tensors": 48, "num_weights": 292_800, "num_bytes": 1_171_200, "loaded_bytes": 1_171_200}
    assert row == {"type": "F32", "becomes": "as it is", **sizes}
    text = ridgeline("inspect", path, "--dtype", "bfloat16").out
    assert "Tensors of the file" in text
    assert "converted to bfloat16" in text
