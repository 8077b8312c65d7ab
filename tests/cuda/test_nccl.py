"""`train` on several ranks with a GPU each: golden's trajectories, the same training as on one rank, and faults.

ROWNORM_EXE names an executable with a CUDA module beside it: that of the stand-in, build/cuda/standin/rownorm, whose
NCCL works over MPI, or the real one on a machine with GPUs. ROWNORM_TEST_RANKS says which numbers of ranks (default
"1 2 3 4"). Faults are planted in the stand-in (tests/cuda_standin/standin.h)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_ranks as host_ranks
import test_trajectories
from support import (
    EXE,
    FULL,
    Result,
    checkpoint,
    command,
    environment,
    expect_error,
    expect_ok,
    read_json,
    records,
    run,
    tiny_config,
    write_config,
    write_shard,
)

pytestmark = pytest.mark.skipif(not (EXE.parent / "librownorm_cuda.so").exists(), reason="no CUDA module here")

STANDIN = EXE.parent.name == "standin"
standin_only = pytest.mark.skipif(not STANDIN, reason="faults are planted in the stand-in")
RANKS = [int(n) for n in os.environ.get("ROWNORM_TEST_RANKS", "1 2 3 4").split()]


def machine(mode: str = "lazy", devices: int = 4) -> dict[str, str]:
    if not STANDIN:
        return {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"),
            "OMP_NUM_THREADS": "1",
        }
    return {"ROWNORM_STANDIN": f"{mode},devices={devices}", "OMP_NUM_THREADS": "1"}


# ---- the same training ----

# (trajectory, ranks that divide its sequences)
TRAJECTORIES = [("trajectory_main", 1), ("trajectory_main", 2), ("trajectory_main", 4), ("trajectory_clipped", 1),
                ("trajectory_clipped", 2), ("trajectory_clipped", 3)]  # fmt: skip
USUAL = {("trajectory_clipped", 3, "adamw", "cuda_fp32")}


@pytest.mark.parametrize("device", ["cuda_fp32", "cuda_bf16"])
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
@pytest.mark.parametrize(("trajectory", "ranks"), TRAJECTORIES)
def test_golden_trajectory(trajectory: str, ranks: int, head: str, device: str, tmp_path: Path) -> None:
    if ranks not in RANKS or not (FULL or (trajectory, ranks, head, device) in USUAL):
        pytest.skip("runs with ROWNORM_FULL=1")
    test_trajectories.follow(tmp_path, trajectory, head, device, ranks, env=machine())


MODEL = {"vocab_size": 61, "context": 8, "layers": 3, "width": 8, "head_dim": 4}
SEQUENCES, UPDATES = 12, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for shard, groups in enumerate((5, 7)):  # 8 updates cross a shard's boundary
        write_shard(folder / f"train_{shard}.bin", groups * SEQUENCES * 8 + 1, seed=shard)
    write_shard(folder / "val_1.bin", 26 * 8 + 1, seed=8)
    return folder


def config_for(data: Path, output: Path, **changes: object) -> dict[str, Any]:
    base = {"device": "cuda", "precision": "fp32", "model": MODEL, "batch": {"sequences": SEQUENCES, "micro_batch": 1},
            "schedule": {"updates": UPDATES}, "evaluation": {"every": 4, "tokens": 25 * 8},
            "diagnostics": {"diameter_every": 2, "hilbert_panel": [[0, 20], [50, 71]]}, "clip_norm": 0.5,
            "log_every": 1, "checkpoint": {"every": 0}, "comm": {"timeout_seconds": 60}}  # fmt: skip
    return tiny_config(data, output, **(base | changes))


def train(config: dict[str, Any], ranks: int, *arguments: str, env: dict[str, str] | None = None) -> Path:
    output = Path(config["output"])
    path = write_config(output.parent / f"{output.name}-{ranks}.json", config)
    expect_ok(run("train", path, *arguments, ranks=ranks, env=env or machine()))
    return output


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process on the CPU."""
    return train(config_for(data, tmp_path_factory.mktemp("one") / "run", device="cpu"), 1)


