"""`rownorm eval` and `rownorm inspect` on what training leaves, against the run's own records and numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    CONTEXT,
    VOCAB,
    checkpoint,
    expect_ok,
    made_up_tokens,
    read_json,
    read_safetensors,
    records,
    run,
    shard_bytes,
    tiny_config,
    write_config,
    write_safetensors,
)


def printed(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    return json.loads(expect_ok(run(*arguments, cwd=cwd)).out)


# ---- eval ----


@pytest.fixture(scope="module", params=["cpu", "reference"])
def evaluated_run(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A run with an evaluation at each of its checkpoints, 4, 8 and 12."""
    folder = tmp_path_factory.mktemp(f"evaluated-{request.param}")
    config = tiny_config(
        data, folder / "run", device=request.param, evaluation__every=4, checkpoint__keep=9, schedule__updates=12
    )
    expect_ok(run("train", write_config(folder / "config.json", config)))
    return config


def test_eval_reproduces_the_records(evaluated_run: dict[str, Any]) -> None:
    """The same batches in the same order: the same bits."""
    output, device = Path(evaluated_run["output"]), evaluated_run["device"]
    recorded = {r["progress/update"]: r["validation/loss"] for r in records(output) if "validation/loss" in r}
    assert list(recorded) == [4, 8, 12]
    for update, loss in recorded.items():
        result = printed("eval", checkpoint(output, update), "--device", device)
        assert result == {
            "checkpoint": str(checkpoint(output, update)),
            "update": update,
            "loss": loss,
            "perplexity": pytest.approx(np.exp(loss), rel=1e-15),
            "sequences": 25,
            "tokens": 25 * CONTEXT,
        }
    # Of a run's directory: the newest.
    assert printed("eval", output, "--device", device)["loss"] == recorded[12]


def test_eval_changes_nothing(evaluated_run: dict[str, Any], tmp_path: Path) -> None:
    """Needs the checkpoint only, wherever it lies, and leaves nothing."""
    output = Path(evaluated_run["output"])
    shutil.copytree(checkpoint(output, 8), tmp_path / "moved")
    before = sorted(tmp_path.rglob("*"))
    result = printed("eval", "moved", "--device", evaluated_run["device"], cwd=tmp_path)
    assert result["update"] == 8
    assert sorted(tmp_path.rglob("*")) == before


def test_eval_tokens_and_data(evaluated_run: dict[str, Any], data: Path) -> None:
    """The mean over all is the mean of the means over its parts: order, prefix and weights are what they should be."""
    output, device = Path(evaluated_run["output"]), evaluated_run["device"]

    def evaluate(*rest: object) -> dict[str, Any]:
        return printed("eval", output, "--device", device, *rest)

    # 10 whole sequences in the first shard, 30 in the second; the run used the first 25.
    everything = evaluate("--tokens", 0)
    first = evaluate("--data", data / "val_1.bin")
    second = evaluate("--data", data / "val_2.bin")
    assert [r["sequences"] for r in (everything, first, second)] == [40, 10, 30]
    # Sums of a few hundred losses in double of float32 rows: 1e-7 allows for other partial batches.
    close = {"rel": 1e-7, "abs": 0}
    assert everything["loss"] == pytest.approx((10 * first["loss"] + 30 * second["loss"]) / 40, **close)
    assert evaluate("--data", data / "val_*.bin")["loss"] == everything["loss"]
    assert evaluate("--tokens", 160)["loss"] == first["loss"]
    assert evaluate("--data", data / "val_2.bin", "--tokens", 480)["loss"] == second["loss"]
    assert first["loss"] != pytest.approx(second["loss"], rel=1e-4)  # else this would show nothing
    single = [evaluate("--tokens", n * CONTEXT)["loss"] * n for n in (1, 2, 3)]
    shard = np.frombuffer((data / "val_1.bin").read_bytes()[1024:], "<u2")
    third = output.parent / "third.bin"
    third.write_bytes(shard_bytes(shard[2 * CONTEXT : 3 * CONTEXT + 1]))
    assert evaluate("--data", third)["loss"] == pytest.approx(single[2] - single[1], rel=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 3, 25, 1000])
