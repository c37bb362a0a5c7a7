"""`ridgeline quantize --format gguf`: files that the gguf package reads, with the folder's logits and tokens."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_checkpoint import write

from ridgeline import LLM, SamplingParams
from ridgeline.cli import main
from ridgeline.compress.quantize import QuantizeJob
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import ConfigError
from ridgeline.quality.texts import Texts
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.write import GgufWriter
from ridgeline.weights.quality import QUALITY_FILE

CONFIG = {
    "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "hidden_act": "silu", "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
}
METHODS = {
    "Q4_0": {"method": "rtn", "bits": 4},
    "Q8_0": {"method": "rtn", "bits": 8},
    "Q4_1": {"method": "hqq", "bits": 4},
}
TEXT = "def f(x):\n    return [x for _ in range(12)]  # ñ → 5\n"


def folder_of(path, family, dtype=torch.bfloat16):
    path.mkdir()
    write(path, CONFIG | CONFIGS[family], dtype)
    config = CONFIG | CONFIGS[family] | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(config))
    for file in ModelFolder.open("python-1m").path.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_is_the_folder(tmp_path, family, kind):
    folder = folder_of(tmp_path / "model", family)
    writer = GgufWriter(ModelFolder.open(folder))
    job = QuantizeJob(ModelFolder.open(folder), Recipe(**METHODS[kind], group_size=32), Texts("", {}), tmp_path / "out")
    job.run(lambda progress: None)
    path = tmp_path / "made.gguf"
    writer.write(ModelFolder.open(job.partial), path)
    read = gguf.GGUFReader(path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in read.tensors}
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == kind
    assert kinds["token_embd.weight"] == "BF16" and kinds["output_norm.weight"] == "F32"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=1)
    outputs = []
    for model in (job.partial, path):
        llm = LLM(str(model), dtype="float32", num_threads=1, quantize_inputs="int16")
        outputs.append(llm.generate([TEXT], params, use_tqdm=False)[0])
        assert llm.engine.info.choices["quantize"].value == "as stored"
    first, second = outputs
    assert first.prompt_token_ids == second.prompt_token_ids  # the tokenizer cuts alike
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.outputs[0].text == second.outputs[0].text
    assert first.outputs[0].logprobs == second.outputs[0].logprobs  # bit for bit: it is the same model
    assert ModelFolder.open(path).generation_config.eos_token_ids == (0,)


def test_the_package_decodes_what_the_folder_has(tmp_path):
    """Paired rows of queries are put back by the reader here; the package sees them as they lie."""
    folder = folder_of(tmp_path / "model", "llama", torch.float16)
    GgufWriter(ModelFolder.open(folder)).write(ModelFolder.open(folder), tmp_path / "plain.gguf")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    source = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(read["blk.0.attn_v.weight"].data, source["model.layers.0.self_attn.v_proj.weight"])
    q_NK = source["model.layers.0.self_attn.q_proj.weight"]
    paired = q_NK.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    np.testing.assert_array_equal(read["blk.0.attn_q.weight"].data, paired)


def test_the_command(tmp_path, capsys):
    text = tmp_path / "text.py"
    text.write_text(TEXT * 60)
    out = tmp_path / "python.gguf"
    arguments = ["quantize", "python-1m", "--method=rtn", "--format=gguf", f"--out={out}"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, f"--text={text}", "--eval-tokens=200", "--num-threads=1"])
    assert not ended.value.code, capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python.gguf", f"python.gguf.{QUALITY_FILE}", "text.py"]
    llm = LLM(str(out), num_threads=1)
    assert llm.engine.info.choices["quality"].value.startswith("KL 0.")
    reader = gguf.GGUFReader(out)
    assert reader.get_field("tokenizer.ggml.pre").contents() == "ridgeline-python"
    own = ModelFolder.open("python-1m").tokenizer()
    assert ModelFolder.open(out).tokenizer().encode(TEXT) == own.encode(TEXT)


def test_groups_that_gguf_lacks_are_refused(tmp_path, capsys):
    out = f"--out={tmp_path / 'x.gguf'}"
    with pytest.raises(SystemExit) as ended:
        main(["quantize", "python-1m", "--method=rtn", "--group-size=64", "--format=gguf", out])
    assert ended.value.code == 2 and "--group-size 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "GGUF cannot say"),
        ({"model_type": "gemma"}, "gemma in bfloat16"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path, change, said):
    folder = folder_of(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=said):
        GgufWriter(ModelFolder.open(folder))


def test_words_without_a_name_are_refused(tmp_path):
    folder = folder_of(tmp_path / "model", "llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[a-z]+"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="byte-level BPE"):
        GgufWriter(ModelFolder.open(folder))
