"""Say how important a model's parts are by what flows through them, and make smaller models (arXiv 2407.14679).

Legend: L layers · H hidden channels · F neurons of an MLP or experts of a mixture · K key-value heads · Q query heads
of each

A part is as important as its activations on a text: the mean magnitude of a window, in the root mean square of all
windows; neurons and heads times the norm of the weights that read them. An expert is as important as what it adds: the
norms of its outputs times what they count for. A layer is as important as it turns what passes through it, 1 - cos.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs, dense_logits
from ridgeline.backends.reference.interpreter import compute, interpret_each
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import Op, Program
from ridgeline.program.ops.dense import NORMS
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, MixtureOfExperts

DENSE = ("llama", "qwen3")  # families whose config.json has all sizes, and whose weights are those of AXES
# Those with experts in place of neurons, and the key of their number. Nothing else of them is cut but layers.
MIXTURES = {"mixtral": "num_local_experts", **dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe"), "num_experts")}
STEP, STEPS = 32, 16  # a width is cut in panels of the native kernels, and in so many steps at most
CLOSE = 0.9  # of the budget: what candidates use at least, where any does
MAX_SCORES = 1 << 24  # probabilities of one model in memory at once, while candidates are compared

# The axes of a matrix or vector, by the end of its name; what is not here is never cut. Stacks are of experts.
AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("embed.weight", "head.weight"), ("vocabulary", "hidden")),
    **dict.fromkeys(("final_norm.weight", "mixer_norm.weight", "ffn_norm.weight"), ("hidden",)),
    **dict.fromkeys(("attn.k.weight", "attn.v.weight"), ("keys", "hidden")),
    **dict.fromkeys(("attn.k.bias", "attn.v.bias"), ("keys",)),
    **dict.fromkeys(("ffn.gate.weight", "ffn.up.weight"), ("ffn", "hidden")),
    **dict.fromkeys(("ffn.gate.bias", "ffn.up.bias"), ("ffn",)),
    **dict.fromkeys(("attn.o.bias", "ffn.down.bias"), ("hidden",)),
    "ffn.router.weight": ("ffn", "hidden"),
    "attn.q.weight": ("queries", "hidden"),
    "attn.q.bias": ("queries",),
    "attn.o.weight": ("hidden", "queries"),
    "ffn.down.weight": ("hidden", "ffn"),
}

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; `group` query heads share the keys and values of one head. All but `head_dim` can shrink."""

    layers: int
    hidden: int
    ffn: int  # neurons of an MLP, or experts of a mixture
    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, spec: DecoderSpec) -> "Shape":
        """Read a model's. Raises ConfigError for one that cannot be pruned, with the reason."""
        if spec.model_type not in (known := (*DENSE, *MIXTURES)):
            why = f"which of its weights share an axis is known of {', '.join(known)} alone"
            raise ConfigError(f"model_type {spec.model_type!r} cannot be pruned: {why}")
        mixer, ffn = spec.layers[0].mixer, spec.layers[0].feed_forward
        for number, layer in enumerate(spec.layers):
            if not isinstance(layer.mixer, GroupedQueryAttention) or layer.mixer.window is not None:
                raise ConfigError(f"layer {number} cannot be pruned: its attention has a window")
            if layer.feed_forward != ffn:
                raise ConfigError(f"layer {number} cannot be pruned: one has experts, another has none")
        assert isinstance(mixer, GroupedQueryAttention) and isinstance(ffn, (GatedMlp, MixtureOfExperts)), "no others"
        size = ffn.num_experts if isinstance(ffn, MixtureOfExperts) else ffn.size
        group = mixer.num_heads // mixer.num_kv_heads
        return cls(len(spec.layers), spec.hidden_size, size, mixer.num_kv_heads, group, mixer.head_dim)

    def config(self, config: Mapping[str, object], layers: Sequence[int]) -> dict[str, object]:
        """Return config.json of a model of this shape, made of the `layers` of the one of `config`."""
        kinds, ffn = config.get("layer_types"), read_spec(config).layers[0].feed_forward
        own = {"intermediate_size": self.ffn, "head_dim": self.head_dim}
        if isinstance(ffn, MixtureOfExperts):
            own = {MIXTURES[str(config["model_type"])]: self.ffn}
            own["num_experts_per_tok"] = min(self.ffn, ffn.routing.top_k)
        gone = ("quantization_config", "max_window_layers", "num_local_experts")
        return {
            **{key: value for key, value in config.items() if key not in gone},
            **({"layer_types": [kinds[layer] for layer in layers]} if isinstance(kinds, list) else {}),
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.kv_heads * self.group,
            "num_key_value_heads": self.kv_heads,
            **own,
        }

    def program(self, config: Mapping[str, object]) -> Program:
        """Return what a model of this shape computes, where `config` is of the whole one."""
        return lower(read_spec(self.config(config, range(self.layers))))


