"""Define what the native backend offers: which models it runs, in which formats and instructions, in what memory.

Imported on every start, also where the native code is missing: what needs it is imported where it is used.
"""

import math
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, cast

from ridgeline.backends import host
from ridgeline.backends.base import BackendPlan, ModelSource, StepLimits
from ridgeline.backends.native.kinds import NATIVE_KINDS, NATIVE_OPS
from ridgeline.backends.native.settings import KV_KINDS, NativeSettings, matrix_bytes, prequantized_formats, settings_of
from ridgeline.backends.probe import NativeModule, find_native
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.dtypes import DTYPES, Array
from ridgeline.core.errors import ConfigError
from ridgeline.core.files import read_ahead
from ridgeline.core.log import get_logger
from ridgeline.core.machine import cache_folder
from ridgeline.cost.account import weight_bytes
from ridgeline.cost.efficiency import OpTiming
from ridgeline.program.op import KvState, LatentState, Program, RecurrentState, State
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.quant import chosen_format, decoded_matrices, quantized_names
from ridgeline.quant.inputs import chosen_inputs, describe_inputs
from ridgeline.quant.kv import ENTRY_BYTES, check_kv_dtype
from ridgeline.weights.load import StreamedWeights, prequantized
from ridgeline.weights.lora import stacked

if TYPE_CHECKING:
    from ridgeline.backends.native.executable import NativeExecutable
    from ridgeline.backends.native.measure import MeasuredTape
    from ridgeline.backends.native.packs.store import PackStore
    from ridgeline.backends.step import Executable

LAYOUT_VERSION = 6  # of packed weights; raised when their bytes change, so that packs on disk are built again
MAX_HEAD_DIM = 576  # of the attention kernels
MIN_PACK_BYTES = 32 << 20  # of packed weights that are cached; fewer are packed again in no time
AHEAD_SHARE = 0.5  # of free memory: what files take at most that are read ahead, and packed weights beside them as much

log = get_logger("native")


