"""A run that changes its device at a checkpoint goes on as if it had not: cpu to cuda, cuda to cpu, reference to cuda.

ROWNORM_EXE names an executable with a CUDA module beside it, such as that of the stand-in, build/cuda/standin/rownorm.

Bounds (relative). fp32: that of a trajectory on CUDA (tests/cmd/test_trajectories.py), since cpu and cuda differ by
the order of sums. bf16: 8 significant bits, so what is stored on the way is rounded by 2^-9 at most; about 16 such
roundings stand between a weight and its gradient (four a layer forward, as many backward), and add like a random walk:
sqrt(16) 2^-9 = 8e-3, doubled for the largest of a run's records, for everything that is made of gradients. A loss,
about log 61, is made of logits, below 1 in size here, that are rounded likewise: 8e-3 / log 61, again doubled.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from support import (
    CONTEXT,
    EXE,
    FULL,
    HEADS,
    Result,
    checkpoint,
    expect_ok,
    read_safetensors,
    records,
    run,
    tiny_config,
    write_config,
    write_data,
)

pytestmark = pytest.mark.skipif(
    not (EXE.parent / "librownorm_cuda.so").exists(), reason=f"no CUDA module beside {EXE}; see ROWNORM_EXE"
)

ROUNDED = 2 * math.sqrt(16) * 2.0**-9
BOUNDS = {
    "fp32": {"loss": 1e-5, "other": 1e-5},
    "bf16": {"loss": ROUNDED / math.log(61), "other": ROUNDED},
}
STOP, UPDATES = 12, 24  # every measurement is due at STOP, so that stopping there adds no record


def train(*arguments: object) -> Result:
    """On a machine with GPUs: on those that the caller sees (support.py hides them), the first where nothing says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return expect_ok(run("train", *arguments, env={"CUDA_VISIBLE_DEVICES": visible}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def config_of(data: Path, output: Path, head: str, device: str) -> dict[str, Any]:
    return tiny_config(
        data,
        output,
        device=device,
        optimizer__head=HEADS[head],
        evaluation={"every": 4, "tokens": 25 * CONTEXT},
        checkpoint={"every": STOP, "keep": 2},
    )


@pytest.fixture(scope="module", params=sorted(HEADS))
def on_cpu(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A head, and an uninterrupted run of it."""
    folder = tmp_path_factory.mktemp(f"cpu-{request.param}")
    train(write_config(folder / "config.json", config_of(data, folder / "run", request.param, "cpu")))
    return request.param, folder / "run"


def expect_close(ours: Path, theirs: Path, bounds: dict[str, float]) -> None:
    worst: dict[str, float] = {}
    found, expected = records(ours), records(theirs)
    assert [r.keys() for r in found] == [r.keys() for r in expected]
    for record, right in zip(found, expected, strict=True):
        for key in ("progress/update", "progress/tokens", "train/lr_scale", "validation/tokens"):
            assert record.get(key) == right.get(key)
        for key in ("train/loss", "train/grad_norm", "diagnostics/lm_head_step/diameter_exact", "validation/loss",
                    "diagnostics/lm_head_step/row_norm_max", "diagnostics/lm_head_step/row_norm_median",
                    "validation/hilbert_step/rms"):  # fmt: skip
            if key in right:
                worst[key] = max(worst.get(key, 0.0), abs(record[key] - right[key]) / right[key])
    print({key: f"{error:.1e}" for key, error in worst.items()})
    assert len(worst) == 7
    for key, error in worst.items():
        assert error <= bounds["loss" if key.endswith("loss") else "other"], (key, error)


def expect_same_form(ours: Path, theirs: Path) -> None:
    """The same tensors, of the same shapes and dtypes."""
    for update in (STOP, UPDATES):
        for name in ("model.safetensors", "optimizer.safetensors"):
            found, right = (read_safetensors(checkpoint(p, update) / name) for p in (ours, theirs))
            assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
                k: (v.shape, v.dtype) for k, v in right.items()
            }


@pytest.mark.parametrize(
    ("first", "then", "precision"),
    [
        ("cpu", "cuda", "fp32"),
        ("cuda", "cpu", "fp32"),
        ("reference", "cuda", "fp32"),
        ("cpu", "cuda", "bf16"),
        ("cuda", "cpu", "bf16"),
        ("reference", "cuda", "bf16"),
    ],
)
def test_device_changes(
    on_cpu: tuple[str, Path], data: Path, tmp_path: Path, first: str, then: str, precision: str
) -> None:
    head, whole = on_cpu
    usual = {("rownorm", "cpu", "fp32"), ("rownorm", "cuda", "fp32"), ("adamw", "reference", "fp32"),
             ("rownorm", "cpu", "bf16")}  # fmt: skip
    if not FULL and (head, first, precision) not in usual:
        pytest.skip("runs with ROWNORM_FULL=1")
    config = write_config(tmp_path / "config.json", config_of(data, tmp_path / "run", head, "cpu"))

    def on(device: str) -> tuple[str, ...]:
        return "--set", f"device={device}", "--set", f"precision={precision if device == 'cuda' else 'auto'}"

    train(config, *on(first), "--set", f"schedule.max_updates={STOP}")
    result = train(config, *on(then), "--resume")
    assert f"device: {then}" in result.err
    assert "resumed from" in result.err
    expect_close(tmp_path / "run", whole, BOUNDS[precision])
    if first != "reference":  # whose checkpoints hold 64 bits
        expect_same_form(tmp_path / "run", whole)
