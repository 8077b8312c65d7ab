"""scripts/paper.py on made-up histories whose means and deviations are known."""

import base64
import csv
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "paper.py"
EXE = Path(os.environ.get("ROWNORM_EXE", ROOT / "build" / "release" / "rownorm")).resolve()
FULL = os.environ.get("ROWNORM_FULL") == "1"
MakeRun = Callable[..., Path]

# Powers of two and their small multiples: every mean, deviation and ratio of these is exact in binary.
ADAMW = [(3.0, 0.25, 0.5), (3.25, 0.5, 1.0), (3.5, 0.75, 1.5)]
ROWNORM = [(3.125, 0.0625, 0.125), (3.25, 0.0625, 0.125), (3.375, 0.0625, 0.125)]


def paper(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)


def error_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Its one line."""
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("[paper] ")
    return line


def write_matrix(folder: Path, **changes: Any) -> Path:
    matrix = {"scales": ["tiny"], "heads": ["adamw", "rownorm"], "seeds": [0, 1, 2], "ranks": 1, "device": "cpu"}
    matrix |= {"runs": str(folder / "runs")} | changes
    folder.mkdir(exist_ok=True)
    for scale in matrix["scales"]:
        for head in matrix["heads"]:
            config = {"optimizer": {"head": {"algorithm": head}}}
            (folder / f"{scale}-{head}.json").write_text(json.dumps(config))
    path = folder / "matrix.json"
    path.write_text(json.dumps({key: value for key, value in matrix.items() if value is not None}))
    return path


@pytest.fixture
def study(tmp_path: Path, make_run: MakeRun) -> Path:
    """The matrix of six finished runs."""
    matrix = write_matrix(tmp_path)
    for head, finals in (("adamw", ADAMW), ("rownorm", ROWNORM)):
        for seed, final in enumerate(finals):
            make_run(tmp_path / "runs" / f"tiny-{head}-seed{seed}", head, seed, final)
    return matrix


def run_of(study: Path, name: str) -> Path:
    return study.parent / "runs" / f"tiny-{name}"


def edit_lines(path: Path, edit: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def with_value(key: str, text: str) -> Callable[[list[str]], list[str]]:
    """The third line, with this value."""

    def edit(lines: list[str]) -> list[str]:
        return [*lines[:2], re.sub(rf'("{key}": )[^,}}]*', rf"\g<1>{text}", lines[2]), *lines[3:]]

    return edit


# ---- tables


def test_tables_of_known_numbers_are_exact(study: Path) -> None:
    result = paper("tables", "--matrix", study)
    assert result.returncode == 0, result.stderr
    results = study.parent / "runs" / "results"
    assert result.stdout == (results / "tables.md").read_text()
    with (results / "tables.csv").open(newline="") as file:
        rows = {(row["table"], row["head"], row["quantity"]): row for row in csv.DictReader(file)}
    expected = {
        ("final", "adamw", "loss"): (3.25, 0.25),
        ("final", "adamw", "diameter"): (0.5, 0.25),
        ("final", "adamw", "hilbert"): (1.0, 0.5),
        ("final", "rownorm", "loss"): (3.25, 0.125),
        ("final", "rownorm", "diameter"): (0.0625, 0.0),
        ("final", "rownorm", "hilbert"): (0.125, 0.0),
        ("difference", "rownorm - adamw", "loss"): (0.0, 0.125),  # of 1/8, 0, -1/8
        ("ratio", "adamw / rownorm", "diameter"): (8.0, None),
        ("ratio", "adamw / rownorm", "hilbert"): (8.0, None),
        # RowNorm's prediction is 2 / 128, AdamW's sqrt(16) (1 - 0.5) / sqrt(1 - 0.75) / 128 = 4 / 128 to 1e-13.
        ("prediction", "adamw", "diameter"): (16.0, 8.0),
        ("prediction", "rownorm", "diameter"): (4.0, 0.0),
        ("prediction", "adamw / rownorm", "diameter"): (4.0, None),
        # Of the updates 80, 90, 100 the middle one: D is 1 + 10 / 16 times the last one's.
        ("prediction", "adamw", "quarter"): (26.0, 13.0),
        ("prediction", "rownorm", "quarter"): (6.5, 0.0),
        ("prediction", "adamw / rownorm", "quarter"): (4.0, None),
    }
    assert set(rows) == set(expected)
    for key, (mean, deviation) in expected.items():
        row = rows[key]
        # The prediction's sqrt(1 - 0.75^t) is not exactly 1.
        near = {"rel": 1e-9} if key[0] == "prediction" else {"rel": 0, "abs": 0}
        assert float(row["mean"]) == pytest.approx(mean, **near)
        assert bool(row["deviation"]) == (deviation is not None)
        assert float(row["deviation"] or 0) == pytest.approx(deviation or 0, **near)
        assert (row["seeds"], row["of"], row["paper_mean"]) == ("3", "3", "")
    assert "| tiny | adamw | D(S_T) | (5.000 ± 2.500)e-1 |" in result.stdout
    assert "| tiny | adamw | 16 | 20,000 | 100 | 100,000 | 5.00 | 0.01 |" in result.stdout  # tokens a parameter
    assert "| tiny | adamw | D(S_T) | 0.03125 | 16.000 ± 8.000 |" in result.stdout
    assert "| tiny | adamw / rownorm | D(S_t), median of the last quarter | 2 | 4.000 |" in result.stdout
    tex = (results / "tables.tex").read_text()
    assert r"tiny & adamw & $D(S_T)$ & $(5.000 \pm 2.500) \times 10^{-1}$ \\" in tex
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 5


def test_the_paper_beside_ours(tmp_path: Path, make_run: MakeRun) -> None:
    """Runs with the paper's mean, one deviation above and below; one head twice the deviation higher."""
    matrix = tmp_path / "matrix.json"
    shutil.copytree(ROOT / "configs" / "paper", tmp_path, dirs_exist_ok=True)
    text = re.sub(r"^\s*//.*$", "", matrix.read_text(), flags=re.MULTILINE)
    matrix.write_text(json.dumps(json.loads(text) | {"runs": str(tmp_path / "runs"), "device": "cpu"}))
    for seed, by in enumerate((-1, 0, 1)):
        adamw = (3.1588 + 0.0027 * by, 2.870e-2 + 0.140e-2 * by, 9.076e-2 + 0.605e-2 * by)
        rownorm = (3.1741 + 0.0031 * (by + 2), 6.369e-4 + 0.009e-4 * by, 7.506e-3 + 0.017e-3 * by)
        make_run(tmp_path / "runs" / f"190m-adamw-seed{seed}", "adamw", seed, adamw)
        make_run(tmp_path / "runs" / f"190m-rownorm-seed{seed}", "rownorm", seed, rownorm)
    result = paper("tables", "--matrix", matrix)
    assert result.returncode == 0, result.stderr
    for line in (
        "| 190m | adamw | validation loss | 3.1588 ± 0.0027 | 3.1588 ± 0.0027 | +0.0 |",
        "| 190m | adamw | D(S_T) | (2.870 ± 0.140)e-2 | (2.870 ± 0.140)e-2 | +0.0 |",
        "| 190m | rownorm | validation loss | 3.1803 ± 0.0031 | 3.1741 ± 0.0031 | +2.0 |",
        "| 190m | rownorm | Hilbert RMS | (7.506 ± 0.017)e-3 | (7.506 ± 0.017)e-3 | +0.0 |",
        "| 640m | rownorm | D(S_T) | - (0 of 3 seeds) | (3.1856 ± 0.0029)e-4 | - |",
        # The gaps are 0.0215 + (-1, 0, 1) 0.0004: (0.0215 - 0.0153) / 0.0027 = 2.3.
        "| 190m | rownorm - adamw | validation loss | 0.0215 ± 0.0004 | 0.0153 ± 0.0027 | +2.3 |",
        # 2.870e-2 / 6.369e-4 = 45.06; 45.1 sqrt((0.140 / 2.870)^2 + (0.009 / 6.369)^2) = 2.2.
        "| 190m | adamw / rownorm | D(S_T) | 45.1 | 45.1 ± 2.2 | -0.0 |".replace("-0.0", "+0.0"),
    ):
        assert line in result.stdout.splitlines()
    assert "Paper: docs/paper.md 6." in result.stdout
    assert "[paper] 640m-rownorm-seed2: missing: no measurement in" in result.stderr


