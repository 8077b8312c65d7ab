"""A run that was interrupted, however and whenever, and resumed is the run that was not: every record but speed and
memory, and every byte of the last checkpoint. And what else must not change a result: repetition, the size of a
micro-batch (to rounding), recomputation."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    ADAMW,
    CONTEXT,
    FULL,
    HEADS,
    ROWNORM,
    TOKENS_PER_UPDATE,
    VOCAB,
    checkpoint,
    checkpoints,
    expect_ok,
    read_json,
    read_safetensors,
    records,
    run,
    start,
    tiny_config,
    tree,
    wait_for,
    write_config,
    write_data,
    write_shard,
)

TENSORS = ("model.safetensors", "optimizer.safetensors")


def expect_same(ours: Path, theirs: Path, update: int) -> None:
    assert records(ours) == records(theirs)
    for name in TENSORS:
        assert (checkpoint(ours, update) / name).read_bytes() == (checkpoint(theirs, update) / name).read_bytes(), name
    state, right = (read_json(checkpoint(p, update) / "state.json") for p in (ours, theirs))
    for key in ("update", "tokens", "running", "files", "dataset"):
        assert state[key] == right[key], key
    assert read_json(ours / "summary.json")["finished"]


def newest(run_directory: Path) -> int:
    """Update of the newest checkpoint, 0 without one."""
    folder = run_directory / "checkpoints"
    return max((int(p.name[7:]) for p in folder.glob("update-*")), default=0) if folder.exists() else 0


# ---- kill -9 ----

UPDATES = 24
KILLS = 16 if FULL else 6

# The two large ones spend most of their time in writing checkpoints of some megabytes.
LARGE = {"vocab_size": 4000, "context": CONTEXT, "layers": 1, "width": 64, "head_dim": 32}
LARGE_BATCH = {"sequences": 4, "micro_batch": 2}
KILLED = {
    "rownorm-large": {"optimizer__head": ROWNORM, "model": LARGE, "batch": LARGE_BATCH},
    "adamw-large": {"optimizer__head": ADAMW, "model": LARGE, "batch": LARGE_BATCH},
    "rownorm-reference": {"optimizer__head": ROWNORM | {"projected": True}, "device": "reference"},
}


@pytest.mark.parametrize("name", KILLED)
def test_kill(name: str, data: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = KILLED[name] | {
        "evaluation": {"every": 5, "tokens": 25 * CONTEXT, "at_start": True},
        "checkpoint": {"every": 1, "keep": 2},
    }
    right = tiny_config(data, tmp_path / "right", **changes)
    expect_ok(run("train", write_config(tmp_path / "right.json", right)))

    output = tmp_path / "killed"
    config = write_config(tmp_path / "killed.json", right | {"output": str(output)})
    rng = random.Random(name)  # noqa: S311
    killed = unfinished = 0
    for kill in range(KILLS):
        # Spread over the run: at a moment after some update's record, or as soon as a checkpoint is being written.
        target = rng.randrange(1, 3) + kill * (UPDATES - 6) // KILLS
        within_checkpoint = kill % 2 == 1
        process = start("train", config, "--resume")

        def reached(target: int = target, within: bool = within_checkpoint) -> bool:
            if newest(output) < target - 1:
                return False
            return not within or any((output / "checkpoints").glob(".*.unfinished"))

        wait_for(lambda p=process, r=reached: r() or p.poll() is not None)
        if not within_checkpoint:
            time.sleep(rng.uniform(0, 0.03))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        unfinished += output.exists() and any(output.rglob("*.unfinished"))
    assert killed >= KILLS - 1  # the last may have come too late
    assert unfinished >= 1

    expect_ok(run("train", config, "--resume"))
    expect_same(output, tmp_path / "right", UPDATES)
    assert checkpoints(output) == checkpoints(tmp_path / "right") == ["update-00000023", "update-00000024"]
    assert not [p for p in output.rglob("*") if p.name.endswith((".unfinished", ".partial"))]
    sessions = read_json(output / "run.json")["sessions"]
    assert [s["outcome"] for s in sessions] == ["running"] * (len(sessions) - 1) + ["finished"]


@pytest.mark.parametrize("head", HEADS)
def test_kill_before_the_first_checkpoint(head: str, data: Path, tmp_path: Path) -> None:
    """There is nothing to continue from: the run starts anew and leaves no record of the first attempt."""
    changes = {"optimizer__head": HEADS[head], "checkpoint__every": 0, "evaluation__at_start": True, "log_every": 1,
               "schedule__updates": 100}  # fmt: skip
    right = tiny_config(data, tmp_path / "right", **changes)
    expect_ok(run("train", write_config(tmp_path / "right.json", right)))
    assert checkpoints(tmp_path / "right") == ["update-00000100"]

    output = tmp_path / "killed"
    config = write_config(tmp_path / "killed.json", right | {"output": str(output)})
    process = start("train", config)
    wait_for(lambda: (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").stat().st_size > 2000)
    process.kill()
    process.wait()
    with (output / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"progress/update":7,"progress/tok')  # as a kill in the middle of a write leaves it
    expect_ok(run("train", config, "--resume"))
    expect_same(output, tmp_path / "right", 100)


# ---- signals ----

LONG = {"schedule__updates": 400, "log_every": 7, "checkpoint__every": 0, "evaluation__every": 50,
        "diagnostics__diameter_every": 50}  # fmt: skip


@pytest.fixture(scope="module")
def long_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    expect_ok(run("train", write_config(folder / "config.json", tiny_config(data, folder / "run", **LONG))))
    return folder / "run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal(number: signal.Signals, data: Path, long_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = write_config(tmp_path / "config.json", tiny_config(data, output, **LONG))
    process = start("train", config)
    wait_for(lambda: (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").stat().st_size > 2000)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    stopped = newest(output)
    assert 0 < stopped < 400
    assert checkpoints(output) == [f"update-{stopped:08}"]
    assert not (output / "summary.json").exists()
    session = read_json(output / "run.json")["sessions"][-1]
    assert (session["outcome"], session["last_update"]) == (f"stopped by {number.name}", stopped)
    assert (
        f"{number.name}: stopped after update {stopped}; continue with --resume" in (output / "train.log").read_text()
    )
    assert all(r["progress/update"] <= stopped for r in records(output))

    expect_ok(run("train", config, "--resume"))
    expect_same(output, long_run, 400)
    first, second = read_json(output / "run.json")["sessions"]
    assert (first["first_update"], first["last_update"]) == (1, stopped)
    assert (second["first_update"], second["last_update"], second["outcome"]) == (stopped + 1, 400, "finished")


def test_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = tiny_config(data, output, device="reference", model__layers=100, batch__micro_batch=12, log_every=1)
    process = start("train", write_config(tmp_path / "config.json", config))
    log = output / "train.log"
    wait_for(lambda: log.exists() and "parameters, updates 1 to" in log.read_text())
    time.sleep(0.02)
    for _ in range(2):  # an update takes far longer than this
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert process.wait(5) == -signal.SIGTERM


# ---- max_updates, keep, finished runs ----


@pytest.fixture(scope="module")
def each_update(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run of the tiny config with every measurement at every update."""
    folder = tmp_path_factory.mktemp("each")
    changes = {"log_every": 1, "evaluation__every": 1, "diagnostics__diameter_every": 1}
    expect_ok(run("train", write_config(folder / "config.json", tiny_config(data, folder / "run", **changes))))
    return records(folder / "run")


