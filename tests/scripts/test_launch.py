"""scripts/paper.py launch with the real trainer: killed, stopped, failing, under mpirun, and as a Slurm array that
stubs of Slurm's commands execute here."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "paper.py"
EXE = Path(os.environ.get("ROWNORM_EXE", ROOT / "build" / "release" / "rownorm")).resolve()
NAMES = ["tiny-adamw-seed0", "tiny-adamw-seed1", "tiny-rownorm-seed0", "tiny-rownorm-seed1"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

pytestmark = pytest.mark.skipif(not EXE.exists(), reason=f"{EXE}: not built")


def write_shard(path: Path, count: int, seed: int) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, count
    tokens = np.cumsum(np.random.default_rng(seed).geometric(0.4, count)) % 61
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def write_study(folder: Path) -> Path:
    """Two heads, two seeds; 300 updates of a width of 16, a second or so each."""
    (folder / "data").mkdir()
    write_shard(folder / "data" / "train_1.bin", 6000, seed=1)
    write_shard(folder / "data" / "val_1.bin", 1000, seed=2)
    adamw = {"algorithm": "adamw", "lr": 4e-3}
    for head in (adamw, {"algorithm": "rownorm", "lr": 3.2e-3}):
        config: dict[str, Any] = {
            "model": {"vocab_size": 61, "context": 16, "layers": 2, "width": 16, "head_dim": 8},
            "data": {
                "train": str(folder / "data" / "train_*.bin"),
                "validation": str(folder / "data" / "val_*.bin"),
            },
            "batch": {"sequences": 12, "micro_batch": 6},
            "schedule": {"updates": 300},
            "optimizer": {"hidden": {"algorithm": "muon", "lr": 8e-3}, "embedding": adamw, "head": head},
            "evaluation": {"every": 20, "tokens": 320},
            "diagnostics": {"diameter_every": 5, "hilbert_panel": [[0, 64]]},
            "log_every": 5,
            "checkpoint": {"every": 25, "keep": 1},
            "output": "unused",
        }
        (folder / f"tiny-{head['algorithm']}.json").write_text(json.dumps(config))
    path = folder / "matrix.json"
    write_matrix(path)
    return path


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    return write_study(tmp_path)


def write_matrix(path: Path, **changes: Any) -> None:
    matrix = {"scales": ["tiny"], "heads": ["adamw", "rownorm"], "seeds": [0, 1], "ranks": 2, "device": "cpu"}
    path.write_text(json.dumps(matrix | {"runs": str(path.parent / "runs")} | changes))


def words(command: str, matrix: Path, *arguments: object) -> list[str]:
    exe = ["--exe", str(EXE)] if command in ("launch", "plan") else []
    return [sys.executable, str(SCRIPT), command, "--matrix", str(matrix), *exe, *map(str, arguments)]


def paper(
    command: str, matrix: Path, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENVIRONMENT | (env or {})
    line = words(command, matrix, *arguments)
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment, check=False)


def start(matrix: Path, *arguments: object) -> subprocess.Popen[str]:
    line = words("launch", matrix, "--runner", "local", *arguments)
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def records(folder: Path) -> list[dict[str, Any]]:
    """Without what may differ between two runs of the same updates."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith(("performance/", "memory/"))} for line in lines]


