"""LoRA in the engine: an adapted model answers as the merged one does, alone and beside others in one batch."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB = 2, 48, 4, 2, 12, 72, 97
SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def random_tensor(generator, *shape):
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def modules():
    return [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in SHAPES]


def write_base(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{module}.weight": random_tensor(generator, *SHAPES[module.split(".", 3)[3]]) for module in modules()}
    tensors["model.embed_tokens.weight"] = random_tensor(generator, VOCAB, HIDDEN)
    norms = [
        f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in (*norms, "model.norm")}
    return write_base(tmp_path_factory.mktemp("base"), tensors)


def write_adapter(folder, seed, rank, targets, **config):
    """PEFT's files; returns what is added to each base weight."""
    generator, deltas, tensors = torch.Generator().manual_seed(seed), {}, {}
    alpha = 3.0 * rank
    for module in modules():
        if not re.search(targets, module):
            continue
        num_outputs, num_inputs = SHAPES[module.split(".", 3)[3]]
        a, b = random_tensor(generator, rank, num_inputs), random_tensor(generator, num_outputs, rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        deltas[f"{module}.weight"] = scale * b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False} | config
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return deltas


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Three adapters, and the base merged with each."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    kinds = {"all": (4, ".", {}), "queries": (2, "q_proj|v_proj", {"use_rslora": True}), "mlp": (7, "mlp", {})}
    for seed, (name, (rank, targets, config)) in enumerate(kinds.items()):
        deltas = write_adapter(root / name, seed, rank, targets, **config)
        tensors = load_file(base / "model.safetensors")
        merged = {key: tensor + deltas.get(key, 0) for key, tensor in tensors.items()}
        found[name] = (str(root / name), str(write_base(root / f"merged-{name}", merged)))
    return found


def llm_of(model, backend, **options):
    sizes = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    return LLM(str(model), dtype="float32", num_threads=1, backend=backend, **sizes, **options)


def prompts_of(count):
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(9)] for _ in range(count)]


def assert_same(output, expected):
    assert list(output.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    for ours, theirs in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-4)


def test_mixed_in_one_batch_each_answer_is_that_of_its_merged_model(base, adapters, backend):
    llm = llm_of(base, backend, adapters={name: path for name, (path, _) in adapters.items()})
    names = [None, *adapters, "all", None, "mlp"]
    prompts = prompts_of(len(names))
    outputs = llm.generate(prompts, PARAMS, adapter=names, use_tqdm=False)
    for name, prompt, output in zip(names, prompts, outputs):
        alone = llm_of(base if name is None else adapters[name][1], backend)
        assert_same(output, alone.generate([prompt], PARAMS, use_tqdm=False)[0])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 3


def test_prefixes_are_shared_only_under_the_same_adapter(base, adapters, backend):
    llm = llm_of(base, backend, adapters={"all": adapters["all"][0]})
    (prompt,) = prompts_of(1)
    cached = []
    for adapter in (None, "all", None, "all"):
        (output,) = llm.generate([prompt], PARAMS, adapter=adapter, use_tqdm=False)
        cached.append(output.usage.cached_tokens)
    assert cached == [0, 0, 8, 8]


def test_a_quantized_base_keeps_its_adapter_exact(base, adapters, backend):
    """The adapter's own product is not rounded: int8 changes the base's answer and the adapted one about equally."""
    prompts = prompts_of(4)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(quantize, adapter):
        llm = llm_of(base, backend, adapters={"all": adapters["all"][0]}, quantize=quantize)
        outputs = llm.generate(prompts, scored, adapter=adapter, use_tqdm=False)
        return torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs if entry])

    plain, adapted = ((logprobs("int8", name) - logprobs(None, name)).abs().mean() for name in (None, "all"))
    assert 0 < adapted < 20 * plain < 1


def test_unknown_adapters_are_refused_by_name(base, adapters):
    llm = llm_of(base, "reference", adapters={"all": adapters["all"][0]})
    with pytest.raises(RequestError, match="'poet' is loaded; there is all"):
        llm.generate([[1, 2]], PARAMS, adapter="poet", use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1 adapters"):
        llm.generate([[1], [2]], PARAMS, adapter=["all"], use_tqdm=False)
    with pytest.raises(ConfigError, match="not a folder"):
        llm_of(base, "reference", adapters={"all": "/nowhere"})


def broken(kind, folder):
    """An adapter with one fault."""
    write_adapter(folder, 0, 4, "q_proj")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    first = next(iter(tensors))
    match kind:
        case "dora":
            config["use_dora"] = True
        case "other method":
            config["peft_type"] = "IA3"
        case "half":
            del tensors[first]
        case "wrong inputs":
            tensors[first] = torch.zeros(4, HIDDEN + 1)
        case "no such layer":
            for factor in "AB":
                key = f"base_model.model.model.layers.7.self_attn.q_proj.lora_{factor}.weight"
                tensors[key] = tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight"].clone()
        case "head":
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, HIDDEN)
            tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(VOCAB, 4)
        case "alpha":
            config["lora_alpha"] = "16"
        case "trained embedding":
            tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
        case "NaN":
            tensors[first][0, 0] = float("nan")
        case "empty":
            tensors = {}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


KINDS = ["dora", "other method", "half", "wrong inputs", "no such layer", "head", "alpha", "trained embedding", "empty"]
KINDS += ["NaN"]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_do_not_fit_are_one_clear_error(base, tmp_path, kind):
    broken(kind, tmp_path)
    with pytest.raises(ModelLoadError, match="adapter"):
        llm_of(base, "reference", adapters={"bad": str(tmp_path)})
