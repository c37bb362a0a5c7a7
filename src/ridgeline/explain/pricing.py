"""Price a step of a model on a card: FLOPs, bytes and the least time, by kind of group. Must not import torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted
from ridgeline.cost.account import kv_bytes, weight_bytes
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.prices import price_groups
from ridgeline.cost.roofline import Bound, Roofline
from ridgeline.explain.exploration import Figure, frame, html_table
from ridgeline.explain.limits import MODELS
from ridgeline.program.lower import lower
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
HEAD = ("group", "count", "FLOP", "bytes", "limit", "bound by")


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Holds equal groups of ops: what they cost together, and the least time that they take."""

    kind: str
    label: str
    count: int
    cost: OpCost
    limit_s: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Price:
    """Holds the limit of a step, a sum over its groups. In a notebook it shows itself as a table."""

    model: str
    card: str
    load: Load
    groups: Sequence[GroupLimit]
    is_peak_known: bool
    weight_bytes: float  # of all weights, also those that the step does not read
    kv_bytes: float  # of all that is cached of its sequences
    fits: bool  # both, where the card's memory is known

    @property
    def cost(self) -> OpCost:
        """FLOPs and bytes of the step."""
        return sum((group.cost for group in self.groups), OpCost())

    @property
    def limit_s(self) -> float:
        """The least time of the step in seconds; from a datasheet, so no cache is counted."""
        return sum(group.limit_s for group in self.groups)

    @property
    def sentence(self) -> str:
        """The limit in words."""
        cost, known = self.cost, "" if self.is_peak_known else "; its peak of arithmetic is unknown and not counted"
        held = self.weight_bytes + self.kv_bytes
        known += "" if self.fits else f"; it does not fit: weights and cache are {held / 1e9:,.1f} GB"
        return (
            f"{counted(self.load.num_tokens, 'token')} of {self.model} on {self.card} in at least "
            f"{self.limit_s * 1e3:,.3f} ms, {self.load.num_tokens / self.limit_s:,.0f} tokens/s: "
            f"{cost.flops / 1e9:,.4g} GFLOP and {cost.num_bytes / 1e9:,.4g} GB{known}."
        )

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data; all limits are of the datasheet."""
        return {**asdict(self), "limit_s": self.limit_s, "provenance": "datasheet", "sentence": self.sentence}

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a record for each kind of group. Raises ConfigError without pandas."""
        plain = ({**asdict(group), **asdict(group.cost)} for group in self.groups)
        return frame([{name: value for name, value in record.items() if name != "cost"} for record in plain])

    def lines(self) -> Sequence[Sequence[str]]:
        """Return the cells of a table with the columns HEAD."""

        def cells(group: GroupLimit) -> Sequence[str]:
            numbers = ((group.cost.flops, "FLOP"), (group.cost.num_bytes, "B"), (group.limit_s, "s"))
            texts = (Figure("", value, unit, "", "datasheet").text for value, unit in numbers)
            return group.label if group.count == 1 else group.kind, str(group.count), *texts, group.bound

        return [cells(group) for group in self.groups]

    def _repr_html_(self) -> str:
        return html_table(f"{self.sentence} [datasheet]", HEAD, self.lines())


def price(
    model: str | Path | Mapping[str, object],
    *,
    card: str = "h100-sxm",
    batch: int = 1,
    context: int = 1024,
    prompt: int = 0,
    dtype: str = "bfloat16",
) -> Price:
    """Return the limit of a decode step of `batch` sequences at `context` tokens, or with `prompt` of that prefill.

    `model` is one of `limits.MODELS`, a config.json or its folder, a bundled model, or the config itself. Raises
    ConfigError for a model, a card or a size that cannot be.
    """
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype must be {' or '.join(ELEMENT_BYTES)}, got {dtype!r}")
    for name, value, low in (("batch", batch, 1), ("context", context, 1), ("prompt", prompt, 0)):
        if value not in range(low, (1 << 30) + 1):
            raise ConfigError(f"{name} must be between {low} and {1 << 30}, a whole number, got {value!r}")
    batch, context, prompt = int(batch), int(context), int(prompt)
    sheet, size, inputs = datasheet(card), ELEMENT_BYTES[dtype], "f32" if dtype == "float32" else "bf16"
    program = lower(spec_of(model))
    load = Load(((prompt, prompt),) * batch, batch) if prompt else Load.decode(batch, context)
    priced = [(g, g.cost(load)) for g in price_groups(program, fuse(program), ElementBytes(size, size, size))]
    roofline = Roofline(sheet, 1, sum(cost.num_bytes for _, cost in priced))
    groups: list[GroupLimit] = []
    for group, cost in priced:
        one, count = roofline.predict(cost, inputs), group.count
        groups.append(GroupLimit(group.kind, group.label, count, cost * count, count * one.seconds, one.bound))
    name = str(model.get("model_type", "a model")) if isinstance(model, Mapping) else str(model)
    weights, cached = weight_bytes(program, size), batch * kv_bytes(program, prompt or context, size)
    fits = weights + cached <= (sheet.memory_bytes or math.inf)
    return Price(name, card, load, groups, sheet.peak(inputs, 1) is not None, weights, cached, fits)


def spec_of(model: str | Path | Mapping[str, object]) -> DecoderSpec:
    """Read one of `limits.MODELS`, a config.json or its folder, a bundled model, or a config.

    Raises ConfigError for a name that is none of them.
    """
    if isinstance(model, Mapping):
        return read_spec(model)
    if (model := str(model)) in MODELS:
        return read_spec(MODELS[model])
    from ridgeline.weights.folder import BUNDLED_MODELS
    from ridgeline.weights.jsonfile import read_json_object

    bundled = {config.parent.name: config for config in BUNDLED_MODELS.glob("*/config.json")}
    path = bundled.get(model, Path(model).expanduser())
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join([*MODELS, *sorted(bundled)])
        raise ConfigError(f"{model[:80]!r} is no config.json, no folder with one, and none of {known}")
    return read_spec(read_json_object(path))
