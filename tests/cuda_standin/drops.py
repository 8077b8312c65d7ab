#!/usr/bin/env python3
"""Takes every synchronisation of the real kernels away, one at a time, and asks whether their tests notice.

usage: drops.py LOG FOLDER [--mode MODE...] [--jobs N] [--site FILE:LINE...]

A site is a line of cuda/*.cu with __syncthreads(), __syncwarp() or cp_async_wait<N>(); those of block_sum, in a header,
have a test of the stand-in's suite (BlockSumsInARowNeedEachOfItsBarriers). LOG is what the tests of build/cuda wrote
with ROWNORM_STANDIN_KERNELS=LOG (kernels.py): it says which tests launch the kernels of a file. FOLDER has their
executables, best those of the TSan build, which see most missing barriers in any order of the threads. The tests run
one after another with the site dropped (ROWNORM_STANDIN=MODE,drop=FILE:LINE) until one fails, in one mode after the
other: late, as copies that come at once need no wait; then with the last threads first. Prints a table; exit code 1 if
all tests pass without a site, or one fails with all sites in place. --site tries only those that are named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels import NAME, ROOT, kernels_of_sources

SITE = re.compile(r"__syncthreads\(\)|__syncwarp\(\)|cp_async_wait<\w+>\(\)")
# Suites that launch what a kernel test launches too, for minutes on end, or need their own mode or mpirun.
LEFT_OUT = {"large", "ranks", "queue", "asynchrony", "train"}

Test = tuple[str, str]  # executable, filter


def sites() -> list[tuple[str, int, str]]:
    found = []
    for source in sorted((ROOT / "cuda").glob("*.cu")):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if call := SITE.search(line.split("//")[0]):
                found.append((source.name, number, call.group()))
    return found


def tests_of_sources(log: Path) -> dict[str, list[Test]]:
    """For each file of kernels the tests that launch one of it, kernel tests first."""
    kernels = kernels_of_sources()
    tests: dict[str, set[Test]] = defaultdict(set)
    for line in log.read_text().splitlines():
        name, _, command = line.partition("\t")
        kernel = NAME.search(name)
        program = re.search(r"test_cuda_(\w+)", command)
        chosen = re.search(r"--gtest_filter=(\S+)", command)
        if kernel and program and chosen and program[1] not in LEFT_OUT and kernel[1] in kernels:
            tests[kernels[kernel[1]]].add((program[0], chosen[1]))
    return {
        source: sorted(tests[source], key=lambda test: (test[0] != "test_cuda_kernels", test))
        for source, _, _ in sites()
    }


def outcome(folder: Path, test: Test, mode: str) -> str:
    """How the test ends: '' where all is right."""
    done = subprocess.run(
        [folder / test[0], "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={test[1]}"],
        env=os.environ | {"ROWNORM_STANDIN": mode, "TSAN_OPTIONS": "halt_on_error=1:atexit_sleep_ms=0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode == 0:
        return ""
    text = done.stdout + done.stderr
    return "race" if "data race" in text else "check" if "[standin]" in text else "value"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", nargs="+", default=["late", "reversed,late"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--site", nargs="+")
    options = parser.parse_args()
    tests = tests_of_sources(options.log)
    chosen = [site for site in sites() if not options.site or f"{site[0]}:{site[1]}" in options.site]
    faults = []

    def expect_well(test: Test, mode: str, how: str) -> None:
        if how:
            faults.append(f"{test[0]} {test[1]}: fails in mode {mode} with nothing dropped ({how})")

    def catcher(site: tuple[str, int, str]) -> str:
        source, line, call = site
        for mode in options.mode:
            for test in tests[source]:
                how = outcome(options.folder, test, f"{mode},drop={source}:{line}")
                if not how:
                    continue
                if mode != options.mode[0]:
                    expect_well(test, mode, outcome(options.folder, test, mode))
                return f"| {source}:{line} | `{call}` | {how}, {mode} | {test[1]} |"
        faults.append(f"{source}:{line}: {len(tests[source])} tests pass without `{call}`")
        return f"| {source}:{line} | `{call}` | — | — |"

    with ThreadPoolExecutor(options.jobs) as pool:
        launched = sorted({test for site in chosen for test in tests[site[0]]})
        outcomes = pool.map(lambda test: outcome(options.folder, test, options.mode[0]), launched)
        for test, how in zip(launched, outcomes, strict=True):
            expect_well(test, options.mode[0], how)
        if not faults:
            for row in pool.map(catcher, chosen):
                print(row, flush=True)
    for fault in faults:
        print(f"[drops] {fault}", file=sys.stderr)
    return 1 if faults or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
