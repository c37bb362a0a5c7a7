"""Llama 1 to 3.x, and what shares its layout (TinyLlama, SmolLM2): RMSNorm, rotary attention, SiLU-gated MLP."""

from collections.abc import Sequence

from ridgeline.spec.common import MAX_LAYERS, llama_renames, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Layer, Rename, RmsNorm
from ridgeline.spec.tiny import Choose, tiny_attention, tiny_rope, tiny_sizes


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    config.expect("rope_interleaved", False)
    config.ignore("is_llama_config")  # written by the SmolLM2 training library
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    attention = read_attention(config, head_dim, read_rope(config, head_dim), bias=bias)
    mlp = read_gated_mlp(config, bias=config.flag("mlp_bias", False))
    return DecoderSpec(
        model_type="llama",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        layers=(Layer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return llama_renames()


def tiny(choose: Choose) -> dict[str, object]:
    attention, head_dim = tiny_attention(choose)
    return {
        "model_type": "llama",
        **attention,
        "hidden_act": choose("silu", "gelu_pytorch_tanh"),
        "attention_bias": choose(False, True),
        "mlp_bias": choose(False, True),
        **tiny_sizes(choose),
        **tiny_rope(choose, head_dim),
    }
