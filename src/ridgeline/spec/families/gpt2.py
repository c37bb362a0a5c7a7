"""GPT-2: learned positions, LayerNorm with bias, a fused query-key-value projection stored transposed."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer, LayerNorm, Mlp, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer("n_embd")
    heads = config.integer("n_head")
    positions = config.integer("n_positions", 1024)
    attention = multi_head(hidden, heads, qkv_bias=True, out_bias=True)
    config.expect("add_cross_attention", False)
    config.ignore("n_ctx", "reorder_and_upcast_attn")  # a former name of n_positions; attention here is fp32 anyway
    config.ignore(
        "summary_type",  # the double-heads model's classifier, which is not part of the decoder
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    )
    base_scale = attention.scale if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    mlp = Mlp(
        config.integer("n_inner", 4 * hidden),
        config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        bias=True,
    )

    def layer(index: int) -> Layer:
        scale = base_scale / (index + 1) if by_layer else base_scale
        return Layer(replace(attention, scale=scale), mlp, norm, norm)

    return DecoderSpec(
        model_type="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=positions,
        layers=tuple(layer(index) for index in range(config.integer("n_layer", high=MAX_LAYERS))),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
        embedding=Embedding(num_positions=positions),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    layout = [
        Rename("transformer.wte.weight", ("embed.weight",)),
        Rename("transformer.wpe.weight", ("positions.weight",)),
        Rename("lm_head.weight", ("head.weight",)),
    ]
    for part in ("weight", "bias"):
        source, target, transpose = "transformer.h.{i}", "layers.{i}", part == "weight"
        layout += [
            Rename(f"transformer.ln_f.{part}", (f"final_norm.{part}",)),
            Rename(f"{source}.ln_1.{part}", (f"{target}.mixer_norm.{part}",)),
            Rename(f"{source}.ln_2.{part}", (f"{target}.ffn_norm.{part}",)),
            Rename(
                f"{source}.attn.c_attn.{part}", tuple(f"{target}.attn.{x}.{part}" for x in "qkv"), transpose=transpose
            ),
            Rename(f"{source}.attn.c_proj.{part}", (f"{target}.attn.o.{part}",), transpose=transpose),
            Rename(f"{source}.mlp.c_fc.{part}", (f"{target}.ffn.up.{part}",), transpose=transpose),
            Rename(f"{source}.mlp.c_proj.{part}", (f"{target}.ffn.down.{part}",), transpose=transpose),
        ]
    return layout
