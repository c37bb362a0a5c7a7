"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value for all queries, and plain linear weights."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, fused_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer, LayerNorm, Mlp, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    positions = config.integer("n_positions", 1024)
    kv_heads = 1 if config.flag("multi_query", True) else heads
    config.expect("num_key_value_heads", kv_heads)
    config.expect("add_cross_attention", False)
    config.ignore(
        "attention_softmax_in_fp32",  # it always is
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "validate_runner_input",
        "pre_allocate_kv_cache",
        "max_sequence_length",
        "max_batch_size",
        "pad_key_length",
        "summary_type",  # a classifier, which is not part of the decoder
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    )
    attention = multi_head(hidden, heads, num_kv_heads=kv_heads, qkv_bias=True, out_bias=True)
    if not config.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    size = config.optional_integer("n_inner") or 4 * hidden
    mlp = Mlp(size, config.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"))
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    return DecoderSpec(
        model_type="gpt_bigcode",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=positions,
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("n_layer", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
        embedding=Embedding(num_positions=positions),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
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
