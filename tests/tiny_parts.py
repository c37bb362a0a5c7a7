"""Pieces of the random small configs in `families/`: heads, rope, sizes that many families spell the same way.

The values are small enough to run in milliseconds and odd enough to catch a mix-up:
vocabularies that are no multiple of anything, windows shorter and longer than a prompt of 40 tokens, original
contexts that a prompt of 9 tokens stays below and one of 40 exceeds.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

ORIGINAL_CONTEXT = 16


class Choose(Protocol):
    """Picks one of the options; the contract tests pass a seeded generator."""

    def __call__(self, *options: T) -> T: ...


def tiny_sizes(choose: Choose) -> dict[str, object]:
    """Sizes that every Llama-like config spells the same way."""
    return {
        "vocab_size": choose(97, 131, 256),
        "intermediate_size": choose(40, 72),
        "num_hidden_layers": choose(1, 2, 3),
        "max_position_embeddings": choose(24, 128),
        "rms_norm_eps": choose(1e-6, 1e-5),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def tiny_heads(choose: Choose) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size): 1 to 8 queries per key, at most 512 entries in all where possible."""
    kv_heads = choose(1, 2, 3)
    num_heads = kv_heads * choose(1, 2, 3, 8)
    head_dim = choose(8, 20, 64, 256)
    return num_heads, kv_heads, head_dim if num_heads * head_dim <= 512 else choose(8, 20)


def tiny_attention(choose: Choose, *, filled: bool = False) -> tuple[dict[str, object], int]:
    """Heads within a hidden size as most configs spell them, and the size of a head.

    `filled`: the heads fill the hidden size, and the config does not say how large they are.
    """
    heads, kv_heads, head_dim = tiny_heads(choose)
    hidden = (
        {"hidden_size": heads * head_dim} if filled else {"hidden_size": heads * choose(4, 6), "head_dim": head_dim}
    )
    return {**hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}, head_dim


def tiny_rope(
    choose: Choose, rotary_dim: int, *, spellings: Sequence[str] = ("type", "rope_type")
) -> dict[str, object]:
    """Every type of rope in either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    `spellings`: of the key in `rope_scaling` that says the type.
    """
    theta = choose(10000.0, 500000.0)
    kind = choose("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    scaling: dict[str, object] = {}
    match kind:
        case "linear" | "dynamic":
            scaling = {"factor": choose(2.0, 4.0)}
        case "llama3":
            scaling = {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_CONTEXT,
            }
        case "yarn":
            scaling = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
            extra: list[dict[str, object]] = [
                {},
                {"attention_factor": 1.25},
                {"mscale": 0.7, "mscale_all_dim": 1.0},
                {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
            ]
            scaling |= choose(*extra)
        case "longrope":
            scaling = tiny_longrope(choose, rotary_dim) | {"original_max_position_embeddings": ORIGINAL_CONTEXT}
        case _:
            pass
    if choose(False, True):
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling}}
    spelling = choose(*spellings)
    return {"rope_theta": theta, "rope_scaling": {spelling: kind, **scaling} if scaling else None}


def tiny_partial_rope(choose: Choose, head_dim: int) -> dict[str, object]:
    """As tiny_rope, on a part of each head: `partial_rotary_factor` beside `rope_theta`, or within the parameters."""
    # An odd number of entries has no pairs, and type dynamic has no frequencies for a single one.
    partial = choose(*(part for part in (0.25, 0.5, 1.0) if int(head_dim * part) in range(4, head_dim + 1, 2)))
    rope = tiny_rope(choose, int(head_dim * partial))
    within = rope.get("rope_parameters")
    if isinstance(within, dict):
        return {"rope_parameters": {**within, "partial_rotary_factor": partial}}
    return {**rope, "partial_rotary_factor": partial}


