"""Drafts in a simulation: the closed form at one sequence, the control among many, prices, and bad input."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from ridgeline import explain
from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.cost.speculation import tokens_per_round
from ridgeline.explain.drafting import AssumedDrafts, parse_acceptance
from ridgeline.explain.machine import simulated_machine
from ridgeline.program.pricing import Load

CARD = "h100-sxm"
ONE = "fixed:num_requests=1,input_tokens=64,output_tokens=900"
MANY = "fixed:num_requests=96,input_tokens=64,output_tokens=256"
CONSTANT = {"speculate": "ngram", "adaptive_speculation": False}
needs_native = pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="the native backend is not built")


def simulated(workload=ONE, hardware=CARD, model="llama-3-8b", **options):
    return explain.simulate(model, workload=workload, hardware=hardware, **options)


def tpot_ms(found):
    return found.results.latencies.tpot_ms.mean


@pytest.mark.parametrize(
    ("drafts", "acceptance"), [(1, (0.5,)), (4, (0.8,)), (4, (0.9, 0.6, 0.3)), (7, (1.0,)), (3, (0,))]
)
def test_one_sequence_gains_what_the_closed_form_says(drafts, acceptance):
    found = simulated(**CONSTANT, num_speculative_tokens=drafts, acceptance=acceptance)
    chances = [*acceptance, *[acceptance[-1]] * drafts][:drafts]
    time = simulated_machine(EngineConfig.of("llama-3-8b"), CARD).step_time
    round_s = time.seconds(Load(((drafts + 1, 512 + drafts),), drafts + 1))
    gained = tokens_per_round(chances)
    assert tpot_ms(found) == pytest.approx(1e3 * round_s / gained, rel=0.08)
    assert found.drafts.num_draft_tokens == pytest.approx(900 / gained * drafts, rel=0.08)
    assert found.results.output_tokens == 900
    assert f"of {found.drafts.num_draft_tokens:,} drafted tokens accepted" in found.sentence


def test_the_same_place_of_an_output_is_right_however_it_is_drafted():
    class View:
        seq_id = 7

        class request:
            prompt_ids = (1, 2)

        token_ids = (1, 2, 0)

    proposer, view = AssumedDrafts((0.5,)), View()
    first = list(proposer.propose(view, 6).token_ids)
    view.token_ids = (1, 2, 0, 0, 0)
    assert list(proposer.propose(view, 4).token_ids) == first[2:]
    proposer.forget(view)
    view.token_ids = (1, 2, 0)
    assert list(proposer.propose(view, 6).token_ids) == first


def test_the_control_drafts_where_it_pays_and_rests_where_it_does_not():
    """One sequence gains more than by four tokens always; what is rarely right costs many sequences little."""
    constant = simulated(**CONSTANT, num_speculative_tokens=4, acceptance=(0.8,))
    chosen = simulated(speculate="ngram", acceptance=(0.8,))
    assert tpot_ms(chosen) < tpot_ms(constant)
    options = {"max_num_seqs": 96, "max_num_batched_tokens": 512}
    plain = simulated(MANY, **options).results.duration_s
    wrong = simulated(MANY, **options, speculate="ngram", acceptance=(0.05,)).results.duration_s
    always = simulated(MANY, **options, **CONSTANT, num_speculative_tokens=8, acceptance=(0.05,)).results.duration_s
    assert plain <= wrong < 1.05 * plain < 1.2 * plain < always


@needs_native
def test_what_computes_a_model_costs_its_steps_and_its_memory():
    workload = "fixed:num_requests=1,input_tokens=16,output_tokens=200"
    free, model, head = (
        simulated(
            workload, "this", "python-9m", **CONSTANT | {"speculate": name}, num_speculative_tokens=3, acceptance=(1,)
        )
        for name in ("ngram", "draft:python-1m", "eagle")
    )
    assert free.num_steps == model.num_steps == head.num_steps
    assert tpot_ms(free) < tpot_ms(model) and tpot_ms(free) < tpot_ms(head)
    memory = {"kv_cache_bytes": 1 << 24}
    alone, beside = (
        simulated(workload, "this", "python-9m", **memory, speculate=name, acceptance=(0.5,))
        for name in ("ngram", "draft:python-1m")
    )
    blocks = [each.recording.setup.layout.groups[0].num_blocks for each in (alone, beside)]
    assert blocks[1] < blocks[0]


def test_recordings_of_simulated_drafts_replay(tmp_path):
    found = simulated("fixed:num_requests=5,input_tokens=64,output_tokens=90", speculate="ngram", acceptance=(0.7,))
    assert found.drafts.num_accepted_tokens > 0
    outcome = explain.replay(found.recording)
    assert not outcome.difference and outcome.num_steps == found.num_steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculate": "ngram"}, "acceptance=0.7"),
        ({"acceptance": (0.5,)}, "nothing drafts"),
        ({"speculate": "draft:python-1m", "acceptance": (0.5,)}, "on this machine alone"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        simulated(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["1.2", "-0.1", "often", "0.5,,0.2", "nan"])
def test_shares_are_checked(text):
    with pytest.raises(ConfigError, match="acceptance must be shares"):
        parse_acceptance(text)


def test_the_command_takes_shares_by_position(capsys):
    arguments = ["simulate", "llama-3-8b", "--hardware", CARD, "--workload", ONE, "--speculate", "ngram"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--acceptance", "0.9,0.5"])
    assert stopped.value.code == 0
    assert "drafted tokens accepted" in capsys.readouterr().out


def test_replacing_what_drafts_leaves_the_machine_as_it_was():
    machine = simulated_machine(EngineConfig.of("llama-3-8b"), CARD)
    config = replace(machine.setup.config, speculation=EngineConfig.of("x", speculate="ngram").speculation)
    assert machine.with_config(config).setup.strategy == "speculative"
    assert machine.setup.strategy == "autoregressive"
