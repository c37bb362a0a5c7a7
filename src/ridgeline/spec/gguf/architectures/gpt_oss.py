"""gpt-oss, whose files call the norm before the experts one after attention."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, expert_tensors, llama_tensors, one, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes)
    size = metadata.integer("expert_feed_forward_length")
    scaling = common.get("rope_scaling")
    if isinstance(scaling, dict):
        # Its published config does not round YaRN's limits to whole dims, and no key says so.
        common["rope_scaling"] = {**scaling, "truncate": False}
    metadata.expect("attention.sliding_window_pattern", 2)
    return {
        "model_type": "gpt_oss",
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **common,
        "intermediate_size": size,
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    prefix = "layers.{i}"
    return [
        *llama_tensors(
            one("blk.{i}.post_attention_norm", f"{prefix}.ffn_norm"),
            Stored(Rename("blk.{i}.attn_sinks.weight", (f"{prefix}.attn.sinks",))),
        ),
        *expert_tensors(),
    ]
