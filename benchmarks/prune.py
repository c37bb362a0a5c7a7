"""Half of a model: pruned, pruned and distilled, and trained from scratch on the same tokens, and on three times them.

usage: python -m benchmarks.prune [--model python-9m] [--params 4500000] [--tokens 65536] [--axes width depth both]
                                  [--times 1 3] [--minutes 20] [--folders FOLDER] [--train-on cuda] [--out FOLDER]

For each of the axes the model is pruned as `ridgeline prune` does it and distilled as `ridgeline distill` does it. A
model of the same shape begins with random weights and sees the same windows of the same text in the same order, with
the rates of the bundled models; another one sees three times as many. What is not begun within --minutes is left out.
With --folders models stay, and those that stand there are measured as they are: trained elsewhere, on a GPU.
Quality is held-out bits per byte, in pairs of documents. Nothing here is a timing, so a busy machine does not matter.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from benchmarks.common import option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.bench.report import Report
from ridgeline.cli._measured import training_on
from ridgeline.compress.calibrate import Loaded, default_texts
from ridgeline.compress.distill import SEQUENCE_LENGTHS, distill, token_stream
from ridgeline.compress.presets import load_preset
from ridgeline.compress.prune import prune
from ridgeline.compress.recipe import DistillRecipe, PruneRecipe
from ridgeline.compress.train import Recipe, TextLoss, initial_model, train
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import BFLOAT16
from ridgeline.quality.comparison import Comparison, Estimate, compare
from ridgeline.quality.scorer import Scorer
from ridgeline.quality.texts import make_documents, read_texts
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.save import copy_beside, new_folder, publish, save_weights

WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One model beside its teacher. `below`: by how much less bits per byte it needs than another arm."""

    axes: str
    what: str
    folder: str
    num_tokens: int
    num_parameters: int
    comparison: Comparison
    below: dict[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """All arms, on one text. `settings` are the recipes as they were used."""

    model: str
    text: str
    text_sha256: str
    num_train_tokens: int
    shapes: dict[str, dict[str, int]]
    settings: dict[str, dict[str, object]]
    arms: list[Arm]


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes and measures one arm after the other in a folder, on one thread; a process of the pool has its own."""

    options: argparse.Namespace
    root: Path
    ends_utc_s: float

    def scorer(self, name: str | Path) -> Scorer:
        return Scorer(EngineConfig.of(str(name), dtype="float32", num_threads=1), WINDOW)

    def compared(self, folder: Path, base: str | Path) -> Comparison:
        """A folder beside another model, on the held-out text."""
        model, other = self.scorer(folder), self.scorer(base)
        documents = make_documents(read_texts([]), model.tokenizer(), WINDOW, self.options.eval_tokens)
        return compare(documents, model.logits, other.logits, lambda done: None)

    def pruned(self, axes: str) -> tuple[Arm, dict[str, int]]:
        out, model = self.root / axes, Loaded.open(self.options.model)
        recipe = PruneRecipe(params=self.options.params, axes=axes, samples=self.options.samples)
        if not out.exists():
            partial, shape, _ = prune(model, recipe, default_texts(), out, lambda done, total: None)
            (partial / "shape.json").write_text(json.dumps(asdict(shape)), encoding="utf-8")
            publish(partial, out)
        shape = json.loads((out / "shape.json").read_text(encoding="utf-8"))
        return self.arm(axes, "pruned", 0, out), shape

    def distilled(self, axes: str) -> Arm:
        return self.arm(axes, "pruned and distilled", self.options.tokens, self.student(axes))

    def student(self, axes: str) -> Path:
        """Distil what was pruned, where no folder has it yet."""
        out = self.root / f"{axes}-distilled-{self.options.tokens}"
        if not out.exists():
            with training_on(self.options.train_on):
                student, teacher = Loaded.open(self.root / axes), Loaded.open(self.options.model)
                texts = (default_texts(), read_texts([]))
                publish(distill(student, teacher, self.distill_recipe(), texts, out, lambda progress: None), out)
        return out

    def from_scratch(self, axes: str, times: int) -> Arm | None:
        if time.time() > self.ends_utc_s:
            print(f"{axes}, from scratch on {times} x the tokens: left out", flush=True)
            return None
        return self.arm(
            axes, f"from scratch, {times} x the tokens", times * self.options.tokens, self.newcomer(axes, times)
        )

    def newcomer(self, axes: str, times: int) -> Path:
        """Train the same shape from scratch on so many times the tokens, where no folder has it yet."""
        out = self.root / f"{axes}-scratch-{times * self.options.tokens}"
        if not out.exists():
            shape, recipe = Loaded.open(self.root / axes), self.scratch_recipe(times)
            partial = new_folder(out)
            partial.mkdir()
            copy_beside(shape.folder.path, partial)
            with training_on(self.options.train_on):
                model, text = initial_model(shape.spec, recipe.seed), token_stream(default_texts(), shape.folder)
                for _ in train(model, recipe, text, lambda model: 0.0, TextLoss(shape.spec, recipe.dtype)):
                    pass
                save_weights(partial, shape.spec, as_arrays(model.named_weights()), BFLOAT16)
            publish(partial, out)
        return out

    def below(self, arm: Arm, other: Arm) -> Arm:
        """The arm with how much fewer bits per byte it needs than another, in pairs."""
        found = self.compared(self.root / other.folder, self.root / arm.folder).bits_per_byte_above_base
        return replace(arm, below={**arm.below, other.what: found})

    def distill_recipe(self) -> DistillRecipe:
        return DistillRecipe(tokens=self.options.tokens, batch_tokens=self.options.batch_tokens, rate=self.options.rate)

    def scratch_recipe(self, times: int) -> Recipe:
        recipe = load_preset("python-9m").recipe(times * self.options.tokens)
        return replace(recipe, batch_tokens=self.options.batch_tokens, sequence_lengths=SEQUENCE_LENGTHS)

    def arm(self, axes: str, what: str, num_tokens: int, folder: Path) -> Arm:
        """Measure a folder beside the teacher."""
        found = self.compared(folder, self.options.model)
        print(f"{axes}, {what}: {found.bits_per_byte:.4f} bits per byte", flush=True)
        return Arm(
            axes=axes,
            what=what,
            folder=folder.name,
            num_tokens=num_tokens,
            num_parameters=Loaded.open(folder).program.num_parameters,
            comparison=found,
            below={},
        )


def one_thread() -> None:
    """Prepare a process of the pool."""
    torch.set_num_threads(1)


def measure(options: argparse.Namespace) -> PruneReport:
    """Run everything, in a folder that goes away unless one was given, as many arms at once as there are threads."""
    with tempfile.TemporaryDirectory() as root:
        maker = Maker(options, options.folders or Path(root), time.time() + 60 * options.minutes)
        pool = ProcessPoolExecutor(options.threads, multiprocessing.get_context("spawn"), one_thread)
        with pool:
            pruned = dict(zip(options.axes, pool.map(maker.pruned, options.axes)))
            making = [pool.submit(maker.distilled, axes) for axes in options.axes]
            orders = [(axes, times) for times in options.times for axes in reversed(options.axes)]
            trained = [pool.submit(maker.from_scratch, *order) for order in orders]
            distilled = {arm.axes: arm for arm in (each.result() for each in making)}
            scratch = [arm for arm in (each.result() for each in trained) if arm is not None]
            for arm in scratch:
                distilled[arm.axes] = pool.submit(maker.below, distilled[arm.axes], arm).result()
    folder, held_out = ModelFolder.open(options.model), read_texts([])
    recipes = {"distill": maker.distill_recipe(), "scratch": maker.scratch_recipe(1)}
    return PruneReport(
        name=f"prune-{folder.name}",
        model=folder.name,
        text=held_out.source,
        text_sha256=held_out.sha256,
        num_train_tokens=len(token_stream(default_texts(), folder)),
        shapes={axes: shape for axes, (_, shape) in pruned.items()},
        settings={name: {**asdict(recipe), "dtype": "bfloat16"} for name, recipe in recipes.items()},
        arms=[*(arm for arm, _ in pruned.values()), *distilled.values(), *scratch],
    )


def show(report: PruneReport) -> None:
    """A row per arm."""
    size = report.arms[0].comparison
    base = f"{size.base_bits_per_byte:.4f} bits per byte"
    table = Table(title=f"{report.model}: {size.num_bytes:,} bytes, {size.num_tokens:,} tokens held out, {base}")
    for column in ("axes", "model", "tokens", "parameters", "bits/byte", "above the teacher", "KL, bits", "below"):
        table.add_column(column, justify="left" if column in ("axes", "model") else "right")
    for arm in report.arms:
        above, kl = arm.comparison.bits_per_byte_above_base, arm.comparison.kl
        table.add_row(
            *(arm.axes, arm.what, f"{arm.num_tokens:,}", f"{arm.num_parameters:,}"),
            f"{arm.comparison.bits_per_byte:.4f}",
            f"{above.mean:+.4f} ± {above.standard_error:.4f}",
            f"{kl.mean:.3f} ± {kl.standard_error:.3f}",
            "\n".join(f"{each.mean:+.4f} ± {each.standard_error:.4f} {name}" for name, each in arm.below.items()),
        )
    Console(width=150).print(table)


def main() -> None:
    """Read the options, measure, show and save."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m", help="folder or bundled model: llama or qwen3")
    parser.add_argument("--params", type=int, default=4_500_000, help="of the pruned models, at most")
    parser.add_argument("--axes", nargs="+", choices=("width", "depth", "both"), default=["width", "depth", "both"])
    parser.add_argument("--tokens", type=int, default=65_536, help="to train on")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 3], help="the tokens, from scratch; none: nothing")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of a training step")
    parser.add_argument("--rate", type=float, default=3e-3, help="of distillation")
    parser.add_argument("--samples", type=int, default=32, help="windows that importance is of")
    parser.add_argument("--eval-tokens", type=int, default=None, help="of the held-out text, at most; default: all")
    parser.add_argument(
        "--folders", type=Path, default=None, help="where models stay; those that are there are measured"
    )
    parser.add_argument("--train-on", default="cpu", help="device, as torch names it")
    parser.add_argument("--minutes", type=float, default=20, help="after which no run from scratch begins")
    options = parser.parse_args()
    report = measure(options)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
