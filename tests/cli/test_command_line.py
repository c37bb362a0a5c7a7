"""What holds for every command: the folder is the list, help is cheap, errors are one line and an exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
import typer

from children import Child
from ridgeline import __version__, cli

HEAVY = ("torch", "transformers", "uvicorn", "huggingface_hub", "tokenizers", "numpy")


def python(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", cli.names())
def test_a_command_file_holds_what_its_name_says(name):
    module = import_module(f"ridgeline.cli.{name}")
    command = getattr(module, name)
    assert isinstance(command, typer.Typer) or (command.__module__ == module.__name__ and command.__doc__)
    assert module.__doc__.partition("\n")[0].endswith(".")


def test_help_lists_every_command(ridgeline):
    done = ridgeline("--help")
    assert done.code == 0
    assert {"chat", "generate", "inspect"} <= set(cli.names())
    for name in cli.names():
        assert name in done.out


@pytest.mark.parametrize("name", cli.names())
def test_help_of_a_command_is_its_own(ridgeline, name):
    done = ridgeline(name, "--help")
    assert done.code == 0
    assert f"ridgeline {name}" in done.out


def test_help_imports_nothing_heavy():
    code = f"""
import contextlib, io, json, sys
from ridgeline import cli
for name in [None, *cli.names()]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        cli.main([name, "--help"] if name else ["--help"])
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    assert json.loads(python(code)) == []


def test_only_the_command_asked_for_is_imported():
    code = """
import contextlib, io, json, sys
from ridgeline import cli
for arguments in (["--help"], ["--verbose", "chat", "--help"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        cli.main(arguments)
print(json.dumps([name for name in cli.names() if f"ridgeline.cli.{name}" in sys.modules]))
"""
    assert json.loads(python(code)) == ["chat"]


def test_version(ridgeline):
    done = ridgeline("--version")
    assert (done.code, done.out) == (0, f"ridgeline {__version__}\n")


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "ridgeline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ridgeline {__version__}\n"


def test_unknown_command_and_option(ridgeline):
    for arguments in (["frobnicate"], ["generate", "--frobnicate"]):
        done = ridgeline(*arguments)
        assert done.code == 2
        assert "frobnicate" in done.err
        assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "-m", "no/such/folder/"], 3, "neither an existing folder nor a Hugging Face id"),
        (["generate", "-m", "MODEL", "--temperature", "-1"], 2, "temperature must be between 0 and 100, got -1.0"),
        (["generate", "-m", "MODEL", "--max-model-len", "0"], 2, "max_model_len must be at least 1, got 0"),
        (["generate", "-m", "MODEL", "--max-tokens", "1000"], 2, "maximum context length is 96 tokens"),
        (["generate", "-m", "MODEL", "--n", "0"], 2, "n must be between 1 and"),
        (["generate", "-m", "MODEL", "--stop", ""], 2, "a stop string must have 1 to"),
        (["inspect", "no-such-model"], 2, "no folder, no config.json and no bundled model"),
        (["inspect", "x" * 5000], 2, "not a path"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(ridgeline, model_folder, arguments, code, words):
    done = ridgeline(*[model_folder if argument == "MODEL" else argument for argument in arguments])
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("ridgeline: ")
    assert done.err.count("\n") == 1
    assert words in done.err


def test_broken_weights_exit_3(ridgeline, model_folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    done = ridgeline("generate", "-m", tmp_path, "def")
    assert done.code == 3
    assert done.err.startswith("ridgeline: ") and "Traceback" not in done.err


def test_ctrl_c_exits_130_without_a_word(model_folder):
    command = [sys.executable, "-m", "ridgeline", "chat", "-m", model_folder, "--max-tokens", "2"]
    with Child(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background inherit it ignored
    ) as process:
        process.stdin.write(b"def\n")
        process.stdin.flush()
        process.stdout.readline()  # the output: soon it waits for the next line; before, a signal ends the reply alone
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_a_latin_1_terminal_does_not_break_output(model_folder):
    """A model's text may hold any character; where the terminal cannot show it, another is shown."""
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "generate", "-m", model_folder, "# π → ∞", "--max-tokens", "2"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"# ? ? ?")
