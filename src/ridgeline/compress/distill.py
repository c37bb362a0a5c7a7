"""Distil a student: train it to predict what its teacher does (Minitron, arXiv 2407.14679), not what the text says.

The loss is the KL of the student's tokens to the teacher's, at a temperature; with `hidden_loss` also how far what its
layers give is from what the teacher's do, behind a learned projection where widths differ, weighed to be as large.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.backends.reference.dense import DenseModel, dense_values
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.compress.calibrate import layers_of, tokenizer_of
from ridgeline.compress.recipe import DistillRecipe
from ridgeline.compress.train import Loss, Progress, Recipe, TokenStream, bits_per_byte, train
from ridgeline.core.dtypes import DTYPES, FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.quality.evaluation import Evaluation
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import copy_beside, new_folder, save_weights

QUICK_EVAL_TOKENS = 16 << 10  # while it is trained
SEQUENCE_LENGTHS = (256, 1024)  # tokens of a window, of most steps and of the last


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model that is open to be trained, or to teach: weights in float32."""

    folder: ModelFolder
    spec: DecoderSpec
    program: Program
    weights: dict[str, torch.Tensor]

    @classmethod
    def open(cls, name: str | Path) -> "Trainable":
        """Load it. Raises ConfigError for one that predicts no next token, and as a folder does."""
        folder = ModelFolder.open(name)
        spec = read_spec(folder.config)
        if spec.head is None or spec.diffusion is not None:
            kind = "is an encoder" if spec.head is None else "fills in masks"
            raise ConfigError(f"{folder.name} {kind}; a student and its teacher predict next tokens")
        program = lower(spec)
        return cls(folder, spec, program, as_tensors(load_weights(folder, spec, program, FLOAT32)))


