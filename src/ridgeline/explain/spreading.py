"""Price the ways to spread a step over several devices: replicas, tensor and pipeline parallelism. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.cost.datasheets import Datasheet, datasheet
from ridgeline.explain.exploration import Figure, frame, html_table
from ridgeline.explain.pricing import ELEMENT_BYTES, price, spec_of

HEAD = ("way", "step", "tokens/s", "weights a device", "sent a device", "messages", "network")


@dataclass(frozen=True, slots=True)
class Way:
    """Holds one way: what a token waits for at least, the rate of all devices, and what each has and sends a step.

    `network_s` is part of `step_s`; None: what a link carries is not known, and counts as nothing.
    """

    name: str
    step_s: float
    tokens_per_s: float
    weight_bytes: float
    sent_bytes: float
    num_messages: int
    network_s: float | None
    fits: bool  # the weights, and what is cached, where the card's memory is known

    @property
    def cells(self) -> Sequence[str]:
        """The cells of a row below HEAD."""
        numbers = ((self.step_s, "s"), (self.weight_bytes, "B"), (self.sent_bytes, "B"), (self.network_s, "s"))
        step, weights, sent, network = (Figure("", value, unit, "", "datasheet").text for value, unit in numbers)
        name = self.name if self.fits else f"{self.name}: too large"
        return name, step, f"{self.tokens_per_s:,.0f}", weights, sent, f"{self.num_messages:,}", network


@dataclass(frozen=True, slots=True)
class Ways:
    """Holds all ways for as many devices. In a notebook it shows itself as a table."""

    sentence: str
    ways: Sequence[Way]

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data; all limits are of the datasheet."""
        return {"sentence": self.sentence, "ways": [asdict(way) for way in self.ways], "provenance": "datasheet"}

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a record for each way. Raises ConfigError without pandas."""
        return frame([asdict(way) for way in self.ways])

    def _repr_html_(self) -> str:
        return html_table(f"{self.sentence} [datasheet]", HEAD, [way.cells for way in self.ways])


def devices(
    model: str | Path | Mapping[str, object],
    *,
    card: str = "h100-sxm",
    count: int = 8,
    batch: int = 16,
    context: int = 1024,
    prompt: int = 0,
    dtype: str = "bfloat16",
    link_s: float = 0.0,
) -> Ways:
    """Return what a step of `batch` sequences in all costs at least on `count` cards, for each way to use them.

    Replicas have a part of the batch each. Tensor parallelism shares every product and adds up the rows twice a layer,
    by the cheaper of a ring and an exchange in one go. A pipeline has a part of the layers in each stage, taken as
    equal in time, and as many parts of the batch in flight. `link_s` is the latency of a message, which no datasheet
    tells. Raises ConfigError as `price` does, and for counts that cannot be.
    """
    if count not in range(2, 1025) or count > batch:
        raise ConfigError(f"count must be between 2 and the batch of {batch}, 1,024 at most, got {count}")
    if not 0 <= link_s < 1:
        raise ConfigError(f"link_s must be a latency between 0 and 1 second, got {link_s}")
    spec, sheet, size = spec_of(model), datasheet(card), ELEMENT_BYTES.get(dtype, 0)
    part = price(model, card=card, batch=-(-batch // count), context=context, prompt=prompt, dtype=dtype)
    shared = price(model, card=f"{card}:{count}", batch=batch, context=context, prompt=prompt, dtype=dtype)
    weight_bytes, row_bytes = shared.weight_bytes, size * spec.hidden_size
    num_sums = 2 * len(spec.layers)

    def way(name: str, step_s: float, rate: float, fits: bool, weights: float, sent: float, messages: int) -> Way:
        network_s = _sent_s(sheet, link_s, sent, messages) if messages else 0.0
        waits_s = step_s + (network_s or 0.0)
        return Way(name, waits_s, rate * step_s / waits_s, weights, sent, messages, network_s, fits)

    one_sum = row_bytes * shared.load.num_tokens
    others = count - 1
    ring, at_once = (2 * others / count * one_sum, 2 * others), (others * one_sum, 1)
    sums = min(ring, at_once, key=lambda each: _sent_s(sheet, link_s, *each) or each[0])
    logits = others / count * size * spec.vocab_size * shared.load.num_rows
    hop = row_bytes * part.load.num_tokens
    rate = shared.load.num_tokens / part.limit_s
    ways = [
        way(f"{count} replicas", part.limit_s, rate, part.fits, weight_bytes, 0, 0),
        way(
            f"tensor parallel {count}",
            shared.limit_s,
            shared.load.num_tokens / shared.limit_s,
            shared.fits,
            weight_bytes / count,
            num_sums * sums[0] + logits,
            num_sums * sums[1] + 1,
        ),
        way(f"pipeline of {count}", part.limit_s, rate, shared.fits, weight_bytes / count, others * hop, others),
    ]
    return Ways(f"{shared.load.num_tokens:,} tokens of {part.model} on {count} × {card}: {_said(ways)}", ways)


def _sent_s(sheet: Datasheet, link_s: float, num_bytes: float, num_messages: int) -> float | None:
    speed = sheet.link_bytes_per_s
    return None if speed is None else num_bytes / speed + num_messages * link_s


def _said(ways: Sequence[Way]) -> str:
    """Say which of the ways are best."""
    fitting = [each for each in ways if each.fits]
    if not fitting:
        return "weights and cache fit no way."
    first, fastest = min(fitting, key=lambda each: each.step_s), max(fitting, key=lambda each: each.tokens_per_s)
    other = "" if fastest is first else f" {fastest.name}"
    unknown = "; what links carry is unknown and not counted" if any(each.network_s is None for each in ways) else ""
    return (
        f"{first.name} has the shortest step, {first.step_s * 1e3:,.3f} ms,"
        f"{other or ' and'} the most tokens/s, {fastest.tokens_per_s:,.0f}{unknown}."
    )