def expected_records(each: list[dict[str, Any]], log: set[int], evaluation: set[int], diameter: set[int]) -> list[dict]:
    """What is due at these updates; means over the updates since the last one of `log`, added up in order."""
    expected, losses, clipped = [], [], []
    for record in each:
        update = record["progress/update"]
        losses.append(record["train/loss"])
        clipped.append(record["train/clipped_fraction"])
        due = {"progress/": True, "train/": update in log, "validation/": update in evaluation,
               "diagnostics/": update in diameter}  # fmt: skip
        if not any(list(due.values())[1:]):
            continue
        kept = {k: v for k, v in record.items() if any(on and k.startswith(prefix) for prefix, on in due.items())}
        if due["train/"]:
            kept["train/loss"] = sum(losses) / len(losses)
            kept["train/clipped_fraction"] = sum(clipped) / len(clipped)
            losses, clipped = [], []
        expected.append(kept)
    return expected


def multiples(n: int, *others: int) -> set[int]:
    return {u for u in range(1, UPDATES + 1) if u % n == 0} | set(others)


def test_what_is_due_when(whole_run: dict[str, Any], data: Path, tmp_path: Path) -> None:
    changes = {"log_every": 1, "evaluation__every": 1, "diagnostics__diameter_every": 1,
               "optimizer__head": whole_run["optimizer"]["head"]}  # fmt: skip
    config = tiny_config(data, tmp_path / "run", **changes)
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    each = records(tmp_path / "run")
    assert [r["progress/update"] for r in each] == list(range(1, UPDATES + 1))
    assert [r["progress/tokens"] for r in each] == [u * TOKENS_PER_UPDATE for u in range(1, UPDATES + 1)]
    assert 0 < sum(r["train/clipped_fraction"] for r in each) < UPDATES  # the tiny config tests both
    expected = expected_records(each, multiples(3), multiples(5, UPDATES), multiples(2))
    assert records(Path(whole_run["output"])) == expected


