"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention; experts by softmax, some in the best groups only."""

from collections.abc import Sequence

from ridgeline.spec.common_latent import deepseek_renames, read_deepseek, tiny_deepseek
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename, Routing
from ridgeline.spec.tiny import Choose


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False, None)
    groups, top_groups = config.optional_integer("n_group") or 1, config.optional_integer("topk_group") or 1
    limited = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    routing = Routing(
        top_k=config.integer("num_experts_per_tok"),
        normalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=groups if limited else 1,
        top_groups=top_groups if limited else 1,
    )
    return read_deepseek(config, "deepseek_v2", routing, interleaved=True)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return deepseek_renames(spec)


def tiny(choose: Choose) -> dict[str, object]:
    return {
        "model_type": "deepseek_v2",
        "topk_method": choose("greedy", "group_limited_greedy"),
        **tiny_deepseek(choose),
    }