def has_measured(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") > 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What uninterrupted runs measure: by name; and the tables of them."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_study(folder)
    result = paper("launch", path, "--runner", "local", "--jobs", 2)
    assert result.returncode == 0, result.stderr
    assert all(f"[paper] {name}: finished in 0:00:" in result.stderr for name in NAMES)
    assert paper("tables", path).returncode == 0
    tables = (folder / "runs" / "results" / "tables.csv").read_text()
    return {name: records(folder / "runs" / name) for name in NAMES} | {"tables": tables}


def expect_whole(matrix: Path, whole: dict[str, Any]) -> None:
    runs = matrix.parent / "runs"
    for name in NAMES:
        assert records(runs / name) == whole[name]
    assert paper("tables", matrix).returncode == 0
    assert (runs / "results" / "tables.csv").read_text() == whole["tables"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_in_the_middle_and_started_again(matrix: Path, whole: dict[str, Any], number: signal.Signals) -> None:
    runs = matrix.parent / "runs"
    process = start(matrix)
    wait_for(lambda: has_measured(runs / NAMES[1]))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    # The trainer does not outlive the launcher: it stops behind a checkpoint.
    wait_for(lambda: "SIGUSR1" in (runs / NAMES[1] / "run.json").read_text())
    assert not (runs / NAMES[2]).exists()

    result = paper("launch", matrix, "--runner", "local")
    assert result.returncode == 0, result.stderr
    assert f"[paper] {NAMES[0]}: finished already" in result.stderr
    assert f"[paper] {NAMES[1]}: resumed, it had reached update" in result.stderr
    assert f"[paper] {NAMES[2]}: started" in result.stderr
    expect_whole(matrix, whole)
    again = paper("launch", matrix, "--runner", "local")
    assert again.stderr.splitlines() == [f"[paper] {name}: finished already" for name in NAMES]


def test_two_launchers_share_the_work(matrix: Path, whole: dict[str, Any]) -> None:
    first = start(matrix)
    wait_for(lambda: has_measured(matrix.parent / "runs" / NAMES[0]))
    second = paper("launch", matrix, "--runner", "local")
    _, errors = first.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), errors + second.stderr
    assert f"{NAMES[0]}: in use by another process; waiting for it" in second.stderr
    expect_whole(matrix, whole)


def test_a_run_is_started_by_one_launcher_alone(matrix: Path, whole: dict[str, Any]) -> None:
    """A trainer that needs a while before it locks its directory, and three launchers that come at once."""
    slow = matrix.parent / "slow"
    slow.write_text(f'#!/bin/sh\nsleep 0.3\nexec "{EXE}" "$@"\n')
    slow.chmod(0o755)
    launchers = [start(matrix, "--exe", slow) for _ in range(3)]
    errors = [launcher.communicate(timeout=120)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], "".join(errors)
    for name in NAMES:
        assert "".join(errors).count(f"[paper] {name}: started") == 1
    expect_whole(matrix, whole)


def test_a_failed_run_is_reported_and_the_others_go_on(matrix: Path) -> None:
    path = matrix.parent / "tiny-adamw.json"
    good = path.read_text()
    path.write_text(good.replace('"lr": 0.008', '"lr": 1e38'))
    result = paper("launch", matrix, "--runner", "local", "--only", "seed=0")
    assert result.returncode == 4, result.stderr
    log = matrix.parent / "runs" / "logs" / f"{NAMES[0]}.log"
    assert f"[paper] {NAMES[0]}: failed with exit 4; the end of {log}:\n    " in result.stderr
    assert "    [numbers] update" in result.stderr
    assert f"[paper] {NAMES[2]}: finished in" in result.stderr
    assert f"{NAMES[0]}    failed: [numbers] update" in paper("status", matrix).stdout
    # Tried again, and reported once more before.
    again = paper("launch", matrix, "--runner", "local", "--only", "seed=0")
    assert again.returncode == 4
    assert f"{NAMES[0]}: failed before ([numbers] update" in again.stderr
    assert f"{NAMES[2]}: finished already" in again.stderr


def test_a_finished_run_of_another_configuration_is_not_skipped(matrix: Path) -> None:
    """Nothing is started: its numbers would pass for those of this one."""
    only = ("--only", "adamw,seed=1")
    finished = paper(
        "launch", matrix, "--runner", "local", *only, "--set", "schedule.updates=20", "--set", "log_every=7"
    )
    assert finished.returncode == 0, finished.stderr
    file = matrix.parent / "runs" / NAMES[1] / "config.json"
    for runner in ("local", "slurm"):
        result = paper("launch", matrix, "--runner", runner, "--dry-run")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.splitlines() == [
            f"[paper] {file}: finished with another configuration: schedule.updates: 20, not 300; launch into another "
            "folder (--runs) or leave it out (--only)"
        ]
    again = paper("launch", matrix, "--runner", "local", *only, "--set", "schedule.updates=20")
    assert (again.returncode, again.stderr) == (0, f"[paper] {NAMES[1]}: finished already\n")
    # One of two alternatives: --set of the one drops the other.
    again = paper("launch", matrix, "--runner", "local", *only, "--set", "schedule.tokens_per_parameter=2")
    assert "schedule.tokens_per_parameter: null, not 2;" in again.stderr
    edited = json.loads(file.read_text()) | {"seed": 0}
    file.write_text(json.dumps(edited))
    again = paper("launch", matrix, "--runner", "local", *only, "--set", "schedule.updates=20")
    assert (again.returncode, "seed: 0, not 1;" in again.stderr) == (2, True)


def test_nothing_is_started_where_a_config_is_wrong(matrix: Path, slurm: Path) -> None:
    path = {"PATH": f"{slurm}:{os.environ['PATH']}"}
    for runner in ("local", "mpirun", "slurm"):
        result = paper("launch", matrix, "--runner", runner, "--set", "optimizer.head.lrr=1", env=path)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"[paper] {NAMES[0]}: --dry-run: [config] ")
        assert "lrr" in line
    result = paper("launch", matrix, "--runner", "slurm", "--set", "batch.micro_batch=12", env=path)  # of 12, two ranks
    assert result.returncode == 2
    # The release build has no module for GPUs beside it: 18 jobs would queue for days, and then fail.
    exe = matrix.parent / "rownorm"
    exe.symlink_to(EXE)
    write_matrix(matrix, device="cuda")
    result = paper("launch", matrix, "--runner", "slurm", "--exe", exe, env=path)
    assert result.returncode == 5
    assert result.stderr.endswith(
        "/librownorm_cuda.so: not there, device cuda needs it; build the preset cuda and give --exe "
        "build/cuda/rownorm\n"
    )
    assert not (matrix.parent / "runs").exists()


