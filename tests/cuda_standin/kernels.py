#!/usr/bin/env python3
"""Which tests launch which kernel, and whether any is launched by none.

usage: kernels.py LOG MODULE [--write]

LOG is what the tests of build/cuda wrote with ROWNORM_STANDIN_KERNELS=LOG, MODULE the stand-in's librownorm_cuda.so.
Exit code 1 if an instance of a kernel in MODULE was not launched, or if the table in docs/gpu.md has not every
__global__ of cuda/ and no other, or names a test that does not launch it. --write makes the table anew.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- kernels: made by tests/cuda_standin/kernels.py --write -->\n", "<!-- kernels end -->\n"
NAME = re.compile(r"rownorm::cuda::\(anonymous namespace\)::(\w+)(<.*?>)?\(")


def kernels_of_sources() -> dict[str, str]:
    """Each __global__ of cuda/ and the file that it is in."""
    found: dict[str, str] = {}
    for source in sorted([*(ROOT / "cuda").glob("*.cu"), *(ROOT / "cuda").glob("*.cuh")]):
        for name in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", source.read_text()):
            if name in found:
                sys.exit(f"[kernels] {name}: in {found[name]} and in {source.name}; two kernels need two names")
            found[name] = source.name
    return found


def instances_of(module: str, kernels: dict[str, str]) -> set[str]:
    command = ["nm", "-C", "--defined-only", module]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {m[1] + (m[2] or "") for m in map(NAME.search, text.splitlines()) if m and "[clone" not in m.string}
    return {name for name in found if name.partition("<")[0] in kernels}


def read_log(log: Path) -> tuple[set[str], dict[str, set[str]], dict[str, set[str]]]:
    """Launched instances; for each kernel the tests of test_cuda_kernels; the other suites."""
    launched: set[str] = set()
    tests: dict[str, set[str]] = defaultdict(set)
    suites: dict[str, set[str]] = defaultdict(set)
    for line in log.read_text().splitlines():
        name, _, command = line.partition("\t")
        found = NAME.search(name)
        program = re.search(r"test_cuda_(\w+)", command)
        if not found or not program:
            continue
        launched.add(found[1] + (found[2] or ""))
        test = re.search(r"--gtest_filter=(?:\w+/)?\w+\.(\w+)", command)
        if program[1] == "kernels" and test:
            tests[found[1]].add(test[1])
        elif program[1] != "kernels":
            suites[found[1]].add(program[1])
    return launched, tests, suites


def cell(words: set[str]) -> str:
    return ", ".join(sorted(words)) or "—"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("module")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kernels = kernels_of_sources()
    launched, tests, suites = read_log(options.log)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    if options.write:
        lines = ["| kernel | in | tests of `test_cuda_kernels` | other suites |\n", "|---|---|---|---|\n"]
        for name, source in sorted(kernels.items(), key=lambda item: (item[1], item[0])):
            lines.append(f"| `{name}` | {source} | {cell(tests[name])} | {cell(suites[name])} |\n")
        PAGE.write_text(before + BEGIN + "".join(lines) + END + after)
        return 0

    faults = [f"{name}: no test launches it" for name in sorted(instances_of(options.module, kernels) - launched)]
    rows = {m[1]: m for m in re.finditer(r"^\| `(\w+)` \| (\S+) \| (.*) \| (.*) \|$", table, re.MULTILINE)}
    for name in sorted(kernels.keys() | rows.keys()):
        if name not in rows:
            faults.append(f"{name}: a kernel of cuda/{kernels[name]} that docs/gpu.md does not list")
        elif kernels.get(name) != rows[name][2]:
            faults.append(f"{name}: in docs/gpu.md, but there is no such kernel in cuda/{rows[name][2]}")
        else:
            for column, found in ((3, tests), (4, suites)):
                gone = set(rows[name][column].split(", ")) - found[name] - {"—"}
                faults += [f"{name}: docs/gpu.md names {test}, which does not launch it" for test in sorted(gone)]
    for fault in faults:
        print(f"[kernels] {fault}", file=sys.stderr)
    if faults:
        print("[kernels] the table is made anew with --write", file=sys.stderr)
        return 1
    print(f"kernels: all {len(kernels)} are launched, in all their instances")
    return 0


if __name__ == "__main__":
    sys.exit(main())