@dataclass(frozen=True, slots=True)
class Retained:
    """Says which parts stay, by number; the neurons or experts, key-value heads and query heads of each layer."""

    layers: list[int]
    hidden: list[int]
    ffn: list[list[int]]
    keys: list[list[int]]
    queries: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Says how important parts are. `squares`: of every norm of the hidden channels, the mean squares of its inputs."""

    layers_L: torch.Tensor
    hidden_H: torch.Tensor
    ffn_LF: torch.Tensor
    heads_LKQ: torch.Tensor
    squares: Weights

    def retained(self, shape: Shape) -> Retained:
        """Return the most important parts, as many as the shape has."""
        layers, group = _top(self.layers_L, shape.layers), self.heads_LKQ.shape[2]
        heads, ffn = self.heads_LKQ[layers], [_top(scores_F, shape.ffn) for scores_F in self.ffn_LF[layers]]
        keys = [_top(heads_KQ.square().sum(1), shape.kv_heads) for heads_KQ in heads]
        queries = [
            [key * group + query for key in own for query in _top(heads_KQ[key], shape.group)]
            for heads_KQ, own in zip(heads, keys, strict=True)
        ]
        return Retained(layers, _top(self.hidden_H, shape.hidden), ffn, keys, queries)

    def lost(self, shape: Shape) -> float:
        """Return the shares of importance that a shape loses, added up over its axes."""
        found = self.retained(shape)
        per_layer = zip(self.ffn_LF[found.layers], found.ffn, self.heads_LKQ[found.layers], found.queries, strict=True)
        shares = [_share(f.square(), ffn) + _share(h.square().flatten(), queries) for f, ffn, h, queries in per_layer]
        whole = _share(self.layers_L, found.layers) + _share(self.hidden_H.square(), found.hidden)
        return 4 - whole - sum(shares) / shape.layers

    def pruned(self, shape: Shape, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the weights that stay, as those of a model of as many layers as do.

        A norm divides by the mean square of all its inputs; as that of those that stay differs, its weight makes up
        for it: inputs that were zero can go, and nothing changes.
        """
        stays, pruned = self.retained(shape), dict[str, torch.Tensor]()
        for name, weight in weights.items():
            end, at, layer = _end(name), 0, name.split(".")[1]
            if end != name and int(layer) not in stays.layers:
                continue
            at = stays.layers.index(int(layer)) if end != name else 0
            rows = {"hidden": stays.hidden, "ffn": stays.ffn[at]}
            for axis, heads in (("keys", stays.keys[at]), ("queries", stays.queries[at])):
                rows[axis] = [head * shape.head_dim + entry for head in heads for entry in range(shape.head_dim)]
            for dim, axis in enumerate(AXES.get(end, ()) if weight.ndim < 3 else ("ffn",)):
                weight = weight.index_select(dim, torch.tensor(rows[axis])) if axis in rows else weight
            if name in self.squares and self.squares[name].any():
                weight = weight * (self.squares[name][stays.hidden].mean() / self.squares[name].mean()).sqrt()
            pruned[end if end == name else f"layers.{at}.{end}"] = weight.contiguous()
        return pruned


