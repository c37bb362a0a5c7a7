"""Each processor by itself, and the contract that holds for all files of the folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from sampling_oracle import edited, make_row, softmax

import ridgeline.decoding
import ridgeline.decoding.processors as folder
from ridgeline.decoding.processors import FIRST_NARROWED, load_processors

PROCESSORS = {type(processor).__name__: processor for processor in load_processors()}
V = 40
IDLE = make_row(temperature=1.0)
EVERYTHING = make_row(
    temperature=0.5,
    top_k=5,
    top_p=0.5,
    min_p=0.2,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={3: 2.0},
    allowed_token_ids=range(1, 30),
    bad_word_ids=((4,), (5, 5, 6), (2, 5, 8), (9, 9)),
    min_tokens=10,
    prompt_ids=(1, 2, 2),
    output_ids=(2, 5, 5),
    stop_ids=(0,),
    banned_ids=(7,),
    allowed=np.array([0b11110111], dtype=np.uint64),
)
INF = float("inf")


def apply(name, logits, *rows):
    """The processed logits, the same from numpy and from torch."""
    x_RV = np.asarray(logits, dtype=np.float32).reshape(len(rows), -1)
    of_torch_RV = PROCESSORS[name].apply(torch.from_numpy(x_RV.copy()), rows)
    assert isinstance(of_torch_RV, torch.Tensor)
    found_RV = PROCESSORS[name].apply(x_RV.copy(), rows)
    assert isinstance(found_RV, np.ndarray) and found_RV.dtype == np.float32
    np.testing.assert_array_equal(found_RV, of_torch_RV.numpy())
    return found_RV


def random_logits(num_rows, num_columns, seed):
    return np.random.default_rng(seed).normal(0, 3, (num_rows, num_columns)).astype(np.float32)


def remaining(name, logits, **params):
    """Columns left by a truncation."""
    return np.flatnonzero(np.isfinite(apply(name, logits, make_row(**params))[0])).tolist()


def test_every_file_is_a_processor_with_its_own_place():
    files = {path.stem for path in Path(folder.__file__).parent.glob("*.py")} - {"__init__"}
    assert len(PROCESSORS) == len(files)
    orders = [processor.order for processor in PROCESSORS.values()]
    assert orders == sorted(set(orders))
    documented = [line.split()[1] for line in ridgeline.decoding.__doc__.splitlines() if line.strip()[:2].isdigit()]
    assert documented == [type(p).__module__.rsplit(".", 1)[1] for p in load_processors()]


@pytest.mark.parametrize("name", PROCESSORS)
def test_only_rows_that_use_it_change(name):
    processor = PROCESSORS[name]
    assert not processor.uses(IDLE)
    assert processor.uses(EVERYTHING)
    before_RV = random_logits(3, V, seed=0)
    after_RV = apply(name, before_RV, IDLE, EVERYTHING, IDLE)
    assert np.array_equal(after_RV[[0, 2]], before_RV[[0, 2]])
    assert not np.array_equal(after_RV[1], before_RV[1])
    if processor.order >= FIRST_NARROWED:
        assert int(after_RV[1].argmax()) == int(before_RV[1].argmax())


def test_edits_in_order_equal_the_oracle():
    x_RV = random_logits(1, V, seed=2)
    logits_RV = x_RV
    for name, processor in PROCESSORS.items():
        if processor.order < FIRST_NARROWED:
            logits_RV = apply(name, logits_RV, EVERYTHING)
    np.testing.assert_allclose(logits_RV[0], edited(x_RV[0], EVERYTHING), rtol=1e-6)


def test_repetition_pulls_both_signs_down_once_per_token():
    row = make_row(repetition_penalty=2.0, prompt_ids=(0, 0, 1), output_ids=(1, 1, 2))
    assert apply("Repetition", [4.0, -4.0, 0.0, 4.0], row).tolist() == [[2.0, -8.0, 0.0, 4.0]]


def test_presence_and_frequency_ignore_the_prompt():
    row = make_row(presence_penalty=1.0, frequency_penalty=0.5, prompt_ids=(3, 3), output_ids=(0, 0, 0, 1))
    assert apply("PresenceFrequency", [4.0, 4.0, 4.0, 4.0], row).tolist() == [[1.5, 2.5, 4.0, 4.0]]


@pytest.mark.parametrize(("num_output", "suppressed"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_suppresses_stop_ids_until_reached(num_output, suppressed):
    row = make_row(min_tokens=3, num_output=num_output, stop_ids=(1,), stop_token_ids=(2,))
    assert PROCESSORS["MinTokens"].uses(row) is suppressed
    if suppressed:
        assert apply("MinTokens", [0.0, 9.0, 9.0, 1.0], row).tolist() == [[0.0, -INF, -INF, 1.0]]


@pytest.mark.parametrize("name", ["LogitBias", "BannedIds", "MinTokens", "Repetition", "PresenceFrequency"])
def test_ids_outside_the_vocabulary_touch_nothing(name):
    row = make_row(
        logit_bias={V: 9.0, 2**31 - 1: -9.0},
        min_tokens=5,
        num_output=0,
        stop_ids=(V, -1),
        banned_ids=(V, -2),
        stop_token_ids=(10**6,),
        prompt_ids=(-1, V),
        output_ids=(V, -V),
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    x_V = np.arange(V, dtype=np.float32)
    assert np.array_equal(apply(name, x_V, row)[0], x_V)


def test_temperature_divides():
    rows = make_row(temperature=2.0), make_row(temperature=1.0), make_row(temperature=0.0)
    assert apply("Temperature", [[4.0, -2.0]] * 3, *rows).tolist() == [[2.0, -1.0], [4.0, -2.0], [4.0, -2.0]]


@pytest.mark.parametrize(
    ("top_k", "left"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4]), (10**9, [0, 1, 2, 3, 4])]
)
def test_top_k_ties_go_to_the_lower_id(top_k, left):
    assert remaining("TopK", [0.0, 5.0, 0.0, 5.0, 5.0], top_k=top_k) == left


def test_top_k_of_rows_that_differ():
    x_RV = apply("TopK", [[1.0, 2.0, 3.0, 4.0]] * 3, make_row(top_k=1), make_row(top_k=3), make_row(top_k=-1))
    assert np.isfinite(x_RV).sum(1).tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("min_p", "left"),
    [(1.0, [0, 1]), (0.51, [0, 1]), (0.49, [0, 1, 2]), (0.26, [0, 1, 2]), (0.24, [0, 1, 2, 3]), (1e-9, [0, 1, 2, 3])],
)
def test_min_p_is_relative_to_the_largest(min_p, left):
    assert remaining("MinP", np.log([4.0, 4.0, 2.0, 1.0]), min_p=min_p) == left


@pytest.mark.parametrize(
    ("top_p", "left"),
    [(1e-12, [2]), (0.5, [2]), (0.501, [0, 2]), (0.62, [0, 2]), (0.63, [0, 2, 3]), (0.99, [0, 1, 2, 3, 4, 5, 6])],
)
def test_top_p_keeps_the_fewest_and_lower_ids_first(top_p, left):
    assert remaining("TopP", np.log([2.0, 1.0, 8.0, 2.0, 1.0, 1.0, 1.0]), top_p=top_p) == left  # shares of 16


@pytest.mark.parametrize("exact", [0.25, 0.5, 0.75])
def test_top_p_stops_where_the_mass_is_exactly_reached(exact):
    assert remaining("TopP", np.zeros(8), top_p=exact) == list(range(round(8 * exact)))
    assert remaining("TopP", np.zeros(8), top_p=np.nextafter(exact, 1).item()) == list(range(round(8 * exact) + 1))


@pytest.mark.parametrize(("top_p", "count"), [(1e-9, 1), (0.25, 1250), (0.5, 2500), (0.9999, 5000), (0.01, 51)])
def test_top_p_of_a_flat_distribution_needs_the_whole_row(top_p, count):
    left = remaining("TopP", np.zeros(5000), top_p=top_p)
    assert left == list(range(len(left)))
    assert abs(len(left) - count) <= 1


def test_top_p_of_rows_that_need_different_effort():
    x_RV = random_logits(4, 5000, seed=3) / 3 * np.float32([[20.0], [3.0], [1.0], [0.0]])
    rows = [make_row(top_p=0.9)] * 4
    together = apply("TopP", x_RV, *rows)
    left_RV = np.isfinite(together)
    for i in range(4):
        assert np.array_equal(together[i : i + 1], apply("TopP", x_RV[i : i + 1], rows[0]))
        p_V, left_V = softmax(x_RV[i].astype(np.float64)), left_RV[i]
        assert p_V[left_V].sum() >= 0.9 - 1e-6
        assert p_V[left_V].sum() - p_V[left_V].min() < 0.9 + 1e-6
        assert p_V[left_V].min() >= p_V[~left_V].max()
    assert left_RV.sum(1).tolist() == sorted(left_RV.sum(1).tolist())


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("num_columns", [V, 20011])
def test_arrays_of_every_kind_give_the_same(name, num_columns):
    """`apply` compares numpy with torch: over a vocabulary, in a batch of rows of which some do not use it."""
    rng = np.random.default_rng(6)
    rows = [
        make_row(
            temperature=float(rng.choice([0.5, 1.0, 1.7])),
            top_k=int(rng.choice([-1, 1, 7, 30])),
            top_p=float(rng.choice([0.1, 0.5, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.05, 0.3])),
            repetition_penalty=float(rng.choice([0.9, 1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            frequency_penalty=float(rng.choice([-0.2, 0.0])),
            logit_bias={int(i): 2.5 for i in rng.integers(0, V, i % 4)},
            allowed_token_ids=range(1, 30) if i % 2 else (),
            bad_word_ids=((4,), (5, 6)) if i % 3 else (),
            min_tokens=3,
            num_output=i,
            banned_ids=(8, i) if i % 3 else (),
            allowed=np.full(5, 0xF0F0_F0F0_F0F0_F0F0 >> i, dtype=np.uint64) if i % 4 else None,
            prompt_ids=rng.integers(0, V, 10).tolist(),
            output_ids=rng.integers(0, V, i).tolist(),
            stop_ids=(5, 6),
        )
        for i in range(40)
    ]
    x_RV = random_logits(len(rows), num_columns, seed=7)
    x_RV[::2] = x_RV[::2].astype(bfloat16)  # many ties
    assert not np.array_equal(apply(name, x_RV, *rows), x_RV)
