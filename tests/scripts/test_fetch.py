"""data/fetch_fineweb.py from a local mirror, and from a stand-in for the hub that breaks off in the middle."""

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fetch_fineweb
import pytest

SCRIPT = Path(__file__).parents[2] / "data" / "fetch_fineweb.py"
EXE = Path(os.environ.get("ROWNORM_EXE", SCRIPT.parents[1] / "build" / "release" / "rownorm")).resolve()
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{number:06d}.bin" for number in range(1, 5))]


def shard(count: int, seed: int) -> bytes:
    header = struct.pack("<256i", 20240520, 1, count, *[0] * 253)
    return header + b"".join(struct.pack("<H", (seed * 7919 + i * i) % 50257) for i in range(count))


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        (folder / name).write_bytes(shard(3000 + 100 * i, i))
    return folder


def fetch(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def error_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("[fetch] ")
    return line


def test_from_a_mirror(mirror: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = fetch("--from", mirror, "--output", output, "--shards", 3)
    assert result.returncode == 0, result.stderr
    assert contents(output) == {name: (mirror / name).read_bytes() for name in NAMES[:4]}
    assert sorted(path.name for path in output.iterdir()) == sorted([*NAMES[:4], "dataset.json"])
    assert "train: 3 shards, 9,600 tokens\nvalidation: 1 shards, 3,000 tokens\n" in result.stdout
    assert "[fetch] 0 of 4 shards are there; 0.0 GB to fetch" in result.stderr
    assert "[fetch] fetching: 0.0 of 0.0 MB" in result.stderr  # no bar where there is no terminal
    # One more: what is there is kept, what is spoilt is fetched again.
    (output / NAMES[1]).write_bytes((mirror / NAMES[1]).read_bytes()[:-2])
    kept = (output / NAMES[2]).stat().st_mtime_ns
    result = fetch("--from", mirror, "--output", output, "--shards", 4)
    assert f"{output / NAMES[1]}: 7,222 bytes, the source has 7,224 (truncated?); fetching it again" in result.stderr
    assert "3 of 5 shards are there" in result.stderr
    assert contents(output) == contents(mirror)
    assert (output / NAMES[2]).stat().st_mtime_ns == kept


@pytest.mark.skipif(not EXE.exists(), reason=f"{EXE}: not built")
def test_the_fingerprint_is_that_of_a_run(mirror: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert fetch("--from", mirror, "--output", output, "--shards", 2).returncode == 0
    config = {
        "device": "cpu",
        "model": {"vocab_size": 50257, "context": 16, "layers": 1, "width": 8, "head_dim": 8},
        "data": {"train": f"{output}/fineweb_train_*.bin", "validation": f"{output}/fineweb_val_*.bin"},
        "batch": {"sequences": 2, "micro_batch": 2},
        "schedule": {"updates": 1, "warmup_updates": 0},
        "optimizer": {role: {"algorithm": "adamw", "lr": 1e-3} for role in ("hidden", "embedding", "head")},
        "evaluation": {"every": 0},
        "diagnostics": {"diameter_every": 0},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [str(EXE), "train", str(tmp_path / "config.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    dataset = json.loads((output / "dataset.json").read_text())
    assert dataset == json.loads((tmp_path / "run" / "run.json").read_text())["dataset"]
    assert [len(dataset[role]) for role in ("train", "validation")] == [2, 1]


def test_verify(mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror, tmp_path / "copy")
    assert fetch("--verify", "--output", mirror).returncode == 0
    (mirror / NAMES[1]).unlink()
    spoilt = bytearray((mirror / NAMES[2]).read_bytes())
    spoilt[0] ^= 1
    (mirror / NAMES[2]).write_bytes(spoilt)
    (mirror / NAMES[3]).write_bytes((mirror / NAMES[3]).read_bytes() + b"\0\0")
    (mirror / NAMES[4]).write_bytes(b"short")
    result = fetch("--verify", "--output", mirror)
    assert "[fetch] " + f"{mirror}: 4 of 5 shards are missing or wrong; fetch them again" == error_of(result, 3)
    for message in (
        f"{NAMES[1]}: missing",
        f"{NAMES[2]}: begins with 20240521, 1; a shard begins with 20240520, 1",
        f"{NAMES[3]}: header says 3,300 tokens, the file holds 3,301.0",
        f"{NAMES[4]}: 5 bytes, a header alone has 1,024 (truncated?)",
    ):
        assert message in result.stderr
    result = fetch("--verify", "--output", mirror, "--shards", 123456)  # in one line
    assert f"{mirror / 'fineweb_train_000005.bin'} to fineweb_train_123456.bin: missing" in result.stderr
    assert len(result.stderr.splitlines()) == 6
    (mirror / NAMES[4]).unlink()
    (mirror / NAMES[4]).mkdir()
    assert f"{mirror / NAMES[4]}: not a file" in fetch("--verify", "--output", mirror).stderr
    assert f"{mirror / NAMES[4]}: is a folder, a shard is to get this name" in error_of(
        fetch("--from", tmp_path / "copy", "--output", mirror, "--shards", 4), 3
    )
    assert "no such folder" in error_of(fetch("--verify", "--output", tmp_path / "none"), 3)


def test_a_bad_source_leaves_nothing_under_a_final_name(mirror: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (mirror / NAMES[1]).write_bytes(b"<html>404</html>")
    line = error_of(fetch("--from", mirror, "--output", output, "--shards", 2, "--jobs", 1), 3)
    assert f"{NAMES[1]}: 16 bytes, a header alone has 1,024" in line
    assert not (output / NAMES[1]).exists()
    assert not (output / "dataset.json").exists()
    assert f"{mirror / 'fineweb_train_000005.bin'}: no such file; fetch fewer" in error_of(
        fetch("--from", mirror, "--output", output, "--shards", 5), 3
    )


def test_free_space_is_checked_first(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = 2**30 + sum((mirror / name).stat().st_size for name in NAMES[:3]) - 1  # a byte too few
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    arguments = ["--from", str(mirror), "--output", str(tmp_path / "out"), "--shards"]
    assert fetch_fineweb.main([*arguments, "2"]) == 3
    assert "GB to fetch, 1.1 GB free" in capsys.readouterr().err
    assert not contents(tmp_path / "out")
    assert fetch_fineweb.main([*arguments, "1"]) == 0


# ---- the hub


class Hub(BaseHTTPRequestHandler):
    """The three requests that a download of a public dataset makes. A body ends half way while its name is in `breaks`,
    and no more of it is given while it is there twice."""

    def __init__(self, folder: Path, breaks: list[str], ranges: list[tuple[str, str]], *arguments: Any) -> None:
        self.folder, self.breaks, self.ranges = folder, breaks, ranges
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = True

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/datasets/kjj0/fineweb100B-gpt2/tree/"):
            files = [
                {"type": "file", "oid": "0" * 40, "size": file.stat().st_size, "path": file.name}
                for file in sorted(self.folder.iterdir())
            ]
            self.answer(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
            return
        name = path.rsplit("/", 1)[-1]
        if not path.startswith("/datasets/kjj0/fineweb100B-gpt2/resolve/") or not (self.folder / name).exists():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        body = (self.folder / name).read_bytes()
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": "0" * 40, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            if self.breaks.count(name) == 2:
                self.close_connection = True
                return
            self.ranges.append((name, asked))
            start = int(asked.removeprefix("bytes=").rstrip("-").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.answer(206, body[start:], headers)
        elif self.command == "GET" and name in self.breaks:
            self.answer(200, body, headers, len(body) // 2)
        else:
            self.answer(200, body, headers)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def hub(mirror: Path) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    breaks: list[str] = []
    ranges: list[tuple[str, str]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, mirror, breaks, ranges))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", breaks, ranges
    server.shutdown()
    server.server_close()


def test_from_the_hub(hub: tuple[str, list[str], list[tuple[str, str]]], mirror: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    url, breaks, ranges = hub
    output = tmp_path / "out"
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    count = 15 << 20  # huggingface_hub writes 10 MiB at a time
    (mirror / NAMES[2]).write_bytes(shard(0, 0)[:8] + struct.pack("<i", count) + bytes(1012) + b"\1\0" * count)
    breaks += [NAMES[2], NAMES[2]]
    line = error_of(fetch("--output", output, "--shards", 3, **environment), 5)
    assert f"[fetch] {NAMES[2]}: " in line
    assert line.endswith("; start again to go on")
    assert contents(output) == {name: (mirror / name).read_bytes() for name in NAMES[:4] if name != NAMES[2]}
    assert not (output / "dataset.json").exists()
    breaks.pop()
    result = fetch("--output", output, "--shards", 3, **environment)
    assert result.returncode == 0, result.stderr
    assert "3 of 4 shards are there" in result.stderr
    assert contents(output) == {name: (mirror / name).read_bytes() for name in NAMES[:4]}
    assert ranges == [(NAMES[2], f"bytes={10 << 20}-")]  # broken off, and on from there
    assert not (output / ".partial").exists()

    line = error_of(fetch("--output", output, "--shards", 9, **environment), 3)
    assert line == "[fetch] kjj0/fineweb100B-gpt2: has no fineweb_train_000005.bin; fetch fewer with --shards"
    environment["HF_ENDPOINT"] += "/elsewhere"
    line = error_of(fetch("--output", output, "--shards", 4, **environment), 5)
    assert "[fetch] kjj0/fineweb100B-gpt2: RemoteEntryNotFoundError: 404 " in line
    assert line.endswith("; start again to go on")


def test_usage() -> None:
    assert "examples\n  data/fetch_fineweb.py" in fetch("--help").stdout
    for arguments, message in (
        (["--shards", "0"], "--shards: 0: a whole number from 1"),
        (["--shards", "9" * 20], "a whole number from 1 to 999999"),
        (["--verify", "--from", "x"], "--from: not with --verify"),
        (["shards"], "unrecognized arguments"),
    ):
        result = fetch(*arguments)
        assert message in error_of(result, 2)
    assert "nowhere: no such folder, --from wants" in error_of(fetch("--from", "nowhere"), 3)


def test_without_packages(mirror: Path) -> None:
    for arguments, package in (([], "huggingface_hub"), (["--verify", "--output", str(mirror)], "xxhash")):
        command = [sys.executable, "-S", "-E", str(SCRIPT), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert f"[fetch] {package}: not installed here; run scripts/setup.sh" in error_of(result, 3)
