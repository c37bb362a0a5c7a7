"""GGUF files as models: logits equal those that transformers computes from the same file, and the published text."""

import json

import pytest
import torch
from small_gguf import (
    HEAD_DIM,
    VOCAB,
    f32,
    gguf_bytes,
    llama_tensors,
    metadata_of,
    one_tensor_per_expert,
    small_llama,
    with_experts,
)
from test_gguf_architectures import MODELS as OTHERS
from torch_weights import StreamedWeights, load_weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.dense import DenseModel
from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower import lower
from ridgeline.spec import gguf as spec_gguf
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder

GEMMA2 = {
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
    "attention.sliding_window": 8,
}
HEADS_OF_8 = {"attention.key_length": 8, "attention.value_length": 8}
HEADS_OF_24 = {"attention.key_length": 24, "attention.value_length": 24}
PHI3 = {"rope.dimension_count": HEAD_DIM, "attention.sliding_window": 8}

# What is in the file, and what of it transformers does not read: architecture, keys, tensors, transformers' config.
MODELS = {
    "llama": ("llama", {"rope.dimension_count": HEAD_DIM}, {}, {}),
    "llama, tied": ("llama", HEADS_OF_8, {"head_dim": 8, "tied": True}, {"head_dim": 8}),
    "qwen2": ("qwen2", {}, {"bias": True}, {}),
    "qwen3": ("qwen3", HEADS_OF_24, {"head_dim": 24, "qk_norms": True}, {"head_dim": 24}),
    "qwen3moe": (
        "qwen3moe",
        HEADS_OF_24 | {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32},
        {"head_dim": 24, "qk_norms": True, "experts": (6, 32)},
        {"moe_intermediate_size": 32},
    ),
    "phi3": ("phi3", PHI3, {"fused": True}, {"sliding_window": 8, "pad_token_id": 0}),
    "gemma2": (
        "gemma2",
        GEMMA2,
        {"head_dim": 24, "post_norms": True, "tied": True},
        {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
}


def write(path, architecture, keys, tensors):
    path.write_bytes(gguf_bytes(metadata_of(architecture, **keys), tensors))
    return path


def read_by_transformers(path, unread):
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"], **unread)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(
        load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"], strict=False
    )
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


def random_tensors(*, experts=None, **options):
    tensors = llama_tensors(**options)
    return with_experts(tensors, *experts) if experts else tensors


def logits(path, token_ids_BT):
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec, token_ids_BT.shape[1])
    return DenseModel(program, load_weights(folder, spec, program, torch.float32))(token_ids_BT)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    architecture, keys, options, unread = MODELS[name]
    path = write(tmp_path / "model.gguf", architecture, keys, random_tensors(**options))
    token_ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = read_by_transformers(path, unread)(token_ids, use_cache=False).logits
    torch.testing.assert_close(logits(path, token_ids), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_every_architecture_is_tested():
    here = {architecture for architecture, *_ in MODELS.values()} | {"gemma"}
    others = {case.partition(",")[0].replace("-", "_") for case in OTHERS}
    assert here | others == set(spec_gguf.names())


def test_gemma(tmp_path):
    """Which transformers does not read from such files: a model of its own, written as the converter does."""
    keys = HEADS_OF_24 | {"context_length": 64}
    path = write(tmp_path / "model.gguf", "gemma", keys, llama_tensors(head_dim=24, tied=True))
    config = {key: value for key, value in ModelFolder.open(path).config.items() if key != "partial_rotary_factor"}
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    names = {"self_attn.": "attn_", "_proj": "", "attn_o.": "attn_output.", "mlp.": "ffn_"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk"}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    tensors = {}
    for name, parameter in oracle.named_parameters():  # a tied head is the embedding
        tensor = torch.nn.init.normal_(parameter, std=0.3).detach()
        for old, new in names.items():
            name = name.replace(old, new)
        stored = tensor + 1 if "norm" in name else tensor
        tensors[name] = (tuple(tensor.shape), 0, stored.numpy().tobytes())
    write(path, "gemma", keys, tensors)
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = oracle(token_ids, use_cache=False).logits
    torch.testing.assert_close(logits(path, token_ids), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("form", [lambda tensors: tensors, one_tensor_per_expert])
def test_mixtral_is_a_llama_with_experts(form, tmp_path):
    """Its experts are those of the file, in one tensor or in many; queries and keys are paired as Llama's."""
    keys = {"expert_count": 3, "expert_used_count": 2}
    tensors = with_experts(llama_tensors(), 3, 96)
    path = write(tmp_path / "model.gguf", "llama", keys, form(tensors))
    folder = ModelFolder.open(path)
    assert folder.config["model_type"] == "mixtral"
    spec = read_spec(folder.config)
    weights = load_weights(folder, spec, lower(spec), torch.float32)
    dense = ModelFolder.open(write(tmp_path / "dense.gguf", "llama", {}, llama_tensors()))
    dense_spec = read_spec(dense.config)
    attention = load_weights(dense, dense_spec, lower(dense_spec), torch.float32)
    for i in range(2):
        for matrix in ("gate", "up", "down"):
            shape, _, raw = tensors[f"blk.{i}.ffn_{matrix}_exps.weight"]
            expected = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(shape)
            assert torch.equal(weights[f"layers.{i}.ffn.{matrix}.weight"], expected)
        for letter in "qkvo":
            name = f"layers.{i}.attn.{letter}.weight"
            assert torch.equal(weights[name], attention[name])


def test_the_published_text(shared_data, backend):
    """As many tokens as the file's context has room for."""
    folder = shared_data / "models" / "stories260K"
    golden = json.loads((folder / "golden_greedy.json").read_text())
    llm = LLM(str(folder / "stories260K.gguf"), backend=backend, num_threads=1)
    greedy = SamplingParams(temperature=0, max_tokens=127, ignore_eos=True)
    output = llm.generate([golden["prompt_ids"]], greedy, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == golden["ids"][:127]
    assert golden["text"].startswith(output.text)


def test_streamed_weights_are_the_loaded_ones(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(small_llama())
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec)
    loaded = load_weights(folder, spec, program, torch.bfloat16)
    streamed = StreamedWeights(folder, spec, program, torch.bfloat16)
    assert all(torch.equal(streamed[name], weight) for name, weight in loaded.items())
    assert folder.name == "model"
    assert folder.weight_files() == (path,)


def test_frequency_divisors_are_part_of_the_config(tmp_path):
    """Llama 3.1's rope_freqs.weight divides the frequencies at every length."""
    divisors = f32((HEAD_DIM // 2,), scale=0.1, offset=4.0)
    path = write(tmp_path / "model.gguf", "llama", {}, llama_tensors() | {"rope_freqs.weight": divisors})
    spec = read_spec(ModelFolder.open(path).config)
    plain = lower(read_spec(ModelFolder.open(write(tmp_path / "plain.gguf", "llama", {}, llama_tensors())).config))
    divided = lower(spec)

    def frequencies(program):
        return torch.tensor(next(op for op in program.ops if op.kind == "rope_angles").attrs.frequencies)

    expected = frequencies(plain) / torch.frombuffer(bytearray(divisors[2]), dtype=torch.float32)
    torch.testing.assert_close(frequencies(divided), expected)


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "match"),
    [
        ("mpt", {}, {}, "general.architecture 'mpt' is not supported; supported: .*llama"),
        ("llama", {"attention.clamp_kqv": 8.0}, {}, "not understood: attention.clamp_kqv=8.0"),
        ("llama", {"attention.head_count": 0}, {}, "attention.head_count=0 is invalid"),
        ("llama", {"attention.key_length": 7, "attention.value_length": 7}, {}, "head size 7: it must be even"),
        ("llama", {"rope.dimension_count": 8}, {}, "head size 16: .* rope.dimension_count the same"),
        ("llama", {"rope.scaling.type": "spiral"}, {}, "rope.scaling.type 'spiral' is not supported"),
        ("llama", {"block_count": 3}, {}, "missing: blk.2.attn_k.weight"),
        ("llama", {}, {"blk.0.attn_q.weight": f32((64, 32))}, r"attn_q.weight \[64, 32\] instead of \[64, 64\]"),
        ("llama", {}, {"blk.0.attn_sinks.weight": f32((4,))}, "1 unexpected: blk.0.attn_sinks.weight"),
    ],
)
def test_a_model_that_is_not_understood_is_refused(architecture, keys, tensors, match, tmp_path):
    path = write(tmp_path / "model.gguf", architecture, keys, llama_tensors() | tensors)
    with pytest.raises(ModelLoadError, match=match) as caught:
        folder = ModelFolder.open(path)
        spec = read_spec(folder.config)
        load_weights(folder, spec, lower(spec), torch.float32)
    assert str(path) in str(caught.value)


def test_split_files_are_one_model(tmp_path):
    tensors = llama_tensors()
    halves = dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])
    shared = {"split.count": 2, "split.tensors.count": len(tensors)}
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(gguf_bytes(metadata_of("llama") | shared | {"split.no": 0}, halves[0]))
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(gguf_bytes(shared | {"split.no": 1}, halves[1]))
    whole = write(tmp_path / "whole.gguf", "llama", {}, tensors)
    token_ids = torch.arange(12)[None]
    assert torch.equal(logits(first, token_ids), logits(whole, token_ids))
    assert ModelFolder.open(first).weight_files() == (first, second)
    with pytest.raises(ModelLoadError, match="is number 1 of 2 files; give the first one"):
        ModelFolder.open(second)
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.gguf is missing"):
        ModelFolder.open(first)