def test_the_published_values_are_those_of_the_specification() -> None:
    text = (ROOT / "configs" / "paper" / "published.json").read_text()
    published = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), parse_float=Decimal)
    document = (ROOT / "docs" / "paper.md").read_text().split("## 6.")[1]
    count = 0
    for scale, head, *cells in re.findall(
        r"^\| (\d+M) \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", document, re.MULTILINE
    ):
        for quantity, cell in zip(("loss", "diameter", "hilbert"), cells, strict=True):
            mean, deviation, exponent = re.fullmatch(r"\(?([\d.]+) \+- ([\d.]+)\)?(e-\d)?", cell).groups()
            expected = [Decimal(mean + (exponent or "")), Decimal(deviation + (exponent or ""))]
            assert published["values"][scale.lower()][head][quantity] == expected
            count += 1
    assert count == 18
    scales = list(published["values"])
    differences = re.search(r"\(rownorm - adamw\): (.*?)\.\n", document)[1].split(", ")
    assert [" +- ".join(map(str, published["loss_difference"][scale])) for scale in scales] == differences
    for quantity, name in (("diameter", "D"), ("hilbert", "Hilbert RMS")):
        ratios = re.search(rf"{name} ([\d.]+), ([\d.]+), ([\d.]+\d)", document).groups()
        assert tuple(str(published["ratios"][scale][quantity]) for scale in scales) == ratios


