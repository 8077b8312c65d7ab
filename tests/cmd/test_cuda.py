"""The executable with the CUDA module: its plan of memory, its precisions, its bench. With the stand-in, as in
ROWNORM_TEST_DEVICES="cuda_fp32 cuda_bf16" ROWNORM_EXE=build/cuda/standin/rownorm (docs/gpu.md); skipped elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    ADAMW,
    CONTEXT,
    EXE,
    TOKENS_PER_UPDATE,
    VOCAB,
    Result,
    checkpoint,
    environment,
    expect_error,
    expect_ok,
    read_json,
    read_safetensors,
    records,
    run,
    tiny_config,
    write_config,
)

pytestmark = pytest.mark.skipif("cuda" not in os.environ.get("ROWNORM_TEST_DEVICES", ""), reason="no CUDA module here")

PRECISIONS = ["bf16", "tf32", "fp32"]
MUON = {"algorithm": "muon", "lr": 1e-3}


def train(folder: Path, config: dict[str, Any], *arguments: str, **changes: Any) -> Result:
    return run("train", write_config(folder / "config.json", config), *arguments, **changes)


def planned(text: str) -> dict[str, str]:
    """What --dry-run prints of memory, by purpose."""
    lines = [line.removeprefix("memory: ") for line in text.splitlines() if line.startswith("memory: ")]
    plan = {" ".join(line.split()[:-2]): " ".join(line.split()[-2:]) for line in lines if not line.startswith("total")}
    (total,) = [line for line in lines if line.startswith("total")]
    return plan | {"total": " ".join(total.split()[1:3])}


def logged(result: Result) -> dict[str, str]:
    """The same of the line that a run logs."""
    (line,) = [line for line in result.err.splitlines() if "memory: " in line]
    parts = line.split("memory: ", 1)[1].split(", ")
    return {" ".join(part.split()[:-2]): " ".join(part.split()[-2:]) for part in parts}


@pytest.mark.skipif(
    EXE.parent.name != "standin" or not (EXE.parents[1] / "librownorm_cuda.so").exists(),
    reason="no real module beside the stand-in's folder",
)
def test_the_real_module_without_a_gpu(data: Path, tmp_path: Path) -> None:
    """It loads, with all that it is linked to, and says why it can do nothing; auto takes the CPU then. A GPU that is
    there is hidden."""
    for file in (EXE, EXE.parents[1] / "librownorm_cuda.so"):
        shutil.copy(file, tmp_path)
    config = tiny_config(data, tmp_path / "run", device="cuda", schedule__max_updates=1)
    command = [tmp_path / "rownorm", "train", write_config(tmp_path / "config.json", config)]
    hidden = environment({"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    expect_error(Result(done.returncode, done.stdout, done.stderr), 5, "[cuda] no device: ")
    assert not (tmp_path / "run").exists()
    done = subprocess.run([*command, "--set", "device=auto"], env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "device: cpu" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": "block"},
        {"diagnostics__diameter_every": 0},
        {"diagnostics__hilbert_panel": []},
        {"optimizer__head": MUON},
        {"optimizer__head": MUON | {"newton_schulz_precision": "bf16"}, "optimizer__hidden": ADAMW},
        {"recompute": "block", "model__vocab_size": 1111, "batch__micro_batch": 12, "diagnostics__diameter_every": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_is_what_a_run_takes(precision: str, changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Printed where there is no module: by a copy of the executable, beside which none lies."""
    changes = {"device": "cuda", "precision": precision, "schedule__max_updates": 1} | changes
    config = tiny_config(data, tmp_path / "run", **changes)
    taken = logged(expect_ok(train(tmp_path, config)))
    alone = tmp_path / "alone" / "rownorm"
    alone.parent.mkdir()
    shutil.copy(EXE, alone)
    dry_run = [alone, "train", tmp_path / "config.json", "--dry-run"]
    assert planned(subprocess.run(dry_run, capture_output=True, text=True, check=True).stdout) == taken
    assert list(taken) == ["weights", "gradients", "optimizer state", "step", "activations", "diagnostics",
                           "workspace", "total"]  # fmt: skip


def test_less_memory_than_the_plan(data: Path, tmp_path: Path) -> None:
    """0.03 GiB, where cuBLASLt's workspace alone is 32 MiB."""
    config = tiny_config(data, tmp_path / "run", device="cuda")
    plan = planned(expect_ok(train(tmp_path, config, "--dry-run")).out)
    result = train(tmp_path, config, env={"ROWNORM_STANDIN": "memory=0.03"})
    parts = [f"{purpose} {size}" for purpose, size in plan.items()]
    expect_error(result, 5, f"[memory] cuda: needs {plan['total']}", "30.7 MiB", "the plan", *parts)
    assert not (tmp_path / "run").exists()


