"""Write the model card of a trained folder: README.md for people, of card.md, and training.json for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ridgeline.compress.train import Recipe
from ridgeline.engine.intake import default_params
from ridgeline.engine.llm import LLM

# Without a newline at the end: the tokenizer keeps it together with the indentation that follows.
SAMPLE_PROMPTS = (
    "def read_lines(path):",
    "class Stack:\n    def __init__(self):",
    "import os\n\ndef walk(",
    "class Point:\n    def __repr__(self):\n        return",
)
SAMPLE_TOKENS = 96
SAMPLE_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Says what a training run used and reached. `held_out_bits_per_byte` is over all held-out text, weights as stored;
    of a model that fills in masks it is the upper bound on them."""

    name: str
    num_parameters: int
    recipe: Recipe
    python_version: str
    num_train_files: int
    num_train_tokens: int
    train_bytes: int
    corpus_sha256: str
    held_out_modules: tuple[str, ...]
    held_out_bytes: int
    held_out_bits_per_byte: float
    fills_masks: bool
    starts_from: str | None
    training_s: float
    device: str


def write_card(folder: Path, facts: TrainingFacts) -> None:
    """Write README.md and training.json into the model's folder; the samples are generated here, not chosen."""
    record = asdict(facts)
    record["recipe"]["dtype"] = str(facts.recipe.dtype)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "README.md").write_text(_card(facts, _samples(folder)))


def _samples(folder: Path) -> list[tuple[str, str]]:
    """Generate one continuation of each fixed prompt, whatever it looks like, at the temperature of the folder."""
    llm = LLM(str(folder), dtype="float32")
    params = default_params(llm.engine.info.generation, seed=SAMPLE_SEED, max_tokens=SAMPLE_TOKENS)
    outputs = llm.generate(list(SAMPLE_PROMPTS), params, use_tqdm=False)
    return [(prompt, output.outputs[0].text) for prompt, output in zip(SAMPLE_PROMPTS, outputs)]


def _card(facts: TrainingFacts, samples: list[tuple[str, str]]) -> str:
    recipe = facts.recipe
    shown = "\n".join(f"```python\n{prompt}{text.rstrip()}\n```\n" for prompt, text in samples)
    how, at_most = (", filling in masks block by block", ", at most") if facts.fills_masks else ("", "")
    modules = ", ".join(f"`{module}`" for module in facts.held_out_modules)
    start = f"| starts from | the weights and the tokenizer of `{facts.starts_from}` |\n" if facts.starts_from else ""
    tokens_seen, (short, long) = recipe.num_steps * recipe.batch_tokens, recipe.sequence_lengths
    counts = {"tokens_seen": tokens_seen, "epochs": tokens_seen / facts.num_train_tokens, "short": short, "long": long}
    counts |= {"minutes": facts.training_s / 60, "sample_tokens": SAMPLE_TOKENS, "sample_seed": SAMPLE_SEED}
    texts = {"how": how, "at_most": at_most, "modules": modules, "start": start, "shown": shown}
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    dtype = str(recipe.dtype).removeprefix("torch.")
    return template.format(facts=facts, recipe=recipe, dtype=dtype, **counts, **texts)