def test_incomplete_cells_say_how_many_seeds_they_have(study: Path, make_run: MakeRun) -> None:
    shutil.rmtree(run_of(study, "adamw-seed2"))
    shutil.rmtree(run_of(study, "rownorm-seed1"))
    shutil.rmtree(run_of(study, "rownorm-seed2"))
    make_run(run_of(study, "rownorm-seed2"), "rownorm", 2, ROWNORM[2], reached=50, outcome="stopped by SIGUSR1")
    result = paper("tables", "--matrix", study)
    assert result.returncode == 0, result.stderr
    notes = [
        f"tiny-adamw-seed2: missing: no measurement in {run_of(study, 'adamw-seed2')}",
        f"tiny-rownorm-seed1: missing: no measurement in {run_of(study, 'rownorm-seed1')}",
        "tiny-rownorm-seed2: interrupted: its history ends at update 50 of 100",
    ]
    assert [line for line in result.stderr.splitlines() if "wrote" not in line] == [f"[paper] {n}" for n in notes]
    for line in (
        "| tiny | adamw | validation loss | 3.1250 ± 0.1768 (2 of 3 seeds) |",  # 3, 3.25: sqrt(2)/8
        "| tiny | rownorm | validation loss | 3.1250 (1 of 3 seeds) |",
        "| tiny | rownorm - adamw | validation loss | 0.1250 (1 of 3 seeds) |",
        "| tiny | adamw / rownorm | D(S_T) | 6.0 (1 of 3 seeds) |",
        f"* {notes[0]}",
        f"* {notes[2]}",
    ):
        assert line in result.stdout.splitlines()
    chosen = paper("tables", "--matrix", study, "--only", "adamw,seed=0,seed=1")
    assert "| tiny | adamw | validation loss | 3.1250 ± 0.1768 |" in chosen.stdout
    assert "rownorm" not in chosen.stdout


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        (
            "metrics.jsonl",
            lambda lines: [*lines[:5], lines[4], *lines[5:]],
            ":6: duplicated: update 50 after update 50",
        ),
        ("metrics.jsonl", lambda lines: lines[:7], "-seed1: truncated: finished, but its history ends at update 70 of"),
        (
            "metrics.jsonl",
            lambda lines: lines[:4] + lines[5:],
            "mixed grid: validation/loss at 60,000 tokens, tiny-adamw-",
        ),
        (
            "metrics.jsonl",
            lambda lines: [line.replace('"progress/tokens": 90000', '"progress/tokens": 90001') for line in lines],
            ":9: mixed grid: 90001 tokens at update 90",
        ),
        ("metrics.jsonl", lambda lines: [*lines[:2], "{\n", *lines[2:]], "metrics.jsonl:3: not JSON"),
        ("metrics.jsonl", lambda lines: [re.sub(r'loss": 3\.2\d*', 'loss": NaN', ln) for ln in lines], "loss is nan"),
        (
            "metrics.jsonl",
            lambda lines: [*lines[:9], lines[9].replace(".5,", ".5}#").split("#")[0]],
            "without validation/",
        ),
        ("metrics.jsonl", lambda _: [], "metrics.jsonl: truncated: the run is finished, but this holds no measurement"),
        ("metrics.jsonl", lambda lines: ["[" * 100_000 + "\n", *lines[1:]], "metrics.jsonl:1: not JSON (maximum"),
        ("metrics.jsonl", with_value("validation/loss", "true"), ":3: validation/loss is true, not a number"),
        ("metrics.jsonl", with_value("validation/loss", "1" + "0" * 400), ":3: validation/loss is 1000"),
        ("metrics.jsonl", with_value("validation/loss", "1e999"), ":3: validation/loss is inf"),
        ("metrics.jsonl", with_value("validation/hilbert_step/rms", "-0.5"), ":3: validation/hilbert_step/rms is -0.5"),
        ("metrics.jsonl", with_value("progress/tokens", "1" + "0" * 400), ":3: without a progress/tokens that is a"),
        ("metrics.jsonl", with_value("progress/update", "Infinity"), ":3: progress/update is Infinity, not a whole"),
        ("metrics.jsonl", with_value("progress/update", "-7"), ":3: progress/update is -7, not a whole number"),
        (
            "run.json",
            lambda lines: [lines[0].replace('"updates": 100', '"updates": 50')],
            "goes on to update 100 of 50",
        ),
        ("run.json", lambda lines: [lines[0].replace("20000", "0")], "run.json: parameters is 0, not a whole number"),
        (
            "run.json",
            lambda lines: [lines[0].replace("20000", "20001")],
            "20,001 parameters, tiny-adamw-seed0 has 20,000",
        ),
        (
            "run.json",
            lambda lines: [lines[0].replace('"ranks": 1', '"ranks": "1"')],
            'ranks is "1", not a whole number',
        ),
        (
            "run.json",
            lambda lines: [lines[0].replace('"validation": [', '"other": [')],
            "dataset.validation is null, not",
        ),
        (
            "config.json",
            lambda lines: [lines[0].replace('"lr": 0.01', '"lr": 0.5')],
            "mixed configurations: optimizer.head.lr: 0.5, not 0.01 as in tiny-adamw-seed0",
        ),
    ],
)
def test_a_damaged_history_is_named(
    study: Path, file: str, edit: Callable[[list[str]], list[str]], message: str
) -> None:
    edit_lines(run_of(study, "adamw-seed1") / file, edit)
    line = error_of(paper("tables", "--matrix", study), 3)
    assert "tiny-adamw-seed1" in line
    assert message in line
    assert not (study.parent / "runs" / "results").exists()


