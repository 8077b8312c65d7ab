#!/usr/bin/env python3
"""What every kernel takes of the GPU, compared with cuda/ptxas.txt, which says what it took when somebody last looked.

usage: scripts/ptxas.py [--write] [--build FOLDER]

Reads what ptxas said when the CUDA module was built (cmake/nvcc.sh keeps it beside the objects, default build/cuda): a
line an instance of a kernel and architecture, with registers a thread, bytes of static shared memory a block, of stack
and of spills a thread, and named barriers. Exit code 1 with the differences if there are any, 2 without a build.
--write makes them the new cuda/ptxas.txt; lines of architectures that were not built stay. Another release of nvcc than
the table's allocates registers otherwise: then nothing is compared, and a line says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "cuda" / "ptxas.txt"
HEAD = "arch    registers  shared  stack  spills  barriers  kernel"

Row = tuple[str, str]  # architecture, kernel


def nvcc_release(build: Path) -> str:
    text = next(build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")).read_text()
    return re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', text)[1]


def short(name: str) -> str:
    """A kernel without its namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|\brownorm::|\bcuda::", "", name).removeprefix("void ")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i].replace(", ", ",")
    return name


def parse(text: str, source: str) -> dict[Row, tuple[int, ...]]:
    """Registers, shared, stack, spills, barriers of each row."""
    rows = {}
    now: Row | None = None
    stack = spills = 0
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(.*)' for '(\w+)'", line):
            now = (found[2], f"{source}:{short(found[1])}")
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spills = int(found[1]), int(found[2]) + int(found[3])
        elif now and (
            found := re.search(r"Used (\d+) registers(?:, used (\d+) barriers)?(?:.*?(\d+) bytes smem)?", line)
        ):
            rows[now] = (int(found[1]), int(found[3] or 0), stack, spills, int(found[2] or 0))
            now = None
    return rows


def built(folder: Path) -> dict[Row, tuple[int, ...]]:
    rows: dict[Row, tuple[int, ...]] = {}
    for log in sorted(folder.rglob("rownorm_cuda.dir/*.cu.o.ptxas")):
        source = log.name.removesuffix(".o.ptxas")
        if (ROOT / "cuda" / source).exists():  # else it is what an older build has left
            rows |= parse(log.read_text(), source)
    return rows


def read_table() -> tuple[str, dict[Row, tuple[int, ...]]]:
    release, rows = "", {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else []:
        words = line.split(maxsplit=6)
        if line.startswith("# nvcc"):
            release = words[2]
        elif line.startswith("sm_"):
            rows[words[0], words[6]] = tuple(map(int, words[1:6]))
    return release, rows


def text_of(row: Row, values: tuple[int, ...]) -> str:
    registers, shared, stack, spills, barriers = values
    return f"{row[0]:<6}  {registers:>9}  {shared:>6}  {stack:>5}  {spills:>6}  {barriers:>8}  {row[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cuda")
    options = parser.parse_args()
    now = built(options.build)
    if not now:
        print(f"[ptxas] {options.build}: no *.ptxas in it; build the target rownorm_cuda first", file=sys.stderr)
        return 2
    release = nvcc_release(options.build)
    was_release, was = read_table()
    archs = sorted({arch for arch, _ in now})
    if options.write:
        rows = {row: values for row, values in was.items() if row[0] not in archs} | now
        lines = [f"# nvcc {release} (made by scripts/ptxas.py --write)", HEAD]
        lines += [text_of(row, rows[row]) for row in sorted(rows)]
        TABLE.write_text("\n".join(lines) + "\n")
        print(f"ptxas: {len(now)} kernels written")
        return 0
    if release != was_release:
        print(f"ptxas: the table is of nvcc {was_release or 'no release'}, this is {release}: not compared")
        return 0
    was = {row: values for row, values in was.items() if row[0] in archs}
    changed = [row for row in sorted(now.keys() | was.keys()) if now.get(row) != was.get(row)]
    if changed:
        print(f"   {HEAD}")
        for row in changed:
            for sign, rows in (("-", was), ("+", now)):
                if row in rows:
                    print(f"{sign}  {text_of(row, rows[row])}")
        print(
            f"[ptxas] {len(changed)} kernels differ from cuda/ptxas.txt; if that is right, scripts/ptxas.py --write",
            file=sys.stderr,
        )
        return 1
    print(f"ptxas: {len(now)} kernels as in cuda/ptxas.txt ({', '.join(archs)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
