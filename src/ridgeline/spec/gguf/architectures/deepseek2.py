"""DeepSeek V2, V2-Lite, V3 and R1."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, expert_tensors, llama_tensors, one, read_rope, read_sizes
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LatentAttention, Rename

SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    groups = metadata.integer("expert_group_count", 1)
    if metadata.integer("expert_gating_func", SOFTMAX, high=SIGMOID) == SIGMOID:
        kind = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        kind = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        **kind,
        **read_sizes(metadata, shapes),
        **_read_attention(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", low=0.0),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, low=0),
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _read_attention(metadata: ConfigReader) -> dict[str, object]:
    """Return a head's sizes, which newer files keep under other keys: the usual ones are the latent's there."""
    rope_dim, rank = metadata.integer("rope.dimension_count"), metadata.integer("attention.kv_lora_rank")
    key_dim, value_dim = (metadata.integer(f"attention.{part}_length") for part in ("key", "value"))
    rope = read_rope(metadata, 1.0)
    scaling = rope.get("rope_scaling")
    if isinstance(scaling, dict) and metadata.has("rope.scaling.yarn_log_multiplier"):
        strength = 10.0 * metadata.number("rope.scaling.yarn_log_multiplier", low=0.0)
        # Every released model has the same value for both strengths of a config.
        rope["rope_scaling"] = {**scaling, "mscale": strength, "mscale_all_dim": strength}
    metadata.ignore("attention.head_count_kv")  # 1 or all: the latent has no heads
    return {
        "num_attention_heads": metadata.integer("attention.head_count"),
        "q_lora_rank": metadata.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": metadata.integer("attention.key_length_mla", key_dim) - rope_dim,
        "v_head_dim": metadata.integer("attention.value_length_mla", value_dim),
        **rope,
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    prefix, to = "blk.{i}.attn", "layers.{i}.attn"
    compressed = any(isinstance(layer.mixer, LatentAttention) and layer.mixer.q_rank for layer in spec.layers)
    names = {"q_a": "q_down", "q_a_norm": "q_norm", "kv_a_mqa": "kv_down", "kv_a_norm": "kv_norm"}
    names |= {"q_b" if compressed else "q": "q"}
    up = Rename(f"{prefix}_kv_b.weight", (f"{to}.kv_up.weight",))
    return [
        *llama_tensors(*(one(f"{prefix}_{source}", f"{to}.{target}") for source, target in names.items())),
        Stored(up, split=(f"{prefix}_k_b.weight", f"{prefix}_v_b.weight")),
        *expert_tensors(),
    ]
