"""`train` on several ranks is the same training: the same examples, records and weights to rounding, bit for bit on the
same number of ranks; resuming may change that number; a rank that fails or dies ends all."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    ADAMW,
    EXE,
    FULL,
    HEADS,
    ROWNORM,
    Result,
    checkpoint,
    checkpoints,
    command,
    environment,
    expect_error,
    expect_ok,
    processes_of,
    read_json,
    read_safetensors,
    records,
    run,
    shard_bytes,
    start,
    tiny_config,
    wait_for,
    write_config,
    write_safetensors,
    write_shard,
)

# More ranks than layers (7 > 3), a vocabulary that no number of ranks divides.
MODEL = {"vocab_size": 257, "context": 4, "layers": 3, "width": 8, "head_dim": 4}
SEQUENCES = 84
MICRO_BATCH = {1: 12, 2: 7, 3: 14, 4: 3, 7: 6}  # by ranks
UPDATES = 60
GROUPS = (25, 20)  # updates that the two shards hold: 60 updates cross a shard's boundary and an epoch's

RANK_HEADS = HEADS | {
    "projected": ROWNORM | {"projected": True},
    "muon": {"algorithm": "muon", "lr": 2e-3},  # whole, by one rank
}


def config_for(folder: Path, output: Path, **changes: object) -> dict[str, Any]:
    base = {
        "model": MODEL,
        "batch": {"sequences": SEQUENCES, "micro_batch": 1},
        "schedule": {"updates": UPDATES},
        "evaluation": {"every": 20, "tokens": 33 * 4},
        "diagnostics": {"diameter_every": 10, "hilbert_panel": [[0, 20], [50, 71], [125, 132]]},
        "clip_norm": 1.2,
        "log_every": 5,
        "checkpoint": {"every": 0},
    }
    return tiny_config(folder, output, **(base | changes))


@pytest.fixture(scope="module")
def rank_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank-data")
    for shard, groups in enumerate(GROUPS):
        tokens = groups * SEQUENCES * 4
        write_shard(folder / f"train_{shard}.bin", tokens + (1, 4 * SEQUENCES)[shard], vocab=257, seed=shard)
    write_shard(folder / "val_1.bin", 20 * 4 + 3, vocab=257, seed=8)
    write_shard(folder / "val_2.bin", 15 * 4 + 1, vocab=257, seed=9)
    return folder


def train(folder: Path, name: str, config: dict[str, Any], ranks: int, *arguments: str) -> Path:
    output = folder / name
    config = config | {"output": str(output), "batch": {"sequences": SEQUENCES, "micro_batch": MICRO_BATCH[ranks]}}
    path = write_config(folder / f"{name}-{ranks}.json", config)
    expect_ok(run("train", path, *arguments, ranks=ranks, env={"OMP_NUM_THREADS": "1"}))
    return output


def expect_close_records(mine: list[dict[str, Any]], right: list[dict[str, Any]], device: str) -> None:
    """Relative to their size. D's pair may change only where distances are equal to rounding: not in this data."""
    assert [r.keys() for r in mine] == [r.keys() for r in right]
    for a, b in zip(mine, right, strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=RECORDS[device]), (a["progress/update"], key)


