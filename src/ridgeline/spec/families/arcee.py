"""Arcee's AFM: Llama with a squared ReLU instead of a gate."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, llama_renames, read_attention, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Mlp, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    mlp = Mlp(
        config.integer("intermediate_size"),
        config.choice("hidden_act", ACTIVATIONS, "relu2"),
        config.flag("mlp_bias", False),
    )
    return DecoderSpec(
        model_type="arcee",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 4096),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "arcee",
        **attention,
        "hidden_act": choose("relu2", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
