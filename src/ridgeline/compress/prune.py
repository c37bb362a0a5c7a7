"""Prune a model folder into an ordinary one: importance on text, candidates in a budget, the nearest one written."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ridgeline.backends.probe import ceilings, find_native
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.compress.calibrate import tokenizer_of, windows
from ridgeline.compress.pruning import Budget, Candidate, Shape, candidates, compared, importance
from ridgeline.compress.recipe import PruneRecipe
from ridgeline.core.dtypes import DTYPES, FLOAT32
from ridgeline.core.machine import usable_cores
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.steptime import StepTime, pieces_of
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.program.passes.context import for_context
from ridgeline.program.pricing import ElementBytes, Load
from ridgeline.quality.evaluation import QUALITY_FILE
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import copy_beside, new_folder, save_weights

THIS_MACHINE = "this"
CONTEXT = 1024  # tokens before the decode step that is priced, where the model sees so many
NOT_COPIED = ("config.json", "training.json", "quantize_config.json", "hf_quant_config.json", QUALITY_FILE)


def prune(
    folder: ModelFolder, recipe: PruneRecipe, texts: Texts, out: Path, report: Callable[[int, int], None]
) -> tuple[Path, list[Candidate]]:
    """Write the pruned model into a folder beside `out`; return it, and the candidates, the one written first.

    `report` is told how many candidates are compared, of how many. Nothing is written before all is computed. Raises
    ConfigError for a model that cannot be pruned, for one without a tokenizer and for a budget that nothing meets.
    """
    partial, spec = new_folder(out), read_spec(folder.config)
    Shape.of(spec)
    program = lower(spec)
    weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
    length = min(recipe.length, program.context_length)
    batches = windows(texts, tokenizer_of(folder), recipe.samples, length, recipe.seed)
    found = importance(spec, for_context(program, length), weights, batches)
    shapes = candidates(folder.config, found, budget_of(recipe, program), recipe.axes, recipe.candidates)
    best = compared(folder.config, weights, found, shapes, torch.cat(batches), report)
    kept = found.kept(best[0].shape)
    config = best[0].shape.config(folder.config, kept.layers)
    pruned = kept.pruned(spec, weights, found.squares)
    partial.mkdir(parents=True, exist_ok=True)
    copy_beside(folder.path, partial, *NOT_COPIED)
    dtype = str(config.get("dtype", config.get("torch_dtype")) or "float32")
    save_weights(partial, read_spec(config), as_arrays(pruned), DTYPES.get(dtype, FLOAT32))
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return partial, best


def budget_of(recipe: PruneRecipe, program: Program) -> Budget:
    """Return what a recipe allows a pruned model, of what there is. Raises ConfigError for an unknown datasheet."""
    if recipe.num_parameters is not None:
        return Budget(recipe.num_parameters, lambda each: each.num_parameters, f"--params {recipe.params}")
    assert recipe.latency is not None, "a recipe has one of the two"
    here = recipe.hardware == THIS_MACHINE
    device, num_threads = ceilings(find_native()) if here else datasheet(recipe.hardware), usable_cores() if here else 1
    load = Load.decode(1, min(CONTEXT, program.context_length))

    def price(each: Program) -> float:
        """Return the least seconds of a decode step, weights and keys in 16 bits."""
        pieces = pieces_of(each, ElementBytes(), "bf16")
        return StepTime(each, pieces, device, num_threads, is_limit=True).seconds(load)

    return Budget(recipe.latency * price(program), price, f"--latency {recipe.latency:g}")


def facts(folder: ModelFolder, recipe: PruneRecipe, texts: Texts, found: list[Candidate]) -> dict[str, object]:
    """Say how a folder was made, and what it was compared with."""
    shapes = [{**asdict(each.shape), "price": each.price, "kl_bits": each.kl_bits} for each in found]
    text = {"text": texts.source, "text_sha256": texts.sha256}
    return {"method": "prune", "source": folder.name, **asdict(recipe), **text, "candidates": shapes}