def expect_close_tensors(ours: Path, theirs: Path, device: str, update: int = UPDATES) -> None:
    """Weights and optimizer state, relative to the norm of each tensor."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, right = (read_safetensors(checkpoint(p, update) / name) for p in (ours, theirs))
        assert mine.keys() == right.keys()
        for key, values in right.items():
            assert np.linalg.norm(mine[key] - values) <= TENSORS[device] * np.linalg.norm(values), key


def expect_close(ours: Path, theirs: Path, device: str, update: int = UPDATES) -> None:
    expect_close_records(records(ours), records(theirs), device)
    expect_close_tensors(ours, theirs, device, update)


# Another order of the same sums, those of 84 sequences' gradients, of losses and of squares, 60 updates long. Measured
# in f64: records 6e-15, tensors 6e-13 (small singular values of a gradient are what Newton-Schulz enlarges). In f32 it
# is the same times 2^29, the ratio of the roundings: records 4e-6, tensors 3e-4. The bounds are a few times that; an
# error of meaning, such as one sequence left out (1/84) or a layer updated twice, is far above, and f64 would show it.
RECORDS = {"reference": 5e-14, "cpu": 5e-14 * 2**29}
TENSORS = {"reference": 2e-12, "cpu": 2e-12 * 2**29}


# Each head on two numbers of ranks, each number with two heads; in f32, where only the collectives' type is another, on
# one; in a full run all.
RANKS = {"adamw": (2, 7), "rownorm": (3, 4), "projected": (4, 7), "muon": (2, 3)}


@pytest.mark.parametrize("device", RECORDS)
@pytest.mark.parametrize("head", RANK_HEADS)
def test_any_number_of_ranks(head: str, device: str, rank_data: Path, tmp_path: Path) -> None:
    config = config_for(rank_data, tmp_path, optimizer__head=RANK_HEADS[head], device=device)
    right = train(tmp_path, "one", config, 1)
    for ranks in (2, 3, 4, 7) if FULL else RANKS[head][: 2 if device == "reference" else 1]:
        output = train(tmp_path, f"ranks{ranks}", config, ranks)
        expect_close(output, right, device)
        (session,) = read_json(output / "run.json")["sessions"]
        assert session["ranks"] == ranks
        assert "MPI" in session["exchange"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_same_number_of_ranks_gives_the_same_bits(ranks: int, rank_data: Path, tmp_path: Path) -> None:
    config = config_for(rank_data, tmp_path, optimizer__head=ROWNORM | {"projected": True}, schedule__updates=12)
    first, second = (train(tmp_path, name, config, ranks) for name in ("first", "second"))
    assert records(first) == records(second)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint(first, 12) / name).read_bytes() == (checkpoint(second, 12) / name).read_bytes()


@pytest.mark.parametrize("role", ["hidden", "embedding"])
@pytest.mark.parametrize("algorithm", ["adamw", "rownorm", "muon"])
def test_any_optimizer_in_any_role(role: str, algorithm: str, rank_data: Path, tmp_path: Path) -> None:
    """Layers are owned whole, so that a projection's row means are of one matrix; embedding rows by blocks."""
    optimizer = {"algorithm": algorithm, "lr": 3e-3} | ({"projected": True} if algorithm == "rownorm" else {})
    changes = {f"optimizer__{role}": optimizer, "schedule__updates": 12, "evaluation__every": 0}
    config = config_for(rank_data, tmp_path, device="reference", **changes)
    expect_close(train(tmp_path, "three", config, 3), train(tmp_path, "one", config, 1), "reference", update=12)


# ---- which examples ----


def expected_groups(seed: int, updates: int) -> list[tuple[int, int]]:
    """(shard, group of consecutive sequences) of each update, by NumPy itself (PAPER 3)."""

    def shuffled(count: int, *key: int) -> np.ndarray:
        order = np.arange(count, dtype=np.uint32)
        np.random.default_rng(np.random.SeedSequence([seed, *key])).shuffle(order)
        return order

    groups: list[tuple[int, int]] = []
    epoch = 0
    while len(groups) < updates:
        for shard in shuffled(len(GROUPS), epoch, 0):
            groups += [(int(shard), int(g)) for g in shuffled(GROUPS[shard], epoch, int(shard), 1)]
        epoch += 1
    return groups[:updates]


