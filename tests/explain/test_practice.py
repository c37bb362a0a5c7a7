"""Practice questions: one for each explorer, its right answer worked out apart from the code."""

import pytest

from ridgeline.cli import main
from ridgeline.explain import explorers
from ridgeline.explain.practice import questions

RIGHT = {
    "timeline": 0.12425,
    "roofline": 62.6567 / 295.224,
    "kv": 687.19e9,
    "growth": 131_072,
    "cache": 1_081_216,
    "batching": 3993.5,
    "scheduling": 0.55,
    "dtypes": 1000 / 254,
    "speculation": 4.0951,
    "variants": 4096,
    "fit": 32,
    "pruning": 1.870,
    "paging": 1 - 400 / 2048,
    "prefix": 11,
    "moe": 8 * (1 - 0.75**8),
    "pipeline": 4 / 7,
    "stack": 3.35985,
}


def test_every_explorer_asks_one():
    assert {question.explorer for question in questions()} == set(RIGHT) == set(explorers.names())


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.explorer)
def test_one_answer_is_right_and_no_slip_leads_there(question):
    (right,) = [answer for answer in question.answers if answer.is_right]
    assert right.figure.value == pytest.approx(RIGHT[question.explorer], rel=3e-4)
    texts = [answer.figure.text for answer in question.answers]
    assert len(set(texts)) == len(texts) == 3
    assert question.ask.endswith("?")


def test_the_command_asks_and_answers(capsys):
    for arguments, said in (([], "  687.2 GB\n"), (["--answers"], "  ✓ 687.2 GB")):
        with pytest.raises(SystemExit) as ended:
            main(["explain", "practice", "kv", *arguments])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert said in out
        assert out.count("\n") == 4
    with pytest.raises(SystemExit) as ended:
        main(["explain", "practice", "nothing"])
    assert ended.value.code == 2
    assert "there is no explorer 'nothing'" in capsys.readouterr().err