def test_a_run_that_is_not_what_the_matrix_says_is_named(study: Path, make_run: MakeRun) -> None:
    seed1 = run_of(study, "adamw-seed1")
    edit_json(seed1 / "config.json", lambda config: config.update(seed=7))
    assert "tiny-adamw-seed1/config.json: seed is 7, should be 1" in error_of(paper("tables", "--matrix", study), 3)
    shutil.rmtree(seed1)
    make_run(seed1, "rownorm", 1, ADAMW[1])
    assert 'algorithm is "rownorm", should be "adamw"' in error_of(paper("tables", "--matrix", study), 3)
    shutil.rmtree(seed1)
    make_run(seed1, "adamw", 1, ADAMW[0])  # a copy of seed 0's numbers
    assert "tiny-adamw-seed1: duplicated: the same measurements as tiny-adamw-seed0" in error_of(
        paper("tables", "--matrix", study), 3
    )
    shutil.rmtree(seed1)
    make_run(seed1, "adamw", 1, ADAMW[1], updates=120)
    assert "mixed grid: ends at 120,000 tokens, tiny-adamw-seed0 at 100,000" in error_of(
        paper("tables", "--matrix", study), 3
    )
    (seed1 / "run.json").write_text("{}")
    for command in ("tables", "status"):
        assert "run.json: parameters is null, not a whole number" in error_of(paper(command, "--matrix", study), 3)
    shutil.rmtree(seed1)
    make_run(seed1, "adamw", 1, ADAMW[1])
    edit_json(seed1 / "run.json", lambda run: run["dataset"]["train"].append({}))
    assert "tiny-adamw-seed1: other data than tiny-adamw-seed0" in error_of(paper("tables", "--matrix", study), 3)


def test_a_pipe_is_not_waited_for(study: Path) -> None:
    metrics = run_of(study, "adamw-seed1") / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics)
    for command in ("tables", "status"):
        assert error_of(paper(command, "--matrix", study), 3) == f"[paper] {metrics}: is not a regular file"


def test_what_is_no_folder_is_named(study: Path) -> None:
    seed1 = run_of(study, "adamw-seed1")
    (seed1 / "run.json").unlink()
    assert error_of(paper("tables", "--matrix", study), 3) == f"[paper] {seed1}/run.json: no such file or directory"
    shutil.rmtree(seed1)
    for make in (lambda: seed1.touch(), lambda: seed1.symlink_to(seed1)):
        make()
        assert error_of(paper("tables", "--matrix", study), 3) == f"[paper] {seed1}: not a folder"
        # What is damaged does not hide how far the others are.
        result = paper("status", "--matrix", study)
        assert error_of(result, 3) == f"[paper] {seed1}: not a folder"
        assert re.search(r"^tiny-adamw-seed1 +damaged +0/-", result.stdout, re.MULTILINE)
        assert len(result.stdout.splitlines()) == 7
        seed1.unlink()
    runs = study.parent / "runs"
    runs.rename(study.parent / "other")
    runs.touch()
    assert error_of(paper("tables", "--matrix", study), 3) == f"[paper] {runs}: not a folder"
    assert "afile: not a folder" in error_of(
        paper("status", "--matrix", study, "--runs", "afile", cwd=make_file(study.parent)), 3
    )


