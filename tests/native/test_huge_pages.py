"""How much of the weights' memory lies in huge pages, as the system says."""

from pathlib import Path

import numpy as np

from ridgeline.backends.native.memory import ARENA_BYTES, Arena, address, allocate, huge_page_share


def smaps(path: Path, *mappings: tuple[int, int, int, int, int]) -> Path:
    """Write mappings, each (begin, end, kB that are resident, kB in anonymous huge pages, kB in those of a file)."""
    lines: list[str] = []
    for begin, end, resident, anonymous, file in mappings:
        lines += [
            f"{begin:x}-{end:x} rw-p 00000000 00:00 0    [heap]",
            f"Size:        {(end - begin) >> 10} kB",
            f"Rss:         {resident} kB",
            f"AnonHugePages:  {anonymous} kB",
            "ShmemPmdMapped:  0 kB",
            f"FilePmdMapped:  {file} kB",
            "VmFlags: rd wr mr mw me ac",
        ]
    path.write_text("\n".join(lines))
    return path


def test_the_mappings_of_the_parts_count(tmp_path: Path) -> None:
    parts = [np.zeros(64, dtype=np.uint8) for _ in range(2)]
    first, second = (address(part) & ~0xFFF for part in parts)
    around = [(first, first + 4096, 100, 60, 0)]
    if second != first:
        around.append((second, second + 4096, 100, 0, 100))
    elsewhere = max(first, second) + (1 << 30)
    path = smaps(tmp_path / "smaps", *sorted(around), (elsewhere, elsewhere + 4096, 900, 900, 0))
    assert huge_page_share(parts, path) == (0.6 if second == first else 0.8)
    assert huge_page_share([], path) is None


def test_without_the_file_nothing_is_known(tmp_path: Path) -> None:
    assert huge_page_share([np.zeros(8, dtype=np.uint8)], tmp_path / "absent") is None


def test_of_this_process_it_is_a_share() -> None:
    memory = allocate(4 << 20)
    memory[:] = 1
    share = huge_page_share([memory])
    assert share is None or 0.0 <= share <= 1.0


def test_parts_lie_side_by_side_in_an_arena() -> None:
    """So that a huge page is shared by the end of one and the beginning of the next."""
    arena, generator = Arena(), np.random.default_rng(0)
    sizes = [1, 64, 0, ARENA_BYTES + 1, *generator.integers(1, 1 << 20, 200).tolist()]
    parts = [arena.take(size) for size in sizes]
    neighbours = 0
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert part.nbytes == size and address(part) % 64 == 0 and not part.any()
        part[:] = number % 255 + 1
        neighbours += number > 0 and 0 <= address(part) - address(parts[number - 1]) - sizes[number - 1] < 64
    assert all((part == number % 255 + 1).all() for number, part in enumerate(parts)), "none overlaps another"
    assert neighbours > 190
