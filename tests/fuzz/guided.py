"""Run one fuzzer under atheris, in this process, which ends with it: python -m tests.fuzz.guided PARSER -OPTION=…"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path

import atheris
from tests.fuzz.harness import WORDS, Checked
from tests.fuzz.parsers import PARSERS, opened

FOLLOWED = ["ridgeline", "httptools", "python_multipart", "uvicorn.protocols"]


def main() -> None:
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=FOLLOWED):
        import_module(f"tests.fuzz.{PARSERS[name]}")
    with tempfile.TemporaryDirectory() as folder:
        corpus, scratch, words = (Path(folder) / part for part in ("corpus", "scratch", "words"))
        corpus.mkdir()
        scratch.mkdir()
        checked = Checked(opened(name, scratch))
        for number, seed in enumerate(checked.target.seeds):
            (corpus / f"seed{number}").write_bytes(seed)
        written = ("".join(f"\\x{byte:02x}" for byte in word) for word in (*checked.target.words, *WORDS) if word)
        words.write_text("".join(f'"{word}"\n' for word in written))
        most = max(4096, *(2 * len(seed) for seed in checked.target.seeds))
        atheris.Setup([sys.argv[0], *options, f"-dict={words}", f"-max_len={most}", str(corpus)], checked)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
