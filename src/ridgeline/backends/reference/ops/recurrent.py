"""State-space and linear-attention layers, token by token in float32, as their papers write them down.

Legend: S spans of equal length · L tokens of each; the others as in `program/ops/recurrent.py`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.backends.reference.memory import Outputs, StepMemory, Tensors
from ridgeline.backends.reference.ops.dense import ACTIVATIONS
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs

L2_EPS = 1e-6  # of the delta rule's queries and keys

Step = Callable[[Tensor, Tensors], tuple[Tensor, Tensor]]
"""(state [S, ..], one token's inputs [S, ..]) -> (state after the token, its output [S, ..])."""


def causal_conv(attrs: CausalConvAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Sum each channel's last W tokens, weighted; the state holds the W - 1 before the span, oldest first."""
    taps_CW, *bias = (weight.float() for weight in weights)

    def step(last_SCW: Tensor, token: Tensors) -> tuple[Tensor, Tensor]:
        seen_SCW = torch.cat((last_SCW, token[0][..., None]), dim=-1)
        y_SC = (seen_SCW * taps_CW).sum(-1)
        y_SC = y_SC + bias[0] if bias else y_SC
        return seen_SCW[..., 1:], y_SC if attrs.activation is None else ACTIVATIONS[attrs.activation](y_SC)

    return _over_tokens(attrs, step, inputs, memory, (0,))


def selective_scan(attrs: RecurrentAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Run Mamba's scan (arXiv 2312.00752): h <- exp(dt A) h + dt x B and y = C h + D x.

    Here dt goes through softplus first, and A = -exp(A_log).
    """
    decay_IN, skip_I = -weights[0].float().exp(), weights[1].float()

    def step(h_SIN: Tensor, token: Tensors) -> tuple[Tensor, Tensor]:
        x_SI, dt_SI, b_SN, c_SN = token
        dt_SI = F.softplus(dt_SI)
        h_SIN = (dt_SI[..., None] * decay_IN).exp() * h_SIN + (dt_SI * x_SI)[..., None] * b_SN[:, None]
        return h_SIN, (h_SIN * c_SN[:, None]).sum(-1) + skip_I * x_SI

    return _over_tokens(attrs, step, inputs, memory, (0, 1, 2))


def ssd(attrs: SsdAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Run Mamba-2's scan (arXiv 2405.21060): the selective scan with one decay for all entries of a head.

    dt = softplus(dt + dt_bias), clamped to its limits; the heads of a group share B and C.
    """
    decay_H, skip_H, dt_bias_H = -weights[0].float().exp(), weights[1].float(), weights[2].float()
    heads_per_group = inputs[0].shape[1] // inputs[2].shape[1]

    def step(h_SHPN: Tensor, token: Tensors) -> tuple[Tensor, Tensor]:
        x_SHP, dt_SH = token[:2]
        b_SHN, c_SHN = (part_SGN.repeat_interleave(heads_per_group, dim=1) for part_SGN in token[2:])
        dt_SH = F.softplus(dt_SH + dt_bias_H).clamp(attrs.dt_min, attrs.dt_max)
        added_SHPN = (dt_SH[..., None] * x_SHP)[..., None] * b_SHN[:, :, None]
        h_SHPN = (dt_SH * decay_H).exp()[..., None, None] * h_SHPN + added_SHPN
        y_SHP = (h_SHPN * c_SHN[:, :, None]).sum(-1) + skip_H[:, None] * x_SHP
        return h_SHPN, y_SHP.flatten(1)

    return _over_tokens(attrs, step, inputs, memory, (0, 1, 2))


def delta_rule(attrs: RecurrentAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Run the gated delta rule (arXiv 2412.06464): the state decays, then its value under k moves to v by beta.

    Decay exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b); q and k are l2-normalised, and q is divided by
    sqrt(K). The heads of v that share a head of q and k lie side by side.
    """
    rate_H, dt_bias_H = weights[0].float().exp(), weights[1].float()
    heads_per_key = inputs[2].shape[1] // inputs[0].shape[1]

    def step(h_SHKV: Tensor, token: Tensors) -> tuple[Tensor, Tensor]:
        q_SHK, k_SHK = (_l2_normalised(x).repeat_interleave(heads_per_key, dim=1) for x in token[:2])
        v_SHV, a_SH, b_SH = token[2:]
        h_SHKV = (-rate_H * F.softplus(a_SH + dt_bias_H)).exp()[..., None, None] * h_SHKV
        error_SHV = v_SHV - (h_SHKV * k_SHK[..., None]).sum(2)
        h_SHKV = h_SHKV + k_SHK[..., None] * (b_SH.sigmoid()[..., None] * error_SHV)[:, :, None]
        o_SHV = (h_SHKV * q_SHK[..., None]).sum(2) * q_SHK.shape[-1] ** -0.5
        return h_SHKV, o_SHV.flatten(1)

    return _over_tokens(attrs, step, inputs, memory, (1, 2, 3, 4))


def retention(attrs: RetentionAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Run linear attention with a constant decay per head (arXiv 2307.08621): h <- exp(-rate) h + k v and o = q h."""
    decay_H = torch.tensor(attrs.rates, dtype=torch.float32).neg().exp()

    def step(h_SHKV: Tensor, token: Tensors) -> tuple[Tensor, Tensor]:
        q_SHK, k_SHK, v_SHV = token
        h_SHKV = decay_H[:, None, None] * h_SHKV + k_SHK[..., None] * v_SHV[:, :, None]
        return h_SHKV, (h_SHKV * q_SHK[..., None]).sum(2).flatten(1)

    return _over_tokens(attrs, step, inputs, memory, (1, 2))


def gated_norm(attrs: GatedNormAttrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> Outputs:
    """Compute weight * rmsnorm(x) * silu(z) or weight * rmsnorm(x * silu(z)); the norm spans `group` entries."""
    x, gate = inputs[0].float(), F.silu(inputs[1].float())
    weight = weights[0].float().view(-1, attrs.group)
    y = x if attrs.norm_before_gate else x * gate
    y = (F.rms_norm(y.unflatten(-1, (-1, attrs.group)), (attrs.group,), None, attrs.eps) * weight).flatten(-2)
    return ((y * gate if attrs.norm_before_gate else y).to(inputs[0].dtype),)


def _over_tokens(
    attrs: RecurrentAttrs, step: Step, inputs: Tensors, memory: StepMemory, logged: Sequence[int]
) -> Outputs:
    """Run `step` over the tokens of every span, from the state that memory holds to the one that it keeps.

    Spans of one length go together. The output has the dtype of the first input; states depend on the inputs `logged`.
    """
    spans = memory.spans()
    before_S = memory.load(attrs.state, attrs.part)
    log, goes_to_log = memory.log(attrs.state, attrs.part), [False] * len(spans)
    if log is not None:
        pending = log.pending()
        before_S = torch.stack([_with(rows, step, h, inputs, logged) for rows, h in zip(pending, before_S)])
        goes_to_log = log.keep(torch.cat([inputs[index].float().flatten(1) for index in logged], dim=1))
    members: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        members.setdefault(span.stop - span.start, []).append(index)
    outputs: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    for num_tokens, batch in members.items():
        inputs_SL = [torch.stack([x[spans[index]] for index in batch]).float() for x in inputs]
        state, rows = before_S[batch], list[Tensor]()
        for token in range(num_tokens):
            state, row = step(state, [x[:, token] for x in inputs_SL])
            rows.append(row)
        outputs.update(zip(batch, torch.stack(rows, dim=1)))
        after.update(zip(batch, state))
    order = range(len(spans))
    stored = [before_S[index] if goes_to_log[index] else after[index] for index in order]
    memory.store(attrs.state, attrs.part, torch.stack(stored))
    return (torch.cat([outputs[index] for index in order]).to(inputs[0].dtype),)


def _with(rows_PW: Tensor, step: Step, state: Tensor, inputs: Tensors, logged: Sequence[int]) -> Tensor:
    """Return the state with the tokens that a log has the inputs `logged` of; the others are for an output."""
    widths = [inputs[index][0].numel() for index in logged]
    for row_W in rows_PW:
        token = [torch.zeros(1, *x.shape[1:]) for x in inputs]
        for index, values in zip(logged, row_W.split(widths)):
            token[index] = values.view(1, *inputs[index].shape[1:])
        state = step(state[None], token)[0][0]
    return state


def _l2_normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