def weights_and_state(run_directory: Path) -> list[bytes]:
    folder = checkpoint(run_directory, UPDATES)
    return [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


# The tolerances are those of tests/cmd/test_ranks.py for f32.
@pytest.mark.parametrize("ranks", RANKS if FULL else [r for r in RANKS if r in (2, 3)])
def test_the_same_training(ranks: int, data: Path, one_rank: Path, tmp_path: Path) -> None:
    """Records, weights and state; and the same bits on all ranks, in every order in which streams may work."""
    output = train(config_for(data, tmp_path / "compared", debug={"compare_ranks": True}), ranks)
    host_ranks.expect_close(output, one_rank, "cpu", UPDATES)
    (session,) = read_json(output / "run.json")["sessions"]
    assert re.fullmatch(r"NCCL 2\.\d+\.\d+" if ranks > 1 else "none", session["exchange"])
    if STANDIN:
        modes = ("lazy", "eager", "lazy,reversed", "eager,huge") if FULL else ("lazy", "eager")
        for mode in modes:  # without the check, which waits for everything after each update
            again = train(config_for(data, tmp_path / mode), ranks, env=machine(mode))
            assert records(again) == records(output), mode
            assert weights_and_state(again) == weights_and_state(output), mode


@pytest.mark.parametrize("head", ["adamw", "projected", "muon"])
def test_every_head(head: str, data: Path, tmp_path: Path) -> None:
    if max(RANKS) == 1:
        pytest.skip("one rank")
    config = {"optimizer__head": host_ranks.RANK_HEADS[head], "schedule__updates": 4, "model": MODEL | {"layers": 1}}
    right = train(config_for(data, tmp_path / "one", **config, device="cpu"), 1)
    ours = train(config_for(data, tmp_path / "two", **config), 2)
    host_ranks.expect_close(ours, right, "cpu", 4)


def test_resume_on_other_ranks_and_devices(data: Path, one_rank: Path, tmp_path: Path) -> None:
    for device, ranks, last in (("cuda", 3, 2), ("cpu", 2, 4), ("cuda", 1, 5), ("cuda", 2, UPDATES)):
        if device == "cuda" and ranks not in RANKS:
            continue
        config = config_for(data, tmp_path / "run", device=device)
        output = train(config, ranks, "--resume", "--set", f"schedule.max_updates={last}")
    host_ranks.expect_close_tensors(output, one_rank, "cpu", UPDATES)
    mine = {r["progress/update"]: r["train/loss"] for r in records(output)}
    right = {r["progress/update"]: r["train/loss"] for r in records(one_rank)}
    assert mine == pytest.approx(right, rel=host_ranks.RECORDS["cpu"])


# ---- one GPU a rank ----


@standin_only
def test_ranks_that_share_a_device(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run"))
    result = run("train", path, ranks=2, env=machine(devices=1))
    expect_error(result, 5, "[nccl] ranks 0 and 1 are both on device 0 of ", "one GPU a rank")
    assert not (tmp_path / "run").exists()


@standin_only
def test_more_ranks_than_devices(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run"))
    result = run("train", path, ranks=3, env=machine(devices=2))
    expect_error(result, 5, "[cuda] no device 2: this machine has 2", "on rank 2 of 3")
    result = run("train", path, "--set", "device=auto", ranks=3, env=machine(devices=2))
    expect_error(result, 5, "[ranks] device auto: is cuda on rank 0, cpu on rank 2")
    assert not (tmp_path / "run").exists()


def ranks_with(modes: list[str], *arguments: object) -> Result:
    """Ranks whose devices behave differently."""
    words = command(ranks=2)[:-3]  # mpirun and its options
    for i, mode in enumerate(modes):
        words += ([":"] if i else []) + ["-n", "1", "env", f"ROWNORM_STANDIN={mode}", str(EXE), *map(str, arguments)]
    env = environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run(words, capture_output=True, timeout=120, env=env, check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@standin_only
def test_a_device_of_its_own_for_each(data: Path, tmp_path: Path) -> None:
    """As Slurm binds them: every rank sees one device, number 0."""
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run", schedule__updates=1))
    expect_ok(ranks_with(["devices=1,first_device=0", "devices=1,first_device=1"], "train", path))


@standin_only
def test_without_the_library(data: Path, tmp_path: Path) -> None:
    """One rank needs no libnccl. Several say what is missing; where the machine has a real one, that has no device."""
    for name in ("rownorm", "librownorm_cuda.so"):
        shutil.copy(EXE.parent / name, tmp_path / name)
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run", schedule__updates=1))
    words = [word.replace(str(EXE), str(tmp_path / "rownorm")) for word in command("train", path, ranks=2)]
    env = environment(machine())
    done = subprocess.run(words, capture_output=True, timeout=120, env=env, check=False)
    expect_error(Result(done.returncode, "", done.stderr.decode()), 5, "[nccl] ")
    subprocess.run([tmp_path / "rownorm", "train", path], check=True, capture_output=True, timeout=120, env=env)


@standin_only
def test_a_library_that_is_cut_off(data: Path, tmp_path: Path) -> None:
    """Loading it would end in a bus error."""
    for file in EXE.parent.iterdir():
        if file.name in ("rownorm", "librownorm_cuda.so") or file.name.startswith("libnccl"):
            shutil.copy(file, tmp_path / file.name)
    library = tmp_path / "libnccl.so.2"
    os.truncate(library, library.stat().st_size // 2)
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run", schedule__updates=1))
    words = [word.replace(str(EXE), str(tmp_path / "rownorm")) for word in command("train", path, ranks=2)]
    env = environment(machine() | {"LD_LIBRARY_PATH": str(tmp_path)})
    done = subprocess.run(words, capture_output=True, timeout=120, env=env, check=False)
    lines = min(2, done.stderr.count(b"is cut off"))  # a rank that meets it says so and ends
    expect_error(Result(done.returncode, "", done.stderr.decode()), 5, "libnccl.so.2: is cut off", lines=lines)


# ---- faults ----


@standin_only
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_collective_left_out_on_one_rank(mode: str, data: Path, tmp_path: Path) -> None:
    """All ranks wait; the watchdog ends them and says where each is: the one that is ahead left something out."""
    config = config_for(data, tmp_path / "run", comm={"timeout_seconds": 2})
    path = write_config(tmp_path / "config.json", config)
    modes = [f"{mode},devices=3"] * 3
    # Of an update 9 reductions, 2 all-reductions, 9 broadcasts.
    for number, update in ((3, 1), (35, 2)) if FULL else ((35, 2),):
        modes[1] = f"{mode},devices=3,skip={number}"
        result = ranks_with(modes, "train", path)
        assert result.code == 5, result.err
        lines = [line for line in result.err.splitlines() if line.startswith("[nccl] ")]
        form = r"\[nccl\] (.*), update (\d+): not done after 2 s \(comm.timeout_seconds\): .* \(on rank (\d) of 3\)"
        found = {int(m[3]): (m[1], int(m[2])) for m in (re.fullmatch(form, line) for line in lines) if m}
        assert len(found) == len(lines) == 3, result.err
        assert found[0] == found[2] != found[1]
        assert found[0][1] == update
        for what, _ in found.values():
            assert re.fullmatch(r"(reduce of (blocks\.\d|\w+\.weight) to rank \d)|(broadcast of .* from rank \d)|"
                                r"(all-reduce of \(\d\) f64)", what)  # fmt: skip
        assert not list((tmp_path / "run" / "checkpoints").glob("*"))
        shutil.rmtree(tmp_path / "run")


@standin_only
def test_an_error_that_nccl_finds_itself(data: Path, tmp_path: Path) -> None:
    """A link that breaks: no rank waits for the time-out, the one that sees it ends all."""
    config = config_for(data, tmp_path / "run", comm={"timeout_seconds": 100})
    path = write_config(tmp_path / "config.json", config)
    result = ranks_with(["lazy,devices=3", "lazy,devices=3,async_error=35", "lazy,devices=3"], "train", path)
    assert result.code == 5, result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("[nccl] ")]
    assert re.fullmatch(r"\[nccl\] (.*, update \d|between collectives): NCCL error \(on rank 1 of 3\)", line), line
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@standin_only
def test_a_layer_reduced_twice(data: Path, one_rank: Path, tmp_path: Path) -> None:
    """A sum with one rank's gradients counted twice is far from the right one."""
    output = train(config_for(data, tmp_path / "run"), 2, env=machine("lazy,twice=5"))
    with pytest.raises(AssertionError):
        host_ranks.expect_close(output, one_rank, "cpu", UPDATES)


@standin_only
def test_ranks_whose_weights_differ(data: Path, tmp_path: Path) -> None:
    """One bit of what one rank receives: nothing else would show it."""
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run"))
    # Of the collectives of an update on two ranks: 2 + 3 + 2 reductions, 2 all-reductions, 2 + 3 + 2 broadcasts.
    for number, named in ((10, "embed.weight"), (12, "blocks.0.attn.q.weight"), (16, "lm_head.weight")):
        modes = ["lazy,devices=2", f"lazy,devices=2,flip={number}"]
        result = ranks_with(modes, "train", path, "--set", "debug.compare_ranks=true")
        expect_error(result, 5, f"[ranks] update 1: {named} is not the same on rank 0 and rank 1")
        shutil.rmtree(tmp_path / "run")


@standin_only
def test_ranks_with_different_configs(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", config_for(data, tmp_path / "run"))
    words = command(ranks=2)[:-3]
    for i, lr in enumerate(("0.1", "0.2")):
        words += ([":"] if i else []) + ["-n", "1", str(EXE), "train", str(path), "--set", f"optimizer.head.lr={lr}"]
    done = subprocess.run(words, capture_output=True, timeout=60, env=environment(machine()), check=False)
    result = Result(done.returncode, "", done.stderr.decode())
    expect_error(result, 2, "[ranks] not started alike: config.optimizer.head.lr: 0.1 on rank 0, 0.2 on rank 1")


# The calls of cudaStreamWaitEvent, in three updates of one layer on two ranks, that something depends on. Each is left
# out in turn, and the last checkpoint or record is another. The other calls are for something that a wait beside them
# on the same stream is for as well.
NEEDED_WAITS = {
    # Of the exchange for the work before it, where it works as early as it may. The first call is the initialisation's;
    # an update's are 5 of reductions (of the head, blocks.0 and the embedding: 2, 4, 5), of the loss and of the norm
    # (8), and 5 of broadcasts (9), which nobody needs after the last update.
    "ahead": {2, 4, 5, 8, 9} | {14, 16, 17, 20, 21} | {26, 28, 29, 32},
    # Of the work for the exchange, where both work as late as they may: for the norm, and in the next update for the
    # embedding, blocks.0 and the head.
    "lazy": {15, 22, 23, 25} | {39, 46, 47, 49} | {63},
}
CALLS = {"ahead": 38, "lazy": 74}


@standin_only
@pytest.mark.parametrize("mode", NEEDED_WAITS if FULL else ["lazy"])
def test_a_wait_left_out(mode: str, data: Path, tmp_path: Path) -> None:
    """No kernel reads a weight or a gradient before its ticket: without any one of the waits it would."""

    def result(name: str, env: dict[str, str]) -> tuple[list[bytes], list[dict[str, Any]]]:
        config = config_for(data, tmp_path / name, model=MODEL | {"layers": 1}, batch__micro_batch=6, clip_norm=0.05,
                            schedule__updates=3, log_every=100, evaluation__every=0, diagnostics__diameter_every=0,
                            diagnostics__hilbert_panel=[])  # fmt: skip
        output = train(config, 2, env=env)
        files = [(checkpoint(output, 3) / f"{n}.safetensors").read_bytes() for n in ("model", "optimizer")]
        found = files, records(output)
        shutil.rmtree(output)
        return found

    right = result("right", machine(mode))
    assert result("right", machine("eager")) == right
    some = NEEDED_WAITS[mode] & (set(range(14, 22)) if mode == "ahead" else set(range(15, 40)))
    tried = range(1, CALLS[mode] + 1) if FULL else sorted(some)
    caught = {n for n in tried if result("run", machine(f"{mode},no_wait={n}")) != right}
    assert caught == (NEEDED_WAITS[mode] if FULL else some)
