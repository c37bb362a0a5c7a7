"""Read what a GGUF file says of a model, in this project's terms: a row of architectures.toml for each architecture.

`metadata` are the architecture's own keys without its name; the frequency divisors that some files keep as tensors are
beside them as lists of numbers, under the tensors' names. What no key says as a family does has a function here.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.core.files import read_toml
from ridgeline.spec.gguf.common import (
    FACTOR_TENSORS,
    Shapes,
    Stored,
    read_common,
    read_layouts,
    read_rope,
    read_sizes,
    read_window,
)
from ridgeline.spec.reader import ConfigReader

__all__ = ["FACTOR_TENSORS", "Shapes", "Stored", "names", "read_config", "tensors"]

Config = dict[str, object]
Read = Callable[[ConfigReader, Shapes], object]

SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func
ROW = {
    "family": "",
    "common": "usual",
    "layouts": ("llama", "fused_qkv", "experts"),
}  # keys of a row that are none of config.json


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of an architecture are read.

    `model_type` is the family that reads the config of `common`, the sizes, and of `values`, each a constant or read of
    the file; a model_type of these comes first. `layouts` of tensors.toml say how its tensors become program weights.
    """

    model_type: str
    values: Mapping[str, object]
    common: Callable[[ConfigReader, Shapes], Config]
    layouts: Sequence[str]


def names() -> list[str]:
    """Return all supported values of general.architecture, with underscores for hyphens."""
    return sorted(ARCHITECTURES)


def tensors(name: str) -> Sequence[Stored]:
    """Return how the tensors of architecture `name` become the program's weights."""
    return list(ChainMap(*(dict(LAYOUTS[layout]) for layout in reversed(_architecture(name).layouts))).values())


def read_config(name: str, metadata: Mapping[str, object], shapes: Shapes) -> Config:
    """Return the config.json of architecture `name` with these metadata and tensors.

    Raises ConfigError for an unknown architecture, key or value: what is not understood is refused, never dropped.
    """
    reader, found = ConfigReader(metadata, name), _architecture(name)
    own = {key: value(reader, shapes) if callable(value) else value for key, value in found.values.items()}
    config = {"model_type": found.model_type, **found.common(reader, shapes), **own}
    reader.finish()
    return config


def _architecture(name: str) -> Architecture:
    found = ARCHITECTURES.get(name.replace("-", "_"))
    if found is None:
        raise ConfigError(f"general.architecture {name[:80]!r} is not supported; supported: {', '.join(names())}")
    return found


def query_scalar(metadata: ConfigReader, layers_of_27b: int) -> int:
    """Return the size of a head, or another number for the 27B, which is known by its number of layers alone."""
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    is_27b = metadata.integer("block_count") == layers_of_27b
    return hidden // heads if is_27b else metadata.integer("attention.key_length", hidden // heads)


def _value(**said: Any) -> Read:
    """Return what reads a value as a row of the table says."""
    (kind, key), *options = said.items()
    arguments = dict(options)
    match kind, key:
        case "integer", _:
            return lambda metadata, shapes: metadata.integer(key, **arguments)
        case "number", _:
            return lambda metadata, shapes: metadata.number(key, **{"low": -1e30, **arguments})
        case "has", _:
            return lambda metadata, shapes: f"blk.0.{key}" in shapes
        case "read", "window":
            return read_window
        case "read", "optional_window":  # 0 where there is none
            return lambda metadata, shapes: metadata.optional_integer("attention.sliding_window", low=0) or None
        case "read", "number_above_0":  # 0 where there is none
            return lambda metadata, shapes: metadata.optional_number(**arguments, low=0.0) or None
        case _:
            assert key == "query_scalar", f"architectures.toml: nothing reads {said}"
            return lambda metadata, shapes: query_scalar(metadata, **arguments)


