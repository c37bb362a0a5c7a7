"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention; experts by sigmoid scores, a learned bias on the choice."""

from ridgeline.spec import common
from ridgeline.spec.families.deepseek_v2 import read_deepseek
from ridgeline.spec.families.deepseek_v2 import renames as renames_of_deepseek_v2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename, Renames, Routing

MAX_PREDICTORS = 16


def read(config: ConfigReader) -> DecoderSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.ignore("num_mtp_layers")  # the same as num_nextn_predict_layers
    num_predictors = config.integer("num_nextn_predict_layers", 1, low=0, high=MAX_PREDICTORS)
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
    interleaved = config.flag("rope_interleave", True)
    return read_deepseek(config, routing, interleaved=interleaved, num_predictors=num_predictors)


def renames(spec: DecoderSpec) -> Renames:
    usual, at = renames_of_deepseek_v2(spec), f"model.layers.{len(spec.layers)}"
    modules = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "join", "shared_head.norm": "final_norm"}
    copies = [f"{at}.embed_tokens.", f"{at}.shared_head.head."]
    count = spec.predictor.num_layers if spec.predictor else 1
    predictors = [f"model.layers.{len(spec.layers) + number}." for number in range(count)]
    return [
        *usual,
        *common.predictor_renames(spec, usual, at, {f"{at}.{module}": to for module, to in modules.items()}),
        *(Rename(source, ()) for source in (*copies, *predictors)),
    ]
