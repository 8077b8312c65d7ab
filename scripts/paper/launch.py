"""Starts the runs: one after the other here, under mpirun, or as a Slurm array. Standard library only.

Every run is started with --resume, so that launching again does what is left: finished runs are skipped, the others
continue at their newest checkpoint. A run's output goes to RUNS/logs/NAME.log.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from history import LOSS, USAGE, ScriptError, read_object

from .matrix import ROOT, Matrix, Run, config_differences, flat, intended_config, listed, read_commented_json
from .plan import dry_run, train_arguments
from .state import FAILED, duration, in_use, is_finished, state_of

COMMUNICATION = 5  # the exit code of what a launcher's absence is
LOG_END = 12  # lines shown of a run that failed
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # prctl(2)


class Plan(NamedTuple):
    exe: Path
    matrix: Matrix
    overrides: list[str]
    ranks: int

    @property
    def device(self) -> str:
        """The last one that is said."""
        said = [word.removeprefix("device=") for word in self.overrides if word.startswith("device=")]
        return [self.matrix.device, *said][-1]

    def command(self, run: Run) -> list[str]:
        return [str(self.exe), *train_arguments(self.matrix, run, self.overrides), "--resume"]


def say(message: str) -> None:
    print(f"[paper] {message}", file=sys.stderr, flush=True)


def log_of(matrix: Matrix, run: Run) -> Path:
    return matrix.folder / "logs" / f"{run.name}.log"


def log_end(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [f"    {line}" for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_END:]]


def report_failure(matrix: Matrix, run: Run, what: str) -> None:
    log = log_of(matrix, run)
    say("\n".join([f"{run.name}: {what}; the end of {log}:", *log_end(log)]))


# ---- before anything is started


def check_program(plan: Plan, runs: list[Run], ranks: int) -> None:
    """Every config is right for the program, which has the device's module beside it."""
    module = plan.exe.parent / "librownorm_cuda.so"
    if plan.device == "cuda" and not module.exists():
        raise ScriptError(
            f"{module}: not there, device cuda needs it; build the preset cuda and give --exe build/cuda/rownorm",
            COMMUNICATION,
        )
    checked = set()
    for run in runs:
        if run.config not in checked:
            dry_run(plan.exe, plan.matrix, run, ranks, plan.overrides)
            checked.add(run.config)


def check_finished(plan: Plan, run: Run) -> None:
    """A finished run is what would be started now: else its numbers would pass for those of another configuration."""
    path = run.folder / "config.json"
    if other := config_differences(flat(read_object(path)), intended_config(run, plan.overrides)):
        raise ScriptError(
            f"{path}: finished with another configuration: {listed(other)}; launch into another folder (--runs) or "
            "leave it out (--only)",
            USAGE,
        )


def shards_of(run: Run) -> dict[str, tuple[str, int]]:
    """Role -> pattern in the config, number of files that match it."""
    config = read_commented_json(run.config)
    found = {}
    for role in ("train", "validation"):
        pattern = config.get("data", {}).get(role)
        if not isinstance(pattern, str):
            raise ScriptError(f"{run.config}: data.{role}: missing", USAGE)
        path = ROOT / pattern
        found[role] = pattern, len(list(path.parent.glob(path.name)))
    return found


def check_data(matrix: Matrix, runs: list[Run], may_make: bool) -> None:
    """Every shard is there, or the matrix says how to make them and that this may be done unasked."""
    wanted = matrix.data.training_shards if matrix.data else None
    for run in {(run.scale, run.head): run for run in runs}.values():
        for role, (pattern, count) in shards_of(run).items():
            enough = count == wanted if wanted and role == "train" else count > 0
            if enough:
                continue
            if matrix.data and matrix.data.automatic and may_make:
                make_data(matrix.data.command)
                return check_data(matrix, runs, may_make=False)
            need = f"{count} shards, the runs need {wanted}" if wanted and role == "train" else "no shard"
            hint = f"; get them with: {matrix.data.command}" if matrix.data else ""
            raise ScriptError(f"{pattern}: {need}{hint}")
    return None


def make_data(command: str) -> None:
    script, *arguments = shlex.split(command)
    python = ROOT / ".venv" / "bin" / "python"
    say(f"no data yet: {command}")
    command_line = [python if python.exists() else sys.executable, script, *arguments]
    code = subprocess.run(command_line, cwd=ROOT, preexec_fn=lambda: end_with_parent(signal.SIGTERM)).returncode
    if code != 0:
        raise ScriptError(f"{command}: ended with exit {code}, see above", code)


