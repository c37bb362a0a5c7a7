"""GPT-2: learned positions, LayerNorm with bias, a fused query-key-value projection stored transposed."""

import re
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, TIED, decoder, fused_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Layer, LayerNorm, Mlp, Renames


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("n_ctx", "reorder_and_upcast_attn")  # a former name of n_positions; attention here is fp32 anyway
    return read_gpt2(config)


def read_gpt2(config: ConfigReader, **attention: object) -> DecoderSpec:
    """Read a model of GPT-2's shape; `attention` are fields of its mixer that no key of GPT-2 says."""
    config.spell(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config.spell(max_position_embeddings="n_positions")
    config.expect("add_cross_attention", False)
    config.ignore("summary_type", "summary_use_proj", "summary_activation")  # of a classifier beside the decoder
    config.ignore("summary_proj_to_labels", "summary_first_dropout")
    mixer = multi_head(config, qkv_bias=True, out_bias=True, **attention)
    scale = mixer.scale if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    size = config.integer("n_inner", 4 * config.integer("hidden_size"))
    mlp = Mlp(size, config.choice("activation_function", ACTIVATIONS, "gelu_new"))
    scales = [scale / (i + 1 if by_layer else 1) for i in range(config.integer("num_hidden_layers", high=MAX_LAYERS))]
    layers = [Layer(replace(mixer, scale=scale), mlp, norm, norm) for scale in scales]
    embedding = Embedding(num_positions=config.integer("max_position_embeddings", 1024))
    return decoder(config, layers, norm, positions=1024, head=TIED, embedding=embedding)


def renames(spec: DecoderSpec) -> Renames:
    """Return the renames: all matrices of layers are stored turned around, and no queries share a key."""
    turned = re.compile(r".*\.c_\w+\.weight")
    named = fused_names(spec)
    return [replace(rename, transpose=bool(turned.fullmatch(rename.source)), groups=1) for rename in named]


def fused_names(spec: DecoderSpec) -> Renames:
    """Return the renames as fused_renames does."""
    at = "transformer"
    outside = {f"{at}.wte": "embed", f"{at}.wpe": "positions", f"{at}.ln_f": "final_norm", "lm_head": "head"}
    layer = {"ln_1": "mixer_norm", "ln_2": "ffn_norm", "attn.c_proj": "attn.o"}
    layer |= {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}
    return fused_renames(spec, outside, f"{at}.h.{{i}}", layer, "attn.c_attn")