def deepseek(metadata: ConfigReader, shapes: Shapes) -> Config:
    """Return the config of DeepSeek V2 or V3; heads' sizes are under other keys in newer files: the usual ones are the
    latent's there."""
    groups = metadata.integer("expert_group_count", 1)
    if metadata.integer("expert_gating_func", SOFTMAX, high=SIGMOID) == SIGMOID:
        kind = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        kind = {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    key_dim, value_dim = (metadata.integer(f"attention.{part}_length") for part in ("key", "value"))
    rope_dim, rope = metadata.integer("rope.dimension_count"), read_rope(metadata, 1.0)
    scaling = rope.get("rope_scaling")
    if isinstance(scaling, dict) and metadata.has("rope.scaling.yarn_log_multiplier"):
        strength = 10.0 * metadata.number("rope.scaling.yarn_log_multiplier", low=0.0)
        # Every released model has the same value for both strengths of a config.
        rope["rope_scaling"] = {**scaling, "mscale": strength, "mscale_all_dim": strength}
    metadata.ignore("attention.head_count_kv")  # 1 or all: the latent has no heads
    return {
        **kind,
        **read_sizes(metadata, shapes),
        **rope,
        "q_lora_rank": metadata.optional_integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": metadata.integer("attention.key_length_mla", key_dim) - rope_dim,
        "v_head_dim": metadata.integer("attention.value_length_mla", value_dim),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", low=0.0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, low=0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "n_group": groups,
    }


def gpt2(metadata: ConfigReader, shapes: Shapes) -> Config:
    sizes = read_sizes(metadata, shapes)
    metadata.expect("attention.head_count_kv", metadata.integer("attention.head_count"))
    return {
        "n_embd": sizes.pop("hidden_size"),
        "n_layer": sizes.pop("num_hidden_layers"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon", low=0.0),
        **sizes,
    }


def gpt_oss(metadata: ConfigReader, shapes: Shapes) -> Config:
    common = read_common(metadata, shapes)
    scaling = common.get("rope_scaling")
    if isinstance(scaling, dict):
        # Its published config does not round YaRN's limits to whole dims, and no key says so.
        common["rope_scaling"] = {**scaling, "truncate": False}
    metadata.expect("attention.sliding_window_pattern", 2)
    return common


def gptneox(metadata: ConfigReader, shapes: Shapes) -> Config:
    common = read_common(metadata, shapes, layer_norm=True, free_head_dim=False)
    heads = common["num_attention_heads"]
    if common.pop("num_key_value_heads") != heads:
        raise ConfigError(f"attention.head_count_kv must be attention.head_count, {heads}")
    return {"use_parallel_residual": metadata.flag("use_parallel_residual", True), **common}


def llama(metadata: ConfigReader, shapes: Shapes) -> Config:
    """Return the config of Llama, or with experts that of Mixtral."""
    num_experts = metadata.integer("expert_count", 0, low=0)
    num_used = metadata.integer("expert_used_count", 0, low=0)
    common = PAIRED(metadata, shapes)
    if num_experts:
        return {"model_type": "mixtral", "num_local_experts": num_experts, "num_experts_per_tok": num_used, **common}
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes, **common}


def mamba(metadata: ConfigReader, shapes: Shapes) -> Config:
    # There are no attention and no feed-forwards; and any length will do.
    metadata.ignore("attention.head_count", "feed_forward_length", "context_length")
    return {
        **read_sizes(metadata, shapes),
        "model_type": "falcon_mamba" if metadata.flag("ssm.dt_b_c_rms", False) else "mamba",
        "expand": metadata.integer("ssm.inner_size") // metadata.integer("embedding_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon", low=0.0),
    }


def nemotron(metadata: ConfigReader, shapes: Shapes) -> Config:
    common = LAYER_NORM(metadata, shapes)
    return {"norm_eps": common.pop("layer_norm_eps"), **common}


def olmo(metadata: ConfigReader, shapes: Shapes) -> Config:
    """Return the config of OLMo 2, or with a window that of OLMo 3."""
    window = read_window(metadata, shapes)
    three: Config = {} if window is None else {"model_type": "olmo3", "sliding_window": window}
    return {**read_common(metadata, shapes), **three}


def stablelm(metadata: ConfigReader, shapes: Shapes) -> Config:
    metadata.ignore("use_parallel_residual")  # written wrongly at times; a second norm tells
    common = read_common(metadata, shapes, layer_norm=True, free_head_dim=False)
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes, **common}


PAIRED, LAYER_NORM = partial(read_common, paired=True), partial(read_common, layer_norm=True)
WHOLE_HEADS = partial(read_common, free_head_dim=False)

COMMON: Mapping[str, Callable[[ConfigReader, Shapes], Config]] = {
    "usual": read_common,
    "paired": PAIRED,
    "layer_norm": LAYER_NORM,
    "whole_heads": WHOLE_HEADS,
    "layer_norm_whole_heads": partial(WHOLE_HEADS, layer_norm=True),
    **{each.__name__: each for each in (deepseek, gpt2, gpt_oss, gptneox, llama, mamba, nemotron, olmo, stablelm)},
}


def _table() -> Mapping[str, Architecture]:
    """Read the rows of architectures.toml."""
    found: dict[str, Architecture] = {}
    for name, row in read_toml(__file__, "architectures.toml").items():
        family, common, layouts = (row.pop(key, other) for key, other in ROW.items())
        values = {key: _value(**said) if isinstance(said, dict) else said for key, said in row.items()}
        found[name] = Architecture(family or name, values, COMMON[common], layouts)
    return found


ARCHITECTURES = _table()
LAYOUTS = read_layouts()
