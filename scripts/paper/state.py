"""How far each run is: what its directory says. Standard library only."""

import fcntl
import math
import os
from pathlib import Path
from typing import NamedTuple

from history import LOSS, UPDATE, Record, ScriptError, member, read_metrics, read_object

from .matrix import Run

FINISHED, RUNNING, INTERRUPTED, STOPPED, FAILED, WAITING = (
    "finished",
    "running",
    "interrupted",
    "stopped",  # at schedule.max_updates
    "failed",
    "waiting",
)


class State(NamedTuple):
    word: str
    update: int = 0
    updates: int | None = None  # of the schedule
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    error: str = ""


def in_use(folder: Path) -> bool:
    """Whether a trainer holds the lock of the run's directory (flock; let go at once)."""
    if not folder.is_dir():
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and read_object(summary).get("finished") is True


def read_provenance(folder: Path) -> Record:
    """run.json, with what the scripts use of it."""
    path = folder / "run.json"
    provenance = read_object(path)
    for key in ("parameters", "updates"):
        if not member(path, provenance, key, int, "a whole number"):
            raise ScriptError(f"{path}: {key} is 0, not a whole number from 1")
    for role in ("train", "validation"):
        member(path, provenance, f"dataset.{role}", list, "a list")
    for session in member(path, provenance, "sessions", list, "a list"):
        for key in ("program", "device", "start", "outcome"):
            member(path, session, key, str, "a text")
        for key in ("ranks", "first_update"):
            member(path, session, key, int, "a whole number")
        member(path, session, "end", str | None, "a text or null")
        member(path, session, "last_update", int | None, "a whole number or null")
    if not provenance["sessions"]:
        raise ScriptError(f"{path}: sessions is empty")
    return provenance


def check_folder(folder: Path) -> None:
    """Not there yet, or a folder."""
    if not folder.is_dir() and os.path.lexists(folder):
        raise ScriptError(f"{folder}: not a folder")


def state_of(folder: Path) -> State:
    check_folder(folder)
    if not (folder / "run.json").exists():
        return State(RUNNING if in_use(folder) else WAITING)
    provenance = read_provenance(folder)
    outcome = provenance["sessions"][-1]["outcome"]
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []

    def latest(key: str) -> float | None:
        numbers = (record[key] for record in reversed(records) if isinstance(record.get(key), int | float))
        return next(numbers, None)

    update, updates = int(latest(UPDATE) or 0), provenance["updates"]
    pace, word, error = latest("performance/seconds_per_update"), INTERRUPTED, ""
    if is_finished(folder):
        word = FINISHED
    elif outcome == "running":  # or killed
        word = RUNNING if in_use(folder) else INTERRUPTED
    elif outcome.startswith("stopped at"):
        word = STOPPED
    elif not outcome.startswith("stopped by") and outcome != "finished":  # without summary.json: launch writes it again
        word, error = FAILED, outcome
    seconds_left = pace * (updates - update) if pace is not None and word != FINISHED else None
    return State(word, update, updates, latest(LOSS), latest("performance/tokens_per_second"), seconds_left, error)


# ---- the table


def table(rows: list[tuple[str, ...]], left: int = 2) -> str:
    """Columns under each other, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def print_status(runs: list[Run]) -> None:
    """Error (exit 3), after the table: of the first run whose files are damaged."""
    damage: list[ScriptError | OSError] = []
    rows: list[tuple[str, ...]] = [("run", "state", "update", "loss", "tokens/s", "time left")]
    for run in runs:
        try:
            state = state_of(run.folder)
        except (ScriptError, OSError) as error:
            damage.append(error)
            state = State("damaged")
        total = f"{state.updates:,}" if state.updates is not None else "-"
        loss = f"{state.loss:.4f}" if state.loss is not None else "-"
        pace = f"{state.tokens_per_second:,.0f}" if state.tokens_per_second is not None else "-"
        word = f"failed: {state.error}" if state.word == FAILED else state.word
        rows.append((run.name, word, f"{state.update:,}/{total}", loss, pace, duration(state.seconds_left)))
    print(table(rows))
    if damage:
        raise damage[0]