def make_file(folder: Path) -> Path:
    (folder / "afile").touch()
    return folder


def test_another_configuration_than_the_matrix_is_said(study: Path) -> None:
    """Such as of runs that were launched with --set; not what does not change the numbers."""
    config = {"optimizer": {"head": {"algorithm": "adamw", "lr": 0.25}}, "seed": 9, "log_every": 3, "device": "cuda"}
    (study.parent / "tiny-adamw.json").write_text(json.dumps(config))
    result = paper("tables", "--matrix", study)
    assert result.returncode == 0, result.stderr
    note = "another configuration than tiny-adamw.json: optimizer.head.lr: 0.01, not 0.25"
    assert [line for line in result.stdout.splitlines() if line.startswith("* ")] == [
        f"* tiny-adamw-seed{seed}: {note}" for seed in range(3)
    ]
    assert f"% note: tiny-adamw-seed0: {note}\n" in (study.parent / "runs" / "results" / "tables.tex").read_text()


def test_numbers_against_numpy(tmp_path: Path, make_run: MakeRun) -> None:
    """Numbers that are not exact in binary, over four magnitudes."""
    numpy = pytest.importorskip("numpy")
    matrix = write_matrix(tmp_path)
    values = numpy.random.default_rng(3).uniform(1, 2, (2, 3, 3)) * numpy.array([[[3, 1, 0.1]], [[3, 1e-4, 0.01]]])
    for head, finals in zip(("adamw", "rownorm"), values, strict=True):
        for seed, final in enumerate(finals):
            make_run(tmp_path / "runs" / f"tiny-{head}-seed{seed}", head, seed, tuple(map(float, final)))
    assert paper("tables", "--matrix", matrix).returncode == 0
    with (tmp_path / "runs" / "results" / "tables.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] != "prediction"]
    gaps = values[1, :, 0] - values[0, :, 0]
    ratios = values[0].mean(0) / values[1].mean(0)
    means = [*values.mean(1).ravel(), gaps.mean(), *ratios[1:]]
    deviations = [*values.std(1, ddof=1).ravel(), gaps.std(ddof=1)]
    # A few sums and products of doubles: some units of 2^-53, of the larger terms where they cancel.
    assert [float(row["mean"]) for row in rows] == pytest.approx(means, rel=1e-13)
    assert [float(row["deviation"]) for row in rows[:7]] == pytest.approx(deviations, rel=1e-12)


def test_a_mean_that_rounds_to_the_next_power_of_ten(tmp_path: Path, make_run: MakeRun) -> None:
    matrix = write_matrix(tmp_path, seeds=[0], heads=["adamw"])
    make_run(tmp_path / "runs" / "tiny-adamw-seed0", "adamw", 0, (3.0, 9.99961e-2, 9.9994e-2))
    shown = paper("tables", "--matrix", matrix).stdout
    assert "| D(S_T) | (1.000)e-1 |" in shown
    assert "| Hilbert RMS | (9.999)e-2 |" in shown


def test_output_that_cannot_be_written_leaves_nothing(study: Path) -> None:
    results = study.parent / "runs" / "results"
    (results / "tables.tex").mkdir(parents=True)
    result = paper("tables", "--matrix", study)
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1] == f"[paper] {results / 'tables.tex'}: is a directory"
    assert sorted(path.name for path in results.iterdir()) == ["tables.md", "tables.tex"]
    result = paper("tables", "--matrix", study, "--output", study)
    assert error_of(result, 3) == f"[paper] {study}: file exists"
    pytest.importorskip("matplotlib")

    def few_bytes() -> None:  # of a file: as a full disk, an error of write()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    for command, name in (("figures", "overview.pdf"), ("report", "report.html")):
        output = study.parent / command
        words = [command, "--matrix", study, "--output", output]
        environment = os.environ | {"MPLCONFIGDIR": str(study.parent)}
        result = paper(*words, preexec_fn=few_bytes, env=environment)
        assert result.returncode == 3
        assert result.stderr.splitlines()[-1] == f"[paper] {output / name}: file too large"
        assert list(output.iterdir()) == []


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "| true"])
def test_closed_streams(study: Path, closed: str) -> None:
    command = f"{sys.executable} {SCRIPT} status --matrix {study} {closed}; exit ${{PIPESTATUS[0]}}"
    bash = shutil.which("bash")
    assert bash
    result = subprocess.run([bash, "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_interrupted(study: Path) -> None:
    """^C while it waits for the program."""
    sleeper = study.parent / "sleeper"
    sleeper.write_text("#!/bin/sh\necho > began\nexec sleep 60\n".replace("began", str(study.parent / "began")))
    sleeper.chmod(0o755)
    words = [sys.executable, str(SCRIPT), "plan", "--matrix", str(study), "--exe", str(sleeper)]

    def heed() -> None:  # tests that run in the background of a shell inherit that ^C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed)
    end = time.monotonic() + 60
    while not (study.parent / "began").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "[paper] interrupted\n"
    assert process.returncode == 130


def test_no_run_at_all(tmp_path: Path) -> None:
    line = error_of(paper("tables", "--matrix", write_matrix(tmp_path)), 3)
    assert "no run has measured anything yet; scripts/paper.py launch starts them" in line


# ---- status


def test_status(study: Path, make_run: MakeRun) -> None:
    for head, seed, outcome in (
        ("adamw", 1, "running"),
        ("rownorm", 0, "stopped by SIGTERM"),
        ("rownorm", 1, "[numbers] update 51: loss inf"),
    ):
        shutil.rmtree(run_of(study, f"{head}-seed{seed}"))
        make_run(run_of(study, f"{head}-seed{seed}"), head, seed, ADAMW[0], reached=50, outcome=outcome)
    shutil.rmtree(run_of(study, "rownorm-seed2"))
    lock = os.open(run_of(study, "adamw-seed1"), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        header, *lines = paper("status", "--matrix", study).stdout.splitlines()
    finally:
        os.close(lock)
    assert re.split(r"  +", header) == ["run", "state", "update", "loss", "tokens/s", "time left"]
    rows = [re.split(r"  +", line) for line in lines]
    assert rows == [
        ["tiny-adamw-seed0", "finished", "100/100", "3.0000", "2,000", "-"],
        ["tiny-adamw-seed1", "running", "50/100", "4.5625", "2,000", "0:00:25"],
        ["tiny-adamw-seed2", "finished", "100/100", "3.5000", "2,000", "-"],
        ["tiny-rownorm-seed0", "interrupted", "50/100", "4.5625", "2,000", "0:00:25"],
        ["tiny-rownorm-seed1", "failed: [numbers] update 51: loss inf", "50/100", "4.5625", "2,000", "0:00:25"],
        ["tiny-rownorm-seed2", "waiting", "0/-", "-", "-", "-"],
    ]
    # Without the lock the same run was killed.
    assert "tiny-adamw-seed1    interrupted" in paper("status", "--matrix", study).stdout


# ---- plan


def test_plan_of_the_paper_runs_without_packages_from_any_folder(tmp_path: Path) -> None:
    if not EXE.exists():
        pytest.skip(f"{EXE}: not built")
    arguments = ["plan", "--exe", str(EXE), "--tokens-per-second", "190m=1000,380m=2000"]
    command = [sys.executable, "-S", "-E", str(SCRIPT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[1:-1]}
    assert len(rows) == 18
    # docs/paper.md 2: parameters, updates, tokens.
    for scale, expected in {
        "190m": ["185,680,896", "7,083", "3,713,531,904"],
        "380m": ["379,184,640", "14,464", "7,583,301,632"],
        "640m": ["639,797,248", "24,406", "12,795,772,928"],
    }.items():
        for head in ("adamw", "rownorm"):
            for seed in range(3):
                assert rows[f"{scale}-{head}-seed{seed}"][:3] == expected
    assert rows["190m-adamw-seed0"][-1] == f"{3_713_531_904 / 1000 / 3600:.2f}"
    assert rows["640m-adamw-seed0"][-1] == "-"
    # Exact: FLOPs a token (6 a weight, and attention's) times tokens.
    flops = int(rows["190m-adamw-seed0"][4].replace(",", ""))
    assert flops % 3_713_531_904 == 0
    assert flops // 3_713_531_904 > 6 * (185_680_896 - 50257 * 512)


# ---- figures and report


def test_figures(study: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("once", "again"):
        result = paper("figures", "--matrix", study, "--output", study.parent / name)
        assert result.returncode == 0, result.stderr
    stems = ["overview", "tiny-diameter", "tiny-hilbert", "tiny-loss"]
    once, again = study.parent / "once", study.parent / "again"
    assert sorted(path.name for path in once.iterdir()) == [f"{s}.{f}" for s in stems for f in ("pdf", "png")]
    for path in once.iterdir():
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG")
        assert path.read_bytes() == (again / path.name).read_bytes()  # same runs, same bytes


def svgs_of(document: str) -> list[str]:
    return [
        base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', document)
    ]


def test_published_histories_are_drawn_over_ours(study: Path, tmp_path: Path) -> None:
    """As Weights & Biases exports them: more keys, nulls, NaN, one update in two rows, tokens as floats."""
    pytest.importorskip("matplotlib")
    exported = tmp_path / "exported"
    exported.mkdir()
    rows = []
    for record in map(json.loads, (run_of(study, "adamw-seed0") / "metrics.jsonl").read_text().splitlines()):
        tokens = float(record["progress/tokens"])
        loss, diameter = record["validation/loss"], record["diagnostics/lm_head_step/diameter_exact"]
        rows += [
            {"_step": 1, "progress/tokens": tokens, "validation/loss": loss, "train/loss": None},
            {"_step": 1, "progress/tokens": tokens, "diagnostics/lm_head_step/diameter_exact": diameter},
            {"_step": 2, "progress/tokens": tokens, "validation/loss": float("nan")},
            {"_step": 3, "progress/tokens": None, "train/grad_norm": 1.0},
        ]
    path = exported / "tiny-adamw-seed0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = paper("report", "--matrix", study, "--published", exported)
    assert result.returncode == 0, result.stderr
    svgs = svgs_of((study.parent / "runs" / "results" / "report.html").read_text())
    assert len(svgs) == 3
    assert all("<!-- adamw, published -->" in svg for svg in svgs)
    assert not any("<!-- rownorm, published -->" in svg for svg in svgs)

    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0] | {"validation/loss": 9.0}) + "\n")
    line = error_of(paper("figures", "--matrix", study, "--published", exported), 3)
    assert "tiny-adamw-seed0.jsonl:2: duplicated: another validation/loss at 10,000 tokens before" in line
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:30])
    line = error_of(paper("figures", "--matrix", study, "--published", exported), 3)
    assert "tiny-adamw-seed0.jsonl:2: not JSON" in line  # truncated
    path.write_text(json.dumps(rows[0] | {"validation/loss": 10**400}) + "\n")
    line = error_of(paper("figures", "--matrix", study, "--published", exported), 3)
    assert re.search(r"seed0\.jsonl:1: validation/loss is 10{56}\.\.\., not a number$", line)
    path.rename(exported / "other.jsonl")
    line = error_of(paper("figures", "--matrix", study, "--published", exported), 3)
    assert "holds none of tiny-adamw-seed0.jsonl" in line


