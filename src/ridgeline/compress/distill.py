"""Distil a student: train it to predict what its teacher does (Minitron, arXiv 2407.14679), not what the text says.

The loss is the KL of the student's tokens to the teacher's, at a temperature; with `hidden_loss` also how far what its
layers give is from what the teacher's do, behind a learned projection where widths differ, weighed to be as large.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.backends.reference.dense import DenseModel, dense_values
from ridgeline.backends.reference.tensors import as_arrays, autocast
from ridgeline.compress.calibrate import Loaded, layers_of
from ridgeline.compress.recipe import DistillRecipe
from ridgeline.compress.train import Loss, Progress, Recipe, TokenStream, bits_per_byte, train
from ridgeline.core.dtypes import DTYPES, FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Program
from ridgeline.quality.evaluation import Evaluation
from ridgeline.quality.texts import Texts
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.save import NOT_COPIED, copy_beside, new_folder, save_weights

QUICK_EVAL_TOKENS = 16 << 10  # while it is trained
SEQUENCE_LENGTHS = (256, 1024)  # tokens of a window, of most steps and of the last


class Distillation(Loss):
    """Compares a student with its teacher; with `hidden_loss` what layers give as well."""

    def __init__(self, student: Program, teacher: Loaded, recipe: DistillRecipe, dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype, self._temperature = teacher.weights, dtype, recipe.temperature
        own, others = (_outputs(each) if recipe.hidden_loss else () for each in (student, teacher.program))
        theirs = [others[-(-(at + 1) * len(others) // len(own)) - 1] for at in range(len(own))]
        self._student, self._teacher = replace(student, taps=tuple(own)), replace(teacher.program, taps=tuple(theirs))
        generator = torch.Generator("cpu").manual_seed(recipe.seed)
        width, wider = student.weights["embed.weight"][1], teacher.program.weights["embed.weight"][1]
        drawn = [torch.randn(wider, width, generator=generator, device="cpu") for _ in own if width != wider]
        drawn = [(matrix / math.sqrt(width)).to(torch.get_default_device()) for matrix in drawn]
        self.projections = torch.nn.ParameterList([torch.nn.Parameter(matrix) for matrix in drawn])

    def forward(self, model: DenseModel, window_BT: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return KL(teacher || student) of a token at the temperature, times its square, nats, and what hiddens add."""
        ids_BT = window_BT[:, :-1]
        with autocast(self._dtype):
            with torch.no_grad():
                theirs = dense_values(self._teacher, self._weights, ids_BT)
            own = dense_values(self._student, model.named_weights(), ids_BT)
        results = theirs[self._teacher.result], own[self._student.result]
        log_p, log_q = ((logits.float() / self._temperature).log_softmax(-1) for logits in results)
        loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * self._temperature**2
        hidden = torch.zeros(())
        for at, (name, other) in enumerate(zip(self._student.taps, self._teacher.taps, strict=True)):
            x_TH, y_TH = own[name].float(), theirs[other].float()
            x_TH = x_TH @ self.projections[at].T if self.projections else x_TH
            hidden = hidden + F.mse_loss(x_TH, y_TH) / y_TH.square().mean().clamp(min=1e-12)
        return loss + hidden * (loss / hidden.clamp(min=1e-12)).detach()


def distill(
    student: Loaded,
    teacher: Loaded,
    recipe: DistillRecipe,
    texts: tuple[Texts, Texts],
    out: Path,
    report: Callable[[Progress], None],
) -> Path:
    """Write the student, trained on the first of two texts, into a folder beside `out`, and return that.

    The folder is written at every evaluation, on the second text, so that a run that was stopped leaves its latest
    weights. Raises ConfigError for a teacher with another vocabulary, and for a text without tokens.
    """
    partial, folder, config = new_folder(out), student.folder, student.folder.config
    _check_vocabulary(student, teacher)
    training, held_out = (token_stream(each, folder) for each in texts)
    quick = held_out[:QUICK_EVAL_TOKENS]
    num_bytes = len(folder.text_tokenizer().decode(quick.tolist(), skip_special_tokens=False).encode())
    short, long = (min(length, student.program.context_length) for length in SEQUENCE_LENGTHS)
    run = Recipe(
        num_tokens=recipe.tokens,
        batch_tokens=recipe.batch_tokens,
        sequence_lengths=(short, long),
        matrix_rate=recipe.rate,
        vector_rate=recipe.rate,
        seed=recipe.seed,
    )
    bits: Callable[[DenseModel], float] = lambda model: bits_per_byte(model, quick, num_bytes, run.dtype)  # noqa: E731
    copy_beside(folder.path, partial, *NOT_COPIED)
    dtype = DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), FLOAT32)
    loss_of = Distillation(student.program, teacher, recipe, run.dtype)
    model = DenseModel(student.program, {name: weight.clone() for name, weight in student.weights.items()})
    for progress in train(model, run, training, bits, loss_of):
        report(progress)
        if progress.held_out is not None:
            save_weights(partial, student.spec, as_arrays(model.named_weights()), dtype)
    return partial


def write_card(folder: Path, found: Evaluation, facts: Mapping[str, object]) -> None:
    """Write README.md, of student.md: what the student learned from, and what it reached."""
    template = Path(__file__).with_name("student.md").read_text(encoding="utf-8")
    name, told = folder.name.removesuffix(".partial"), found.comparison
    text = template.format(name=name, facts=facts, text=found.text, told=told, kl=told.kl, top1=told.top1_agreement)
    (folder / "README.md").write_text(text, encoding="utf-8")


def token_stream(texts: Texts, folder: ModelFolder) -> TokenStream:
    """Return texts one after the other in a model's tokens. Raises ConfigError where there are fewer than two."""
    tokenizer = folder.text_tokenizer()
    ids = [token_id for text in texts.by_name.values() for token_id in tokenizer.encode(text)]
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, so nothing can be learned from it; give a longer one")
    return np.array(ids, dtype=np.int32)


def _outputs(program: Program) -> list[str]:
    """Return what each layer gives."""
    return [program.ops[ops[-1]].outputs[0] for ops in layers_of(program)]


def _check_vocabulary(student: Loaded, teacher: Loaded) -> None:
    """Raise ConfigError where a token of one is not the same text for the other."""
    size, other = student.spec.vocab_size, teacher.spec.vocab_size
    own, theirs = student.folder.text_tokenizer(), teacher.folder.text_tokenizer()
    if size != other or any(own.token(token_id) != theirs.token(token_id) for token_id in range(size)):
        raise ConfigError(
            f"{teacher.folder.name} has another vocabulary than {student.folder.name} ({other} and {size} tokens): "
            "a student learns its teacher's probabilities of the same tokens"
        )