def importance(spec: DecoderSpec, program: Program, weights: Weights, batches: Sequence[torch.Tensor]) -> Importance:
    """Run windows of text [B, T] through the program, and sum up what flows where."""
    shape = Shape.of(spec)
    norms = [op for op in program.ops if op.kind in NORMS and AXES.get(_end(op.weights[0])) == ("hidden",)]
    inputs, outputs = ({getattr(op, side)[0]: op.weights[0] for op in norms} for side in ("inputs", "outputs"))
    last = {op.inputs[0]: op.weights[0] for op in program.ops if _end(op.label) in ("attn.o", "ffn.down")}
    squares = {name: torch.zeros(shape.hidden) for name in inputs.values()}
    sums: dict[str, torch.Tensor] = {}
    turned_L, num_tokens = torch.zeros(shape.layers), sum(ids_BT.numel() for ids_BT in batches)
    ends = [*(f"layers.{layer}.mixer_norm.weight" for layer in range(shape.layers)), "final_norm.weight"]
    for ids_BT in batches:
        values, passing = dense_inputs(ids_BT), dict[str, torch.Tensor]()
        for op in interpret_each(program, weights, values, DenseMemory(program.states, len(ids_BT), ids_BT.shape[1])):
            if op.kind == "experts":
                scores_E, key = _scores(op, values, weights) / num_tokens, op.weights[2]
                sums[key] = sums.get(key, torch.zeros(shape.ffn)) + scores_E
            for name in op.outputs:
                if name in inputs:
                    passing[inputs[name]] = values[name]
                    squares[inputs[name]] += values[name].square().sum(0) / num_tokens
                if key := "hidden" if name in outputs else last.get(name):
                    a_BC = values[name].reshape(*ids_BT.shape, -1).abs().mean(1)
                    sums[key] = sums.get(key, torch.zeros(a_BC.shape[1])) + a_BC.square().sum(0)
        for layer, (begin, end) in enumerate(zip(ends, ends[1:])):
            cosine = torch.nn.functional.cosine_similarity(passing[begin], passing[end], dim=-1)
            turned_L[layer] += (1 - cosine).sum() / num_tokens
    read = sums | {name: (sums[name] * weights[name].square().sum(0)).sqrt() for name in last.values()}
    heads = torch.stack([read[f"layers.{layer}.attn.o.weight"] for layer in range(shape.layers)])
    return Importance(
        layers_L=turned_L,
        hidden_H=sums["hidden"].sqrt(),
        ffn_LF=torch.stack([read[f"layers.{layer}.ffn.down.weight"] for layer in range(shape.layers)]),
        heads_LKQ=heads.square().unflatten(1, (shape.kv_heads, shape.group, -1)).sum(-1).sqrt(),
        squares=squares,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape within the budget: its price, and the KL to the whole model on calibration text, before any training."""

    shape: Shape
    price: float
    kl_bits: float = math.nan


def candidates(
    config: Mapping[str, object],
    found: Importance,
    budget: tuple[float, Callable[[Program], float]],
    axes: str,
    count: int,
) -> list[Candidate]:
    """Return the shapes that cost a budget at most, at most `count`: those that lose least of what is important.

    For each number of layers and hidden channels the best one counts. Raises ConfigError where the whole model is
    within the budget, and where no shape is.
    """
    (most, price_of), whole = budget, Shape.of(read_spec(config))
    price: Callable[[Shape], float] = lambda shape: price_of(shape.program(config))  # noqa: E731
    layers = range(1, whole.layers + 1) if axes != "width" else [whole.layers]
    has_experts = config["model_type"] in MIXTURES
    cuts_hidden = axes != "depth" and not has_experts
    hiddens = _steps(whole.hidden) if cuts_hidden else [whole.hidden]
    heads = [range(1, size + 1) if cuts_hidden else [size] for size in (whole.kv_heads, whole.group)]
    ffns = [whole.ffn] if axes == "depth" else range(1, whole.ffn + 1) if has_experts else _steps(whole.ffn)
    smallest = Shape(layers[0], hiddens[0], ffns[0], heads[0][0], heads[1][0], whole.head_dim)
    if not price(smallest) <= most < price(whole):
        bounds = f"from {price(smallest):,.6g}, the smallest shape of these axes, to below {price(whole):,.6g}"
        raise ConfigError(f"a budget of {most:,.6g} prunes nothing or cannot be met: it must be {bounds}, the model's")
    best: dict[tuple[int, int], tuple[float, Candidate]] = {}
    for num_layers, hidden, kv_heads, group in product(layers, hiddens, *heads):
        shapes = [Shape(num_layers, hidden, ffn, kv_heads, group, whole.head_dim) for ffn in ffns]
        if at := bisect_right(shapes, most, key=price):
            shape, key = shapes[at - 1], (num_layers, hidden)
            entry = found.lost(shape), Candidate(shape, price(shape))
            best[key] = min(best.get(key, entry), entry, key=lambda each: each[0])
    close = [entry for entry in best.values() if entry[1].price >= CLOSE * most] or list(best.values())
    return [candidate for _, candidate in sorted(close, key=lambda entry: entry[0])[:count]]


def compared(
    config: Mapping[str, object],
    weights: Weights,
    found: Importance,
    shapes: Sequence[Candidate],
    ids_BT: torch.Tensor,
    report: Callable[[int, int], None],
) -> list[Candidate]:
    """Return the candidates by their KL on windows of text, the nearest to the whole model first."""
    program = lower(read_spec(config))
    ids_BT = ids_BT[: max(1, MAX_SCORES // (ids_BT.shape[1] * program.vocab_size))]
    log_p = dense_logits(program, weights, ids_BT).flatten(0, 1).log_softmax(-1)
    done: list[Candidate] = []
    for each in shapes:
        log_q = dense_logits(each.shape.program(config), found.pruned(each.shape, weights), ids_BT).log_softmax(-1)
        nats = torch.nn.functional.kl_div(log_q.flatten(0, 1), log_p, log_target=True, reduction="batchmean")
        done.append(replace(each, kl_bits=nats.item() / math.log(2)))
        report(len(done), len(shapes))
    return sorted(done, key=lambda each: each.kl_bits)


def _end(name: str) -> str:
    """Return a name without the number of its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _scores(op: Op, values: Weights, weights: Weights) -> torch.Tensor:
    """Return what each expert adds, [E]: the norms of its outputs, times what they count for, of all tokens."""
    x_TH, ids_TK, counts_TK = (values[name] for name in op.inputs)
    alone = (x_TH.repeat_interleave(ids_TK.shape[1], 0), ids_TK.reshape(-1, 1), counts_TK.reshape(-1, 1))
    each = dict(zip(op.inputs, alone, strict=True))
    compute(op, weights, each, DenseMemory((), 1, 1))
    return torch.zeros(len(weights[op.weights[0]])).index_add(0, ids_TK.flatten(), each[op.outputs[0]].norm(dim=1))


def _steps(size: int) -> list[int]:
    """Return the widths that a width can be cut to, and itself."""
    step = max(STEP, size // STEPS // STEP * STEP)
    return [*range(step, size, step), size]


def _top(scores: torch.Tensor, count: int) -> list[int]:
    """Return the numbers of the highest scores, rising; among equal ones the first."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _share(scores: torch.Tensor, chosen: Sequence[int]) -> float:
    return float(scores[list(chosen)].sum() / scores.sum().clamp(min=1e-30))
