#!/usr/bin/env python3
"""Takes every synchronisation of the real kernels away, one at a time, and asks whether their tests notice.

usage: drops.py LOG FOLDER [--mode MODE] [--jobs N] [--site FILE:LINE...]

A site is a line of cuda/ with __syncthreads(), __syncwarp() or cp_async_wait<N>(). LOG is what the tests of build/cuda
wrote with ROWNORM_STANDIN_KERNELS=LOG (kernels.py): it says which tests launch the kernels of a file. FOLDER has their
executables, best those of the TSan build, which see a missing barrier in any order of the threads. The tests run one
after another with the site dropped (ROWNORM_STANDIN=MODE,drop=FILE:LINE) until one fails. MODE is late by default, as
copies that come at once need no wait. Prints a table; exit code 1 if all tests pass without a site, or fail with all
sites in place. --site tries only those that are named.
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
    for source in sorted([*(ROOT / "cuda").glob("*.cu"), *(ROOT / "cuda").glob("*.cuh")]):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if call := SITE.search(line.split("//")[0]):
                found.append((source.name, number, call.group()))
    return found


def tests_of_sources(log: Path) -> dict[str, list[Test]]:
    """For each file of kernels the tests that launch one of it, kernel tests first; for a header all of them."""
    kernels = kernels_of_sources()
    tests: dict[str, set[Test]] = defaultdict(set)
    for line in log.read_text().splitlines():
        name, _, command = line.partition("\t")
        kernel = NAME.search(name)
        program = re.search(r"test_cuda_(\w+)", command)
        chosen = re.search(r"--gtest_filter=(\S+)", command)
        if kernel and program and chosen and program[1] not in LEFT_OUT and kernel[1] in kernels:
            tests[kernels[kernel[1]]].add((program[0], chosen[1]))
    every = set().union(*tests.values())
    return {
        source: sorted(tests.get(source, every), key=lambda test: (test[0] != "test_cuda_kernels", test))
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
    parser.add_argument("--mode", default="late")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--site", nargs="+")
    options = parser.parse_args()
    tests = tests_of_sources(options.log)
    chosen = [site for site in sites() if not options.site or f"{site[0]}:{site[1]}" in options.site]
    faults = []

    def catcher(site: tuple[str, int, str]) -> str:
        source, line, call = site
        for test in tests[source]:
            if how := outcome(options.folder, test, f"{options.mode},drop={source}:{line}"):
                return f"| {source}:{line} | `{call}` | {how} | {test[1]} |"
        faults.append(f"{source}:{line}: {len(tests[source])} tests pass without `{call}`")
        return f"| {source}:{line} | `{call}` | — | — |"

    with ThreadPoolExecutor(options.jobs) as pool:
        launched = sorted({test for site in chosen for test in tests[site[0]]})
        outcomes = pool.map(lambda test: outcome(options.folder, test, options.mode), launched)
        for test, how in zip(launched, outcomes, strict=True):
            if how:
                faults.append(f"{test[0]} {test[1]}: fails in mode {options.mode} with nothing dropped ({how})")
        if not faults:
            for row in pool.map(catcher, chosen):
                print(row, flush=True)
    for fault in faults:
        print(f"[drops] {fault}", file=sys.stderr)
    return 1 if faults or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