@pytest.fixture(scope="module")
def telling(rank_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    """A config whose loss of an update tells which examples it read, and those losses as NumPy finds them.

    Every token has the same embedding and the blocks are zero, so the head sees one hidden state (after RMSNorm: ones)
    and the logit of token v is z_v = the sum of row v of the head. The rates are zero. The loss of an update is then
    logsumexp(z) - mean of z over its targets."""
    folder = tmp_path_factory.mktemp("telling")
    width, vocab = MODEL["width"], MODEL["vocab_size"]
    z = np.random.default_rng(3).normal(size=vocab)
    weights = {"embed.weight": np.ones((vocab, width)), "lm_head.weight": np.tile(z[:, None] / width, (1, width))}
    for layer in range(MODEL["layers"]):
        for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            rows, cols = {"mlp.gate": (4, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}.get(name, (1, 1))
            weights[f"blocks.{layer}.{name}.weight"] = np.zeros((rows * width, cols * width))
    config = config_for(
        rank_data, folder, device="reference", log_every=1, init_from=str(folder / "weights.safetensors"),
        evaluation__every=0, diagnostics__hilbert_panel=[], model__norm_eps=1e-30,
        optimizer={role: {"algorithm": "adamw", "lr": 0} for role in ("hidden", "embedding", "head")},
    )  # fmt: skip
    # The names are those of the program's own parameter table.
    plan = config | {
        "output": str(folder / "names"),
        "init_from": None,
        "schedule": {"updates": 1, "warmup_updates": 0},
    }
    expect_ok(run("train", write_config(folder / "names.json", plan)))
    names = read_safetensors(checkpoint(folder / "names", 1) / "model.safetensors")
    weights = {n: weights.get(n, np.zeros(v.shape)) for n, v in names.items()}
    write_safetensors(folder / "weights.safetensors", weights)

    tokens = [np.fromfile(rank_data / f"train_{s}.bin", "<u2")[512:].astype(int) for s in range(len(GROUPS))]
    at_once = SEQUENCES * MODEL["context"]
    losses = []
    for shard, group in expected_groups(config["seed"], UPDATES):
        targets = tokens[shard][group * at_once + 1 : (group + 1) * at_once + 1]
        losses.append(float(np.log(np.exp(z).sum()) - z[targets].mean()))
    distinct = np.diff(np.sort(list(set(losses))))
    assert len(distinct) == sum(GROUPS) - 1  # the second epoch repeats some
    assert distinct.min() > 1e-7  # so a loss names its examples
    return config, losses


def losses_of(run_directory: Path) -> list[float]:
    return [r["train/loss"] for r in records(run_directory)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7] if FULL else [1, 4])  # the others: test_no_example_twice_none_lost
def test_the_same_examples(ranks: int, telling: tuple[dict[str, Any], list[float]], tmp_path: Path) -> None:
    config, losses = telling
    assert losses_of(train(tmp_path, "run", config, ranks)) == pytest.approx(losses, rel=0, abs=1e-12)


def test_no_example_twice_none_lost(telling: tuple[dict[str, Any], list[float]], tmp_path: Path) -> None:
    """Resumed with 3 and then 2 ranks: in the middle of a shard, behind a shard's boundary, in the second epoch."""
    config, losses = telling
    for ranks, last in ((1, 17), (3, 31), (2, 47), (7, UPDATES)):
        output = train(tmp_path, "run", config, ranks, "--resume", "--set", f"schedule.max_updates={last}")
    found = losses_of(output)
    assert found == pytest.approx(losses, rel=0, abs=1e-12)
    first_epoch = {round(loss, 9) for loss in found[: sum(GROUPS)]}
    assert len(first_epoch) == sum(GROUPS)  # each group of the epoch once


@pytest.mark.parametrize(
    ("head", "device"),
    [(h, d) for h in ("adamw", "projected") for d in RECORDS]
    if FULL
    else [("adamw", "cpu"), ("projected", "reference")],
)
def test_resume_on_other_ranks(head: str, device: str, rank_data: Path, tmp_path: Path) -> None:
    config = config_for(rank_data, tmp_path, optimizer__head=RANK_HEADS[head], device=device, log_every=1,
                        evaluation__every=0)  # fmt: skip
    right = train(tmp_path, "right", config, 1)
    for ranks, last in ((1, 17), (3, 40), (2, UPDATES)):
        # D is measured at every tenth update and at the last of each session, whose extra record stays.
        output = train(tmp_path, "run", config, ranks, "--resume", "--set", f"schedule.max_updates={last}")
    extra = {"diagnostics/lm_head_step/" + k for k in ("diameter_exact", "diameter_pair", "row_norm_max",
                                                       "row_norm_median")}  # fmt: skip
    ours = records(output)
    assert extra <= ours[16].keys()
    for key in extra:  # the one record that the uninterrupted run does not have
        ours[16].pop(key)
    expect_close_records(ours, records(right), device)
    expect_close_tensors(output, right, device)
    assert [s["ranks"] for s in read_json(output / "run.json")["sessions"]] == [1, 3, 2]


# ---- faults ----


def expect_gone(pids: list[int], seconds: float) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds)


