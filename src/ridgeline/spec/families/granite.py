"""Granite 3: Llama with four factors, on the embedding, on what each block adds, on attention and on the logits."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim), bias=bias),
        scale=config.number("attention_multiplier", 1.0),
    )
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    layer = Layer(attention, mlp, norm, norm, residual_scale=config.number("residual_multiplier", 1.0))
    return DecoderSpec(
        model_type="granite",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(
            tied=config.flag("tie_word_embeddings", False), scale=1.0 / config.number("logits_scaling", 1.0, low=1e-6)
        ),
        embedding=Embedding(scale=config.number("embedding_multiplier", 1.0)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose, filled=True)
    return {
        "model_type": "granite",
        **attention,
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        "embedding_multiplier": choose(1.0, 12.0),
        "attention_multiplier": choose(0.0625, 0.2),
        "residual_multiplier": choose(1.0, 0.22),
        "logits_scaling": choose(1.0, 6.0),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
