"""Typed reads of a config.json: every key is read, ignored by name, or refused.

What is left over at `finish()` is an error that names the key: a silently dropped key is a silently wrong model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from ridgeline.core.errors import ConfigError

# Keys with no bearing on the forward pass: the library's bookkeeping, token ids and dropout, training, heads of other
# tasks, what a call returns, and how weights are stored, which the weight loader reads.
BOOKKEEPING = frozenset(
    [
        *("_name_or_path", "architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class"),  # read elsewhere
        *("unk_token_id", "_model_name_or_path"),  # as transformers writes what it has read from a GGUF file
        *("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("initializer_range", "gradient_checkpointing", "pretraining_tp", "router_aux_loss_coef"),
        *("router_jitter_noise", "unsloth_version", "unsloth_fixed"),
        *("id2label", "label2id", "problem_type", "_num_labels", "task_specific_params", "finetuning_task"),
        *("use_cache", "output_attentions", "output_hidden_states", "output_past", "output_router_logits"),
        *("return_dict", "is_encoder_decoder", "chunk_size_feed_forward", "torchscript", "transformers.js_config"),
        *("_attn_implementation", "_attn_implementation_autoset", "quantization_config", "quantization"),
        *("is_matryoshka", "matryoshka_dimensions"),  # read elsewhere
        *("pard_token", "ptd_token_id", "spd_type"),  # of models that draft in parallel, read elsewhere
    ]
)

T = TypeVar("T")


class ConfigReader:
    """Read one config dictionary, remembering which keys were understood.

    Every method raises ConfigError with the key, the value and what would be valid.
    """

    def __init__(self, config: Mapping[str, object], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._seen: set[str] = set()
        self._spelled: dict[str, str] = {}

    def has(self, key: str) -> bool:
        """Tell whether the key is present and not null; it counts as understood only once read."""
        return self._config.get(key) is not None

    def spelling(self, *keys: str) -> str:
        """Return the one of several keys of the same meaning that is there; the first where none is."""
        return next((key for key in keys if self.has(key)), keys[0])

    def spell(self, **keys: str) -> None:
        """Take each key for the usual one: with `hidden_size="n_embd"`, n_embd is read as hidden_size from here on.

        A usual key that is there stays itself. Errors name the keys of the file.
        """
        self._spelled |= {usual: own for usual, own in keys.items() if not self.has(usual)}
        usual_of = {own: usual for usual, own in self._spelled.items()}
        self._config = {usual_of.get(key, key): value for key, value in self._config.items()}

    def assume(self, **values: object) -> None:
        """Take these values for keys that are absent or null."""
        self._config = {**self._config, **{key: value for key, value in values.items() if not self.has(key)}}

    def all_keys(self) -> Sequence[str]:
        """Return all keys, in the order of the file."""
        return list(self._config)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = -1e30, high: float = 1e30) -> float:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        if not low <= value <= high:
            raise self._bad(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24
    ) -> int | None:
        """Read an optional value: None where the key is null, `default` where it is absent."""
        self._seen.add(key)
        if key not in self._config:
            return default
        return self.integer(key, low=low, high=high) if self.has(key) else None

    def integer_or_auto(self, key: str, auto: int) -> int:
        """Return `auto` where the key is absent, null or "auto"."""
        self._seen.add(key)
        return auto if self._config.get(key) in (None, "auto") else self.integer(key)

    def optional_number(
        self, key: str, default: float | None = None, *, low: float = -1e30, high: float = 1e30
    ) -> float | None:
        """Read an optional value: None where the key is null, `default` where it is absent."""
        self._seen.add(key)
        if key not in self._config:
            return default
        return self.number(key, low=low, high=high) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "a string")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        value = self.text(key, default)
        if value not in choices:
            raise self._bad(key, value, "one of " + ", ".join(sorted(choices)))
        return choices[value]

    def positive_numbers(self, key: str) -> tuple[float, ...]:
        value = self._take(key, None)
        items = cast("Sequence[object]", value) if isinstance(value, list) else ()
        numbers = tuple(x for x in items if isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < 1e30)
        if not items or len(numbers) != len(items):
            raise self._bad(key, value, "a list of positive numbers")
        return tuple(float(x) for x in numbers)

    def limits(self, key: str) -> tuple[float, float]:
        """Read the minimum and the maximum value allowed, from 0 up; (0, inf) where the key is absent or null.

        No upper limit is infinity, as JSON's readers spell it or as transformers does ({"__float__": "Infinity"}).
        """
        self._seen.add(key)
        value = self._config.get(key)
        if value is None:
            return 0.0, math.inf
        items = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else []
        if items[1:] == [{"__float__": "Infinity"}]:
            items[1] = math.inf
        low, high = (x if isinstance(x, (int, float)) else -1.0 for x in items) if len(items) == 2 else (-1.0, -1.0)
        if not 0 <= low <= high:
            raise self._bad(key, value, "two numbers of at least 0, the smaller one first")
        return float(low), float(high)

    def integers(self, key: str, *, low: int = 0, high: int = 1 << 24) -> tuple[int, ...]:
        """Read a list of integers; empty where the key is absent or null."""
        value = self._take(key, [])
        items = cast("Sequence[object]", value) if isinstance(value, list) else ("no list",)
        numbers = tuple(x for x in items if isinstance(x, int) and not isinstance(x, bool) and low <= x <= high)
        if len(numbers) != len(items):
            raise self._bad(key, value, f"a list of integers from {low} to {high}")
        return numbers

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._take(key, None)
        if not isinstance(value, list) or any(not isinstance(x, str) for x in cast("Sequence[object]", value)):
            raise self._bad(key, value, "a list of strings")
        return tuple(cast("Sequence[str]", value))

    def section(self, key: str) -> "ConfigReader | None":
        """Read the nested dictionary under `key`, None where it is absent or null."""
        self._seen.add(key)
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return ConfigReader(cast("dict[str, object]", value), f"{self._where}: {key}")

    def within(self, key: str, read: Callable[["ConfigReader"], T], default: T) -> T:
        """Return what `read` reads of the nested dictionary under `key`, which must be all of it; `default` without."""
        section = self.section(key)
        if section is None:
            return default
        found = read(section)
        section.finish()
        return found

    def expect(self, key: str, *allowed: object) -> None:
        """Accept a key that is absent or has one of the values that this project computes."""
        self._seen.add(key)
        if key in self._config and not any(
            self._config[key] == a and type(self._config[key]) is type(a) for a in allowed
        ):
            raise ConfigError(
                f"{self._where}: {self._spelled.get(key, key)}={self._config[key]!r} is not supported; "
                f"supported: {', '.join(map(repr, allowed))}"
            )

    def ignore(self, *keys: str) -> None:
        """Mark keys as understood that have no bearing on this family's forward pass."""
        self._seen.update(keys)

    def unread(self) -> list[str]:
        """Return the keys that were neither read nor ignored."""
        return sorted(set(self._config) - self._seen - BOOKKEEPING)

    def finish(self) -> None:
        """Raise ConfigError where a key was neither read nor ignored."""
        unknown = self.unread()
        if unknown:
            values = ", ".join(f"{key}={self._config[key]!r}" for key in unknown)
            raise ConfigError(
                f"{self._where}: not understood: {values}. Running without it could give wrong results; "
                "support it in the family file, or remove the key if it has no effect."
            )

    def _take(self, key: str, default: object) -> object:
        self._seen.add(key)
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self._where}: {self._spelled.get(key, key)} is missing")
        return value

    def _bad(self, key: str, value: object, wanted: str) -> ConfigError:
        key, shown = self._spelled.get(key, key), repr(value)
        return ConfigError(f"{self._where}: {key}={shown[:120]} is invalid; it must be {wanted}")
