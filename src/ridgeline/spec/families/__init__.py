"""One file per architecture; the file name is the Hugging Face `model_type`.

A family module declares a function, and a second one where its tensors are not named as Llama's:

    read(config: ConfigReader) -> DecoderSpec      what the model is; every config key understood or refused
    renames(spec: DecoderSpec) -> Renames          how checkpoint tensors become program weights

and a CLASSIFIER, of any number of labels, where its head that classifies is more than `score.weight` on the last token.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import expert_renames, llama_renames
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import Classifier, DecoderSpec, Rename, Renames

CLASSIFIES = "ForSequenceClassification"


def names() -> list[str]:
    """Return all supported values of `model_type`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family(model_type: str) -> ModuleType:
    """Return the family module of `model_type`. Raises ConfigError naming what is supported."""
    if model_type.replace("-", "_") not in names():
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{model_type.replace('-', '_')}")


def renames(spec: DecoderSpec) -> Renames:
    """Return how the tensors of a checkpoint become the program's weights: as the family says, else as in Llama.

    Experts, where a model has any, are named as Qwen's.
    """
    own: Callable[[DecoderSpec], Renames] | None = getattr(family(spec.model_type), "renames", None)
    found = own(spec) if own else [*llama_renames(), *expert_renames()]
    return [*found, Rename("score.weight", ("classifier.out.weight",))] if spec.classifier is not None else found


def read_spec(config: Mapping[str, object]) -> DecoderSpec:
    """Read config.json as a DecoderSpec. Raises ConfigError for an unknown model_type, key or value."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json: model_type is missing; is this a Hugging Face model folder?")
    reader = ConfigReader(config)
    spec: DecoderSpec = family(model_type).read(reader)
    reader.finish()
    architectures, labels = config.get("architectures"), config.get("id2label")
    if any(str(name).endswith(CLASSIFIES) for name in (architectures if isinstance(architectures, list) else ())):
        known: dict[str, object] = labels if isinstance(labels, dict) and labels else {"0": "LABEL_0", "1": "LABEL_1"}
        names = tuple(str(known.get(f"{number}", f"LABEL_{number}")) for number in range(len(known)))
        own: Classifier = getattr(family(model_type), "CLASSIFIER", Classifier(names))
        spec = replace(spec, classifier=replace(own, labels=names))
    return spec