# ---- here


def end_with_parent(number: signal.Signals = signal.SIGUSR1) -> None:
    """In the child: SIGUSR1 (write a checkpoint and stop) when the launcher dies, however it dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def claim(matrix: Matrix, run: Run) -> int | None:
    """A lock on the run (flock), as a descriptor that its process inherits: of two launchers one starts it, and what
    a killed launcher leaves behind keeps it until it has ended. None: taken by another."""
    descriptor = os.open(matrix.folder / "logs" / f"{run.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if in_use(run.folder):  # by `rownorm train`, started by hand
        os.close(descriptor)
        return None
    return descriptor


def with_mpirun(command: Sequence[str], ranks: int) -> list[str]:
    return ["mpirun", "-n", str(ranks), "--bind-to", "none", *command]


def run_here(plan: Plan, runs: list[Run], jobs: int, mpirun: bool) -> int:
    """Runs one after the other, `jobs` at a time. Returns 0, or the exit code of the first that failed."""
    environment = os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    active: dict[Run, tuple[subprocess.Popen[bytes], float]] = {}
    asked: list[int] = []  # signals to stop
    told = 0  # of those, how many the processes have had

    def stop(number: int, _: object) -> None:
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)

    (plan.matrix.folder / "logs").mkdir(parents=True, exist_ok=True)
    waiting, code, waited_for = deque(runs), 0, set()
    while active or (waiting and not asked):
        for _ in range(len(waiting)):
            if len(active) == jobs or asked:
                break
            run = waiting.popleft()
            lock = claim(plan.matrix, run)
            if lock is None:
                if run not in waited_for:
                    say(f"{run.name}: in use by another process; waiting for it")
                    waited_for.add(run)
                waiting.append(run)
                continue
            if is_finished(run.folder):
                os.close(lock)
                say(f"{run.name}: finished meanwhile")
                continue
            update = state_of(run.folder).update
            command = plan.command(run)
            with log_of(plan.matrix, run).open("ab") as log:
                process = subprocess.Popen(
                    with_mpirun(command, plan.ranks) if mpirun else command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's ^C reaches it through stop() alone
                    preexec_fn=end_with_parent,
                    pass_fds=(lock,),
                )
            os.close(lock)
            active[run] = process, time.monotonic()
            say(f"{run.name}: {f'resumed, it had reached update {update:,}' if update else 'started'}")
        time.sleep(0.2)
        while told < len(asked):  # here, so that a process that was being started is not missed
            for process, _started in active.values():
                process.send_signal(signal.SIGUSR1)  # the one that mpirun passes on
            told += 1
        for run, (process, started) in list(active.items()):
            status = process.poll()
            if status is None:
                continue
            del active[run]
            state = state_of(run.folder)
            if status == 0:
                loss = f", {LOSS} {state.loss:.4f}" if state.loss is not None else ""
                say(f"{run.name}: {state.word} in {duration(time.monotonic() - started)}{loss}")
            elif asked:
                say(f"{run.name}: stopped at update {state.update:,}")
            else:
                exit_code = status if status > 0 else 128 - status
                report_failure(plan.matrix, run, f"failed with exit {exit_code}")
                code = code or exit_code
    return 128 + asked[0] if asked else code


# ---- Slurm


def job_name(matrix: Matrix) -> str:
    """The same for the same runs in the same order, so that a second launch sees what is queued already."""
    names = [str(matrix.folder), *(run.name for run in matrix.runs())]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"rownorm-{re.sub(r'[^A-Za-z0-9]+', '-', matrix.path.parent.name)}-{digest}"


def slurm_script(plan: Plan) -> str:
    """An array over the whole matrix: task N is run N, whichever are submitted."""
    matrix, quote = plan.matrix, shlex.quote
    runs = matrix.runs()
    if wrong := re.search(r'["%\\\x00-\x1f]', str(matrix.folder)):
        raise ScriptError(f"{matrix.folder}: {wrong[0]!r} in it; Slurm takes no such folder for its logs", USAGE)
    # As scripts/launch/slurm.sh, which says why.
    mpi = '--mpi="${ROWNORM_SLURM_MPI:-pmix}" --cpu-bind=none ' if plan.ranks > 1 else ""
    gpus = f"#SBATCH --gpus-per-node={plan.ranks}\n" if matrix.device == "cuda" else ""
    cases = []
    for run in runs:
        words = " ".join(map(quote, plan.command(run)))
        cases.append(f"  {run.number}) log={quote(str(log_of(matrix, run)))}\n     run=({words}) ;;\n")
    return f"""#!/bin/bash