def tiny_local_global_ropes(choose: Choose, head_dim: int, *, local_key: str | None = None) -> dict[str, object]:
    """Ropes of sliding and of full layers: by kind of layer, or in the old spelling, where `local_key`, if there is
    one, is the theta of sliding layers and otherwise all have the default theta."""
    scaled = tiny_rope(choose, head_dim, spellings=("rope_type",))
    if "rope_parameters" in scaled:
        local: dict[str, object] = {"rope_type": "default", "rope_theta": choose(10000.0, 20000.0)}
        return {"rope_parameters": {"sliding_attention": local, "full_attention": scaled["rope_parameters"]}}
    return scaled | ({local_key: choose(10000.0, 20000.0)} if local_key else {"rope_theta": 500000.0})


def tiny_longrope(choose: Choose, rotary_dim: int) -> dict[str, object]:
    """Other divisors for short contexts than for long ones, and the ways to say the factor on cos and sin."""
    pairs = rotary_dim // 2
    scaling: dict[str, object] = {
        "short_factor": [1.0 + 0.01 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.1 * i for i in range(pairs)],
    }
    extra: list[dict[str, object]] = [{}, {"attention_factor": 1.1}, {"factor": 8.0}]
    return scaling | choose(*extra)


def tiny_windows(choose: Choose, sizes: dict[str, object]) -> dict[str, object]:
    """Qwen's ways to say which layers slide: none, from a layer on, or by `layer_types`."""
    if not choose(False, True):
        return {"use_sliding_window": False, "sliding_window": choose(None, 8)}
    windows: dict[str, object] = {
        "use_sliding_window": True,
        "sliding_window": choose(1, 4, 16, 64),
        "max_window_layers": choose(0, 1, 28),
    }
    if choose(False, True):
        windows["layer_types"] = tiny_layer_types(choose, sizes)
    return windows


def tiny_sparse_layers(choose: Choose, sizes: dict[str, object]) -> dict[str, object]:
    """Qwen's ways to say which layers have experts; always one, or the model would be another family's."""
    if sizes["num_hidden_layers"] == 1:
        return {"decoder_sparse_step": 1, "mlp_only_layers": choose(None, [])}
    some: list[dict[str, object]] = [
        {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ]
    return choose(*some)


def tiny_layer_types(choose: Choose, sizes: dict[str, object]) -> list[str]:
    """For each layer whether it slides."""
    return tiny_by_layer(choose, sizes, "full_attention", "sliding_attention")


def tiny_by_layer(choose: Choose, sizes: dict[str, object], *options: T) -> list[T]:
    """One of the options for each layer."""
    num_layers = sizes["num_hidden_layers"]
    assert isinstance(num_layers, int)
    return [choose(*options) for _ in range(num_layers)]


def tiny_mamba(choose: Choose) -> dict[str, object]:
    """Sizes that Mamba and Falcon-Mamba spell the same way."""
    return {
        "vocab_size": choose(97, 131, 256),
        "hidden_size": choose(32, 54),
        "state_size": choose(4, 16),
        "num_hidden_layers": choose(1, 2, 3),
        "layer_norm_epsilon": choose(1e-6, 1e-5),
        "expand": choose(1, 2),
        "conv_kernel": choose(2, 4),
        "use_bias": choose(False, True),
        "use_conv_bias": choose(False, True),
        "time_step_rank": choose("auto", 3, 8),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def tiny_hybrid(choose: Choose) -> dict[str, object]:
    """Sizes that hybrids of Mamba and attention spell the same way; hidden sizes into which every head count goes."""
    kv_heads = choose(1, 2)
    return {
        "vocab_size": choose(97, 131, 256),
        "hidden_size": choose(32, 64),
        "intermediate_size": choose(40, 72),
        "num_hidden_layers": choose(2, 3, 4),
        "num_attention_heads": kv_heads * choose(1, 2, 4),
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": choose(1e-6, 1e-5),
        "max_position_embeddings": choose(24, 128),
        "mamba_d_state": choose(4, 16),
        "mamba_d_conv": choose(2, 4),
        "mamba_expand": choose(1, 2),
        "mamba_conv_bias": choose(False, True),
        "mamba_proj_bias": choose(False, True),
        "tie_word_embeddings": choose(False, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
