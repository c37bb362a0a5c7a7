"""GPT-2: learned positions, LayerNorm with bias, a fused query-key-value projection stored transposed."""

from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, TIED, decoder, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Layer, LayerNorm, Mlp, Rename, Renames


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
    names = [
        Rename("transformer.wte.weight", ("embed.weight",)),
        Rename("transformer.wpe.weight", ("positions.weight",)),
        Rename("lm_head.weight", ("head.weight",)),
    ]
    norms = {"ln_1": ["mixer_norm"], "ln_2": ["ffn_norm"]}
    matrices = {
        "attn.c_attn": ["attn.q", "attn.k", "attn.v"],
        "attn.c_proj": ["attn.o"],
        "mlp.c_fc": ["ffn.up"],
        "mlp.c_proj": ["ffn.down"],
    }
    for part in ("weight", "bias"):
        names.append(Rename(f"transformer.ln_f.{part}", (f"final_norm.{part}",)))
        for source, targets in {**norms, **matrices}.items():
            to = tuple(f"layers.{{i}}.{target}.{part}" for target in targets)
            is_turned = part == "weight" and source in matrices
            names.append(Rename(f"transformer.h.{{i}}.{source}.{part}", to, transpose=is_turned))
    return names
