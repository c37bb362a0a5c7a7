"""A wheel holds the package as it is committed, and the native module once, or with --reference not at all.

Usage: python tools/check_wheel.py [--reference] WHEEL. Exit status 1 lists what is missing and what is too much.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
NATIVE = re.compile(r"ridgeline/_native\.[\w-]+\.so")


def complaints(wheel: Path, *, native: bool) -> list[str]:
    """Return what is wrong, one line each."""
    listed = subprocess.run(["git", "ls-files", "."], cwd=SOURCE, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    modules = [name for name in names if NATIVE.fullmatch(name)]
    found = [f"{name} is in the wheel twice" for name in sorted(set(names)) if names.count(name) > 1]
    found += [f"{name} is missing" for name in listed.stdout.split("\n") if name and name not in names]
    known = {*listed.stdout.split("\n"), *modules}
    found += [f"{name} is not of the package" for name in names if name not in known]
    if len(modules) != native:
        found.append(f"expected {int(native)} native modules, found {len(modules)}: {', '.join(modules)}")
    return found


def main() -> int:
    found = complaints(Path(sys.argv[-1]), native="--reference" not in sys.argv)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
