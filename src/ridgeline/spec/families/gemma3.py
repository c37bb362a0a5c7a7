"""Gemma 3 with images, its language model: the same as gemma3_text, one level deeper; vision tensors stay unread."""

from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.families import gemma3_text
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, Rename, Renames

VISION = ("vision_tower", "multi_modal_projector")


def read(config: ConfigReader) -> DecoderSpec:
    text = config.section("text_config")
    if text is None:
        raise ConfigError("config.json: text_config is missing; a gemma3 config describes its language model there")
    tied = config.flag("tie_word_embeddings", True)
    config.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    spec = gemma3_text.read(text)
    text.finish()
    return replace(spec, model_type="gemma3", head=Head(tied))


def renames(spec: DecoderSpec) -> Renames:
    text = gemma3_text.renames(spec)
    # As published, and as transformers 4.52 and later hold it.
    published = [replace(rename, source=f"language_model.{rename.source}") for rename in text]
    held = [replace(r, source=r.source.replace("model.", "model.language_model.", 1)) for r in text]
    unread = [Rename(f"{prefix}{part}.", ()) for prefix in ("", "model.") for part in VISION]
    return [*published, *held, *unread]
