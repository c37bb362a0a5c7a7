"""What a comparison says: every run as it was measured, and the ratios of runs that lie side by side. Pure data.

A ratio is above 1 where Ridgeline is better, for rates and for durations alike. Fields are only added within a schema
version; a changed meaning raises it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.bench.facts import MachineFacts, SoftwareFacts

SCHEMA_VERSION = 1
OWN_ENGINE = "ridgeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """A cell of the workload, see workload.py:Cell."""

    name: str
    label: str
    unit: str
    lower_is_better: bool
    requests: int
    shared_tokens: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """An engine with weights of some bits. `versions` as the engine itself reports them, empty if it never ran."""

    name: str
    engine: str
    bits: int
    weights: str
    options: dict[str, object]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system once, in fresh processes: the value of every cell that it can do, and the machine at that time.

    `read_bandwidth_gb_per_s` and `load_average` (of the last minute) are of just before it, `steal_share` of the run.
    """

    system: str
    repetition: int
    started_utc: str
    duration_s: float
    read_bandwidth_gb_per_s: float
    load_average: float
    steal_share: float
    values: dict[str, float]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ridgeline beside one peer with the same bits in one cell: a ratio for every repetition in which both ran."""

    cell: str
    bits: int
    own: str
    peer: str
    own_median: float
    peer_median: float
    ratios: list[float]
    median_ratio: float
    min_ratio: float
    max_ratio: float
    best_peer: bool  # no other peer with these bits has a better median here


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReport:
    """Everything about a comparison."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_utc: str
    command: str
    machine: MachineFacts
    software: SoftwareFacts
    model: str
    threads: int
    seed: int
    cells: list[CellFacts]
    systems: list[SystemFacts]
    runs: list[Run]
    comparisons: list[Comparison]


def compare(cells: Sequence[CellFacts], systems: Sequence[SystemFacts], runs: Sequence[Run]) -> list[Comparison]:
    """All pairs of a Ridgeline system and a peer with the same bits, cell by cell."""
    own_systems = [system for system in systems if system.engine == OWN_ENGINE]
    found: list[Comparison] = []
    for cell in cells:
        for own in own_systems:
            peers = [system.name for system in systems if system.bits == own.bits and system.engine != OWN_ENGINE]
            found += _against_peers(cell, own, peers, runs)
    return found


def _against_peers(cell: CellFacts, own: SystemFacts, peers: Sequence[str], runs: Sequence[Run]) -> list[Comparison]:
    """One Ridgeline system against those of the peers that share a repetition with it."""
    own_values = _values(cell.name, own.name, runs)
    pairs = {peer: _values(cell.name, peer, runs) for peer in peers}
    pairs = {peer: values for peer, values in pairs.items() if own_values.keys() & values.keys()}
    medians = {peer: statistics.median(values.values()) for peer, values in pairs.items()}
    best = (min if cell.lower_is_better else max)(medians.values(), default=None)
    found: list[Comparison] = []
    for peer, values in pairs.items():
        ratios = [
            values[repetition] / own_value if cell.lower_is_better else own_value / values[repetition]
            for repetition, own_value in own_values.items()
            if repetition in values
        ]
        found.append(
            Comparison(
                cell=cell.name,
                bits=own.bits,
                own=own.name,
                peer=peer,
                own_median=statistics.median(own_values.values()),
                peer_median=medians[peer],
                ratios=ratios,
                median_ratio=statistics.median(ratios),
                min_ratio=min(ratios),
                max_ratio=max(ratios),
                best_peer=medians[peer] == best,
            )
        )
    return found


def _values(cell: str, system: str, runs: Sequence[Run]) -> dict[int, float]:
    """By repetition."""
    return {run.repetition: run.values[cell] for run in runs if run.system == system and cell in run.values}
