"""Runs the executable as a user does, on tiny shards and a tiny config with every measurement switched on."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXE = Path(os.environ.get("ROWNORM_EXE", ROOT / "build" / "release" / "rownorm")).resolve()
FULL = os.environ.get("ROWNORM_FULL") == "1"  # the slow tests too
full_only = pytest.mark.skipif(not FULL, reason="slow: runs with ROWNORM_FULL=1")

VOCAB, CONTEXT, SEQUENCES = 61, 16, 12
TOKENS_PER_UPDATE = SEQUENCES * CONTEXT

# What may differ between two runs of the same updates.
VOLATILE = ("performance/", "memory/")


@dataclass(frozen=True)
class Result:
    code: int  # as a shell shows it; a death by signal is negative
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.rstrip("\n").rsplit("\n", 1)[-1]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    # One thread: models of this size gain nothing by more, and the tests run beside each other. Where several threads
    # matter the test says so. Passive: threads that wait for each other by spinning crawl when the cores are busy.
    # CUDA_VISIBLE_DEVICES: "device cuda" has no device, also on a machine that has one, unless
    # the tests are of it.
    # OMPI_*: mpirun wants to be told twice that it may run as root.
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip
    hidden = {} if "cuda" in os.environ.get("ROWNORM_TEST_DEVICES", "") else {"CUDA_VISIBLE_DEVICES": ""}
    return defaults | os.environ | hidden | (extra or {})


# How many ranks `rownorm train` has where a test does not say.
default_ranks = 1


def command(*arguments: object, ranks: int | None = None) -> list[str]:
    """The command line of one process, or of `train` on several ranks. mpirun adds nothing to their errors (--quiet)
    and, when one of them ends with an error, kills the others at once instead of two seconds later."""
    words = [str(EXE), *map(str, arguments)]
    if ranks is None:
        ranks = default_ranks if arguments[:1] == ("train",) else 1
    if ranks == 1:
        return words
    options = ["--quiet", "--oversubscribe", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "0"]
    return ["mpirun", *options, "-n", str(ranks), *words]


def run(
    *arguments: object,
    timeout: float = 120,
    cwd: Path | None = None,
    preexec: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    ranks: int | None = None,
) -> Result:
    done = subprocess.run(
        command(*arguments, ranks=ranks),
        capture_output=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(env),
        preexec_fn=preexec,
        check=False,
    )
    err = done.stderr.decode(errors="replace")
    err = re.sub(r"^\[warn\] Epoll .*\n", "", err, flags=re.MULTILINE)  # mpirun's, when it kills what is ending
    return Result(done.returncode, done.stdout.decode(errors="replace"), err)


def start(*arguments: object, stderr: int = subprocess.DEVNULL, ranks: int | None = None) -> subprocess.Popen[bytes]:
    words = command(*arguments, ranks=ranks)
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, env=environment())


def processes_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """The ranks' process ids, in rank order as mpirun starts them."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.0005)


def expect_ok(result: Result) -> Result:
    assert result.code == 0, result.err
    return result


HOUSE_STYLE = r"\[[a-z_ ]+\] \S"


def expect_error(result: Result, code: int, *parts: str, lines: int = 1) -> None:
    """The exit code, and one last line on stderr in the house style that holds every part."""
    assert result.code == code, f"exit {result.code}, expected {code}: {result.err[-2000:]}"
    line = result.last_line
    assert re.match(HOUSE_STYLE, line), line
    assert len([other for other in result.err.splitlines() if re.match(HOUSE_STYLE, other)]) == lines, result.err
    assert line.isprintable(), line
    for part in parts:
        assert part in line, f"{part!r} is not in: {line}"
    for word in ("please report", "terminate called", "Sanitizer", "runtime error", "exception", "Assertion"):
        assert word not in result.err, result.err[-2000:]


# ---- data ----


def shard_bytes(tokens: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.astype("<u2").tobytes()


def made_up_tokens(count: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    """Learnable and with rare tokens: each token is the one before plus a step of skewed length."""
    steps = np.random.default_rng(seed).geometric(0.4, count)
    return np.cumsum(steps) % vocab


def write_shard(path: Path, count: int, vocab: int = VOCAB, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shard_bytes(made_up_tokens(count, vocab, seed)))
    return path


def write_data(folder: Path) -> None:
    """Two training shards, of 9 and 6 updates, and two validation shards."""
    write_shard(folder / "train_1.bin", 9 * TOKENS_PER_UPDATE + 20, seed=1)
    write_shard(folder / "train_2.bin", 6 * TOKENS_PER_UPDATE + 1, seed=2)
    write_shard(folder / "val_1.bin", 10 * CONTEXT + 1, seed=3)
    write_shard(folder / "val_2.bin", 30 * CONTEXT + 5, seed=4)


# ---- config ----

ADAMW = {"algorithm": "adamw", "lr": 4e-3}
ROWNORM = {"algorithm": "rownorm", "lr": 3.2e-3}
HEADS = {"adamw": ADAMW, "rownorm": ROWNORM}


def tiny_config(data: Path, output: Path, **changes: object) -> dict[str, Any]:
    """Keyword arguments replace keys by path, with __ for the dot: batch__micro_batch=3."""
    config: dict[str, Any] = {
        "seed": 5,
        "device": "cpu",
        "model": {"vocab_size": VOCAB, "context": CONTEXT, "layers": 2, "width": 16, "head_dim": 8},
        "data": {"train": str(data / "train_*.bin"), "validation": str(data / "val_*.bin")},
        "batch": {"sequences": SEQUENCES, "micro_batch": 4 if default_ranks == 1 else 3},
        "schedule": {"updates": 24},
        "optimizer": {"hidden": {"algorithm": "muon", "lr": 8e-3}, "embedding": ADAMW, "head": ROWNORM},
        "clip_norm": 0.53,  # some updates are clipped, some are not
        "evaluation": {"every": 5, "tokens": 25 * CONTEXT},
        "diagnostics": {"diameter_every": 2, "hilbert_panel": [[0, 10], [70, 130]]},
        "log_every": 3,
        "checkpoint": {"every": 4, "keep": 2},
        "output": str(output),
    }
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *above, key = path.split("__")
        place = config
        for name in above:
            place = place.setdefault(name, {})
        place[key] = value
    return config


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


# ---- what a run leaves ----


def records(run_directory: Path, keep: Callable[[str], bool] = lambda key: not key.startswith(VOLATILE)) -> list[dict]:
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if keep(k)} for line in lines]


def checkpoint(run_directory: Path, update: int) -> Path:
    return run_directory / "checkpoints" / f"update-{update:08}"


def checkpoints(run_directory: Path) -> list[str]:
    return sorted(p.name for p in (run_directory / "checkpoints").iterdir())


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- safetensors ----

DTYPES = {"F64": "<f8", "F32": "<f4"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"]).copy()
    return tensors


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    names = {np.dtype(form): name for name, form in DTYPES.items()}
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": names[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()))
    return path
