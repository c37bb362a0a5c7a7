"""How drafts are made and verified: the options, and the names of what drafts. Called by `core/config.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from ridgeline.core.errors import ConfigError
from ridgeline.core.options import check, option

DraftSampleMethod = Literal["match", "probabilistic"]
RejectionSampleMethod = Literal["standard", "block", "typical"]

MAX_DRAFT, MAX_PLAIN_DRAFT = 24, 8  # tokens, where the length is chosen each step and costs no memory; else
PROPOSERS = Path(__file__).parents[1] / "decoding" / "proposers"  # a file for each proposer, named as it
DRAFTERS = Path(__file__).parents[1] / "decoding" / "drafters"  # a file for each that drafts with a model, named as it
OWN_DRAFTER = "mtp"  # whose weights are in the model's own files
OWN_HEADS = {"eagle": ("eagle3", "eagle"), "medusa": ("medusa",)}  # folders within the model's, the preferred one first
NATIVE = "ridgeline._native"
NATIVE_PROPOSERS = ("suffix",)  # auto goes without them where there is no native module
DEAR_PROPOSERS = ("lookahead",)  # auto goes without them: they have the model compute what gains nothing yet
LESSER_PROPOSERS = ("ngram",)  # auto goes without them where native ones find all that they do, and sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Draft tokens that a step verifies beside the next one. The output does not change, only how soon it is there."""

    PANEL: ClassVar[str] = "Speculative decoding"

    speculate: str | None = option(
        None,
        "Draft the next tokens and verify them in one step: off, auto, or proposers separated by commas, such as ngram "
        "or draft:MODEL. Default: auto in a server, generate and chat, off elsewhere.",
        metavar="NAMES",
        aka="spec_type speculative_model draft",
    )
    speculative_config: str | Mapping[str, object] | None = option(
        None, "The same as vLLM's JSON object, in place of the other options here.", metavar="JSON"
    )
    num_speculative_tokens: int | None = option(
        None,
        "Maximum number of drafted tokens per sequence and step. Default: 24; 8 where drafts are not adaptive, and for "
        "models with recurrent layers.",
        low=1,
        high=64,
        aka="draft_max spec_draft_n_max",
    )
    adaptive_speculation: bool = option(
        True, "Draft only as many tokens as pay, none where that is best; otherwise always the maximum."
    )
    draft_sample_method: DraftSampleMethod = option(
        "probabilistic",
        "How a draft model's tokens are accepted in requests without a seed: probabilistic samples drafts apart and "
        "rejects, which accepts more; match has the same random numbers decide the output as without drafts.",
    )
    rejection_sample_method: RejectionSampleMethod = option(
        "standard",
        "How probabilistic drafts are accepted: standard one by one; block together, never fewer on average. typical "
        "accepts any draft that is likely enough, which changes what is sampled without a seed: it is lossy.",
    )
    draft_quantize: str = option(
        "auto",
        "Quantize the weights of what drafts, by a scheme of --quantize, or none; wrong drafts cost time and no token. "
        "auto takes the scheme of the model's, else int8; what is stored in few bits stays so.",
        metavar="SCHEME",
    )
    prompt_lookup_min: int = option(2, "Minimum number of tokens that ngram matches.", low=1, high=64)
    prompt_lookup_max: int = option(5, "Number of matching tokens that is as good as more.", low=1, high=64)
    suffix_decoding_max_tree_depth: int = option(24, "Matching tokens that suffix tells from fewer.", low=2, high=256)
    suffix_decoding_max_cached_requests: int = option(
        10000, "Maximum finished outputs that suffix drafts from; 0: the text itself alone.", low=0, high=2**30
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "Maximum number of tokens that suffix drafts for each that matched.", above=0.0, high=64.0
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "Minimum share of places that have gone on as a draft of suffix does.", low=0.0, high=1.0
    )

    lookahead_window: int = option(4, "Columns of guesses that lookahead computes beside the text.", low=1, high=32)
    lookahead_ngram: int = option(3, "Tokens of the n-grams that lookahead makes and drafts.", low=2, high=8)
    lookahead_guesses: int = option(4, "Maximum n-grams of lookahead for each first token.", low=1, high=32)

    def __post_init__(self) -> None:
        check(self)
        for name, model in self._asked():
            if name not in (known := [*proposer_names(), *drafter_names()]):
                raise ConfigError(f"speculate must be off, auto or one of {', '.join(known)}, got {name!r}")
            if name in drafter_names() and not model and name not in (OWN_DRAFTER, *OWN_HEADS):
                raise ConfigError(f"speculate={name} lacks its model; write {name}:MODEL, such as {name}:python-1m")
            if name in (*proposer_names(), OWN_DRAFTER) and model:
                raise ConfigError(f"speculate={name}:{model}: {name} needs no model; write {name}")
        if sum(name in drafter_names() for name in self.proposers()) > 1:
            raise ConfigError(f"speculate={self.speculate}: one model can draft beside a model; name one")
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least > most:
            raise ConfigError(f"prompt_lookup_min must be at most prompt_lookup_max ({most}), got {least}")

    def proposers(self) -> tuple[str, ...]:
        """Return the names of the proposers, the preferred one first; none where speculation is off."""
        return tuple(name for name, _ in self._asked())

    @property
    def is_auto(self) -> bool:
        """Whether what drafts is chosen, beside what is named."""
        return "auto" in (part.strip() for part in (self.speculate or "").split(","))

    @property
    def drafter(self) -> tuple[str, str] | None:
        """The name of the proposer that needs a model, and that model; None where none is asked for."""
        return next(((name, model) for name, model in self._asked() if name in drafter_names()), None)

    def max_draft_tokens(self, *, logged: bool) -> int:
        """Return how many tokens a draft may have; those of recurrent layers are `logged`, which takes memory."""
        usual = MAX_PLAIN_DRAFT if logged or not self.adaptive_speculation else MAX_DRAFT
        return self.num_speculative_tokens or usual

    def _asked(self) -> list[tuple[str, str]]:
        """Return the proposers by name, each with what stands behind its colon; auto is the best that need no model."""
        if self.speculate is None or self.speculate == "off":
            return []
        parts = [part.strip().partition(":") for part in self.speculate.split(",")]
        left_out = (*DEAR_PROPOSERS, *(LESSER_PROPOSERS if find_spec(NATIVE) else NATIVE_PROPOSERS))
        hosts = [(name, "") for name in proposer_names() if name not in left_out]
        found = [hosts if (name, model) == ("auto", "") else [(name, model)] for name, _, model in parts]
        return list(dict.fromkeys(chain.from_iterable(found)))


def proposer_names() -> list[str]:
    """Return the names of the proposers that need no model."""
    return sorted(path.stem for path in PROPOSERS.glob("[a-z]*.py"))


def drafter_names() -> list[str]:
    """Return the names of the proposers that compute a model of their own."""
    return sorted(path.stem.replace("_", "-") for path in DRAFTERS.glob("[a-z]*.py"))
