"""Writes src/ridgeline/_native.pyi, the types of the compiled module, or with --check says whether it is up to date."""

import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "src" / "ridgeline" / "_native.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "_native.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "ridgeline._native", "-o", str(path)]
        subprocess.run(command, check=True)
        # An array of any type, a function of no arguments: nanobind leaves out what pyright's strict mode wants to see.
        stub = path.read_text().replace("Annotated[NDArray, ", "Annotated[NDArray[numpy.generic], ")
        return stub.replace("Callable | None", "Callable[[], object] | None")


def main() -> int:
    stub = generate()
    if "--check" not in sys.argv:
        STUB.write_text(stub)
    elif stub != STUB.read_text():
        print(f"{STUB.name} is not what the bindings say; run `python tools/native_stub.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
