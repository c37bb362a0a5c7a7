"""Prune a model folder into an ordinary one: the shape within a budget that is nearest to the whole model on a text."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ridgeline.backends.probe import ceilings, find_native
from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.compress.calibrate import Loaded, windows
from ridgeline.compress.pruning import Shape, candidates, compared, importance
from ridgeline.compress.recipe import PruneRecipe
from ridgeline.core.dtypes import DTYPES, FLOAT32
from ridgeline.core.machine import usable_cores
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.steptime import StepTime, pieces_of
from ridgeline.program.op import Program
from ridgeline.program.passes.context import for_context
from ridgeline.program.pricing import ElementBytes, Load
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.weights.save import NOT_COPIED, copy_beside, new_folder, save_weights

CONTEXT = 1024  # tokens before the decode step that is priced, where the model sees so many


@torch.inference_mode()
def prune(
    model: Loaded, recipe: PruneRecipe, texts: Texts, out: Path, report: Callable[[int, int], None]
) -> tuple[Path, Shape, dict[str, object]]:
    """Write the pruned model into a folder beside `out`; return it, its shape, and how it was made.

    `report` is told how many candidates are compared, of how many. Nothing is written before all is computed. Raises
    ConfigError for a model that cannot be pruned, for one without a tokenizer and for a budget that nothing meets.
    """
    partial, source, program = new_folder(out), model.folder.config, model.program
    Shape.of(model.spec)
    length, budget = min(recipe.length, program.context_length), budget_of(recipe, program)
    batches = windows(texts, model.folder.text_tokenizer(), recipe.samples, length, recipe.seed)
    found = importance(model.spec, for_context(program, length), model.weights, batches)
    shapes = candidates(source, found, budget, recipe.axes, recipe.candidates)
    best = compared(source, model.weights, found, shapes, torch.cat(batches), report)
    shape = best[0].shape
    config = shape.config(source, found.retained(shape).layers)
    copy_beside(model.folder.path, partial, "config.json", *NOT_COPIED)
    dtype = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), FLOAT32)
    save_weights(partial, read_spec(config), as_arrays(found.pruned(shape, model.weights)), dtype)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts: dict[str, object] = {"method": "prune", "source": model.folder.name, **asdict(recipe), "text": texts.source}
    return partial, shape, facts | {"text_sha256": texts.sha256, "candidates": [asdict(each) for each in best]}


def budget_of(recipe: PruneRecipe, program: Program) -> tuple[float, Callable[[Program], float]]:
    """Return what a recipe allows at most, and what says it of a program. Raises ConfigError for no datasheet."""
    if recipe.params is not None:
        return recipe.params, lambda each: each.num_parameters
    assert recipe.latency is not None, "a recipe has one of the two"
    here, load = recipe.hardware == "this", Load.decode(1, min(CONTEXT, program.context_length))
    device, num_threads = (ceilings(find_native()), usable_cores()) if here else (datasheet(recipe.hardware), 1)

    def price(each: Program) -> float:
        """Return the least seconds of a decode step, weights and keys in 16 bits."""
        pieces = pieces_of(each, ElementBytes(), "bf16")
        return StepTime(each, pieces, device, num_threads, is_limit=True).seconds(load)

    return recipe.latency * price(program), price
