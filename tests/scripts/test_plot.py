"""scripts/plot.py on made-up histories whose ratios are known."""

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot.py"
MAIN = runpy.run_path(str(SCRIPT))["main"]
LOSS, DIAMETER, HILBERT = "validation/loss", "diagnostics/lm_head_step/diameter_exact", "validation/hilbert_step/rms"
TOKENS = 1000  # an update


def write_run(folder: Path, head: str, seed: int = 0, scale: float = 1.0, loss: float = 3.0, **config: Any) -> Path:
    """100 updates: D every 5 and Hilbert RMS every 10, `scale` times the update; D is 0 at update 1."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"progress/update": 1, "progress/tokens": TOKENS, DIAMETER: 0.0}]
    for update in range(5, 101, 5):
        record: dict[str, Any] = {"progress/update": update, "progress/tokens": update * TOKENS, "train/loss": 3.5}
        record[DIAMETER] = scale * update
        if update % 10 == 0:
            record |= {LOSS: loss + 10 / update, HILBERT: 0.5 * scale * update}
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"name": folder.name, "seed": seed, "output": str(folder), "optimizer": {"head": {"algorithm": head}}}
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def run_script(*arguments: str | Path, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def plot(*arguments: str | Path) -> Result:
    """The script without a new interpreter, since matplotlib takes long to import."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = MAIN([str(argument) for argument in arguments])
    return Result(code, stdout.getvalue(), stderr.getvalue())


def test_figure_table_and_ratios(tmp_path: Path) -> None:
    adamw = write_run(tmp_path / "a", "adamw", scale=0.5, loss=3.0)
    rownorm = write_run(tmp_path / "r", "rownorm", scale=0.01, loss=3.0153)
    result = run_script(adamw, rownorm, "--output", tmp_path / "figure.png", "--title", "toy")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    header, first, second, _, final, medians = result.stdout.splitlines()
    assert header.split()[:5] == ["run", "head", "tokens", "loss", "D"]
    # Last quarter: updates 80, 85, ... 100 for D and 80, 90, 100 for Hilbert RMS.
    assert first.split() == ["a", "adamw", "100,000", "3.1000", "50", "25", "45", "22.5"]
    assert second.split() == ["r", "rownorm", "100,000", "3.1153", "1", "0.5", "0.9", "0.45"]
    assert final == "final: adamw / rownorm D 50, Hilbert RMS 50; rownorm - adamw loss +0.0153"
    assert medians == ("median of the last quarter: adamw / rownorm D 50, Hilbert RMS 50; rownorm - adamw loss +0.0153")


def test_same_runs_same_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "adamw")
    for name in ("1.png", "2.png"):
        assert plot(run, "--output", tmp_path / name).returncode == 0
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()


def test_seeds_share_a_curve_and_other_settings_do_not(tmp_path: Path) -> None:
    seeds = [write_run(tmp_path / f"seed{seed}", "rownorm", seed, scale=1 + seed) for seed in range(3)]
    wider = write_run(tmp_path / "wider", "rownorm", model={"width": 64})
    ours = write_run(tmp_path / "ours", "lion")
    adamw = write_run(tmp_path / "adamw", "adamw", scale=20)
    svg = tmp_path / "figure.svg"
    result = plot(*seeds, wider, ours, adamw, "--output", svg)
    assert result.returncode == 0, result.stderr
    # matplotlib notes every text of an SVG in a comment.
    text = svg.read_text()
    for label in ("rownorm, seed0 (3 runs)", "rownorm, wider", "lion", "adamw", "training tokens (thousands)"):
        assert f"<!-- {label} -->" in text
    assert "adamw / rownorm D 11.4," in result.stdout  # 20 over the mean of 1, 2, 3 and 1


def test_a_run_without_a_head_is_called_by_its_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", "adamw")
    (run / "config.json").unlink()
    result = plot(run, "--output", tmp_path / "figure.svg")
    assert result.returncode == 0, result.stderr
    assert "<!-- mine -->" in (tmp_path / "figure.svg").read_text()
    assert "adamw / rownorm" not in result.stdout


