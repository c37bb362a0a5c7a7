"""Tensor and pipeline parallelism: how full a pipeline is, and what the parts of a layer have to send."""

from ridgeline.explain.exploration import Figure, Found, Grid, Series

SHOWN = 48  # columns


def explore(stages: int = 4, micro_batches: int = 4, layers: int = 80, hidden: int = 8192, tokens: int = 1) -> Found:
    """Count bubbles, hops and all-reduces."""

    def full(micro_batches: int) -> float:
        return micro_batches / (micro_batches + stages - 1)

    row = 2 * hidden * tokens
    figures = (
        Figure("full", full(micro_batches), "share", "M ÷ (M + s - 1)", "counted"),
        Figure("hops", stages - 1, "messages", f"of {row:,} B between stages", "counted"),
        Figure("all_reduces", 2 * layers, "messages", "two a layer with tensor parallelism", "counted"),
        Figure("all_reduce_bytes", row, "B", f"{tokens} · {hidden} · 2 bytes", "counted"),
        Figure("link_time", None, "s", "latency and bandwidth of the link are not known here", "measured"),
    )
    sentence = (
        f"A pipeline of {stages} is {full(micro_batches):.0%} full; tensor parallelism would send "
        f"{2 * layers} all-reduces of {row:,} B a step."
    )
    series = Series("fill", "batches", "share", [(1 << i, full(1 << i)) for i in range(8)])
    at = [[slot - stage for slot in range(min(micro_batches + stages - 1, SHOWN))] for stage in range(min(stages, 16))]
    inside = [[0 <= number < micro_batches for number in row] for row in at]
    rows = [
        (
            f"stage {stage}",
            [str(number) if there else "" for number, there in zip(at[stage], inside[stage])],
            "".join(str(number % 8) if there else "." for number, there in zip(at[stage], inside[stage])),
        )
        for stage in range(len(at))
    ]
    return sentence, figures, (series, Grid("the batch in each stage, one after the other; empty: a bubble", rows))