def test_max_updates_stop_and_extension(each_update: list[dict[str, Any]], data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = write_config(tmp_path / "config.json", tiny_config(data, output, log_every=7))
    for last in (10, 17):
        expect_ok(run("train", config, "--resume", "--set", f"schedule.max_updates={last}"))
        assert newest(output) == last
        summary = read_json(output / "summary.json")
        assert (summary["finished"], summary["updates"]) == (False, last)
        # Once more: nothing to do.
        before = tree(output)
        again = expect_ok(run("train", config, "--resume", "--set", f"schedule.max_updates={last}"))
        assert f"finished already: {last} updates" in again.err
        assert tree(output) == before
    expect_ok(run("train", config, "--resume"))
    stops = (10, 17, UPDATES)  # their extra records stay
    assert records(output) == expected_records(
        each_update, multiples(7, *stops), multiples(5, *stops), multiples(2, *stops)
    )
    assert read_json(output / "summary.json")["finished"]
    assert [s["first_update"] for s in read_json(output / "run.json")["sessions"]] == [1, 11, 18]


KEPT = [
    ({"every": 2, "keep": 2}, [22, 24]),
    ({"every": 5, "keep": 1}, [24]),
    ({"every": 5, "keep": 9}, [5, 10, 15, 20, 24]),
    ({"every": 2, "keep": 2, "keep_updates": [3, 6, 24]}, [3, 6, 20, 22, 24]),
    ({"every": 0, "keep": 1, "keep_updates": [7, 99]}, [7, 24]),
    ({"every": 0}, [24]),
]


@pytest.mark.parametrize("kept", KEPT, ids=[json.dumps(k[0]) for k in KEPT])
def test_kept_checkpoints(kept: tuple[dict[str, Any], list[int]], data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", checkpoint=kept[0])
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    assert checkpoints(tmp_path / "run") == [f"update-{u:08}" for u in kept[1]]


def test_finished_run(whole_run: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(whole_run["output"], tmp_path / "run")
    config = write_config(tmp_path / "config.json", whole_run | {"output": str(tmp_path / "run")})
    before = tree(tmp_path / "run")
    assert "finished already: 24 updates" in expect_ok(run("train", config, "--resume")).err
    assert tree(tmp_path / "run") == before
    # Killed between its last checkpoint and the summary.
    (tmp_path / "run" / "summary.json").unlink()
    expect_ok(run("train", config, "--resume"))
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize("there", [False, True], ids=["no-directory", "empty-directory"])
def test_resume_from_nothing(there: bool, whole_run: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "deep" / "er" / "run"
    if there:
        output.mkdir(parents=True)
    config = write_config(tmp_path / "config.json", whole_run | {"output": str(output)})
    expect_ok(run("train", config, "--resume"))
    expect_same(output, Path(whole_run["output"]), UPDATES)


def test_at_start(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", evaluation__at_start=True, evaluation__every=0)
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    first, *rest = records(tmp_path / "run")
    assert set(first) == {"progress/update", "progress/tokens", "validation/loss", "validation/tokens"}
    assert (first["progress/update"], first["progress/tokens"], first["validation/tokens"]) == (0, 0, 400)
    assert first["validation/loss"] == pytest.approx(4.11, abs=0.05)  # log(61), from small weights
    assert not any("validation/loss" in r for r in rest)


def test_measurements_off(each_update: list[dict[str, Any]], data: Path, tmp_path: Path) -> None:
    """Without evaluation the validation shards need not hold evaluation.tokens; nothing else changes."""
    changes = {"evaluation": {"every": 0}, "diagnostics": {"diameter_every": 0, "hilbert_panel": []}}
    expect_ok(run("train", write_config(tmp_path / "config.json", tiny_config(data, tmp_path / "run", **changes))))
    assert records(tmp_path / "run") == expected_records(each_update, multiples(3), set(), set())


# ---- what a run leaves ----


def test_run_directory(whole_run: dict[str, Any], data: Path, tmp_path: Path) -> None:
    output = Path(whole_run["output"])
    files = {p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()}
    state = {f"checkpoints/update-000000{u}/{name}" for u in (20, 24) for name in (*TENSORS, "state.json")}
    assert files == state | {"config.json", "run.json", "metrics.jsonl", "summary.json", "train.log"}

    resolved = read_json(output / "config.json")
    assert resolved["name"] == "run"
    assert resolved["optimizer"]["hidden"]["momentum"] == 0.95
    assert resolved["schedule"] == {"updates": 24, "warmup_fraction": 0.1, "min_lr_ratio": 0.1, "max_updates": None}
    # It is itself a valid config, of the same run, and resolves to itself.
    again = tmp_path / "again"
    expect_ok(run("train", output / "config.json", "--set", f"output={again}"))
    expect_same(again, output, UPDATES)
    ours, theirs = read_json(again / "config.json"), resolved
    assert ours.pop("output") == str(again)
    assert theirs.pop("output") == str(output)
    assert ours == theirs

    provenance = read_json(output / "run.json")
    parameters = 2 * 16 * 16**2 + 2 * VOCAB * 16
    assert provenance["parameters"] == parameters
    assert (provenance["updates"], provenance["tokens_per_update"]) == (24, TOKENS_PER_UPDATE)
    assert {"version", "commit"} <= set(provenance)
    (session,) = provenance["sessions"]
    assert session["outcome"] == "finished"
    assert session["start"] <= session["end"]
    assert (session["ranks"], session["exchange"]) == (1, "none")
    assert "2 threads" in session["device"]
    for role, pattern in (("train", "train_*.bin"), ("validation", "val_*.bin")):
        shards = sorted(data.glob(pattern))
        assert [s["name"] for s in provenance["dataset"][role]] == [p.name for p in shards]
        assert [s["bytes"] for s in provenance["dataset"][role]] == [p.stat().st_size for p in shards]

    summary = read_json(output / "summary.json")
    assert (summary["finished"], summary["updates"], summary["parameters"]) == (True, 24, parameters)
    assert summary["tokens"] == 24 * TOKENS_PER_UPDATE
    latest: dict[str, Any] = {}
    for record in records(output, keep=lambda _: True):
        latest |= record
    assert summary["final"] == latest
    assert "finished: " in (output / "train.log").read_text()


def test_moved_data(data: Path, whole_run: dict[str, Any], tmp_path: Path) -> None:
    """Equal shards elsewhere are the same data, and a run's directory may move too."""
    first = tmp_path / "first"
    config = write_config(tmp_path / "config.json", whole_run | {"output": str(first)})
    expect_ok(run("train", config, "--set", "schedule.max_updates=12"))
    first.rename(tmp_path / "second")
    shutil.copytree(data, tmp_path / "elsewhere")
    moved = whole_run | {"output": str(tmp_path / "second"), "name": "renamed"}
    moved["data"] = {k: v.replace(str(data), str(tmp_path / "elsewhere")) for k, v in moved["data"].items()}
    expect_ok(run("train", write_config(config, moved), "--resume"))
    for name in TENSORS:
        ours, theirs = (checkpoint(p, 24) / name for p in (tmp_path / "second", Path(whole_run["output"])))
        assert ours.read_bytes() == theirs.read_bytes()


# ---- what does not change the result ----


def test_same_config_same_bits(whole_run: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", whole_run | {"output": str(tmp_path / "run")})
    expect_ok(run("train", config))
    expect_same(tmp_path / "run", Path(whole_run["output"]), UPDATES)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_recomputation_changes_no_bit(device: str, whole_run: dict[str, Any], tmp_path: Path) -> None:
    for name in ("none", "block"):
        config = whole_run | {"output": str(tmp_path / name), "recompute": name, "device": device}
        expect_ok(run("train", write_config(tmp_path / f"{name}.json", config)))
    expect_same(tmp_path / "block", tmp_path / "none", UPDATES)


def worst_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative difference of each number over all records; counts and pairs of tokens must be equal."""
    assert [list(r) for r in ours] == [list(r) for r in theirs]
    worst: dict[str, float] = {}
    for a, b in zip(ours, theirs, strict=True):
        for key, right in b.items():
            if isinstance(right, float):
                error = abs(a[key] - right) / abs(right) if right else abs(a[key])
                worst[key] = max(worst.get(key, 0.0), error)
            elif not key.endswith("diameter_pair"):  # two pairs may be equally far apart but for rounding
                assert a[key] == right, key
    return worst


# A record of a float32 run of this size differs from the float64 run's by up to 4e-7 (golden/README), so two orders of
# summation differ by up to 8e-7. In float64 the same holds with 2^-29 of it, 2e-15; 1e-12 only asks that the difference
# is rounding.
ROUNDING = {"cpu": 1e-6, "reference": 1e-12}


def each_record(data: Path, output: Path, device: str, head: str, **changes: object) -> list[dict[str, Any]]:
    every = {"log_every": 1, "evaluation__every": 4, "diagnostics__diameter_every": 1, "clip_norm": 0.3}
    config = tiny_config(data, output, device=device, optimizer__head=HEADS[head], **every, **changes)
    expect_ok(run("train", write_config(output.with_suffix(".json"), config), "--resume"))
    return records(output)


@pytest.mark.parametrize("device", ROUNDING)
@pytest.mark.parametrize("head", HEADS)
def test_micro_batches_agree(head: str, device: str, data: Path, tmp_path: Path) -> None:
    runs = {b: each_record(data, tmp_path / str(b), device, head, batch__micro_batch=b) for b in (12, 3, 1)}
    for micro_batch in (3, 1):
        worst = worst_difference(runs[micro_batch], runs[12])
        print(head, device, micro_batch, {k: f"{v:.1e}" for k, v in worst.items()})
        assert max(worst.values()) <= ROUNDING[device], worst
        assert max(worst.values()) > 0  # they are not one and the same computation


@pytest.mark.parametrize("devices", [("cpu", "reference"), ("reference", "cpu")], ids="-then-".join)
def test_resume_elsewhere(devices: tuple[str, str], data: Path, tmp_path: Path) -> None:
    """On another device, with another micro-batch: the same run to rounding."""
    right = each_record(data, tmp_path / "right", "reference", "rownorm")
    each_record(data, tmp_path / "run", devices[0], "rownorm", schedule__max_updates=8, batch__micro_batch=6)
    ours = each_record(data, tmp_path / "run", devices[1], "rownorm", batch__micro_batch=2, recompute="block")
    assert [r["progress/update"] for r in ours] == list(range(1, UPDATES + 1))
    worst = worst_difference(ours, right)
    print(devices, {k: f"{v:.1e}" for k, v in worst.items()})
    assert max(worst.values()) <= ROUNDING["cpu"]


def test_other_seed_other_run(whole_run: dict[str, Any], tmp_path: Path) -> None:
    """The comparisons above can fail."""
    config = whole_run | {"output": str(tmp_path / "run"), "seed": 6}
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    assert records(tmp_path / "run") != records(Path(whole_run["output"]))
    write_shard(tmp_path / "other.bin", 4000, seed=9)
    config = whole_run | {
        "output": str(tmp_path / "run2"),
        "data": whole_run["data"] | {"train": str(tmp_path / "other.bin")},
    }
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    assert records(tmp_path / "run2") != records(Path(whole_run["output"]))


def test_the_config_reaches_the_run(tmp_path: Path) -> None:
    """Values that other tests leave at their defaults: the seed of the weights, the schedule's end, the norm's eps."""
    write_data(tmp_path / "data")

    def final(name: str, **changes: object) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        config = tiny_config(tmp_path / "data", tmp_path / name, **changes)
        expect_ok(run("train", write_config(tmp_path / f"{name}.json", config)))
        update = records(tmp_path / name)[-1]["progress/update"]
        weights = read_safetensors(checkpoint(tmp_path / name, update) / "model.safetensors")
        return records(tmp_path / name)[-1], weights

    one = {"schedule__max_updates": 1}  # its learning rate is 0: the checkpoint holds the initial weights
    _, a = final("a", seed=5, **one)
    _, b = final("b", seed=6, **one)
    assert all(not np.array_equal(a[name], b[name]) for name in a)
    record, _ = final("c", schedule__min_lr_ratio=0.25)
    assert record["train/lr_scale"] == 0.25
    plain, _ = final("d", **one)
    for name, changes in (("e", {"model__norm_eps": 0.1}), ("f", {"model__rope_base": 10})):
        other, weights = final(name, **one, **changes)
        assert other["train/loss"] != plain["train/loss"]
        assert all(np.array_equal(a[name], weights[name]) for name in a)
