"""Mixtures of experts: one expert after the other, over the tokens that were sent to it."""

import torch

from ridgeline.backends.reference.memory import Outputs, StepMemory, Tensors
from ridgeline.backends.reference.ops.dense import ACTIVATIONS, of_two
from ridgeline.backends.reference.packed import linear
from ridgeline.backends.reference.rounding import RoundedInputs, rounded
from ridgeline.program.op import Attrs
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs
from ridgeline.spec.spec import ClampedSwiGlu, Routing


def route(attrs: RouteAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Select experts in falling order of score; the selection bias and the groups left out affect the choice alone."""
    routing, logits_TE = attrs.routing, inputs[0].float()
    scores_TE = logits_TE.softmax(-1) if routing.scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE.detach()
    if weights:
        choice_TE = choice_TE + weights[0].detach().float()
    if routing.num_groups > 1:
        choice_TE = _best_groups(routing, choice_TE)
    ids_TK = _best(choice_TE, routing.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be 0
    return (ids_TK.int(), routing.scale * weights_TK)


def experts(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Sum each token's results in the order of the experts' numbers, in float32."""
    own = attrs.attrs if isinstance(attrs, RoundedInputs) else attrs
    assert isinstance(own, ExpertsAttrs)
    x_TH, ids_TK, weights_TK = inputs[0], inputs[1].long(), inputs[2]
    gate_EFH, up_EFH, down_EHF, *biases = weights
    sums_TH = torch.zeros_like(x_TH, dtype=torch.promote_types(x_TH.dtype, torch.float32))
    for expert in ids_TK.unique().tolist():
        rows, slots = (ids_TK == expert).nonzero(as_tuple=True)
        gate_bias, up_bias, down_bias = (bias[expert] for bias in biases) if biases else (None, None, None)
        x = rounded(x_TH[rows], attrs)
        h = gated(own, linear(x, gate_EFH[expert], gate_bias), linear(x, up_EFH[expert], up_bias))
        y = linear(rounded(h, attrs, weight=2), down_EHF[expert], down_bias) * weights_TK[rows, slots, None]
        sums_TH = sums_TH.index_add(0, rows, y.to(sums_TH.dtype))
    return (sums_TH.to(x_TH.dtype),)


gate_rows = of_two(lambda _, x, gate: gate.sigmoid() * x)


def _best(scores_TN: torch.Tensor, count: int) -> torch.Tensor:
    """Return where the `count` largest entries of each row are, the first of equals first."""
    return scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _best_groups(routing: Routing, choice_TE: torch.Tensor) -> torch.Tensor:
    """Mask the scores of all but the best groups with -inf."""
    choice_TGN = choice_TE.unflatten(1, (routing.num_groups, -1))
    num_best = 1 if routing.group_score == "max" else 2
    groups_TG = _best(choice_TGN.topk(num_best).values.sum(-1), routing.top_groups)
    is_out_TG = torch.ones_like(choice_TGN[..., 0], dtype=torch.bool).scatter(1, groups_TG, False)
    return choice_TGN.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)


def gated(attrs: ExpertsAttrs, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    act = attrs.activation
    if not isinstance(act, ClampedSwiGlu):
        return ACTIVATIONS[act](gate) * up
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return (up + 1) * gate * (act.alpha * gate).sigmoid()