def test_report_is_one_file_with_everything(study: Path, make_run: MakeRun) -> None:
    pytest.importorskip("matplotlib")
    shutil.rmtree(run_of(study, "rownorm-seed2"))
    make_run(run_of(study, "rownorm-seed2"), "rownorm", 2, ROWNORM[2], reached=50, outcome="running")
    result = paper("report", "--matrix", study)
    assert result.returncode == 0, result.stderr
    document = (study.parent / "runs" / "results" / "report.html").read_text()
    for text in (
        "<td>3.2500 ± 0.2500</td>",
        "(5.000 ± 2.500)&#8239;·&#8239;10<sup>-1</sup>",
        "rownorm &lt;0.1.0&gt;",
        "killed, or running",
        "<summary>tiny-rownorm-seed2</summary>",
        "tiny-rownorm-seed2: interrupted: its history ends at update 50 of 100",
    ):
        assert text in document
    assert len(svgs_of(document)) == 3
    # Nothing is fetched from anywhere.
    assert not re.search(r'(src|href)="(?!data:)', document)


def test_a_report_names_no_path_of_this_machine() -> None:
    pytest.importorskip("matplotlib")
    from paper.matrix import Run
    from paper.report import config_text
    from paper.results import History

    run = Run(0, "tiny", "adamw", 0, ROOT / "tiny-adamw.json", ROOT / "runs" / "tiny-adamw-seed0")
    text = config_text(History(run, [], {"seed": 3, "output": str(run.folder)}, {}))
    assert json.loads(text) == {"seed": 3, "output": "runs/tiny-adamw-seed0"}