@dataclass(eq=False)
class NativePlan:
    """A tape's settings and the sizes that follow. `prequantized` are matrices that stay as the file has them."""

    model: ModelSource
    config: EngineConfig
    settings: NativeSettings
    choices: Mapping[str, Choice]
    prequantized: StreamedWeights | None

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights, padding not counted."""
        program, quantize = self.model.program, self.config.quantize
        element_bytes = host.ELEMENT_BYTES[self.settings.dtype]
        latent = [LatentSizes.of_op(program, op) for op in program.ops if op.kind == "latent_attention"]
        plain = int(weight_bytes(program, element_bytes))
        plain += sum(sizes.absorbed_entries for sizes in latent) * element_bytes
        if self.prequantized is not None:
            forms = {name: self.prequantized.formats[name] for name in self.settings.prequantized}
        elif quantize.scheme is not None:
            forms = dict.fromkeys(quantized_names(program, embeddings=quantize.embeddings), chosen_format(quantize))
        else:
            return plain
        shapes = {name: program.weights[name] for name in forms}
        more = (forms[name].num_bytes(shape) - math.prod(shape) * element_bytes for name, shape in shapes.items())
        return plain + sum(more)

    @property
    def available_bytes(self) -> int:
        return host.available_bytes()

    @property
    def overlaps(self) -> bool:
        return self.settings.num_threads > 1

    def state_size(self, state: State) -> StateSize:
        if isinstance(state, RecurrentState):
            return RecurrentStateSize(state.num_bytes, state.logged_bytes)
        return KvStateSize(state.bytes_per_token(ENTRY_BYTES[self.choices["kv_dtype"].value]), state.window)

    def workspace_bytes(self, limits: StepLimits) -> int:
        return self._measured.workspace_bytes(limits)

    def pieces(self) -> Sequence[OpTiming]:
        return self._measured.pieces

    @cached_property
    def _measured(self) -> "MeasuredTape":
        from ridgeline.backends.native.measure import MeasuredTape

        program = self.model.program
        sizes = [self.state_size(state) for state in program.states]
        return MeasuredTape(program, self.settings, sizes, self.config.cache.block_size)

    def open(self, program: Program, layout: CacheLayout, beside: "Executable | None" = None) -> "Executable":
        """Build the tape over weights that an earlier start packed, or that are packed now and cached for the next."""
        from ridgeline.backends.native.executable import NativeExecutable

        host.retain_freed_memory()
        store, files = self._open_store(program), self.model.folder.weight_files()
        fits = sum(path.stat().st_size for path in files) < AHEAD_SHARE * host.available_bytes()
        if (store is None or not store.found) and self.model.tensors is None and fits:
            read_ahead(files)
        pool = beside.pool if isinstance(beside, NativeExecutable) else None
        executable = NativeExecutable(
            program, self._load, layout, self.settings, store, prequantized=self.prequantized, pool=pool
        )
        if self.config.backend.tuning == "auto":
            _check_bandwidth(self.settings, executable)
        if store is not None:
            store.commit()
        return executable

    def replace_weights(self, executable: "Executable") -> None:
        from ridgeline.backends.native.executable import NativeExecutable

        assert isinstance(executable, NativeExecutable), "a plan of this backend opened it"
        settings = replace(self.settings, variants=executable.settings.variants)
        executable.drop_weights()
        executable.load_weights(self._load, settings, prequantized=self.prequantized)

    def _load(self) -> Mapping[str, Array]:
        """Return the checkpoint's tensors, each read when it is asked for: memory holds what is packed of them."""
        model, dtype = self.model, DTYPES[self.settings.dtype]
        if model.tensors is not None:
            return model.tensors(dtype)
        weights = StreamedWeights(model.folder, model.spec, model.base, dtype)
        return ChainMap(dict(stacked(model.adapters, model.program, dtype)), cast("dict[str, Array]", weights))

    def _open_store(self, program: Program) -> "PackStore | None":
        """Return the folder of cached packed weights; None: no cache."""
        caches = self.config.backend.pack_cache and self.weight_bytes >= MIN_PACK_BYTES
        if not caches or any(op.kind == "lora" for op in program.ops):
            return None
        from ridgeline.backends.native.memory import checksums
        from ridgeline.backends.native.packs.store import PackName, PackStore

        folder = self.model.folder
        try:
            name = PackName.of(folder.path, folder.weight_files(), pack_settings(self.settings, program))
            sums = partial(checksums, num_threads=self.settings.num_threads)
            return PackStore(cache_folder() / "packs", name, self.weight_bytes, sums)
        except (OSError, ConfigError) as error:
            log.warning("packed weights are not cached between starts: %s", error)
            return None


