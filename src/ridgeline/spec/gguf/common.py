"""Sizes, rope and tensor names that most GGUF architectures share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.core.files import read_toml
from ridgeline.spec.common import MAX_LAYERS, head_size
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import Rename

Shapes = Mapping[str, tuple[int, ...]]

# Divisors of the rotary frequencies, which GGUF keeps as tensors: they are part of the config here.
FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    """A GGUF tensor, `{i}` its layer, and the program weights that are made of it.

    `offset` is added to every element. `change`: each head's rows alternate between the two halves that rotate against
    each other, a vector there is a matrix of one row here, or x is log(-x) here. `split`: two tensors that may be in
    its place, of each head transposed rows [H, K, A] and the others [H, B, K].
    """

    rename: Rename
    offset: float = 0.0
    change: Literal["", "paired rows", "one row", "log of negative"] = ""
    split: Sequence[str] = ()


def read_sizes(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    """Return the sizes of every model, the vocabulary from the embedding where no key says. Raises as read_common."""
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("there is no tensor token_embd.weight; a file of a vocabulary alone is no model")
    metadata.expect("attention.causal", True)
    metadata.ignore("rope.scaling.finetuned", "tensor_data_layout")  # how the model was trained, and converted
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.integer("block_count", high=MAX_LAYERS),
        "vocab_size": metadata.integer("vocab_size", embedding[0]),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def read_common(
    metadata: ConfigReader,
    shapes: Shapes,
    *,
    layer_norm: bool = False,
    paired: bool = False,
    free_head_dim: bool = True,
) -> dict[str, object]:
    """Return the sizes and the rope that every Llama-like config has.

    `layer_norm`: the norms are no RMSNorm. `paired`: the rows of queries and keys are stored in pairs. Without
    `free_head_dim` the heads must share the hidden size, and the config does not say theirs. Raises ConfigError for
    what is missing or invalid.
    """
    sizes = read_sizes(metadata, shapes)
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = read_head_dim(metadata, hidden, heads)
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if paired and (head_dim % 2 or rotary_dim != head_dim):
        raise ConfigError(f"head size {head_dim}: it must be even, and rope.dimension_count the same")
    if not free_head_dim and head_dim * heads != hidden:
        raise ConfigError(f"attention.key_length {head_dim} with {heads} heads must make embedding_length {hidden}")
    norm = "layer_norm" if layer_norm else "layer_norm_rms"
    return {
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        **({"head_dim": head_dim} if free_head_dim else {}),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "max_position_embeddings": metadata.integer("context_length"),
        "layer_norm_eps" if layer_norm else "rms_norm_eps": metadata.number(f"attention.{norm}_epsilon", low=0.0),
        **read_rope(metadata, rotary_dim / head_dim),
    }


def read_head_dim(metadata: ConfigReader, hidden: int, heads: int) -> int:
    """Return the entries of a head, the same for keys and values."""
    given = metadata.optional_integer("attention.key_length", high=1024)
    head_dim = head_size(hidden, heads) if given is None else given
    metadata.expect("attention.value_length", head_dim)
    return head_dim


def read_rope(metadata: ConfigReader, partial: float) -> dict[str, object]:
    """Return the base and scaling of the rope of `partial` of a head. Raises as read_common does."""
    config: dict[str, object] = {
        "rope_theta": metadata.number("rope.freq_base", 10000.0, low=1.0),
        "partial_rotary_factor": partial,
    }
    scaling = _read_scaling(metadata)
    return config | {"rope_scaling": scaling} if scaling else config


def read_window(metadata: ConfigReader, shapes: Shapes) -> int | None:
    """Return the window of all layers but every fourth; None where no layer has one. Raises for any other pattern."""
    layers = metadata.integer("block_count", high=MAX_LAYERS)
    metadata.expect("attention.sliding_window_pattern", 4, [(index + 1) % 4 != 0 for index in range(layers)])
    return metadata.optional_integer("attention.sliding_window", low=0) or None


def _read_scaling(metadata: ConfigReader) -> dict[str, object]:
    context = metadata.integer("context_length")
    original = metadata.optional_integer("rope.scaling.original_context_length")
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", 1.0, low=0.0)
    if metadata.has("rope_freqs.weight"):  # Llama 3.1: the same divisors at every length
        metadata.expect("rope.scaling.type", "none", "llama3")
        divisors = metadata.positive_numbers("rope_freqs.weight")
        return _divided(divisors, divisors, original or context, 1.0)
    if metadata.has("rope_factors_long.weight"):
        metadata.expect("rope.scaling.type", "none", "longrope")
        short, long = (metadata.positive_numbers(f"rope_factors_{x}.weight") for x in ("short", "long"))
        return _divided(short, long, original or context, metadata.number("rope.scaling.attn_factor", 1.0))
    match kind:
        case "none":
            return {}
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            metadata.expect("rope.scaling.attn_factor", 1.0)
            metadata.expect("rope.scaling.yarn_attn_factor", 1.0)
            metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original or context,
                "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            }
        case _:
            raise ConfigError(f"rope.scaling.type {kind[:80]!r} is not supported (none, linear, yarn)")


def _divided(
    short: Sequence[float], long: Sequence[float], original: int, attention_factor: float
) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def read_layouts() -> Mapping[str, Mapping[str, Stored]]:
    """Read tensors.toml: the tensors of every layout, by name."""
    return {name: dict(_tensors(rows)) for name, rows in read_toml(__file__, "tensors.toml").items()}


def _tensors(rows: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    for source, said in rows.items():
        options = dict(said) if isinstance(said, dict) else {"to": said}
        to, experts = options.pop("to"), options.pop("experts", False)
        targets: Sequence[str] = [to] if isinstance(to, str) else to
        for part in ("weight", "bias") if source.endswith("*") else ("",):
            name, *ends = (each.replace("*", part) for each in (source, *targets))
            yield name, Stored(Rename(name, tuple(ends), experts=experts), **options)
