from families.deepseek_v2 import tiny_deepseek
from tiny_parts import Choose


def tiny(choose: Choose) -> dict[str, object]:
    common = tiny_deepseek(choose)
    return {
        "model_type": "deepseek_v3",
        **common,
        "topk_group": choose(1, common["n_group"]),
        "norm_topk_prob": choose(False, True),
        "rope_interleave": choose(False, True),
    }
