"""tools/check_docstrings.py finds docstrings without a verb."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_docstrings.py"


@pytest.fixture
def check(tmp_path):
    """Runs the tool over a module; gives exit status and output."""

    def run(text: str) -> tuple[int, str]:
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / "a.py").write_text(text)
        done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode, done.stdout

    return run


def function(docstring: str, decorator: str = "", keyword: str = "def") -> str:
    return f'{decorator}{keyword} f():\n    """{docstring}"""\n'


@pytest.mark.parametrize(
    "docstring", ["Return the sum.", "Returns the sum.", "Pushes it.", "Tries\n\n    again.", "Compute: x."]
)
def test_verbs_pass(check, docstring):
    assert check(function(docstring)) == (0, "")


@pytest.mark.parametrize("docstring", ["Of a key.", "What it costs.", "Whether it fits.", "The sum.", "Rows of x."])
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_fragments_fail(check, docstring, keyword):
    status, output = check(function(docstring, keyword=keyword))
    assert status == 1 and output.startswith("tools/a.py:1: ") and docstring in output


def test_a_module_and_a_class_have_a_verb_in_the_first_sentence(check):
    assert check('"""Run things."""\n\n\nclass A:\n    """A thing that holds\n    x."""\n') == (0, "")
    assert check('"""A module. It holds x."""\n')[1].startswith("tools/a.py:1: ")
    assert check('class A:\n    """A thing."""\n')[1].startswith("tools/a.py:1: ")


@pytest.mark.parametrize("docstring", ["Of things that are.", "What it holds."])
def test_no_docstring_starts_with_a_fragment(check, docstring):
    for text in (f'"""{docstring}"""\n', f'class A:\n    """{docstring}"""\n', function(docstring, "@property\n")):
        assert check(text)[0] == 1
    assert check(function("The size.", "@property\n")) == (0, "")


def test_methods_and_inner_functions_are_found(check):
    assert check('class A:\n    def f(self):\n        """The sum."""\n')[1].startswith("tools/a.py:2: ")
    assert check('def f():\n    def g():\n        """The sum."""\n')[1].startswith("tools/a.py:2: ")


def test_no_docstring_is_nothing_to_complain_about(check):
    assert check("def f():\n    return 1\n") == (0, "")
