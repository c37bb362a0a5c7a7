"""Prune a model by what flows through it (Minitron, arXiv 2407.14679): layers, hidden channels, heads, MLP neurons.

Legend: L layers · H hidden channels · F neurons of an MLP · K key-value heads · Q query heads of each · D head width

A part is as important as its activations on a text: the mean magnitude of a window, in the root mean square of all
windows; of neurons and heads times the norm of the weights that read them. A layer is as important as it turns what
passes through it, 1 - cos. What is left is an ordinary model of the same family.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs, dense_logits
from ridgeline.backends.reference.interpreter import interpret_each
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.program.ops.dense import NORMS
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec, GatedMlp, GroupedQueryAttention, Layer, RmsNorm

FAMILIES = ("llama", "qwen3")  # whose config.json has all sizes, and whose tensors have no others
STEP = 32  # what widths are multiples of: a panel of the native kernels
STEPS = 16  # that a width is cut in at most
CLOSE = 0.9  # of the budget: what candidates use at least, where any does
MAX_SCORES = 1 << 24  # probabilities of one model in memory at once, while candidates are compared

# The axes of a weight, by the end of its name; None is never cut.
AXES: Mapping[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("embed.weight", "head.weight"), (None, "hidden")),
    **dict.fromkeys(("final_norm.weight", "mixer_norm.weight", "ffn_norm.weight"), ("hidden",)),
    **dict.fromkeys(("attn.q_norm.weight", "attn.k_norm.weight"), (None,)),
    **dict.fromkeys(("attn.k.weight", "attn.v.weight"), ("keys", "hidden")),
    **dict.fromkeys(("attn.k.bias", "attn.v.bias"), ("keys",)),
    **dict.fromkeys(("ffn.gate.weight", "ffn.up.weight"), ("ffn", "hidden")),
    **dict.fromkeys(("ffn.gate.bias", "ffn.up.bias"), ("ffn",)),
    **dict.fromkeys(("attn.o.bias", "ffn.down.bias"), ("hidden",)),
    "attn.q.weight": ("queries", "hidden"),
    "attn.q.bias": ("queries",),
    "attn.o.weight": ("hidden", "queries"),
    "ffn.down.weight": ("hidden", "ffn"),
}

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The sizes that pruning changes; `group` query heads share the keys and values of one head."""

    layers: int
    hidden: int
    ffn: int
    kv_heads: int
    group: int

    @classmethod
    def of(cls, spec: DecoderSpec) -> "Shape":
        """Read a model's. Raises ConfigError for one that cannot be pruned, with the reason."""
        attention, mlp = _blocks(spec)[0]
        group = attention.num_heads // attention.num_kv_heads
        return cls(len(spec.layers), spec.hidden_size, mlp.size, attention.num_kv_heads, group)

    def config(self, config: Mapping[str, object], layers: Sequence[int]) -> dict[str, object]:
        """Return config.json of a model of this shape, made of the `layers` of the one of `config`."""
        spec = read_spec(config)
        kinds = config.get("layer_types")
        changed = {"layer_types": [kinds[layer] for layer in layers]} if isinstance(kinds, list) else {}
        if "max_window_layers" in config:
            changed["max_window_layers"] = self.layers
        return {
            **{key: value for key, value in config.items() if key != "quantization_config"},
            **changed,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.kv_heads * self.group,
            "num_key_value_heads": self.kv_heads,
            "head_dim": _blocks(spec)[0][0].head_dim,
        }