def test_eval_micro_batch(micro_batch: int, evaluated_run: dict[str, Any]) -> None:
    """Partial batches count by their tokens. float32: rows are independent, only BLAS's blocking may differ."""
    output, device = Path(evaluated_run["output"]), evaluated_run["device"]
    loss = printed("eval", output, "--device", device)["loss"]
    other = printed("eval", output, "--device", device, "--micro-batch", micro_batch)["loss"]
    assert other == pytest.approx(loss, rel=1e-13 if device == "reference" else 1e-7, abs=0)


def test_eval_on_the_other_device(evaluated_run: dict[str, Any]) -> None:
    output = Path(evaluated_run["output"])
    losses = [printed("eval", output, "--device", device)["loss"] for device in ("cpu", "reference")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != losses[1]


# ---- inspect ----


def test_inspect_shards(data: Path, tmp_path: Path) -> None:
    tokens = made_up_tokens(100)
    (tmp_path / "one.bin").write_bytes(shard_bytes(tokens))
    one = printed("inspect", tmp_path / "one.bin")
    (shard,) = one["shards"]
    assert (one["kind"], one["tokens"], shard["path"], shard["tokens"]) == (
        "shards",
        100,
        str(tmp_path / "one.bin"),
        100,
    )
    assert (shard["smallest_token"], shard["largest_token"]) == (tokens.min(), tokens.max())
    assert len(shard["xxh128"]) == 32

    two = printed("inspect", data / "train_*.bin")
    paths = sorted(data.glob("train_*.bin"))
    assert [s["path"] for s in two["shards"]] == [str(p) for p in paths]
    assert two["tokens"] == sum((p.stat().st_size - 1024) // 2 for p in paths)
    assert all(s["largest_token"] == VOCAB - 1 for s in two["shards"])


def test_inspect_safetensors(whole_run: dict[str, Any]) -> None:
    path = checkpoint(Path(whole_run["output"]), 24) / "model.safetensors"
    result = printed("inspect", path)
    tensors = read_safetensors(path)
    assert result["kind"] == "safetensors"
    assert result["elements"] == sum(t.size for t in tensors.values())
    listed = {t["name"]: (t["dtype"], t["shape"]) for t in result["tensors"]}
    assert listed == {name: ("F32", list(t.shape)) for name, t in tensors.items()}


def test_inspect_checkpoint_and_run(whole_run: dict[str, Any], tmp_path: Path) -> None:
    output = Path(whole_run["output"])
    state = read_json(checkpoint(output, 24) / "state.json")
    result = printed("inspect", checkpoint(output, 24))
    assert (result["kind"], result["update"], result["config"]) == ("checkpoint", 24, state["config"])
    assert result["files"] == state["files"]
    assert result["model"]["elements"] == 2 * 16 * 16**2 + 2 * VOCAB * 16
    assert {t["name"] for t in result["optimizer"]["tensors"]} == set(
        read_safetensors(checkpoint(output, 24) / "optimizer.safetensors")
    )

    result = printed("inspect", output)
    assert (result["kind"], result["state"], result["updates"]) == ("run", "finished", 24)
    assert result["checkpoints"] == [{"update": u, "whole": True} for u in (20, 24)]
    assert result["latest"] == read_json(output / "summary.json")["final"]

    # A corrupt checkpoint is listed as such; the run can be resumed from the one before.
    shutil.copytree(output, tmp_path / "run")
    model = checkpoint(tmp_path / "run", 24) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    result = printed("inspect", tmp_path / "run")
    assert result["state"] == "can be resumed"
    assert [c["whole"] for c in result["checkpoints"]] == [True, False]
    assert str(model) in result["checkpoints"][1]["error"]


def farthest_pair(rows: np.ndarray) -> tuple[float, list[int], np.ndarray]:
    """Brute force in float64."""
    rows = rows.astype(np.float64)
    distances = np.sqrt(((rows[:, None, :] - rows[None, :, :]) ** 2).sum(-1))
    i, j = np.unravel_index(np.argmax(np.triu(distances)), distances.shape)
    return float(distances[i, j]), [int(i), int(j)], np.linalg.norm(rows, axis=1)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_inspect_diameter(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    tensors = {
        "cloud": rng.standard_normal((257, 33)).astype(dtype),
        "offset": (1e3 + 1e-3 * rng.standard_normal((130, 5))).astype(dtype),  # small differences of large rows
        "point": np.ones((4, 3), dtype),
        "one row": np.ones((1, 3), dtype),
    }
    path = write_safetensors(tmp_path / "t.safetensors", tensors)
    for name, rows in tensors.items():
        result = printed("inspect", path, "--diameter", name)["diameter"]
        diameter, pair, norms = farthest_pair(rows)
        assert result["tensor"] == name
        assert result["pair"] == pair, name
        # Squares of float64 differences of the stored values, summed over at most 33 columns: 33 * 2^-53.
        assert result["diameter"] == pytest.approx(diameter, rel=4e-15, abs=0), name
        assert result["row_norm_max"] == pytest.approx(norms.max(), rel=4e-15)
        assert result["row_norm_median"] == pytest.approx(np.sort(norms)[(len(norms) - 1) // 2], rel=4e-15)


def test_inspect_diameter_of_the_head(whole_run: dict[str, Any]) -> None:
    output = Path(whole_run["output"])
    for name, file in (("lm_head.weight", "model"), ("embed.weight", "model")):
        tensor = read_safetensors(checkpoint(output, 24) / f"{file}.safetensors")[name]
        expected = farthest_pair(tensor)[0]
        for path in (checkpoint(output, 24) / f"{file}.safetensors", checkpoint(output, 24), output):
            result = printed("inspect", path, "--diameter", name)
            assert result["diameter"]["diameter"] == pytest.approx(expected, rel=4e-15)
    states = read_safetensors(checkpoint(output, 24) / "optimizer.safetensors")
    name = next(n for n, t in states.items() if t.shape == (VOCAB, 16))
    result = printed("inspect", output, "--diameter", name)
    assert result["diameter"]["diameter"] == pytest.approx(farthest_pair(states[name])[0], rel=4e-15)


def test_recorded_diameter_is_that_of_the_step(whole_run: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """D(S_t) of the record against the change of the head between two checkpoints, weight decay taken out."""
    head = whole_run["optimizer"]["head"]
    config = tiny_config(
        data,
        tmp_path / "run",
        optimizer__head=head | {"weight_decay": 0},
        device="reference",
        diagnostics__diameter_every=1,
        checkpoint={"every": 1, "keep": 30},
    )
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    heads = [read_safetensors(checkpoint(tmp_path / "run", u) / "model.safetensors")["lm_head.weight"]
             for u in range(1, 25)]  # fmt: skip
    for record in records(tmp_path / "run")[1:]:
        update = record["progress/update"]
        diameter, pair, norms = farthest_pair(heads[update - 1] - heads[update - 2])
        prefix = "diagnostics/lm_head_step"
        # The difference of weights of size 0.1 carries 1e-17 each, the step is larger than 1e-4.
        assert record[f"{prefix}/diameter_exact"] == pytest.approx(diameter, rel=1e-11)
        assert record[f"{prefix}/diameter_pair"] == pair
        assert record[f"{prefix}/row_norm_max"] == pytest.approx(norms.max(), rel=1e-11)
        assert record[f"{prefix}/row_norm_median"] == pytest.approx(np.sort(norms)[(VOCAB - 1) // 2], rel=1e-11)
