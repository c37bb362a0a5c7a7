"""GPT-2, whose matrices are not transposed here."""

from ridgeline.spec.gguf.common import Shapes, read_sizes
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    sizes = read_sizes(metadata, shapes)
    heads = metadata.integer("attention.head_count")
    metadata.expect("attention.head_count_kv", heads)
    return {
        "model_type": "gpt2",
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": heads,
        "n_inner": metadata.integer("feed_forward_length"),
        "n_positions": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon", low=0.0),
        "vocab_size": sizes["vocab_size"],
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }
