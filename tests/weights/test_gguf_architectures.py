"""Architectures in GGUF files that transformers does not read: its models, written with the `gguf` package's own names.

`converted` says what is done to tensors on the way into a file, as llama.cpp's converter does it.
"""

import gguf
import pytest
import torch
from small_gguf import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, gguf_bytes, metadata_of
from torch_weights import load_weights
from transformers import AutoConfig, AutoModelForCausalLM

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder

EXPERTS = {"expert_count": 6, "expert_used_count": 2}
MOE = {"num_experts": 6, "num_experts_per_tok": 2}
LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
HEADS_OF_24 = {"attention.key_length": 24, "attention.value_length": 24}
LOCAL_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
FROM_1 = {"gemma3_text", "nemotron"}  # whose norms are stored without their 1, but not in these files
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
DEEPSEEK = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK_KEYS = {
    **EXPERTS, "expert_shared_count": 2, "expert_feed_forward_length": 32, "expert_weights_scale": 2.0,
    "leading_dense_block_count": 1, "rope.dimension_count": 8, "attention.kv_lora_rank": 32,
    "attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32,
    "attention.key_length_mla": 28, "attention.value_length_mla": 12,
}  # fmt: skip
MAMBA = {"state_size": 4, "time_step_rank": 6, "conv_kernel": 4, "expand": 2, "intermediate_size": 128}
MAMBA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 4, "ssm.time_step_rank": 6, "ssm.dt_b_c_rms": False,
    "attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0, "rope.freq_base": None,
}  # fmt: skip

# The file's architecture -> model_type, what its config says, the file's keys (None: not there), and whether the rows
# of queries and keys are stored in pairs.
MODELS = {
    "qwen2moe": (
        "qwen2_moe",
        {**MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
        {**EXPERTS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
        False,
    ),
    "olmoe": ("olmoe", MOE, EXPERTS, False),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_hidden_layers": 7,
         "rope_parameters": LOCAL_GLOBAL},
        {**HEADS_OF_24, "attention.sliding_window": 8, "block_count": 7, "rope.freq_base": 1e6,
         "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        False,
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 24,
         "rope_parameters": {**YARN, "truncate": False}},
        {**EXPERTS, **YARN_KEYS, **HEADS_OF_24, "expert_feed_forward_length": FFN, "attention.sliding_window": 8},
        False,
    ),
    "deepseek2, lite": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {**DEEPSEEK_KEYS, **YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.0707},
        False,
    ),
    "deepseek2, joined": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": 24, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
        {**DEEPSEEK_KEYS, "attention.q_lora_rank": 24, "expert_group_count": 3, "expert_group_used_count": 2,
         "attention.head_count_kv": 4, "attention.key_length": 28, "attention.value_length": 12,
         "attention.key_length_mla": None, "attention.value_length_mla": None},
        False,
    ),
    "deepseek2, sigmoid": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": 24, "n_group": 3, "topk_group": 2, "norm_topk_prob": True},
        {**DEEPSEEK_KEYS, "attention.q_lora_rank": 24, "expert_group_count": 3, "expert_group_used_count": 2,
         "expert_weights_norm": True, "expert_gating_func": 2},
        False,
    ),
    "mamba": ("mamba", {**MAMBA, "tie_word_embeddings": False}, MAMBA_KEYS, False),
    "mamba, falcon": ("falcon_mamba", {**MAMBA, "mixer_rms_eps": 1e-6}, {**MAMBA_KEYS, "ssm.dt_b_c_rms": True}, False),
    "ernie4_5": ("ernie4_5", {"head_dim": 24}, HEADS_OF_24, False),
    "exaone4": (
        "exaone4",
        {"head_dim": 24, "sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
        HEADS_OF_24,
        False,
    ),
    "exaone4, windows": (
        "exaone4",
        {"sliding_window": 8, "sliding_window_pattern": 4, "num_hidden_layers": 5},
        {"attention.sliding_window": 8, "block_count": 5},
        False,
    ),
    "glm4": (
        "glm4",
        {"head_dim": 24, "attention_bias": True,
         "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {**HEADS_OF_24, "rope.dimension_count": 12},
        False,
    ),
    "nemotron": (
        "nemotron",
        {"head_dim": 16, "norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {**LAYER_NORM, "rope.dimension_count": 8, "rope.scaling.type": "none"},
        False,
    ),
    "gptneox": (
        "gpt_neox",
        {"layer_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {**LAYER_NORM, "rope.dimension_count": 4, "use_parallel_residual": True, "attention.head_count_kv": None},
        False,
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_inner": FFN, "n_positions": 64},
        {**LAYER_NORM, "rope.freq_base": None, "attention.head_count_kv": None},
        False,
    ),
    "phi2": (
        "phi",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "rope.dimension_count": 8, "rope.freq_base": None},
        False,
    ),
    "stablelm": (
        "stablelm",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "use_qkv_bias": True,
         "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "rope.dimension_count": 4, "use_parallel_residual": True},
        False,
    ),
    "stablelm, parallel": (
        "stablelm",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "use_parallel_residual": True,
         "qk_layernorm": True, "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "rope.dimension_count": 4, "use_parallel_residual": True},
        False,
    ),
    "olmo2": ("olmo2", {}, {}, False),
    "olmo2, windows": (
        "olmo3",
        {"sliding_window": 8, "num_hidden_layers": 5,
         "rope_parameters": {"sliding_attention": LOCAL_GLOBAL["sliding_attention"], "full_attention": YARN}},
        {**YARN_KEYS, "attention.sliding_window": 8, "block_count": 5},
        False,
    ),
    "command-r": (
        "cohere",
        {"logit_scale": 0.25, "use_qk_norm": True, "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "logit_scale": 0.25, "rope.scaling.type": "none"},
        False,
    ),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 5, "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "logit_scale": 0.25, "attention.sliding_window": 8, "block_count": 5, "vocab_size": VOCAB},
        False,
    ),
    "granite": (
        "granite",
        GRANITE,
        {"embedding_scale": 12.0, "attention.scale": 0.2, "residual_scale": 0.22, "logit_scale": 6.0},
        True,
    ),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 5, "use_sliding_window": False},
        {"block_count": 5},
        True,
    ),
    "arcee": ("arcee", {"head_dim": 16}, {"rope.dimension_count": 16}, True),
    "seed_oss": ("seed_oss", {"head_dim": 24}, HEADS_OF_24, False),
}  # fmt: skip