def test_missing_data_are_named_or_made(matrix: Path) -> None:
    data = matrix.parent / "data"
    made = matrix.parent / "made"
    data.rename(made)
    command = f"{matrix.parent / 'make.py'} --from '{made}'"
    (matrix.parent / "make.py").write_text(f"import shutil, sys\nshutil.copytree(sys.argv[2], {str(data)!r})\n")
    pattern = data / "train_*.bin"
    for spec, hint in ((None, ""), ({"command": command, "automatic": False}, f"; get them with: {command}")):
        write_matrix(matrix, **({"data": spec} if spec else {}))
        result = paper("launch", matrix, "--runner", "local")
        assert (result.returncode, result.stderr) == (3, f"[paper] {pattern}: no shard{hint}\n")
    write_matrix(matrix, data={"command": command, "automatic": True}, seeds=[0])
    result = paper("launch", matrix, "--runner", "local", "--only", "rownorm")
    assert result.returncode == 0, result.stderr
    assert f"no data yet: {command}" in result.stderr
    # Another number of shards is another order of the data.
    write_matrix(matrix, data={"command": command, "automatic": False, "training_shards": 3})
    result = paper("launch", matrix, "--runner", "local", "--only", "adamw")
    assert result.returncode == 3
    assert f"{pattern}: 1 shards, the runs need 3" in result.stderr


def test_making_data_ends_with_the_launcher(matrix: Path) -> None:
    """However that ends."""
    (matrix.parent / "data").rename(matrix.parent / "away")
    script, began = matrix.parent / "make.py", matrix.parent / "began"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    write_matrix(matrix, data={"command": str(script), "automatic": True})
    process = start(matrix)
    wait_for(lambda: began.exists() and began.read_text())
    process.kill()
    process.communicate(timeout=60)
    maker = Path("/proc") / began.read_text() / "stat"
    wait_for(lambda: not maker.exists() or ") Z " in maker.read_text(), 30)