class Distillation(Loss):
    """The loss of a student of `teacher`; with `hidden` of what layers give as well."""

    def __init__(self, student: Program, teacher: Trainable, recipe: DistillRecipe, dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = teacher.weights, dtype
        self._temperature = recipe.temperature
        own, others = (_outputs(each) if recipe.hidden_loss else [] for each in (student, teacher.program))
        theirs = [others[-(-(at + 1) * len(others) // len(own)) - 1] for at in range(len(own))]
        self._student, self._teacher = replace(student, taps=tuple(own)), replace(teacher.program, taps=tuple(theirs))
        widths = [program.shapes[taps[0]][-1] for program, taps in ((student, own), (teacher.program, theirs)) if taps]
        self.projections = torch.nn.ParameterList()
        if len(set(widths)) == 2:
            generator = torch.Generator().manual_seed(recipe.seed)
            drawn = (torch.randn(widths[1], widths[0], generator=generator) for _ in own)
            self.projections.extend(torch.nn.Parameter(w / math.sqrt(widths[0])) for w in drawn)

    def forward(self, model: DenseModel, window_BT: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return KL(teacher || student) of a token at the temperature, times its square, nats, and what hiddens add."""
        ids_BT = window_BT[:, :-1]
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            with torch.no_grad():
                theirs = dense_values(self._teacher, self._weights, ids_BT)
            own = dense_values(self._student, model.named_weights(), ids_BT)
        log_p, log_q = (
            (values[program.result].float() / self._temperature).log_softmax(-1)
            for program, values in ((self._teacher, theirs), (self._student, own))
        )
        loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * self._temperature**2
        if not self._student.taps:
            return loss
        hidden = torch.stack(
            [
                self._distance(at, own[name].float(), theirs[other].float())
                for at, (name, other) in enumerate(zip(self._student.taps, self._teacher.taps, strict=True))
            ]
        ).mean()
        return loss + hidden * (loss / hidden.clamp(min=1e-12)).detach()

    def _distance(self, at: int, x_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        """Return the mean square between what two layers give, as a share of the teacher's."""
        x_TH = x_TS @ self.projections[at].T if self.projections else x_TS
        return F.mse_loss(x_TH, y_TH) / y_TH.square().mean().clamp(min=1e-12)


def distill(
    student: Trainable,
    teacher: Trainable,
    recipe: DistillRecipe,
    texts: tuple[Texts, Texts],
    out: Path,
    report: Callable[[Progress], None],
) -> Path:
    """Write the student, trained on the first of two texts, into a folder beside `out`, and return that.

    The folder is written at every evaluation, on the second text, so that a run that was stopped leaves its latest
    weights. Raises ConfigError for a teacher with another vocabulary, and for a text without tokens.
    """
    partial = new_folder(out)
    _check_vocabulary(student, teacher)
    training, quick = (token_stream(each, student.folder) for each in texts)
    quick = quick[:QUICK_EVAL_TOKENS]
    num_bytes = len(tokenizer_of(student.folder).decode(quick.tolist(), skip_special_tokens=False).encode())
    short, long = (min(length, student.program.context_length) for length in SEQUENCE_LENGTHS)
    run = Recipe(
        num_tokens=recipe.tokens,
        batch_tokens=recipe.batch_tokens,
        sequence_lengths=(short, long),
        matrix_rate=recipe.rate,
        vector_rate=recipe.rate,
        seed=recipe.seed,
    )
    partial.mkdir(parents=True, exist_ok=True)
    copy_beside(student.folder.path, partial, "training.json", "ridgeline_quality.json")
    dtype = DTYPES.get(str(student.folder.config.get("dtype", student.folder.config.get("torch_dtype"))), FLOAT32)
    bits = lambda model: bits_per_byte(model, quick, num_bytes, run.dtype)  # noqa: E731
    loss_of = Distillation(student.program, teacher, recipe, run.dtype)
    for progress, model in train(student.spec, run, training, bits, student.weights, loss_of):
        report(progress)
        if progress.held_out_bits is not None:
            save_weights(partial, student.spec, as_arrays(model.named_weights()), dtype)
    return partial


def write_card(folder: Path, found: Evaluation, facts: Mapping[str, object]) -> None:
    """Write README.md: what the student learned from and how, and what it reached; numbers are in the quality file."""
    told, kl = found.comparison, found.comparison.kl
    rows = {
        "student": facts["source"],
        "teacher": facts["teacher"],
        "training text": facts["text"],
        "tokens seen": f"{facts['tokens']:,}",
        "held out": f"{told.num_tokens:,} tokens, {found.text}",
        "**bits per byte, held out**": f"**{told.bits_per_byte:.4f}** (teacher {told.base_bits_per_byte:.4f})",
        "KL to the teacher, bits per token": f"{kl.mean:.4f} ± {kl.standard_error:.4f}",
        "same first choice": f"{told.top1_agreement.mean:.2%}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    text = f"# {folder.name.removesuffix('.partial')}\n\nMade by `ridgeline distill`.\n\n| | |\n|---|---|\n{table}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def token_stream(texts: Texts, folder: ModelFolder) -> TokenStream:
    """Return texts one after the other in a model's tokens. Raises ConfigError where there are fewer than two."""
    tokenizer = tokenizer_of(folder)
    ids = [token_id for text in texts.by_name.values() for token_id in tokenizer.encode(text)]
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, so nothing can be learned from it; give a longer one")
    return np.array(ids, dtype=np.int32)


def _outputs(program: Program) -> list[str]:
    """Return what each layer gives."""
    return [program.ops[ops[-1]].outputs[0] for ops in layers_of(program)]


def _check_vocabulary(student: Trainable, teacher: Trainable) -> None:
    """Raise ConfigError where a token of one is not the same text for the other."""
    size, other = student.spec.vocab_size, teacher.spec.vocab_size
    own, theirs = tokenizer_of(student.folder), tokenizer_of(teacher.folder)
    if size != other or any(own.token(token_id) != theirs.token(token_id) for token_id in range(size)):
        raise ConfigError(
            f"{teacher.folder.name} has another vocabulary than {student.folder.name} ({other} and {size} tokens): "
            "a student learns its teacher's probabilities of the same tokens"
        )