def model_of(model_type, changes):
    """A random model; transformers ties a head to the embedding where it does by default."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "pad_token_id": 0,
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **config), attn_implementation="eager", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        centre = 1.0 if name.endswith("norm.weight") and model_type not in FROM_1 else 0.0
        torch.nn.init.normal_(parameter, centre, 0.3)
    return model.eval()


def parts(name, tensor, *, paired, split, model_type):
    """What the converter makes of one of the model's tensors: names of transformers', and rows, of a tensor each."""
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        kind = "bias" if name.endswith("bias") else "weight"
        if model_type == "gpt_oss":
            columns = tensor.transpose(1, 2) if kind == "weight" else tensor
            gate, up = columns[:, ::2], columns[:, 1::2]
        else:
            gate, up = tensor.chunk(2, dim=1)
        base = name.partition(".gate_up")[0]
        return [(f"{base}.gate_proj.{kind}", gate), (f"{base}.up_proj.{kind}", up)]
    if "experts.down_proj" in name:
        kind = "bias" if name.endswith("bias") else "weight"
        turned = tensor.transpose(1, 2) if model_type == "gpt_oss" and kind == "weight" else tensor
        return [(f"{name.partition('.down')[0]}.down_proj.{kind}", turned)]
    if model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
        return [(name, tensor.T)]
    if "query_key_value" in name:
        return [(name, tensor.view(HEADS, 3, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2))]
    if name.endswith("kv_b_proj.weight") and split:
        each = tensor.view(HEADS, 32, -1)
        keys, values = each[:, :20].transpose(1, 2), each[:, 20:]
        return [(name.replace("kv_b", "k_b"), keys), (name.replace("kv_b", "v_b"), values)]
    if name.endswith("A_log"):
        return [(name, -tensor.exp())]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    if paired and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = HEADS if "q_proj" in name else KV_HEADS
        turned = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        return [(name, turned)]
    return [(name, tensor + 1 if model_type in FROM_1 and name.endswith("norm.weight") else tensor)]


def head_norms_stacked(state):
    """StableLM's norms of single heads as one tensor."""
    stacked = {name: tensor for name, tensor in state.items() if ".norms." not in name}
    for name in state:
        if name.endswith("norms.0.weight"):
            count = sum(other.startswith(name.removesuffix("0.weight")) for other in state)
            each = [state[name.replace("norms.0", f"norms.{head}")] for head in range(count)]
            stacked[name.replace("norms.0.", "")] = torch.stack(each)
    return stacked


def converted(model, architecture, *, paired=False, split=True):
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, tensor in head_norms_stacked(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for source, part in parts(name, tensor, paired=paired, split=split, model_type=config.model_type):
            target = names.get_name(source, try_suffixes=(".weight", ".bias"))
            assert target is not None, source
            part = part.squeeze().contiguous()
            tensors[target] = (tuple(part.shape), 0, part.numpy().tobytes())
    return tensors


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers(case, tmp_path):
    architecture = case.partition(",")[0]
    model_type, changes, keys, paired = MODELS[case]
    model = model_of(model_type, changes)
    metadata = {key: value for key, value in metadata_of(architecture, **keys).items() if value is not None}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, converted(model, architecture, paired=paired, split="joined" not in case)))
    folder = ModelFolder.open(path)
    assert folder.config["model_type"] == model_type
    spec = read_spec(folder.config)
    token_ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    program = lower(spec, 40)
    with torch.no_grad():
        expected = model(token_ids, use_cache=False).logits
        found = DenseModel(program, load_weights(folder, spec, program, torch.float32))(token_ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
