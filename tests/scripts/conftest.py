"""Made-up runs with known numbers, and the scripts importable as they are when run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "data")]

TOKENS = 1000  # an update
LOSS, DIAMETER, HILBERT = "validation/loss", "diagnostics/lm_head_step/diameter_exact", "validation/hilbert_step/rms"


def write_run(
    folder: Path,
    head: str,
    seed: int,
    final: tuple[float, float, float],
    updates: int = 100,
    reached: int | None = None,
    every: int = 10,
    outcome: str = "finished",
) -> Path:
    """A run as rownorm leaves it: loss, D and Hilbert RMS fall to `final`."""
    folder.mkdir(parents=True)
    reached = updates if reached is None else reached
    records: list[dict[str, Any]] = []
    for update in range(every, reached + 1, every):
        before = updates - update
        record: dict[str, Any] = {"progress/update": update, "progress/tokens": update * TOKENS}
        record |= {
            "train/loss": 3.5,
            "train/lr/head": 1 / 128,
            "performance/tokens_per_second": 2000.0,
            "performance/seconds_per_update": 0.5,
        }
        record |= {LOSS: final[0] + before / 32, DIAMETER: final[1] * (1 + before / 16)}
        record |= {HILBERT: final[2] * (1 + before / 16)}
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "name": folder.name,
        "seed": seed,
        "model": {"width": 16},
        "optimizer": {"head": {"algorithm": head, "lr": 0.01} | ({"betas": [0.5, 0.75]} if head == "adamw" else {})},
        "output": str(folder),
    }
    (folder / "config.json").write_text(json.dumps(config))
    sessions = [
        {
            "program": "rownorm <0.1.0>",
            "device": "cpu",
            "ranks": 1,
            "first_update": 1,
            "start": "2026-01-01T00:00:00Z",
            "end": None if outcome == "running" else "2026-01-01T01:00:00Z",
            "last_update": reached,
            "outcome": outcome,
        }
    ]
    dataset = {
        role: [{"name": f"{role}.bin", "bytes": 3024, "header_xxh128": "ab"}] for role in ("train", "validation")
    }
    provenance = {"name": folder.name, "parameters": 20_000, "updates": updates, "tokens_per_update": TOKENS}
    (folder / "run.json").write_text(json.dumps(provenance | {"dataset": dataset, "sessions": sessions}))
    if outcome == "finished":
        (folder / "summary.json").write_text(json.dumps({"finished": True, "updates": updates}))
    return folder


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run
