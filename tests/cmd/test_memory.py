"""What --dry-run announces is what a run takes: its anonymous resident memory (RssAnon; the shards are mapped files and
not counted) stays within 1.15 times the plan plus 128 MB for the program, its libraries and what it stages on the way
to disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, expect_ok, full_only, read_json, run, start, tiny_config, write_config, write_shard


def planned_bytes(*arguments: object) -> int:
    (line,) = [
        x for x in expect_ok(run("train", *arguments, "--dry-run")).out.splitlines() if x.startswith("memory: total")
    ]
    return int(line.rsplit("(", 1)[1].removesuffix(" bytes)"))


def peak_rss_anon(*arguments: object) -> int:
    """Bytes, sampled every few milliseconds until the run ends."""
    process = start("train", *arguments)
    status = Path("/proc") / str(process.pid) / "status"
    peak = 0
    try:
        while process.poll() is None:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    return peak


def expect_within_plan(what: str, planned: int, peak: int) -> None:
    print(f"{what}: plan {planned / 2**20:.1f} MiB, RssAnon {peak / 2**20:.1f} MiB, {peak / planned:.3f} of the plan")
    assert planned * 0.5 < peak <= 1.15 * planned + 128e6  # (less would mean that the plan is not what is used)


def check_run(what: str, config: Path, stop: int, updates: int, *overrides: str) -> None:
    """To update `stop` with all measurements and a checkpoint, then resumed to `updates`."""
    arguments = (config, *(part for o in overrides for part in ("--set", o)))
    planned = planned_bytes(*arguments)
    for name, last in (("from the start", stop), ("resumed", updates)):
        peak = peak_rss_anon(*arguments, "--resume", "--set", f"schedule.max_updates={last}")
        expect_within_plan(f"{what} {name}", planned, peak)


QUICKSTART: dict[str, Any] = {
    "model": {"vocab_size": 4096, "context": 128, "layers": 4, "width": 128, "head_dim": 32},
    "batch": {"sequences": 16, "micro_batch": 16},
    "evaluation": {"every": 2, "tokens": 16 * 128},
    "diagnostics": {"diameter_every": 1, "hilbert_panel": [[0, 128], [1024, 1152]]},
    "checkpoint": {"every": 2},
}


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_quickstart(head: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "train_1.bin", 200_000, vocab=4096)
    write_shard(tmp_path / "val_1.bin", 200_000, vocab=4096)
    config = tiny_config(tmp_path, tmp_path / "run", **QUICKSTART)
    config["optimizer"]["head"] = {"algorithm": head, "lr": 3e-3}
    check_run(f"quickstart {head}", write_config(tmp_path / "config.json", config), 4, 6)
    assert read_json(tmp_path / "run" / "summary.json")["updates"] == 6


@full_only
def test_paper_190m(tmp_path: Path) -> None:
    write_shard(tmp_path / "train_1.bin", 1_000_000, vocab=50257)
    write_shard(tmp_path / "val_1.bin", 1_000_000, vocab=50257)
    overrides = ["device=cpu", f"data.train={tmp_path}/train_*.bin", f"data.validation={tmp_path}/val_*.bin",
                 "batch.sequences=1", "batch.micro_batch=1", "model.context=256", "schedule.updates=100",
                 "evaluation.tokens=512", "evaluation.every=1", "diagnostics.hilbert_panel=[[0,64],[256,320]]",
                 "diagnostics.diameter_every=1", "checkpoint.every=1", f"output={tmp_path}/run"]  # fmt: skip
    check_run("190M", ROOT / "configs" / "paper" / "190m-rownorm.json", 2, 3, *overrides)
