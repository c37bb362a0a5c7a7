"""tools/check_words.py finds private words in text and in names, and exceptions that are not needed."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_words.py"
WORDS = """
[scope]
folders = ["README.md", "src", "native", "scripts"]
left_out = ["src/old/"]

[[word]]
pattern = "token tables?"
use = "embedding"

[[word]]
pattern = 'mutual'
use = "bidirectional_block"
names = true

[[word]]
pattern = '\\bMOST_'
use = "MAX_"
case = true
"""


@pytest.fixture
def check(tmp_path):
    """Runs the tool over `files`, with `more` behind the list of words; gives exit status and output."""

    def run(files: dict[str, str], more: str = "") -> tuple[int, str]:
        for name, text in {"README.md": "", "tools/words.toml": WORDS + more, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode, done.stdout

    return run


def exception(pattern: str, path: str, reason: str = "the key of result files") -> str:
    return f'[[word]]\npattern = "{pattern}"\nuse = "x"\nexcept = {{ "{path}" = "{reason}" }}\n'


def test_other_words_pass(check):
    assert check({"src/a.py": "x = 1  # the embedding\n", "README.md": "an embedding\n"}) == (0, "")


@pytest.mark.parametrize("name", ["README.md", "src/p/a.py", "native/kernels/a.h", "native/a.cpp", "scripts/run"])
def test_a_private_word_fails_wherever_it_is(check, name):
    line = "# Token tables\n" if not name.startswith("native") else "// Token tables\n"
    assert check({name: "\n" + line}) == (1, f"{name}:2: 'Token tables': say embedding\n")


def test_what_is_left_out_may_say_anything(check):
    assert check({"src/old/a.py": "# token table\n"}) == (0, "")


def test_a_private_name_fails_and_the_same_word_in_prose_passes(check):
    assert check({"src/a.py": '"""Two mutual friends."""\n# mutual\nx = "mutual"\n'}) == (0, "")
    assert check({"src/a.py": "def f(num_mutual): ...\n"}) == (1, "src/a.py:1: 'mutual': say bidirectional_block\n")
    assert check({"src/a.py": "", "native/a.h": '// mutual\nauto a = "mutual";\n'}) == (0, "")
    assert check({"src/a.py": "", "native/a.h": "/* two\nlines */ int mutual;\n"})[1].startswith("native/a.h:2: ")


def test_case_counts_where_the_list_says_so(check):
    assert check({"src/a.py": "most_ = 1\n"}) == (0, "")
    assert check({"src/a.py": "MOST_BYTES = 1\n"})[0] == 1


def test_an_exception_is_obeyed_and_only_as_long_as_it_is_needed(check):
    words = exception("read stream", "src/a.py")
    assert check({"src/a.py": "# read stream\n"}, words) == (0, "")
    status, output = check({"src/a.py": "# bandwidth\n"}, words)
    assert status == 1 and "no longer needed" in output


def test_an_exception_needs_a_reason(check):
    status, output = check({"src/a.py": "# read stream\n"}, exception("read stream", "src/a.py", reason=""))
    assert status == 1 and "has no reason" in output
