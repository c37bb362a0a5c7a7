"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention; experts by sigmoid scores, a learned bias on the choice."""

from ridgeline.spec.families.deepseek_v2 import read_deepseek
from ridgeline.spec.families.deepseek_v2 import renames as renames_of_deepseek_v2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename, Renames, Routing


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.ignore("num_nextn_predict_layers", "num_mtp_layers")  # for speculative decoding
    routing = Routing(
        top_k=config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 2.5),
        selection_bias=True,
        num_groups=config.integer("n_group", 8),
        top_groups=config.integer("topk_group", 4),
        group_score="top2_sum",
    )
    return read_deepseek(config, routing, interleaved=config.flag("rope_interleave", True))


def renames(spec: DecoderSpec) -> Renames:
    predicts_further = Rename(f"model.layers.{len(spec.layers)}.", ())  # for speculative decoding
    return [*renames_of_deepseek_v2(spec), predicts_further]
