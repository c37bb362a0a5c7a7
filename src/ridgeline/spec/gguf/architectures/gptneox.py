"""GPT-NeoX (Pythia, Dolly), whose queries, keys and values stand one behind the other here."""

from ridgeline.core.errors import ConfigError
from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common = read_common(metadata, shapes, layer_norm=True, free_head_dim=False)
    heads = common["num_attention_heads"]
    if common.pop("num_key_value_heads") != heads:
        raise ConfigError(f"attention.head_count_kv must be attention.head_count, {heads}")
    return {
        "model_type": "gpt_neox",
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in shapes,
        **common,
    }
