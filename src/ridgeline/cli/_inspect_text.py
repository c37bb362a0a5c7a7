"""Print an Inspection as tables."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import cast

from rich.console import Console
from rich.table import Table

from ridgeline.backends.select import computes
from ridgeline.cli._inspection import Inspection
from ridgeline.cli._tables import new_table, plain_console
from ridgeline.core.words import counted
from ridgeline.cost import account as cost
from ridgeline.program.op import Shape
from ridgeline.program.pricing import OpCost
from ridgeline.spec.spec import AnyLayer

MAX_LISTED_NUMBERS = 4
LAYER = re.compile(r"layers\.(\d+)\.")


def print_inspection(inspection: Inspection) -> None:
    """Print to standard output; no colour and no lines where that is not a terminal."""
    console = plain_console()
    spec = inspection.spec
    sizes = f"{counted(len(spec.layers), 'layer')} · hidden {spec.hidden_size:,} · vocabulary {spec.vocab_size:,}"
    console.print(f"{spec.model_type} · {sizes} · context {counted(spec.max_positions, 'token')}")
    if quality := inspection.quality:
        console.print(f"measured quality: {quality.value} {quality.reason}")
    tables = (_parameters, _stored) if inspection.stored else (_parameters,)
    for table in (*tables, _layers, _program, _groups, _steps, _kv):
        console.print()
        console.print(table(inspection, console))
    if sharing := _sharing(inspection):
        console.print(sharing)


def _parameters(inspection: Inspection, console: Console) -> Table:
    program, size = inspection.program, inspection.element
    embedding, head = cost.embedding_parameters(program), cost.head_parameters(program)
    head_spec = inspection.spec.head
    tied = head_spec is not None and head_spec.tied
    active, total = cost.active_parameters(program), program.num_parameters
    table = new_table(console, ("", "count", f"bytes in {inspection.dtype}"), title="Parameters")
    counts = {"embedding, also the head" if tied else "embedding": embedding, "head": head}
    counts |= {"layers and norms": total - embedding - head, "total": total}
    counts |= {"active for a token": active} if active != total else {}
    for name, count in counts.items():
        table.add_row(name, f"{count:,}", _bytes(count * size))
    return table


def _stored(inspection: Inspection, console: Console) -> Table:
    """Make one row per type of tensors and what becomes of them."""
    columns = ("type", "on load", "tensors", "bits/weight", "bytes", "bytes loaded")
    table = new_table(console, columns, title="Tensors of the file", left=2)
    for tensors in inspection.stored:
        bits = f"{8 * tensors.num_bytes / tensors.num_weights:.2f}"
        sizes = (str(tensors.num_tensors), bits, _bytes(tensors.num_bytes), _bytes(tensors.loaded_bytes))
        table.add_row(tensors.type, tensors.becomes, *sizes)
    return table


def _layers(inspection: Inspection, console: Console) -> Table:
    """Make one row per distinct layer, however often it stands in the model."""
    spec = inspection.spec
    table = new_table(console, ("part", "what it is"), title="Spec", left=2)
    table.add_row("embedding", _describe(spec.embedding))
    for layer, numbers in _distinct_layers(spec.layers):
        named = {field.name: getattr(layer, field.name) for field in fields(layer)}
        lines = [f"{name}: {_describe(value)}" for name, value in named.items() if value is not None]
        table.add_row(f"layer {_numbers(numbers)}", "\n".join(lines))
    for name, part in (("final_norm", spec.final_norm), ("head", spec.head)):
        if part is not None:
            table.add_row(name, _describe(part))
    return table


def _program(inspection: Inspection, console: Console) -> Table:
    """List each distinct layer's ops once, between what comes before all layers and after them."""
    steps = inspection.decode, inspection.prefill
    title = f"Program (T tokens, R logit rows), and its cost for {steps[0].name} and {steps[1].name}"
    columns = ("op", "kind", "output", "weights", "decode\nFLOPs", "\nbytes", "prefill\nFLOPs", "\nbytes")
    table = new_table(console, columns, title=title, left=4)
    rows = list(zip(inspection.program.ops, *(step.ops for step in steps)))
    numbers = [int(match[1]) if (match := LAYER.match(op.label)) else None for op, _, _ in rows]
    last = max(index for index, number in enumerate(numbers) if number is not None)

    def add(indices: Iterable[int], prefix: str = "", indent: str = "") -> None:
        for op, *costs in (rows[index] for index in indices):
            outputs = {inspection.program.shapes[name] for name in op.outputs}
            weights = [inspection.program.weights[name] for name in op.weights]
            label = indent + op.label.removeprefix(prefix)
            table.add_row(label, op.kind, _shapes(outputs), _shapes(weights), *_cells(costs))

    add(index for index in range(last) if numbers[index] is None)
    for _, members in _distinct_layers(inspection.spec.layers):
        table.add_row(f"layer {_numbers(members)}")
        own = (index for index, number in enumerate(numbers) if number == members[0])
        add(own, f"layers.{members[0]}.", "  ")
    add(range(last + 1, len(rows)))
    return table


