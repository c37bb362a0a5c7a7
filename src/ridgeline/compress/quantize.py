"""Quantize a model folder, layer by layer, into one that vLLM and transformers load too: of compressed-tensors, or of
bitsandbytes or HQQ where codes or zeros are their own.

    OUT.partial/   state.json, and a shard for every finished layer: a run that was killed goes on after the last one
    OUT/           appears at the end, whole

A layer is in memory, with the values of the calibration windows that its ops read; the others are on disk. What a layer
hands on is computed with the matrices as they were stored, so that a run in pieces makes the same bytes as a whole one.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ridgeline import __version__
from ridgeline.backends.reference.tensors import DTYPES as TORCH_DTYPES
from ridgeline.backends.reference.tensors import as_array, as_tensors
from ridgeline.compress.calibrate import Flow, layers_of, windows
from ridgeline.compress.grid import Grid
from ridgeline.compress.layer import Key, LayerQuantizer, MatrixReport, QuantizedLayer
from ridgeline.compress.methods import load
from ridgeline.compress.mix import Sweep, wide_matrices
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.rotate import RotatedWeights
from ridgeline.core.dtypes import DTYPES, FLOAT32, Array, to_dtype
from ridgeline.core.errors import ConfigError
from ridgeline.core.files import remove_cut_off, write_whole
from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.passes.context import for_context
from ridgeline.quality.texts import Texts
from ridgeline.quant import matrices_together, quantized_names
from ridgeline.quant.stored import StoredFormat, StoredMatrix, joined
from ridgeline.spec import families
from ridgeline.spec.families import read_spec
from ridgeline.weights.checkpoint import INDEX, WHOLE, Checkpoint, take_ranges
from ridgeline.weights.folder import QUANTIZATION, ModelFolder
from ridgeline.weights.formats import bitsandbytes, compressed_tensors, hqq, unpacked
from ridgeline.weights.load import StreamedWeights
from ridgeline.weights.packing.outliers import in_given_order
from ridgeline.weights.quality import QUALITY_FILE, quality_path
from ridgeline.weights.renames import Source, expand, followed, spelled_as_in
from ridgeline.weights.save import NOT_COPIED, copy_beside, new_folder, publish, stored_tensors, write_tensors

if TYPE_CHECKING:
    from ridgeline.weights.gguf.write import GgufWriter

INT8 = StoredFormat("uniform", 8, 0, scale="float32")
STATE = "state.json"
SWEEP = "sweep"  # what says which matrices get 8 bits, until that is known
OF_MLX = re.compile(r"\.(switch_mlp|experts)\.(gate|up|down)_proj\.")  # names that transformers does not know
REPORTS = "{}.reports.json"  # beside a shard until all are done


@dataclass(frozen=True, slots=True)
class Progress:
    """Says which of how many layers is done, and how its matrices came out."""

    layer: int
    num_layers: int
    reports: Sequence[MatrixReport]


class QuantizeJob:
    """Quantizes one model into one folder."""

    def __init__(self, folder: ModelFolder, recipe: Recipe, texts: Texts, out: Path) -> None:
        """Check everything that can be checked before work begins. Raises ConfigError and ModelLoadError."""
        self._folder, self._recipe, self._texts = folder, recipe, texts
        self.out, self.partial = out, new_folder(out)
        self._form, self._method = recipe.form(), load(recipe.method)
        written: str | None = getattr(self._method, "FORMAT", None)
        self._is_plain = written == "dense"
        is_bitsandbytes = self._form.code == "nf4" or written == "llm-int8"
        self._format = bitsandbytes if is_bitsandbytes else hqq if self._form.zero == "minima" else compressed_tensors
        own = read_spec(folder.config)
        is_untied = recipe.rotate and own.head is not None and own.head.tied
        self._config = {**folder.config, **({"tie_word_embeddings": False} if is_untied else {})}
        self._spec = read_spec(self._config) if is_untied else own
        program = lower(self._spec)
        self._program = for_context(program, min(recipe.length, program.context_length))
        self._dtype = str(folder.config.get("dtype", folder.config.get("torch_dtype")) or "float32")
        if self._dtype not in DTYPES:
            raise ConfigError(f"config.json's dtype {self._dtype!r} is not supported; it must be {', '.join(DTYPES)}")
        self._sources = _sources(folder, self._spec, self._program)
        weights, plain = (StreamedWeights(folder, own, lower(own), each) for each in (FLOAT32, DTYPES[self._dtype]))
        rotated = RotatedWeights(folder.name, self._program, weights, recipe.seed) if recipe.rotate else None
        self._weights: Mapping[str, Array] = rotated or weights
        self._plain: Mapping[str, Array] = rotated or plain  # those that stay as they are
        self.left_out = _left_out(self._program, self._sources, self._form)
        self._chosen = quantized_names(self._program, embeddings=False) - self.left_out.keys()
        if not self._chosen:
            reasons = "; ".join(dict.fromkeys(self.left_out.values())) or "it has no linear layers"
            raise ConfigError(f"{folder.name} has no matrix that can be quantized: {reasons}")
        self._layers = layers_of(self._program)
        self._names = [self._weights_of(ops) for ops in self._layers]
        self._linear = {op.weights[0] for op in self._program.ops if op.kind == "linear"}
        self.calibrates = self._method.NEEDS_STATISTICS
        self.reports: list[MatrixReport] = []
        self._wide = frozenset[str]()

    def run(self, report: Callable[[Progress], None]) -> Path:
        """Write all shards and everything beside them into the partial folder, and return it."""
        batches = self._windows() if self.calibrates or self._recipe.mixed_bits is not None else []
        self._wide = self._begin(batches)
        with torch.inference_mode():
            self._quantize(Flow(self._program, batches if self.calibrates else []), report)
        self._finish()
        return self.partial

    def _quantize(self, flow: Flow, report: Callable[[Progress], None]) -> None:
        """Write the shards that are not there yet."""
        dtype = TORCH_DTYPES[self._dtype]
        grids = {name: Grid(INT8 if name in self._wide else self._form, dtype) for name in self._chosen}
        quantizer = LayerQuantizer(self._program, self._method, grids, dtype)
        for index, ops in enumerate(self._layers):
            shard, names = self._shard(index), self._names[index]
            if not shard.exists():
                before = flow.begin_layer()
                self._write(shard, names, quantizer.quantize(ops, flow, self._weights))
                flow.values = before
            self.reports += [MatrixReport(**each) for each in json.loads(_reports_of(shard).read_text())]
            report(Progress(index + 1, len(self._layers), self.reports))
            if self.calibrates and index + 1 < len(self._layers):
                flow.begin_layer()
                flow.run(ops, self._read(shard, names))
        inside = set(chain(*self._names))
        rest = [name for name in self._program.weights if name not in inside]
        self._write(self._shard(len(self._layers)), rest, QuantizedLayer())

    def publish(self, gguf: "GgufWriter | None" = None) -> None:
        """Let the folder appear under its own name, or the file that is written of it."""
        if gguf is not None:
            gguf.write(ModelFolder.open(self.partial), self.out)
            if (quality := quality_path(self.partial)).exists():
                quality.replace(quality_path(self.out))
            shutil.rmtree(self.partial)
            return
        for path in (self.partial / STATE, *self.partial.glob(REPORTS.format("*"))):
            path.unlink()
        publish(self.partial, self.out)

    def discard(self) -> None:
        """Remove all that was made but the report on its quality, which stays in the folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.partial / QUALITY_FILE).replace(self.out / QUALITY_FILE)
        shutil.rmtree(self.partial)

    def facts(self) -> dict[str, object]:
        """Say how the folder was made, matrix by matrix."""
        return {
            "source": self._folder.name,
            **asdict(self._recipe),
            "text": self._texts.source,
            "text_sha256": self._texts.sha256,
            "left_out": self.left_out,
            "matrices": [asdict(report) for report in self.reports],
        }

    # ---- parts

    def _begin(self, batches: Sequence[torch.Tensor]) -> frozenset[str]:
        """Make the partial folder, or go on with one of the same work; return the weights that get 8 bits.

        Raises ConfigError for a folder of other work.
        """
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._folder.weight_files()]
        facts = [__version__, asdict(self._recipe), self._texts.sha256, dict(self._folder.config), files]
        digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
        path, wide = self.partial / STATE, None if self._recipe.mixed_bits is not None else list[str]()
        if path.exists():
            state = json.loads(path.read_text())
            if state["sha256"] != digest:
                raise ConfigError(f"{self.partial} has the state of another run; delete it, or give --out another name")
            wide = state["wide"]
            remove_cut_off(self.partial)
        write_whole(path, json.dumps({"sha256": digest, "wide": wide}).encode())
        if wide is None:
            grids = Grid(self._form, TORCH_DTYPES[self._dtype]), Grid(INT8, TORCH_DTYPES[self._dtype])
            bounds = self._recipe.mixed_bits or 0.0, self._recipe.budget_kl or 0.0
            sweep = Sweep(self._program, self._weights, batches, self._recipe.seed, self.partial / SWEEP)
            wide = sorted(wide_matrices(sweep, self._together(), grids, *bounds))
            write_whole(path, json.dumps({"sha256": digest, "wide": wide}).encode())
        shutil.rmtree(self.partial / SWEEP, ignore_errors=True)
        return frozenset(wide)

    def _together(self) -> list[frozenset[str]]:
        """Return the weights that are quantized, those in a set that run as one matrix or are stored in one tensor."""
        sets = [frozenset(names) for names in matrices_together(self._program)]
        sets += [frozenset(source.rename.targets) for source in self._sources.values()]
        found: list[frozenset[str]] = []
        for each in (self._chosen & names for names in sets):
            touching = [other for other in found if not other.isdisjoint(each)]
            found = [other for other in found if other.isdisjoint(each)]
            found += [each.union(*touching)] if each else []
        return found

    def _weights_of(self, ops: range) -> list[str]:
        """Return the weights of ops, and those that are stored in one tensor with one of them, used or not."""
        used = dict.fromkeys(name for number in ops for name in self._program.ops[number].weights)
        shared = [source.rename.targets for source in self._sources.values() if source.rename.targets[1:]]
        return list(used | dict.fromkeys(chain(*(each for each in shared if not used.keys().isdisjoint(each)))))

    def _windows(self) -> list[torch.Tensor]:
        recipe, length = self._recipe, self._program.context_length
        return windows(self._texts, self._folder.text_tokenizer(), recipe.samples, length, recipe.seed)

    def _shard(self, index: int) -> Path:
        return self.partial / f"model-{index + 1:05}-of-{len(self._layers) + 1:05}.safetensors"

    def _write(self, shard: Path, names: Sequence[str], made: QuantizedLayer) -> None:
        """Write the checkpoint's tensors of these weights: all of a shard, or nothing."""
        dtype, tensors = DTYPES[self._dtype], dict[str, Array]()
        for name, source in self._sources_of(names):
            keys: list[Key] = [(target, source.expert) for target in source.rename.targets]
            if keys[0] in made.matrices:
                stored = _together(source, self._program, [made.matrices[key] for key in keys])
                if not self._linear.issuperset(source.rename.targets):  # what is no linear layer has no outliers
                    stored = in_given_order(stored)
                tensors |= self._format.packed_tensors(name.removesuffix(".weight"), stored, dtype)
                continue
            plain = [as_array(made.changed[key[0]]) if key[0] in made.changed else self._plain[key[0]] for key in keys]
            parts = [to_dtype(part if key[1] is None else part[key[1]], dtype) for part, key in zip(plain, keys)]
            alone = replace(source.rename, source=name, experts=source.rename.experts and source.expert is None)
            tensors |= stored_tensors(alone, parts)
        write_whole(_reports_of(shard), json.dumps([asdict(report) for report in made.reports]).encode())
        write_tensors(shard, tensors)

    def _read(self, shard: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return weights as a shard has them, in float32."""
        checkpoint = unpacked(Checkpoint.of_file(shard), {QUANTIZATION: self._quantization_config()}, FLOAT32)
        found = {name: np.empty(self._program.weights[name], np.float32) for name in names}
        for name, source in self._sources_of(names):
            values = source.arranged(to_dtype(checkpoint.read(name, 0, WHOLE), FLOAT32))
            for target in source.rename.targets:
                into = found[target] if source.expert is None else found[target][source.expert]
                rows = source.rows(self._program, target, slice(None))
                into[...] = take_ranges(values, source.row_dim, rows)
        return as_tensors(found)

    def _sources_of(self, names: Sequence[str]) -> list[tuple[str, Source]]:
        wanted = set(names)
        return [(name, source) for name, source in self._sources.items() if wanted.issuperset(source.rename.targets)]

    def _finish(self) -> None:
        """Write the index, config.json and what the source has beside its weights."""
        shards = sorted(self.partial.glob("model-*-of-*.safetensors"))
        entries = {name: shard for shard in shards for name in Checkpoint.of_file(shard).entries}
        index = {
            "metadata": {"total_size": sum(shard.stat().st_size for shard in shards)},
            "weight_map": {name: shard.name for name, shard in sorted(entries.items())},
        }
        write_whole(self.partial / INDEX, json.dumps(index, indent=1).encode())
        config = {key: value for key, value in self._config.items() if key not in ("quantization", QUANTIZATION)}
        config |= {QUANTIZATION: quantization} if (quantization := self._quantization_config()) else {}
        write_whole(self.partial / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        copy_beside(self._folder.path, self.partial, "config.json", *NOT_COPIED)

    def _quantization_config(self) -> dict[str, object] | None:
        """Return config.json's, with the names of linear layers that stay plain or have 8 bits as the checkpoint's.

        None where all matrices stay plain.
        """
        if self._is_plain:
            return None
        linear = {op.weights[0] for op in self._program.ops if op.kind in MATRIX_OPS}
        linear |= {name for op in self._program.ops if op.kind == "experts" for name in op.weights[:3]}
        plain = [
            name.removesuffix(".weight")
            for name, source in self._sources.items()
            if not self._chosen.issuperset(source.rename.targets) and linear.intersection(source.rename.targets)
        ]
        wide = [n.removesuffix(".weight") for n, s in self._sources.items() if self._wide.issuperset(s.rename.targets)]
        others = {INT8: sorted(wide)} if wide else {}
        return self._format.quantization_config(self._form, sorted({*plain, "lm_head"}), others)


def _sources(folder: ModelFolder, spec: families.DecoderSpec, program: Program) -> Mapping[str, Source]:
    """Return which tensor is to hold what: as in the source, or as transformers spells it where that is no folder."""
    renames, names = expand(families.renames(spec), spec), set[str]()
    if folder.gguf is None:
        suffix = re.compile(r"\.(qweight|weight_packed|weight_scale.*|scales|qzeros|g_idx|weight_shape)$")
        found = (suffix.sub(".weight", name) for name in Checkpoint.open(folder.path).entries)
        names = {name for name in found if not OF_MLX.search(name)}
        renames = spelled_as_in(names, renames)
    return followed(names, renames, program)


def _left_out(program: Program, sources: Mapping[str, Source], form: StoredFormat) -> dict[str, str]:
    """Return the matrices that stay plain, and why."""
    found: dict[str, str] = {}
    candidates = quantized_names(program, embeddings=False)
    for name, source in sources.items():
        why = ""
        if not candidates.issuperset(source.rename.targets):
            why = "it is stored in one tensor with others"
        elif source.rename.transpose or source.rename.depthwise:
            why = "its family stores it turned around"
        elif source.row_dim == 1:
            why = "its family stores all experts in one tensor"
        elif not name.endswith(".weight"):
            why = f"its tensor is called {name}"
        elif form.scale == "e4m3" and len(source.rename.targets) > 1:
            why = "it is stored in one tensor with others, and NVFP4 has one overall scale for a tensor"
        elif form.group and any(program.weights[target][-1] % form.group for target in source.rename.targets):
            why = f"its inputs are no multiple of the group of {form.group}"
        if why:
            found |= {target: why for target in source.rename.targets if target in candidates}
    return found


def _together(source: Source, program: Program, members: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return the matrix of the checkpoint's tensor, of which `members` are rows."""
    whole = joined(members)
    if source.rename.groups == 1:
        return whole
    at = [rows for target in source.rename.targets for rows in source.rows(program, target, slice(None))]
    order = np.argsort(take_ranges(np.arange(len(whole.codes)), 0, at))
    points, minima = (None if each is None else each[order] for each in (whole.points, whole.minima))
    return replace(whole, packed=whole.codes[order], scales=whole.scales[order], points=points, minima=minima)


def _reports_of(shard: Path) -> Path:
    return shard.with_name(REPORTS.format(shard.stem))
