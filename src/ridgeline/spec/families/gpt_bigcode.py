"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value for all queries, and plain linear weights."""

from ridgeline.spec.families import gpt2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

renames = gpt2.fused_names


def read(config: ConfigReader) -> DecoderSpec:
    kv_heads = 1 if config.flag("multi_query", True) else config.integer("n_head")
    config.expect("num_key_value_heads", kv_heads)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # it always is
    config.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache")
    config.ignore("max_sequence_length", "max_batch_size", "pad_key_length")
    return gpt2.read_gpt2(config, num_kv_heads=kv_heads)