def _groups(inspection: Inspection, console: Console) -> Table:
    """Make one row per kind of group: what it is made of, and what all groups of the kind cost together."""
    columns = ("kind", "ops", "backend", "groups", "decode\nFLOPs", "\nbytes", "prefill\nFLOPs", "\nbytes")
    table = new_table(console, columns, title="Groups of ops that run as one", left=3)
    members: dict[tuple[str, str], list[int]] = {}
    for index, group in enumerate(inspection.groups):
        kinds = Counter(op.kind for op in group.ops)
        told = ", ".join(kind if count == 1 else f"{kind} × {count}" for kind, count in kinds.items())
        members.setdefault((group.kind, told), []).append(index)
    for (kind, told), indices in members.items():
        steps = (inspection.decode, inspection.prefill)
        totals = [sum((step.groups[index] for index in indices), OpCost()) for step in steps]
        table.add_row(kind, told, computes(kind), str(len(indices)), *_cells(totals))
    return table


def _cells(costs: Iterable[OpCost]) -> Sequence[str]:
    return [cell for cost in costs for cell in (_flops(cost.flops), _bytes(cost.num_bytes))]


def _steps(inspection: Inspection, console: Console) -> Table:
    columns = ("", "FLOPs", "bytes", "weights", "KV read", "KV write", "other", "FLOP/byte")
    table = new_table(console, columns, title="Cost of a step")
    for step in (inspection.decode, inspection.prefill):
        total, num_tokens = step.total, step.load.num_tokens
        intensity = f"{total.flops / total.num_bytes:.1f}"
        parts = (total.num_bytes, total.weight_bytes, total.kv_read_bytes, total.kv_write_bytes, total.activation_bytes)
        table.add_row(step.name, _flops(total.flops), *map(_bytes, parts), intensity)
        per_token = [_bytes(part / num_tokens) for part in parts]
        table.add_row("  per token", _flops(total.flops / num_tokens), *per_token, "")
    return table


def _kv(inspection: Inspection, console: Console) -> Table:
    lengths = sorted({inspection.spec.max_positions, inspection.context})
    columns = ("group", "layers", "bytes/token", *(f"bytes at {counted(length, 'token')}" for length in lengths))
    table = new_table(console, columns, title=f"KV cache of a sequence, {inspection.kv_dtype}")
    program, size = inspection.program, inspection.kv_element
    for group in cost.kv_groups(program, size):
        name = group.kind if group.window is None else f"sliding, window {group.window:,}"
        sizes = (f"{group.num_bytes(length):,}" for length in lengths)
        table.add_row(name, str(group.num_states), f"{group.bytes_per_token:,}", *sizes)
    totals = (f"{cost.kv_bytes(program, length, size):,}" for length in lengths)
    table.add_row("total", str(len(program.states)), f"{cost.kv_bytes_per_token(program, size):,}", *totals)
    return table


def _sharing(inspection: Inspection) -> str:
    """Say what layers save that read the keys and values of others; empty where none does."""
    program, size = inspection.program, inspection.kv_element
    shared, total = cost.shared_kv(program, size), cost.kv_bytes_per_token(program, size)
    if not shared.num_layers:
        return ""
    layers = "1 layer shares" if shared.num_layers == 1 else f"{shared.num_layers} layers share"
    return f"{layers} the KV of others: {total:,} bytes/token instead of {total + shared.bytes_per_token:,}"


def _distinct_layers(layers: Sequence[AnyLayer]) -> list[tuple[AnyLayer, list[int]]]:
    numbers: dict[AnyLayer, list[int]] = {}
    for number, layer in enumerate(layers):
        numbers.setdefault(layer, []).append(number)
    return list(numbers.items())


def _numbers(numbers: Sequence[int]) -> str:
    """Format [0, 1, 2, 3] as 0-3, [0, 2, 4, 6] as 0-6 by 2, else the ranges one after the other."""
    steps = {after - before for before, after in zip(numbers, numbers[1:])}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    grouped = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in grouped]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _describe(value: object) -> str:
    """Describe a dataclass of the spec, without the optional parts that are off (None, False, 0)."""
    if is_dataclass(value):
        given = [(field, getattr(value, field.name)) for field in fields(value)]
        told = [f"{field.name}={_describe(item)}" for field, item in given if item or item != field.default]
        return f"{type(value).__name__}({', '.join(told)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        if len(items) > MAX_LISTED_NUMBERS:
            return f"<{len(items)} values>"
        return f"({', '.join(_describe(item) for item in items)})"
    return str(value)


def _shapes(shapes: Iterable[Shape]) -> str:
    return " ".join(f"[{', '.join(str(dim) for dim in shape)}]" for shape in shapes)


def _flops(count: float) -> str:
    return _scaled(count, 1000, ("", " k", " M", " G", " T", " P", " E"))


def _bytes(count: float) -> str:
    return _scaled(count, 1024, ("", " Ki", " Mi", " Gi", " Ti", " Pi", " Ei"))


def _scaled(count: float, base: int, prefixes: Sequence[str]) -> str:
    """Format three significant digits and a prefix."""
    steps = 0
    while count >= base and steps < len(prefixes) - 1:
        count /= base
        steps += 1
    digits = 0 if steps == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f}{prefixes[steps]}"
