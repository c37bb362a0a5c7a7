"""Compare a model op by op with transformers, in float32 on the same token ids, and name the first ops that are wrong.

Usage: python tools/compare_ops.py MODEL [--tokens N]. MODEL is a folder or a bundled model's name. Ops have no names in
transformers, so each op's result is compared with everything that goes into and comes out of transformers' modules and
the nearest counts. An op is right if its result is found there, or if an op that was computed from it is right.
Exit status 1 if some op is not right.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from ridgeline.backends.reference.dense import DenseMemory
from ridgeline.backends.reference.interpreter import interpret_each
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.program.op import ADAPTERS, LOGIT_ROWS, POSITIONS, TOKEN_IDS, Op, Program
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

TOLERANCE = 1e-3  # of the largest value: float32 sums in another order differ by 1e-5, a wrong op by more than 1e-2
MAX_SUSPECTS = 5


@dataclass(slots=True)
class Compared:
    """Holds an op, its relative distance from the nearest tensor in transformers, and that tensor."""

    op: Op
    distance: float
    nearest: str
    is_right: bool


def compare(
    program: Program, weights: Mapping[str, torch.Tensor], module: torch.nn.Module, token_ids_T: torch.Tensor
) -> list[Compared]:
    """Return every op that has a result, in order; `module` takes [1, T] token ids."""
    captured = capture(module, token_ids_T)
    num_tokens = len(token_ids_T)
    rows_T = torch.arange(num_tokens)
    values = {TOKEN_IDS: token_ids_T, POSITIONS: rows_T, LOGIT_ROWS: rows_T, ADAPTERS: torch.zeros_like(rows_T)}
    compared: list[Compared] = []
    with torch.inference_mode():
        for op in interpret_each(program, weights, values, DenseMemory(program.states, 1, num_tokens)):
            if op.outputs:
                distance, nearest = min(distances(values[op.outputs[0]], captured), default=(float("inf"), "none"))
                compared.append(Compared(op, distance, nearest, distance < TOLERANCE))
    return confirmed(program, compared)


def capture(module: torch.nn.Module, token_ids_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the float32 tensors that enter and leave the parts of `module`, by the part's name."""
    captured: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: object, arguments: object, result: object) -> None:
            for what, tensors in (("input", arguments), ("output", result)):
                first = tensors[0] if isinstance(tensors, tuple) and tensors else tensors
                if isinstance(first, torch.Tensor) and first.is_floating_point():
                    captured.setdefault(f"{name}.{what}", first.detach().float().flatten())

        return keep

    hooks = [part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name]
    with torch.inference_mode():
        captured["logits"] = module(token_ids_T[None]).logits.float().flatten()
    for handle in hooks:
        handle.remove()
    return captured


def distances(value: torch.Tensor, captured: Mapping[str, torch.Tensor]) -> Iterator[tuple[float, str]]:
    """Yield the relative distance to every captured tensor of as many elements, with its name."""
    flat = value.float().flatten()
    for name, other in captured.items():
        if other.numel() == flat.numel():
            yield float((flat - other).abs().max() / other.abs().max().clamp(min=1e-30)), name


def confirmed(program: Program, compared: list[Compared]) -> list[Compared]:
    """Mark as right what right ops were computed from. An op without results writes state for the op behind it."""
    of_op = {item.op.label: item for item in compared}
    needed: set[str] = set()  # values that a right op read
    writes_are_read = False
    for op in reversed(program.ops):
        item = of_op.get(op.label)
        if item is not None:
            item.is_right = item.is_right or any(name in needed for name in op.outputs)
            writes_are_read = item.is_right
        if writes_are_read:
            needed.update(op.inputs)
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or a bundled model's name")
    parser.add_argument("--tokens", type=int, default=32, help="random token ids to compute")
    arguments = parser.parse_args()
    folder = ModelFolder.open(arguments.model)
    spec = read_spec(folder.config)
    program = lower(spec)
    module = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
    ids_T = torch.randint(spec.vocab_size, (arguments.tokens,), generator=torch.Generator().manual_seed(0))
    compared = compare(program, as_tensors(load_weights(folder, spec, program, FLOAT32)), module, ids_T)
    for item in compared:
        verdict = "" if item.is_right else "  <-- not found in transformers"
        print(f"{item.op.label:32s} {item.op.kind:18s} {item.distance:.1e}  {item.nearest}{verdict}")
    wrong = [item.op.label for item in compared if not item.is_right]
    first = ", ".join(wrong[:MAX_SUSPECTS])
    print(f"suspects, first to last: {first}" if wrong else f"all {len(compared)} ops agree with transformers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
