#!/usr/bin/env python3
"""Takes every synchronisation of real kernels away, one at a time, and asks whether their tests notice.

usage: drops.py TEST_EXECUTABLE SOURCE... [--modes MODE...] [--equivalent FILE:LINE...]

A site is a line with __syncthreads(), __syncwarp() or cp_async_wait<N>(). The tests run with it dropped
(ROWNORM_STANDIN=MODE,drop=FILE:LINE) in one mode after another until one fails. Prints a table; exit code 1 if the
tests pass without a site in every mode, 2 if they fail with all sites in place. With an executable of the TSan build,
one mode is enough. --equivalent names sites whose absence changes nothing.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

MODES = ["forward", "reversed", "random=1", "random=2", "late", "reversed,late"]


def run(executable: str, mode: str) -> str:
    """How the tests end: '' where all is right."""
    done = subprocess.run(
        [executable, "--gtest_brief=1", "--gtest_fail_fast"],
        env=os.environ | {"ROWNORM_STANDIN": mode, "TSAN_OPTIONS": "halt_on_error=1:atexit_sleep_ms=0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 0:
        return ""
    text = done.stdout + done.stderr
    return "race" if "data race" in text else "check" if "[standin]" in text else "value"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("executable")
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--equivalent", nargs="+", default=[])
    options = parser.parse_args()
    for mode in options.modes:
        if how := run(options.executable, mode):
            print(f"[drops] {options.executable}: fails in mode {mode} with nothing dropped ({how})", file=sys.stderr)
            return 2
    survivors = 0
    for source in map(Path, options.sources):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            found = re.search(r"__syncthreads\(\)|__syncwarp\(\)|cp_async_wait<\w+>\(\)", line.split("//")[0])
            if not found:
                continue
            site = f"{source.name}:{number}"
            caught = ""
            for mode in options.modes:
                if how := run(options.executable, f"{mode},drop={site}"):
                    caught = f"{how} ({mode})"
                    break
            survivors += not caught and site not in options.equivalent
            print(f"| {site} | `{found.group()}` | {caught or '—'} |", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