def test_a_device_that_the_module_has_no_code_for(data: Path, tmp_path: Path) -> None:
    """Asked for by name it is an error; `auto` takes what works."""
    config = tiny_config(data, tmp_path / "run", schedule__max_updates=1)
    for device in ("cuda", "auto"):
        result = train(tmp_path, config, "--set", f"device={device}", env={"ROWNORM_STANDIN": "no_code"})
        if device == "cuda":
            expect_error(result, 5, "[cuda] stand-in: this build has no code for compute capability 9.0",
                         "-DCMAKE_CUDA_ARCHITECTURES=90-real")  # fmt: skip
            assert not (tmp_path / "run").exists()
    expect_ok(result)
    assert read_json(tmp_path / "run" / "run.json")["sessions"][0]["device"].startswith("cpu")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_changes_no_bit(precision: str, data: Path, tmp_path: Path) -> None:
    for name in ("none", "block"):
        changes = {"device": "cuda", "precision": precision, "recompute": name, "schedule__updates": 4}
        expect_ok(train(tmp_path, tiny_config(data, tmp_path / name, **changes)))
    assert records(tmp_path / "block") == records(tmp_path / "none")
    ours, theirs = (checkpoint(tmp_path / name, 4) for name in ("block", "none"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()


def test_newton_schulz_precisions(data: Path, tmp_path: Path) -> None:
    """Each ends elsewhere, near fp32, the less precise the farther; a run may go on in another one. The increments of a
    matrix are within 1.2 % (tf32) and 6.7 % (bf16) of fp32's by the bounds of tests/cuda/test_kernels.cpp if their
    directions are equal; what an update changes in the next directions is of second order in the rate."""
    weights, losses = {}, {}
    for name in PRECISIONS:
        config = tiny_config(data, tmp_path / name, device="cuda", precision="fp32", schedule__updates=6,
                             optimizer__head=MUON | {"newton_schulz_precision": name})  # fmt: skip
        config["optimizer"]["hidden"]["newton_schulz_precision"] = name
        expect_ok(train(tmp_path, config, "--set", "schedule.max_updates=3"))
        expect_ok(train(tmp_path, config, "--resume"))
        weights[name] = read_safetensors(checkpoint(tmp_path / name, 6) / "model.safetensors")
        losses[name] = [r["train/loss"] for r in records(tmp_path / name) if "train/loss" in r]
    config["init_from"] = None
    config["output"] = str(tmp_path / "init")
    expect_ok(train(tmp_path, config, "--set", "schedule.max_updates=1"))  # rate 0: the initial weights
    initial = read_safetensors(checkpoint(tmp_path / "init", 1) / "model.safetensors")

    def distance(name: str) -> float:
        matrices = [m for m in initial if m.startswith(("blocks.", "lm_head"))]
        difference = sum(np.sum((weights[name][m] - weights["fp32"][m]).astype(np.float64) ** 2) for m in matrices)
        change = sum(np.sum((weights["fp32"][m] - initial[m]).astype(np.float64) ** 2) for m in matrices)
        return float(np.sqrt(difference / change))

    assert 0 < 2 * distance("tf32") < distance("bf16") <= 0.067
    assert distance("tf32") <= 0.012
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-3)

    config = tiny_config(data, tmp_path / "bf16", device="cuda", precision="fp32", schedule__updates=6,
                         schedule__max_updates=6, optimizer__head=MUON)  # fmt: skip
    assert "finished already" in expect_ok(train(tmp_path, config, "--resume")).err


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bench_has_bounds(precision: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "out", device="cuda", precision=precision)
    arguments = ["bench", write_config(tmp_path / "config.json", config), "--updates", 2]
    environment = {"ROWNORM_STANDIN": "memory=0.25"}  # of which a 64th is probed, 4 MiB
    report = json.loads(expect_ok(run(*arguments, "--json", env=environment)).out)
    assert report["device"].startswith("cuda: stand-in")
    peak, update = report["peak"]["flops_per_second"], report["update"]
    assert peak > 0 and report["bandwidth"]["bytes_per_second"] > 0
    assert update["mfu"] == pytest.approx(update["model_flops"] / update["seconds"] / peak)
    assert update["tokens"] == TOKENS_PER_UPDATE
    size = 2 if precision == "bf16" else 4
    work = {(o["phase"], o["operation"]): (o["calls"], o["flops"], o["bytes"]) for o in report["operations"]}
    head = 2 * 4 * CONTEXT * VOCAB * 16  # a micro-batch of 4 sequences, width 16; gradients of the head in f32
    traffic = size * (2 * 4 * CONTEXT * 16 + VOCAB * 16) + 2 * 4 * VOCAB * 16 + 4 * 4 * CONTEXT
    assert work["forward and backward", "head_loss"] == (3, 3 * 3 * head, 3 * traffic)
    assert all(o["bound"] is None or o["of_bound"] > 0 for o in report["operations"])
    assert all(p["of_peak_alone"] > 0 for p in report["products"])
    text = expect_ok(run(*arguments, env=environment)).out
    assert re.search(r"GFLOP/s: [\d.]+% of the peak of [\d.]+ GFLOP/s \(MFU\)", text)
