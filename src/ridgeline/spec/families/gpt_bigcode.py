"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value for all queries, and plain linear weights."""

from ridgeline.spec.common import fused_renames
from ridgeline.spec.families.gpt2 import read_gpt2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames


def read(config: ConfigReader) -> DecoderSpec:
    kv_heads = 1 if config.flag("multi_query", True) else config.integer("n_head")
    config.expect("num_key_value_heads", kv_heads)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # it always is
    config.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache")
    config.ignore("max_sequence_length", "max_batch_size", "pad_key_length")
    return read_gpt2(config, num_kv_heads=kv_heads)


def renames(spec: DecoderSpec) -> Renames:
    outside = {
        "transformer.wte": "embed",
        "transformer.wpe": "positions",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    }
    layer = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        "attn.c_proj": "attn.o",
        "mlp.c_fc": "ffn.up",
        "mlp.c_proj": "ffn.down",
    }
    return fused_renames(spec, outside, "transformer.h.{i}", layer, "attn.c_attn")