@pytest.mark.parametrize(
    ("last", "tokens"),
    [('{"progress/update": 105, "prog', "100,000"), ('{"progress/update": 105, "progress/tokens": 105000}', "105,000")],
)
def test_a_last_line_counts_if_it_is_whole(tmp_path: Path, last: str, tokens: str) -> None:
    run = write_run(tmp_path / "a", "adamw")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(last)
    result = plot(run, "--output", tmp_path / "figure.png")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1].split()[2] == tokens


def test_what_was_not_measured_is_said_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "adamw")
    rownorm = write_run(tmp_path / "r", "rownorm")
    record = {"progress/update": 1, "progress/tokens": 0, LOSS: 5.5}
    for folder in (run, rownorm):
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    result = plot(run, rownorm, "--output", tmp_path / "figure.svg")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert (tmp_path / "figure.svg").read_text().count("<!-- not measured -->") == 2
    assert result.stdout.splitlines()[1].split() == ["a", "adamw", "0", "5.5000", "-", "-", "-", "-"]
    assert "final: adamw / rownorm D -, Hilbert RMS -; rownorm - adamw loss +0.0000" in result.stdout


def test_runs_of_unequal_length_are_pointed_out(tmp_path: Path) -> None:
    adamw, rownorm = write_run(tmp_path / "a", "adamw"), write_run(tmp_path / "r", "rownorm")
    metrics = rownorm / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-3]))
    result = plot(adamw, rownorm, "--output", tmp_path / "figure.png")
    assert result.returncode == 0
    assert result.stderr == "[plot] the runs end at different tokens, so their final values compare badly\n"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (None, None, "run: no such folder, a run directory holds metrics.jsonl and config.json"),
        ("metrics.jsonl", None, "metrics.jsonl: no such file or directory"),
        ("metrics.jsonl", "", "metrics.jsonl: 0 records, none with validation/loss"),
        ("metrics.jsonl", '{"progress/tokens": 1, "train/loss": 1.5}\n', "metrics.jsonl: 1 records, none with"),
        ("metrics.jsonl", '{"progress/tokens": 1}\n{"x": \n{}\n', "metrics.jsonl:2: not JSON"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl:1: not a JSON object"),
        ("metrics.jsonl", '{"validation/loss": 1}\n', "metrics.jsonl:1: without a progress/tokens"),
        ("metrics.jsonl", '{"progress/tokens": 1, "validation/loss": null}\n', ":1: validation/loss is null, not a nu"),
        ("config.json", "{", "config.json:1: not JSON"),
        ("config.json", "3", "config.json:1: not a JSON object"),
    ],
)
def test_bad_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, text: str | None, message: str
) -> None:
    if file:
        path = write_run(tmp_path / "run", "adamw") / file
        path.unlink()
        if text is not None:
            path.write_text(text)
    monkeypatch.chdir(tmp_path)
    result = plot("run", "--output", "figure.png")
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("[plot] run")
    assert message in line
    assert not result.stdout
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("run", 2, "--output"),
        ("--output figure.png", 2, "RUN_DIR"),
        ("run --output figure", 2, "--output figure: the name must end in one of"),
        ("run --output figure.docx", 2, ".png"),
        ("run --output nowhere/figure.png", 3, "nowhere/figure.png: no such file or directory"),
    ],
)
def test_bad_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, message: str) -> None:
    write_run(tmp_path / "run", "adamw")
    monkeypatch.chdir(tmp_path)
    result = plot(*arguments.split())
    assert result.returncode == code
    (line,) = result.stderr.splitlines()
    assert line.startswith("[plot] ")
    assert message in line


def test_help_and_a_missing_package() -> None:
    assert "example\n  scripts/plot.py runs/" in run_script("--help").stdout
    result = run_script("run", "--output", "figure.png", python=(sys.executable, "-S", "-E"))
    assert result.returncode == 3
    assert result.stderr.startswith("[plot] matplotlib: not installed here; run scripts/setup.sh")
