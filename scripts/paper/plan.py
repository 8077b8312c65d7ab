"""What each run is: parameters, updates, tokens, FLOPs, memory, hours. Standard library only."""

import os
import re
import subprocess
from pathlib import Path

from history import USAGE, ScriptError

from .matrix import ROOT, Matrix, Run
from .state import table


def executable(given: str | None) -> Path:
    path = Path(given).resolve() if given else ROOT / "build" / "release" / "rownorm"
    if not os.access(path, os.X_OK) or path.is_dir():
        build = "scripts/setup.sh && cmake --preset release && cmake --build --preset release"
        raise ScriptError(f"{path}: no such program; build it ({build}) or name it with --exe")
    return path


def train_arguments(matrix: Matrix, run: Run, overrides: list[str]) -> list[str]:
    """What `rownorm` is called with for this run. Later overrides win."""
    sets = [f"device={matrix.device}", f"seed={run.seed}", f"name={run.name}", f"output={run.folder}", *overrides]
    return ["train", str(run.config), *(word for value in sets for word in ("--set", value))]


def dry_run(exe: Path, matrix: Matrix, run: Run, ranks: int, overrides: list[str]) -> dict[str, str]:
    """What `rownorm train --dry-run` prints, by its first column. It learns the number of ranks from a launcher's
    environment, so that memory is that of one rank."""
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(ranks)}
    command = [str(exe), *train_arguments(matrix, run, overrides), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = done.stderr.rstrip().rsplit("\n", 1)[-1]
        raise ScriptError(f"{run.name}: --dry-run: {line}", done.returncode)
    columns = (re.split(r" {2,}| (?=\d)", line, maxsplit=1) for line in done.stdout.splitlines())
    return {words[0]: words[1] for words in columns if len(words) > 1}


def parse_speeds(text: str | None, matrix: Matrix) -> dict[str, float]:
    """`900000` or `190m=900000,380m=450000`: tokens a second of one run, all its ranks together."""
    speeds: dict[str, float] = {}
    for word in text.split(",") if text else []:
        scale, _, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf") or (scale and scale not in matrix.scales):
            raise ScriptError(f"--tokens-per-second {text}: {word}: N or SCALE=N, N more than 0", USAGE)
        speeds |= {scale: value} if scale else dict.fromkeys(matrix.scales, value)
    return speeds


def print_plan(
    exe: Path, matrix: Matrix, runs: list[Run], ranks: int, overrides: list[str], speeds: dict[str, float]
) -> None:
    rows: list[tuple[str, ...]] = [
        ("run", "parameters", "updates", "tokens", "tokens/parameter", "FLOPs", "GiB a rank", "hours")
    ]
    plans: dict[tuple[str, str], dict[str, str]] = {}
    total_tokens = total_flops = 0
    total_hours = 0.0
    for run in runs:
        cell = run.scale, run.head
        plan = plans.get(cell) or plans.setdefault(cell, dry_run(exe, matrix, run, ranks, overrides))
        tokens = int(plan["training tokens"])
        flops = int(plan["FLOPs a token"]) * tokens
        memory = int(plan["memory: total"].split("(")[1].split()[0]) / 2**30
        hours = tokens / speeds[run.scale] / 3600 if run.scale in speeds else None
        total_tokens, total_flops, total_hours = total_tokens + tokens, total_flops + flops, total_hours + (hours or 0)
        numbers = [plan["parameters"], plan["updates"].split()[0], plan["training tokens"]]
        rows.append(
            (
                run.name,
                *(f"{int(number):,}" for number in numbers),
                plan["tokens a parameter"],
                f"{flops:,}",
                f"{memory:.2f}",
                f"{hours:.2f}" if hours is not None else "-",
            )
        )
    hours_cell = f"{total_hours:.2f}" if all(run.scale in speeds for run in runs) else "-"
    rows.append((f"{len(runs)} runs", "", "", f"{total_tokens:,}", "", f"{total_flops:,}", "", hours_cell))
    print(table(rows, left=1))