def test_kill_of_any_rank(data: Path, tmp_path: Path) -> None:
    """SIGKILL of one of two ranks, in and out of checkpoint writing: the other ends within 30 s, and the resumed run is
    the uninterrupted one bit for bit."""
    model = {"vocab_size": 4000, "context": 16, "layers": 1, "width": 64, "head_dim": 32}
    changes = {"model": model, "batch": {"sequences": 4, "micro_batch": 2}, "checkpoint": {"every": 1, "keep": 2}}
    right = tiny_config(data, tmp_path / "right", **changes)
    expect_ok(run("train", write_config(tmp_path / "right.json", right), ranks=2))
    output = tmp_path / "killed"
    config = write_config(tmp_path / "killed.json", right | {"output": str(output)})
    rng = random.Random(4)  # noqa: S311
    kills, killed, unfinished = (30 if FULL else 6), 0, 0
    for kill in range(kills):
        target = rng.randrange(1, 3) + kill * 18 // kills
        within_checkpoint = kill % 2 == 1
        process = start("train", config, "--resume", ranks=2)
        wait_for(lambda p=process: len(processes_of(p)) == 2)

        def reached(target: int = target, within: bool = within_checkpoint) -> bool:
            folder = output / "checkpoints"
            if max((int(p.name[7:]) for p in folder.glob("update-*")), default=0) < target - 1:
                return False
            return not within or any(folder.glob(".*.unfinished"))

        wait_for(lambda p=process, r=reached: r() or p.poll() is not None)
        if process.poll() is not None:
            continue
        if not within_checkpoint:
            time.sleep(rng.uniform(0, 0.03))
        pids = processes_of(process)
        try:
            os.kill(rng.choice(pids), signal.SIGKILL)
        except (IndexError, ProcessLookupError):  # it had ended
            process.wait(60)
            continue
        code = process.wait(30)
        expect_gone(pids, 30)
        killed += code != 0
        unfinished += any(output.rglob("*.unfinished"))
    assert killed >= kills - 2  # the last may have come too late
    assert unfinished >= 1
    expect_ok(run("train", config, "--resume", ranks=2))
    assert records(output) == records(tmp_path / "right")
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (checkpoint(p, 24) / name for p in (output, tmp_path / "right"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert checkpoints(output) == ["update-00000023", "update-00000024"]


def long_config(data: Path, output: Path, **changes: object) -> dict[str, Any]:
    base = {"schedule__updates": 100_000, "log_every": 1, "checkpoint__every": 0, "evaluation__every": 0,
            "diagnostics__diameter_every": 0, "diagnostics__hilbert_panel": [], "batch__micro_batch": 2}  # fmt: skip
    return tiny_config(data, output, **(base | changes))


def wait_for_records(output: Path) -> None:
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 2000)


# mpirun forwards SIGUSR1 only; of the others it kills its ranks after a second.
STOPS = [(n, who) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) for who in ("rank 0", "rank 2", "all")]
if not FULL:
    STOPS = [(signal.SIGINT, "rank 0"), (signal.SIGTERM, "rank 2"), (signal.SIGUSR1, "all")]