@pytest.mark.skipif(not FULL, reason="slow: runs with ROWNORM_FULL=1")
def test_report_in_a_browser(study: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here: apt-get install chromium")
    assert paper("report", "--matrix", study).returncode == 0
    document = (study.parent / "runs" / "results" / "report.html").read_text()
    look = """<script>addEventListener("load", () => {
      const seen = image => {
        const box = image.getBoundingClientRect(), width = document.documentElement.clientWidth;
        return image.complete && image.naturalWidth > 100 && box.width > 100 && box.height > 100 && box.left >= 0 &&
          box.right <= width && image.checkVisibility();
      };
      document.body.dataset.seen = [...document.images].filter(seen).length;
      document.body.dataset.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;
      console.log("looked");
    })</script>"""
    page = study.parent / "page.html"
    page.write_text(document.replace("</body>", f"{look}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", "--dump-dom"]
    options += ["--enable-logging=stderr", f"--user-data-dir={study.parent / 'profile'}"]
    command = [browser, *options, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert re.search(r"<body[^>]* data-seen=\"3\"[^>]* data-overflow=\"false\"", result.stdout), result.stdout[-500:]
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    assert len(console) == 1, console  # ours: so that an error would have been seen
    assert "looked" in console[0]


# ---- wrong input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": []}, "scales: [], must be different words"),
        ({"scales": ["tiny", "tiny"]}, "scales: "),
        ({"heads": ["tiny"]}, "heads: "),
        ({"seeds": [0, 0]}, "seeds: [0, 0], must be different whole numbers"),
        ({"seeds": ["0"]}, 'seeds: ["0"]'),
        ({"seeds": [True]}, "seeds: [true]"),
        ({"ranks": 0}, "ranks: 0, must be a whole number from 1"),
        ({"device": None}, "device: missing"),
        ({"colour": 1}, "colour: unknown key; known are scales"),
        ({"data": {"command": "x"}}, "data.automatic: missing"),
        ({"data": 3}, "data.3: not a JSON object"),
    ],
)
def test_a_bad_matrix(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    line = error_of(paper("status", "--matrix", write_matrix(tmp_path, **changes)), 2)
    assert f"{tmp_path / 'matrix.json'}: {message}" in line


def test_bad_usage(tmp_path: Path) -> None:
    matrix = write_matrix(tmp_path)
    for arguments, code, message in (
        (["tables", "--matrix", tmp_path / "none.json"], 2, "none.json: no such file"),
        (["status", "--matrix", matrix, "--only", "tiny,muon"], 2, "muon: not one of tiny, adamw, rownorm, seed=0"),
        (["status", "--matrix", matrix, "--only", ""], 2, "--only : an empty word"),
        (["launch", "--matrix", matrix], 2, "--runner"),
        (["launch", "--matrix", matrix, "--runner", "local", "--jobs", "0"], 2, "--jobs: 0: a whole number from 1"),
        (["launch", "--matrix", matrix, "--runner", "local", "--sbatch", "x"], 2, "--sbatch: only with"),
        (["launch", "--matrix", matrix, "--runner", "local", "--exe", tmp_path], 3, "build it"),
        (["plan", "--matrix", matrix, "--tokens-per-second", "tiny=0"], 2, "tiny=0: N or SCALE=N, N more than 0"),
        (["plan", "--matrix", matrix, "--exe", "/bin/false"], 1, "--dry-run"),
        (["paint"], 2, "paint"),
        (["report", "--matrix", matrix, "--published", tmp_path / "none"], 3, "no run has measured"),
    ):
        assert message in error_of(paper(*arguments), code)
    matrix.write_text('{"seeds": [0], "seeds": [1]} // twice')
    assert "matrix.json: seeds: given twice" in error_of(paper("status", "--matrix", matrix), 2)
    for word in ([], ["plan"], ["launch"], ["status"], ["tables"], ["figures"], ["report"]):
        assert "example" in paper(*word, "--help").stdout


def test_the_toy_configs_are_the_papers_rule() -> None:
    """The head's rate times the width is the paper's at 512 (docs/paper.md 4); both heads share everything else."""
    for width in (32, 64, 96):
        configs = {}
        for head in ("adamw", "rownorm"):
            text = (ROOT / "configs" / "toy" / f"w{width}-{head}.json").read_text()
            configs[head] = json.loads(re.sub(r"^//.*$", "", text, flags=re.MULTILINE))
            optimizer = configs[head].pop("optimizer")
            configs[head].pop("output")
            assert optimizer["head"]["algorithm"] == head
            assert optimizer["head"]["lr"] * width == pytest.approx({"adamw": 4e-3, "rownorm": 3.2e-3}[head] * 512)
            assert optimizer["hidden"] == {"algorithm": "muon", "lr": 8e-3}
            assert optimizer["embedding"] == {"algorithm": "adamw", "lr": 4e-3}
        assert configs["adamw"] == configs["rownorm"]
        config = configs["adamw"]
        assert config["model"] == {"vocab_size": 2048, "context": 128, "layers": 4, "width": width, "head_dim": 32}
        assert config["batch"]["sequences"] * 128 == 4096
        assert config["schedule"]["updates"] >= 1500
        assert (config["evaluation"]["every"], config["diagnostics"]["diameter_every"]) == (50, 10)