# Made by scripts/paper.py launch --runner slurm for {matrix.path}
# One run a task, on one node for 24 hours as in the paper. Options on sbatch's command line come first.
#SBATCH --job-name={job_name(matrix)}
#SBATCH --array=0-{len(runs) - 1}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={plan.ranks}
{gpus}#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{matrix.folder}/logs/slurm-%A_%a.log"
# Ten minutes before the time limit, and at preemption (PreemptParameters=send_user_signal).
#SBATCH --signal=B:USR1@600
set -u

case "$SLURM_ARRAY_TASK_ID" in
{"".join(cases)}  *) echo "[slurm] array task $SLURM_ARRAY_TASK_ID: not one of 0 to {len(runs) - 1}" >&2; exit 2 ;;
esac
cd {quote(str(ROOT))} || exit 3

# srun passes the signal on: every rank finishes the update, they write a checkpoint and stop with 128 + signal.
# After SIGTERM (scancel) too, but then nothing is queued again.
requeue=0 step=""
stop() {{ [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null; }}
trap 'requeue=1; stop' USR1
trap stop TERM
srun {mpi}--kill-on-bad-exit=1 "${{run[@]}}" >>"$log" 2>&1 &
step=$!
[ "$requeue" = 0 ] || stop  # asked before there was a step
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # the signal ended the wait, not the step
  wait "$step"
  code=$?
done
if [ "$requeue" = 1 ] && [ "$code" -gt 128 ]; then
  echo "stopped with exit $code: queued again to resume"
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" && exit 0
fi
exit "$code"
"""


def slurm_output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ScriptError(f"{command[0]}: not found, --runner slurm needs Slurm", COMMUNICATION) from None
    if done.returncode != 0:
        line = (done.stderr or done.stdout).strip().rsplit("\n", 1)[-1]
        raise ScriptError(f"{command[0]}: exit {done.returncode}: {line}", COMMUNICATION)
    return done.stdout


def queued_tasks(matrix: Matrix) -> set[int]:
    """Array tasks of this matrix that wait or run."""
    name = job_name(matrix)
    lines = slurm_output(["squeue", "--me", "--array", "--noheader", f"--name={name}", "--format=%K"]).split()
    return {int(word) for word in lines if word.isdigit()}


def submit(plan: Plan, runs: list[Run], options: list[str], dry: bool) -> int:
    matrix = plan.matrix
    queued = set() if dry else queued_tasks(matrix)
    for run in runs:
        if run.number in queued:
            say(f"{run.name}: queued already")
    left = [run for run in runs if run.number not in queued]
    if not left:
        return 0
    path = matrix.folder / "launch.slurm"
    array = ",".join(str(run.number) for run in left)
    command = ["sbatch", f"--array={array}", *options, str(path)]
    if dry:
        print(f"{slurm_script(plan)}\n{shlex.join(command)}")
        return 0
    (matrix.folder / "logs").mkdir(parents=True, exist_ok=True)
    path.write_text(slurm_script(plan), encoding="utf-8")
    answer = slurm_output(command).strip()
    say(f"{answer}: {len(left)} runs, {path}")
    return 0


# ---- the command


def launch(plan: Plan, runs: list[Run], runner: str, jobs: int, slurm_options: list[str], dry: bool) -> int:
    left = []
    for run in runs:
        if is_finished(run.folder):
            check_finished(plan, run)
            say(f"{run.name}: finished already")
            continue
        if not dry and (state := state_of(run.folder)).word == FAILED:
            report_failure(plan.matrix, run, f"failed before ({state.error}), starting it again")
        left.append(run)
    if not left:
        return 0
    if not dry:
        check_program(plan, left, 1 if runner == "local" else plan.ranks)
        check_data(plan.matrix, left, may_make=True)
    if runner == "slurm":
        return submit(plan, left, slurm_options, dry)
    if dry:
        for run in left:
            command = plan.command(run)
            print(shlex.join(with_mpirun(command, plan.ranks) if runner == "mpirun" else command))
        return 0
    return run_here(plan, left, jobs, mpirun=runner == "mpirun")