def _blocks(spec: DecoderSpec) -> list[tuple[GroupedQueryAttention, GatedMlp]]:
    """Return the parts of every layer. Raises ConfigError where one is of another kind."""
    if spec.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {spec.model_type!r} cannot be pruned: which of its weights share an axis is known of "
            f"{' and '.join(FAMILIES)} alone"
        )
    found: list[tuple[GroupedQueryAttention, GatedMlp]] = []
    for number, layer in enumerate(spec.layers):
        if not (
            isinstance(layer, Layer)
            and isinstance(layer.mixer, GroupedQueryAttention)
            and isinstance(layer.feed_forward, GatedMlp)
            and isinstance(layer.mixer_norm, RmsNorm)
            and layer.mixer.window is None
        ):
            raise ConfigError(f"layer {number} cannot be pruned: only full attention and a gated MLP behind norms can")
        found.append((layer.mixer, layer.feed_forward))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Says how important parts are. `squares`: of every norm of the hidden channels, the mean squares of its inputs."""

    layers_L: torch.Tensor
    hidden_H: torch.Tensor
    ffn_LF: torch.Tensor
    heads_LKQ: torch.Tensor
    squares: Weights

    def kept(self, shape: Shape) -> "Kept":
        """Return the most important parts, as many as the shape has."""
        layers = _top(self.layers_L, shape.layers)
        kv_heads: list[list[int]] = []
        groups: list[list[list[int]]] = []
        for layer in layers:
            heads_KQ = self.heads_LKQ[layer]
            kv_heads.append(_top(heads_KQ.square().sum(1), shape.kv_heads))
            groups.append([_top(heads_KQ[head], shape.group) for head in kv_heads[-1]])
        ffn = [_top(self.ffn_LF[layer], shape.ffn) for layer in layers]
        return Kept(layers, _top(self.hidden_H, shape.hidden), ffn, kv_heads, groups)

    def lost(self, shape: Shape) -> float:
        """Return the shares of importance that a shape loses, added up over its axes."""
        kept = self.kept(shape)
        lost = 2 - _share(self.layers_L, kept.layers) - _share(self.hidden_H.square(), kept.hidden)
        for layer, ffn, heads, groups in zip(kept.layers, kept.ffn, kept.kv_heads, kept.groups, strict=True):
            flat = [head * self.heads_LKQ.shape[2] + query for head, group in zip(heads, groups) for query in group]
            lost += (1 - _share(self.ffn_LF[layer].square(), ffn)) / shape.layers
            lost += (1 - _share(self.heads_LKQ[layer].square().flatten(), flat)) / shape.layers
        return lost


@dataclass(frozen=True, slots=True)
class Kept:
    """The numbers of the parts that stay: neurons and key-value heads of each layer, query heads of each of those."""

    layers: list[int]
    hidden: list[int]
    ffn: list[list[int]]
    kv_heads: list[list[int]]
    groups: list[list[list[int]]]

    def pruned(self, spec: DecoderSpec, weights: Weights, squares: Weights) -> dict[str, torch.Tensor]:
        """Return the weights that stay, as those of a model of as many layers as do.

        A norm divides by the mean square of all its inputs; as that of those that stay differs, its weight makes up
        for it: inputs that were zero can go, and nothing changes.
        """
        queries, width = Shape.of(spec).group, _blocks(spec)[0][0].head_dim
        found: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            end, at = _end(name), 0
            if end != name:
                layer = int(name.split(".", 2)[1])
                if layer not in self.layers:
                    continue
                at = self.layers.index(layer)
            heads = [head * queries + q for head, group in zip(self.kv_heads[at], self.groups[at]) for q in group]
            rows = {
                "hidden": self.hidden,
                "ffn": self.ffn[at],
                "keys": _entries(self.kv_heads[at], width),
                "queries": _entries(heads, width),
            }
            for dim, axis in enumerate(AXES[end]):
                if axis is not None:
                    weight = weight.index_select(dim, torch.tensor(rows[axis]))
            if name in squares:
                kept, of_all = squares[name][self.hidden].mean(), squares[name].mean()
                weight = weight * (kept / of_all).sqrt() if of_all > 0 else weight
            found[end if end == name else f"layers.{at}.{end}"] = weight.contiguous()
        return found


def importance(spec: DecoderSpec, program: Program, weights: Weights, batches: Sequence[torch.Tensor]) -> Importance:
    """Run windows of text [B, T] through the program, and sum up what flows where."""
    shape = Shape.of(spec)
    norms = [op for op in program.ops if op.kind in NORMS and AXES[_end(op.weights[0])] == ("hidden",)]
    readers = {op.inputs[0]: op for op in program.ops if op.weights}
    inputs = {op.inputs[0]: op.weights[0] for op in norms}
    squares = {name: torch.zeros(shape.hidden) for name in inputs.values()}
    sums: dict[str, torch.Tensor] = {}
    turned_L, num_tokens = torch.zeros(shape.layers), sum(ids_BT.numel() for ids_BT in batches)
    ends = [*(f"layers.{layer}.mixer_norm.weight" for layer in range(shape.layers)), "final_norm.weight"]
    with torch.inference_mode():
        for ids_BT in batches:
            values = dense_inputs(ids_BT)
            passing: dict[str, torch.Tensor] = {}
            for op in interpret_each(program, weights, values, DenseMemory(program.states, *ids_BT.shape)):
                for name in op.outputs:
                    if name in inputs:
                        passing[inputs[name]] = values[name]
                        squares[inputs[name]] += values[name].square().sum(0) / num_tokens
                    reader = readers.get(name)
                    if op in norms:
                        key = "hidden"
                    elif reader is not None and reader.weights[0].endswith(("attn.o.weight", "ffn.down.weight")):
                        key = reader.weights[0]
                    else:
                        continue
                    a_BC = values[name].reshape(*ids_BT.shape, -1).abs().mean(1)
                    sums[key] = sums.get(key, torch.zeros(a_BC.shape[1])) + a_BC.square().sum(0)
            for layer, (begin, end) in enumerate(zip(ends, ends[1:])):
                cosine = torch.nn.functional.cosine_similarity(passing[begin], passing[end], dim=-1)
                turned_L[layer] += (1 - cosine).sum() / num_tokens
    read = {key: (sums[key] * weights[key].square().sum(0)).sqrt() for key in sums if key != "hidden"}
    layers = range(shape.layers)
    heads = [read[f"layers.{layer}.attn.o.weight"].unflatten(0, (shape.kv_heads, shape.group, -1)) for layer in layers]
    return Importance(
        layers_L=turned_L,
        hidden_H=sums["hidden"].sqrt(),
        ffn_LF=torch.stack([read[f"layers.{layer}.ffn.down.weight"] for layer in layers]),
        heads_LKQ=torch.stack(heads).square().sum(-1).sqrt(),
        squares=squares,
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `most` of what `price` says of a program. `spelled`: the option that asked for it."""

    most: float
    price: Callable[[Program], float]
    spelled: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape within the budget: its price, and the KL to the whole model on calibration text, before any training."""

    shape: Shape
    price: float
    kl_bits: float = math.nan


def candidates(
    config: Mapping[str, object], found: Importance, budget: Budget, axes: str, count: int
) -> list[Candidate]:
    """Return the shapes within the budget that keep most of what is important, at most `count`.

    Of each number of layers and hidden channels the best one counts. Raises ConfigError where no shape is small enough.
    """
    whole = Shape.of(read_spec(config))
    price = lambda shape: budget.price(_program(config, shape))  # noqa: E731
    if price(whole) <= budget.most:
        raise ConfigError(f"{budget.spelled} prunes nothing: the model has {price(whole):,.6g} as it is; ask for less")
    layers = range(1, whole.layers + 1) if axes != "width" else [whole.layers]
    widths = [_steps(whole.hidden), _steps(whole.ffn)] if axes != "depth" else [[whole.hidden], [whole.ffn]]
    heads = [range(1, most + 1) if axes != "depth" else [most] for most in (whole.kv_heads, whole.group)]
    best: dict[tuple[int, int], tuple[float, Candidate]] = {}
    for num_layers, hidden, kv_heads, group in product(layers, widths[0], *heads):
        shapes = [Shape(num_layers, hidden, ffn, kv_heads, group) for ffn in widths[1]]
        if at := bisect_right(shapes, budget.most, key=price):
            shape, key = shapes[at - 1], (num_layers, hidden)
            entry = found.lost(shape), Candidate(shape, price(shape))
            best[key] = min(best.get(key, entry), entry, key=lambda each: each[0])
    if not best:
        smallest = price(Shape(layers[0], widths[0][0], widths[1][0], heads[0][0], heads[1][0]))
        raise ConfigError(f"{budget.spelled} is too small: the smallest model of these axes has {smallest:,.6g}")
    close = [entry for entry in best.values() if entry[1].price >= CLOSE * budget.most] or list(best.values())
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
    spec = read_spec(config)
    ids_BT = ids_BT[: max(1, MAX_SCORES // (ids_BT.shape[1] * spec.vocab_size))]
    done: list[Candidate] = []
    with torch.inference_mode():
        log_p = dense_logits(lower(spec), weights, ids_BT).flatten(0, 1).log_softmax(-1)
        for candidate in shapes:
            kept = found.kept(candidate.shape)
            program = _program(config, candidate.shape)
            log_q = dense_logits(program, kept.pruned(spec, weights, found.squares), ids_BT).flatten(0, 1)
            nats = torch.nn.functional.kl_div(log_q.log_softmax(-1), log_p, log_target=True, reduction="batchmean")
            done.append(replace(candidate, kl_bits=nats.item() / math.log(2)))
            report(len(done), len(shapes))
    return sorted(done, key=lambda each: each.kl_bits)


def _program(config: Mapping[str, object], shape: Shape) -> Program:
    return lower(read_spec(shape.config(config, range(shape.layers))))


def _end(name: str) -> str:
    """Return a weight's name without the number of its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _steps(size: int) -> list[int]:
    """Return the widths that a width can be cut to, and itself."""
    step = max(STEP, size // STEPS // STEP * STEP)
    return [*range(step, size, step), size]


def _top(scores: torch.Tensor, count: int) -> list[int]:
    """Return the numbers of the highest scores, rising; of equal ones the first."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _share(scores: torch.Tensor, kept: Sequence[int]) -> float:
    return float(scores[list(kept)].sum() / scores.sum().clamp(min=1e-30))


def _entries(heads: Sequence[int], width: int) -> list[int]:
    return [head * width + entry for head in heads for entry in range(width)]