@pytest.mark.parametrize("name", ["hosts.sh", "slurm.sh"])
def test_launching_scripts_say_how_they_are_called(name: str) -> None:
    bash = shutil.which("bash")
    assert bash
    for arguments, code in ((["--help"], 0), ([], 2)):
        command = [bash, ROOT / "scripts" / "launch" / name, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == code
        assert f"scripts/launch/{name} " in (result.stderr if code else result.stdout)
        assert "configs/paper/640m-rownorm.json" in (result.stderr if code else result.stdout)


def test_mpirun(matrix: Path) -> None:
    arguments = ("launch", matrix, "--runner", "mpirun", "--only", "rownorm,seed=1")
    dry = paper(*arguments, "--dry-run", "--set", "log_every=7")
    run = matrix.parent / "runs" / NAMES[3]
    sets = f"--set device=cpu --set seed=1 --set name={NAMES[3]} --set output={run} --set log_every=7 --resume"
    assert dry.stdout == f"mpirun -n 2 --bind-to none {EXE} train {matrix.parent / 'tiny-rownorm.json'} {sets}\n"
    assert not run.exists()
    options = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # the machine may have one core
    result = paper(*arguments, env=options)
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "run.json").read_text())["sessions"][0]["ranks"] == 2
    assert records(run)[-1]["progress/update"] == 300


# ---- Slurm

