"""Mixtures of experts: feed-forwards of which every token uses a few."""

from dataclasses import dataclass
from typing import Literal

from ridgeline.core.errors import ConfigError
from ridgeline.spec.parts import Activation, GatedMlp

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its `top_k` experts, and what each counts for (arXiv 1701.06538).

    An expert's score is the softmax or sigmoid of its router logit. The chosen scores, divided by their sum with
    `normalize` and multiplied by `scale`, weigh the experts' outputs. `selection_bias`: a learned number for each
    expert is added to its score for the choice alone (arXiv 2408.15664). With several groups of consecutive experts
    only the `top_groups` best take part: a group is as good as its best expert, or as its two best together (arXiv
    2412.19437). Among equals the lower number wins.
    """

    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = True
    scale: float = 1.0
    router_bias: bool = False
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"

    def check(self, num_experts: int) -> None:
        """Raise ConfigError where `num_experts` experts cannot be chosen from like this."""
        groups, top_groups = self.num_groups, self.top_groups
        if num_experts % groups or not 1 <= top_groups <= groups:
            raise ConfigError(
                f"{top_groups} of {groups} groups of {num_experts} experts: choose from 1 to {groups} groups, and "
                "as many experts in each"
            )
        size = num_experts // groups
        if not 1 <= self.top_k <= (reach := top_groups * size):
            raise ConfigError(
                f"every token uses {self.top_k} experts, but only {reach} of {num_experts} are within its reach"
            )
        if groups > 1 and self.group_score == "top2_sum" and size < 2:
            raise ConfigError(f"{groups} groups of {size} expert each have no two best experts to compare them by")


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """Computes (u + 1) * g * sigmoid(alpha * g), the gate g at most `limit`, u between -limit and limit (gpt-oss)."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Weighted sum of the gated feed-forwards of `size` entries that the routing chooses among `num_experts`.

    `shared`: another feed-forward, which every token passes and which is added; with `shared_gate` it is multiplied by
    the sigmoid of one more linear function of the input (Qwen2-MoE). `bias`: the experts' matrices have biases.
    """

    num_experts: int
    size: int
    activation: Activation | ClampedSwiGlu
    routing: Routing
    bias: bool = False
    shared: GatedMlp | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        self.routing.check(self.num_experts)
        if self.shared_gate and self.shared is None:
            raise ConfigError("a gate for the shared expert needs a shared expert")