@pytest.mark.parametrize(("number", "who"), [*STOPS, (signal.SIGUSR1, "mpirun")])
def test_stop_signal(number: signal.Signals, who: str, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start("train", write_config(tmp_path / "config.json", long_config(data, output)), ranks=3)
    wait_for_records(output)
    pids = processes_of(process)
    assert len(pids) == 3
    targets = {"rank 0": pids[:1], "rank 2": pids[2:], "all": pids, "mpirun": [process.pid]}[who]
    for pid in targets:
        os.kill(pid, number)
    assert process.wait(60) == 128 + number
    expect_gone(pids, 30)
    [last] = checkpoints(output)
    stopped = int(last.removeprefix("update-"))
    assert records(output)[-1]["progress/update"] == stopped  # all at the same update, none behind it
    session = read_json(output / "run.json")["sessions"][-1]
    assert (session["outcome"], session["last_update"]) == (f"stopped by {number.name}", stopped)
    path = write_config(tmp_path / "config.json", long_config(data, output))
    expect_ok(run("train", path, "--resume", "--set", f"schedule.max_updates={stopped + 2}", ranks=2))
    assert checkpoints(output)[-1] == f"update-{stopped + 2:08}"


def test_an_error_ends_ranks_that_mpirun_would_kill(data: Path, tmp_path: Path) -> None:
    """As a user starts it, without what the tests tell mpirun: it kills what is left when one rank ends with an error,
    which must not happen before rank 0 has said why."""
    path = write_config(tmp_path / "config.json", long_config(data, tmp_path / "run", model__init_std=1e30))
    words = ["mpirun", "--oversubscribe", "-n", "3", EXE, "train", path]
    for _ in range(3):
        done = subprocess.run(words, capture_output=True, timeout=60, env=environment(), check=False)
        assert done.returncode == 4
        lines = [line for line in done.stderr.decode().splitlines() if line.startswith("[numbers] ")]
        assert len(lines) == 1, done.stderr.decode()
        assert "update" in lines[0]
        shutil.rmtree(tmp_path / "run")


def test_disk_full_under_two_ranks(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = long_config(data, output, checkpoint__every=5, log_every=5, model__vocab_size=4000)
    path = write_config(tmp_path / "config.json", config)
    process = start("train", path, ranks=2, stderr=subprocess.PIPE)
    wait_for(lambda: any((output / "checkpoints").glob("update-*")))
    for pid in processes_of(process):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    _, err = process.communicate(timeout=60)
    result = Result(process.returncode, "", err.decode())
    expect_error(result, 3, ".safetensors", "File too large")
    assert not list(output.rglob("*.unfinished"))
    stopped = int(checkpoints(output)[-1].removeprefix("update-"))
    expect_ok(run("train", path, "--resume", "--set", f"schedule.max_updates={stopped + 5}", ranks=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_that_is_not_finite_anywhere(ranks: int, data: Path, tmp_path: Path) -> None:
    """The second moments of the embedding's last rows, which the last rank owns, overflow f32; loss and norm do not: no
    checkpoint, from any rank."""
    config = tiny_config(data, tmp_path / "run", batch__micro_batch=2, schedule__updates=4, clip_norm=1e30,
                         model__norm_eps=1e-38, schedule__warmup_updates=0)  # fmt: skip
    config["schedule"].pop("warmup_fraction", None)
    config["optimizer"]["embedding"] = ADAMW
    path = write_config(tmp_path / "config.json", config)
    expect_ok(run("train", path, "--set", f"output={tmp_path / 'names'}", "--set", "schedule.max_updates=1"))
    weights = read_safetensors(checkpoint(tmp_path / "names", 1) / "model.safetensors")
    weights["embed.weight"][30:] *= np.float32(1e-18)  # the norm makes them whole again, and their gradients large
    weights["lm_head.weight"] *= np.float32(1e6)
    write_safetensors(tmp_path / "weights.safetensors", weights)
    result = run("train", path, "--set", f"init_from={tmp_path / 'weights.safetensors'}", ranks=ranks)
    where = " (on rank 1 of 2)" if ranks == 2 else "written"
    expect_error(
        result, 4, "[checkpoint] update", "embed.weight.exp_avg_sq is not finite; no checkpoint written", where
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# ---- ranks that were not started alike ----


def together(*programs: list[str], timeout: float = 60) -> Result:
    """Each program as one rank of a common run, with its own working directory and arguments."""
    words = command(ranks=2)[:-3]  # mpirun and its options
    for i, program in enumerate(programs):
        words += ([":"] if i else []) + ["-n", "1", *program]
    done = subprocess.run(words, capture_output=True, timeout=timeout, env=environment(), check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_ranks_with_different_configs(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", tiny_config(data, tmp_path / "run", batch__micro_batch=2))
    train_it = [str(EXE), "train", str(path)]
    result = together(train_it, [*train_it, "--set", "optimizer.head.lr=0.5"])
    expect_error(result, 2, "[ranks] not started alike: config.optimizer.head.lr: 0.0032 on rank 0, 0.5 on rank 1")
    result = together(train_it, [*train_it, "--resume"])
    expect_error(result, 2, "[ranks] not started alike: --resume: false on rank 0, true on rank 1")
    result = together(train_it, [*train_it, "--set", "optimizer.head.lr=high"])
    expect_error(result, 2, "optimizer.head.lr", "(on rank 1 of 2)")
    for other, named in ((["inspect", "x"], "inspect"), (["train", "--bogus"], "[usage] "), ([], "[usage] no")):
        result = together(train_it, [str(EXE), *other])
        expect_error(result, 2, "[ranks] not started alike: train on rank 0, ", named, " on rank 1")
        expect_error(together([str(EXE), *other], train_it), 2, "[ranks] not started alike: ", "train on rank 1")
    assert not (tmp_path / "run").exists()


def test_ranks_that_see_different_data(data: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(data, tmp_path / name / "data")
    write_shard(tmp_path / "b" / "data" / "train_2.bin", 3000, seed=2)
    (tmp_path / "c" / "data" / "val_1.bin").write_bytes(shard_bytes(np.arange(50), magic=1))
    config = tiny_config(Path("data"), tmp_path / "run", batch__micro_batch=2)
    path = write_config(tmp_path / "config.json", config)

    def on(name: str) -> list[str]:
        return ["-wdir", str(tmp_path / name), str(EXE), "train", str(path)]

    expect_error(together(on("a"), on("b")), 3, "[ranks] do not see the same shards: train", "on rank 1")
    expect_error(together(on("a"), on("c")), 3, "val_1.bin", "(on rank 1 of 2)")
    assert not (tmp_path / "run").exists()


OTHER_LAUNCHERS = {
    "MPICH": {"PMI_RANK": "0", "PMI_SIZE": "4"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"},
    "srun": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    "torchrun": {"RANK": "0", "WORLD_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", OTHER_LAUNCHERS)
def test_launcher_of_another_mpi(launcher: str, data: Path, tmp_path: Path) -> None:
    """Each of its processes is rank 0 of 1 to our MPI library, and would train the whole model."""
    path = write_config(tmp_path / "config.json", tiny_config(data, tmp_path / "run"))
    variables = OTHER_LAUNCHERS[launcher]
    size = next(f"{name}={value}" for name, value in variables.items() if value == "4")
    expect_error(run("train", path, env=variables), 5, "[mpi]", launcher, "4 processes", size, "rank 0 of 1")
    others = {name: "2" if value == "0" else value for name, value in variables.items()}
    expect_error(run("train", path, env=others), 5, "[mpi]", launcher)  # they cannot know of each other
    assert not (tmp_path / "run").exists()


def test_a_launcher_of_one_process_is_none(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", tiny_config(data, tmp_path / "run"))
    expect_ok(run("train", path, "--set", "schedule.max_updates=1", env={"PMI_RANK": "0", "PMI_SIZE": "1"}))


@pytest.mark.parametrize("words", [("eval", "run"), ("inspect", "run"), ("train", "no.json"), ("frobnicate",)])
def test_one_line_of_any_command(words: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*words, ranks=3, cwd=tmp_path)
    expect_error(result, 3 if words[0] == "train" else 2)


def test_dry_run_of_ranks_prints_once(data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", tiny_config(data, tmp_path / "run", batch__micro_batch=2))
    one = expect_ok(run("train", path, "--dry-run")).out
    two = expect_ok(run("train", path, "--dry-run", ranks=2)).out
    assert "ranks                  2 (memory: of rank 0)\n" in two
    assert two.count("memory: optimizer state") == 1
    assert "44.0 KiB" in one  # 10144 weights and one more moment for the embedding, in f32
    assert "22.0 KiB" in two


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    """Seven ranks and five tokens: two ranks own no row of embedding and head."""
    folder = tmp_path / "data"
    write_shard(folder / "train_1.bin", 3000, vocab=5, seed=1)
    write_shard(folder / "val_1.bin", 300, vocab=5, seed=2)
    for head in (ADAMW, ROWNORM | {"projected": True}):
        config = config_for(folder, tmp_path, optimizer__head=head, device="reference", schedule__updates=6,
                            model=MODEL | {"vocab_size": 5}, evaluation__every=2, evaluation__tokens=80,
                            diagnostics__hilbert_panel=[[0, 5], [70, 80]])  # fmt: skip
        name = head["algorithm"]
        right = train(tmp_path, f"one-{name}", config, 1)
        expect_close(train(tmp_path, f"seven-{name}", config, 7), right, "reference", update=6)