SBATCH = """#!/usr/bin/env python3
\"\"\"Runs the tasks of the array one after the other, again while they are requeued. If a file `preempt` names
a run's metrics, the first task that writes them gets SIGUSR1, to the batch shell alone, as --signal=B:USR1 says.\"\"\"
import os, signal, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
*options, script = sys.argv[1:]
text = Path(script).read_text()
assert "#SBATCH --signal=B:USR1@" in text and "#SBATCH --requeue" in text
(here / "options").write_text(" ".join(options))
(array,) = [option[8:] for option in options if option.startswith("--array=")]
for task in array.split(","):
    while True:
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_JOB_ID": "77"}
        output = (here / "output").open("ab")
        process = subprocess.Popen(["bash", script], env=environment, stdout=output, stderr=output)
        if (here / "preempt").exists():
            metrics = Path((here / "preempt").read_text())
            while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\\n") > 8):
                time.sleep(0.002)
            if process.poll() is None:
                (here / "preempt").unlink()
                process.send_signal(signal.SIGUSR1)
        code = process.wait()
        with (here / "codes").open("a") as codes:
            codes.write(f"{task}:{code} ")
        if not (here / "requeued").exists():
            break
        assert (here / "requeued").read_text() == f"requeue 77_{task}\\n"
        (here / "requeued").unlink()
print("Submitted batch job 77")
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" >"$(dirname "$0")/requeued"\n'
SQUEUE = '#!/bin/bash\necho "$@" >"$(dirname "$0")/squeue-options"\ncat "$(dirname "$0")/queued" 2>/dev/null || true\n'


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    folder = tmp_path / "slurm bin"  # with a space
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def test_slurm_array_preempted_and_requeued(matrix: Path, slurm: Path, whole: dict[str, Any]) -> None:
    runs = matrix.parent / "runs"
    path = {"PATH": f"{slurm}:{os.environ['PATH']}"}
    (slurm / "preempt").write_text(str(runs / NAMES[2] / "metrics.jsonl"))
    (slurm / "queued").write_text("1\n")
    result = paper("launch", matrix, "--runner", "slurm", "--sbatch=--partition=gpu", env=path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        f"[paper] {NAMES[1]}: queued already",
        f"[paper] Submitted batch job 77: 3 runs, {runs / 'launch.slurm'}",
    ]
    assert (slurm / "options").read_text() == "--array=0,2,3 --partition=gpu"
    assert "--me --array --noheader --name=rownorm-" in (slurm / "squeue-options").read_text()
    assert (slurm / "codes").read_text() == "0:0 2:0 2:0 3:0 "  # 2: queued again, then finished
    outcomes = [session["outcome"] for session in json.loads((runs / NAMES[2] / "run.json").read_text())["sessions"]]
    assert outcomes == ["stopped by SIGUSR1", "finished"]
    assert (slurm / "output").read_text() == "stopped with exit 138: queued again to resume\n"

    (slurm / "queued").unlink()
    result = paper("launch", matrix, "--runner", "slurm", env=path)
    assert (slurm / "options").read_text() == "--array=1"
    expect_whole(matrix, whole)


def test_slurm_failure_is_not_requeued(matrix: Path, slurm: Path) -> None:
    path = {"PATH": f"{slurm}:{os.environ['PATH']}"}
    (matrix.parent / "tiny-adamw.json").write_text(
        (matrix.parent / "tiny-adamw.json").read_text().replace('"lr": 0.008', '"lr": 1e38')
    )
    assert paper("launch", matrix, "--runner", "slurm", "--only", "adamw,seed=1", env=path).returncode == 0
    assert (slurm / "codes").read_text() == "1:4 "
    result = paper("launch", matrix, "--runner", "slurm", "--only", "adamw,seed=1", env=path)
    assert f"{NAMES[1]}: failed before ([numbers] update" in result.stderr


def test_what_is_queued_is_known_by_the_runs(matrix: Path, slurm: Path) -> None:
    """Task N of another matrix is another run, also in the same folder."""
    path, names = {"PATH": f"{slurm}:{os.environ['PATH']}"}, []
    (slurm / "queued").write_text("0\n1\n2\n3\n")
    for seeds in ([0, 1], [1, 0]):
        write_matrix(matrix, seeds=seeds)
        assert paper("launch", matrix, "--runner", "slurm", env=path).returncode == 0
        names.append((slurm / "squeue-options").read_text())
    assert names[0] != names[1]
    write_matrix(matrix, runs=str(matrix.parent / "100%"))
    result = paper("launch", matrix, "--runner", "slurm", "--dry-run")
    assert result.returncode == 2
    assert result.stderr == f"[paper] {matrix.parent}/100%: '%' in it; Slurm takes no such folder for its logs\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slurm_script_is_valid(matrix: Path, tmp_path: Path, device: str) -> None:
    write_matrix(matrix, device=device, ranks=8, runs=str(tmp_path / "it's a folder"))
    result = paper("launch", matrix, "--runner", "slurm", "--dry-run", "--only", "seed=1")
    assert result.returncode == 0, result.stderr
    script, _, command = result.stdout.rstrip("\n").rpartition("\n\n")
    assert command.startswith("sbatch --array=1,3 ")
    assert not (tmp_path / "it's a folder").exists()
    file = tmp_path / "launch.slurm"
    file.write_text(script + "\n")
    bash = shutil.which("bash")
    assert bash
    assert subprocess.run([bash, "-n", file], check=False).returncode == 0
    for line in (
        "--array=0-3",
        "--nodes=1",
        "--ntasks-per-node=8",
        "--time=24:00:00",
        "--requeue",
        "--open-mode=append",
    ):
        assert f"#SBATCH {line}" in script.splitlines()
    assert 'srun --mpi="${ROWNORM_SLURM_MPI:-pmix}" --cpu-bind=none --kill-on-bad-exit=1 ' in script
    assert ("#SBATCH --gpus-per-node=8" in script) == (device == "cuda")
    shellcheck = shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("no shellcheck here: scripts/setup.sh --lint")
    checked = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_no_slurm_here(matrix: Path, tmp_path: Path) -> None:
    result = paper("launch", matrix, "--runner", "slurm", env={"PATH": str(tmp_path)})
    assert result.returncode == 5
    assert result.stderr == "[paper] squeue: not found, --runner slurm needs Slurm\n"
