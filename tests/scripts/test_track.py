"""scripts/track.py in Weights & Biases' offline mode: what it writes, read back."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "track.py"
MakeRun = Callable[..., Path]
FINAL = (3.25, 0.5, 1.0)


def words(*arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def track(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*arguments), capture_output=True, text=True, timeout=120, check=False)


def records_of(path: Path) -> Iterator[bytes]:
    """A .wandb file: 7 bytes of its own, then LevelDB's log: blocks of 32 KiB of chunks (crc 4, length 2, type 1)."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def sent(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[Any]]:
    """The history, the configuration and the metrics defined in the one offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history, config, metrics = [], {}, []
    for data in records_of(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history.append(
                {key: value for key, value in items.items() if not key.startswith("_")}
                | {"step": record.history.step.num}
            )
        elif kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "metric":
            metrics.append(record.metric)
    return history, config, metrics


def measured(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record | {"step": record["progress/update"]} for record in records]


def test_offline(tmp_path: Path, make_run: MakeRun) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed here: scripts/requirements-track.txt")
    run = make_run(tmp_path / "mine", "adamw", 0, FINAL)
    result = track(run, "--project", "rownorm", "--offline")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"mine: up to update 100: wandb sync {run}/wandb/offline-run-")
    history, config, metrics = sent(run)
    assert history == measured(run)
    assert config["optimizer"] == {"head": {"algorithm": "adamw", "lr": 0.01}}
    assert config["provenance"]["parameters"] == 20_000
    assert any(metric.glob_name == "*" and metric.step_metric == "progress/tokens" for metric in metrics)


def test_follow_a_run_that_is_cut_back_and_resumed(tmp_path: Path, make_run: MakeRun) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed here: scripts/requirements-track.txt")
    whole = make_run(tmp_path / "whole", "adamw", 0, FINAL)
    run = make_run(tmp_path / "mine", "adamw", 0, FINAL, reached=60, outcome="running")
    follower = subprocess.Popen(words(run, "--project", "rownorm", "--offline", "--follow"), stdout=subprocess.PIPE)
    while not list(run.glob("wandb/offline-run-*/*.wandb")):  # it is at work
        assert follower.poll() is None
        time.sleep(0.05)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])  # cut behind a checkpoint; half a line
    time.sleep(1)
    assert follower.poll() is None
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "summary.json").write_text((whole / "summary.json").read_text())
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert sent(run)[0] == measured(whole)  # each update once


def test_wrong_input(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "mine", "adamw", 0, FINAL)
    for arguments, code, message in (
        ([tmp_path, "--project", "p"], 3, f"{tmp_path}: not a run's directory (no config.json in it)"),
        ([run], 2, "--project"),
        ([run, run, "--project", "p", "--follow"], 2, "--follow: one run at a time"),
    ):
        result = track(*arguments)
        assert result.returncode == code
        (line,) = result.stderr.splitlines()
        assert line.startswith("[track] ")
        assert message in line
    assert "examples\n  scripts/track.py" in track("--help").stdout
    command = [sys.executable, "-S", "-E", str(SCRIPT), str(run), "--project", "p"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 3
    assert result.stderr.startswith("[track] wandb: not installed here; .venv/bin/python -m pip install -r ")