class NativeBackend:
    """The C++ tape, where this installation has it. `native` is its module; None: found when asked."""

    name = "native"
    preference = 10
    caveat = ""
    kinds = NATIVE_KINDS

    def __init__(self, native: NativeModule | None = None) -> None:
        self._given = native

    @property
    def _native(self) -> NativeModule:
        return self._given or find_native()

    def refuses(self, model: ModelSource, config: EngineConfig) -> str | None:
        """Return that the code is missing, or what of the model its kernels do not have."""
        if self._native.module is None:
            return f"this installation has no native code: {self._native.reason}"
        if host.choose_dtype(config.model.dtype, model.folder.config)[0] == "float16":
            return "it does not compute in float16"
        if lacking := sorted({op.kind for op in model.program.ops} - NATIVE_OPS):
            return f"it has no kernel for this model's {', '.join(lacking)}"
        head_dim = max((_key_entries(state) for state in model.program.states), default=0)
        if head_dim > MAX_HEAD_DIM:
            return f"it has keys of up to {MAX_HEAD_DIM} entries, and this model's have {head_dim}"
        return None

    def plan(self, model: ModelSource, config: EngineConfig) -> BackendPlan:
        """Choose the instructions, the number of threads, and the formats of weights, inputs, keys and values.

        Raises ConfigError for an ISA level that does not run here, and for keys that the cache's type cannot hold.
        """
        from ridgeline.backends.native.tuning.choose import Chooser

        asked = config.quantize.inputs
        config, why_inputs = host.choose_inputs(config, model.quality, encodes=model.spec.head is None)
        dtype, why_dtype = host.choose_dtype(config.model.dtype, model.folder.config)
        kv_dtype = config.cache.kv_dtype if config.cache.kv_dtype != "auto" else dtype
        check_kv_dtype(kv_dtype, model.program)
        level, why_level = _choose_level(config.backend.isa, self._native.module)
        num_threads, why_threads = host.choose_threads(config)
        as_stored = config.quantize.scheme is None and model.tensors is None
        stored = prequantized(model.folder, model.spec, model.base) if as_stored else None
        forms = stored.formats if stored is not None else {}
        formats = prequantized_formats(forms, model.base, chosen_inputs(config.quantize.inputs), dtype)
        stored = stored if formats else None
        quantized = host.describe_quantize(config.quantize)
        if stored is not None:
            quantized = Choice("as stored", f"{len(formats)} matrices keep the file's numbers")
        if decoded := Counter(decoded_matrices(forms, model.base).values()):
            told = [f"{count} are dequantized to {dtype}: {why}" for why, count in decoded.items()]
            quantized = Choice(quantized.value, "; ".join((*([quantized.reason] if stored is not None else []), *told)))
        choices = {
            "isa": why_level,
            **({"deterministic": Choice("on", "as asked")} if config.backend.deterministic else {}),
            "kv_dtype": Choice(kv_dtype, "the model's dtype" if config.cache.kv_dtype == "auto" else "as asked"),
            "quantize": quantized,
            "threads": why_threads,
            "dtype": why_dtype,
        }
        settings = settings_of(config, level, num_threads, dtype, KV_KINDS[kv_dtype], formats)
        has_integers = any(form.inputs in ("int8", "int16") for form in (settings.matrices, *formats.values()))
        choices |= describe_inputs(asked, why_inputs, has_integers=has_integers)
        chooser, matrices = Chooser(level, num_threads), matrix_bytes(settings, model.program)
        variants, why = chooser.choose(config.backend.tuning, matrices, deterministic=settings.deterministic)
        return NativePlan(model, config, replace(settings, variants=variants), {**choices, "kernels": why}, stored)


BACKEND = NativeBackend()


def pack_settings(settings: NativeSettings, program: Program) -> Mapping[str, object]:
    """Return all that decides the packed bytes beside the weight files themselves."""
    return {
        "layout": LAYOUT_VERSION,
        "formats": repr((settings.dtype, settings.matrices, settings.head, settings.embeddings)),
        "prequantized": {name: repr(form) for name, form in settings.prequantized.items()},
        "ops": [(op.kind, op.weights, repr(op.attrs)) for op in program.ops],
        "weights": dict(program.weights),
    }


def _key_entries(state: State) -> int:
    """Return the entries of the keys that queries meet in the cache."""
    match state:
        case KvState():
            return state.head_dim
        case LatentState():
            return state.latent_dim + state.rope_dim
        case RecurrentState():
            return 0


def _check_bandwidth(settings: NativeSettings, executable: "NativeExecutable") -> None:
    """Forget the choice of kernels where memory is not as fast as when they were chosen: the next start measures."""
    from ridgeline.backends.native.tuning.choose import Chooser, bandwidth_changed

    chooser = Chooser(settings.level, settings.num_threads)
    found = [each.read_bytes_per_s for each in chooser.stale() if each.num_threads == settings.num_threads]
    now = executable.read_bandwidth() if found else None
    if now is not None and all(bandwidth_changed(each, now) for each in found):
        log.warning("memory reads %.1f GB/s, not %.1f as when kernels were chosen", now / 1e9, max(found) / 1e9)
        chooser.forget()


def _choose_level(asked: str | None, native: ModuleType | None) -> tuple[str, Choice]:
    assert native is not None, "it was refused"
    if asked is None:
        return native.best_level(), Choice(native.best_level(), "the widest that this machine runs")
    levels: list[str] = native.runnable_levels()
    if asked not in levels:
        raise ConfigError(f"isa {asked!r} is not one that this machine runs: {', '.join(levels)}")
    return asked, Choice(asked, "as asked")
