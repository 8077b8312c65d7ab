#!/usr/bin/env python3
"""The paper's runs: plans and launches a matrix of scales x heads x seeds, and turns what they leave into the paper's
tables and figures."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from history import USAGE, Parser, ScriptError, run_main, whole_file
from paper.launch import Plan, launch
from paper.matrix import ROOT, Matrix, Run, read_matrix, select
from paper.plan import executable, parse_speeds, print_plan
from paper.results import Histories, make_rows, read_exported, read_histories, read_published
from paper.state import check_folder, print_status
from paper.tables import HTML, LATEX, MARKDOWN, csv_text, latex, legend, markdown, result_tables, size_table

EPILOG = """\
examples
  scripts/paper.py plan --tokens-per-second 1000000
  scripts/paper.py launch --runner slurm --exe build/cuda/rownorm --only 190m,seed=0 --dry-run
  scripts/paper.py launch --matrix configs/toy/matrix.json --runner local
  scripts/paper.py report --matrix configs/toy/matrix.json

What a command writes goes to RUNS/results, RUNS being the matrix's folder of runs.

exit codes: 0 done; 2 usage; 3 data or file; launch: of the first run that failed, 128 + signal when stopped
"""

LAUNCH_EPILOG = """\
Does what is left: finished runs are skipped, interrupted ones resumed at their newest checkpoint, failed ones reported
with the end of their log and tried again. Killed in the middle and started again, the runs' numbers are the same.
Nothing is started where a config is wrong, or where a finished run had another one than it would get now.

  local   one process a run, one run after the other (--jobs: several at a time), whatever the matrix's ranks
  mpirun  `mpirun -n RANKS --bind-to none`, one run after the other
  slurm   an array job with the paper's resources, one node of 8 GPUs and 24 hours a run; before the time limit and at
          preemption the runs get SIGUSR1, write a checkpoint, and are queued again. What is queued already is skipped.

^C, SIGTERM and SIGUSR1 stop local and mpirun runs behind a checkpoint; a second one at once.

examples
  scripts/paper.py launch --matrix configs/toy/matrix.json --runner local
  scripts/paper.py launch --runner slurm --exe build/cuda/rownorm --sbatch=--partition=gpu --sbatch=--account=lm
  scripts/paper.py launch --runner mpirun --exe build/cuda/rownorm --only 190m,rownorm,seed=0 --dry-run
"""


def say(message: str) -> None:
    print(f"[paper] {message}", file=sys.stderr, flush=True)


# ---- the commands


def plan_command(options: argparse.Namespace, matrix: Matrix, runs: list[Run]) -> int:
    speeds = parse_speeds(options.tokens_per_second, matrix)
    print_plan(executable(options.exe), matrix, runs, options.ranks or matrix.ranks, options.set, speeds)
    return 0


def launch_command(options: argparse.Namespace, matrix: Matrix, runs: list[Run]) -> int:
    plan = Plan(executable(options.exe), matrix, options.set, options.ranks or matrix.ranks)
    return launch(plan, runs, options.runner, options.jobs, options.sbatch, options.dry_run)


def status_command(_: argparse.Namespace, __: Matrix, runs: list[Run]) -> int:
    print_status(runs)
    return 0


def read(matrix: Matrix, runs: list[Run]) -> Histories:
    histories = read_histories(matrix, runs)
    if not histories.finished and not histories.partial:
        raise ScriptError(f"{matrix.folder}: no run has measured anything yet; scripts/paper.py launch starts them")
    for note in histories.notes:
        say(note)
    return histories


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
    say(f"wrote {path}")


def tables_command(options: argparse.Namespace, matrix: Matrix, runs: list[Run]) -> int:
    histories, published = read(matrix, runs), read_published(matrix)
    rows = make_rows(matrix, runs, histories, published)
    text, sizes = legend(rows, published.get("section")), size_table(histories)
    folder = output_of(options, matrix)
    shown = markdown([*result_tables(rows, MARKDOWN), sizes], text, histories.notes)
    write(folder, "tables.md", shown)
    write(folder, "tables.tex", latex([*result_tables(rows, LATEX), sizes], text, histories.notes))
    write(folder, "tables.csv", csv_text(rows))
    print(shown, end="")
    return 0


def drawing() -> ModuleType:
    try:
        import paper.figures as figures
    except ImportError:
        raise ScriptError(
            "matplotlib: not installed here; run scripts/setup.sh, then .venv/bin/python scripts/paper.py ..."
        ) from None
    return figures


def figures_command(options: argparse.Namespace, matrix: Matrix, runs: list[Run]) -> int:
    figures = drawing()
    histories = read(matrix, runs)
    exported = read_exported(options.published, runs) if options.published else {}
    folder = output_of(options, matrix)
    folder.mkdir(parents=True, exist_ok=True)
    paths = figures.save_figures(folder, figures.figures(matrix, runs, histories, exported))
    say(f"wrote {len(paths)} files, {folder / 'overview.png'}")
    return 0


def report_command(options: argparse.Namespace, matrix: Matrix, runs: list[Run]) -> int:
    figures = drawing()
    from paper.report import report_html

    histories, published = read(matrix, runs), read_published(matrix)
    exported = read_exported(options.published, runs) if options.published else {}
    rows = make_rows(matrix, runs, histories, published)
    document = report_html(
        f"RowNorm and AdamW on the language-model head: {matrix.path.parent.name}",
        [*result_tables(rows, HTML), size_table(histories)],
        legend(rows, published.get("section")),
        histories.notes,
        figures.figures(matrix, runs, histories, exported),
        histories.finished + histories.partial,
    )
    write(output_of(options, matrix), "report.html", document)
    return 0


def output_of(options: argparse.Namespace, matrix: Matrix) -> Path:
    return options.output or matrix.folder / "results"


# ---- the command line


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1")
    return int(text)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="paper.py", description=__doc__, epilog=EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, action: Callable[[argparse.Namespace, Matrix, list[Run]], int], text: str, epilog: str = ""
    ) -> argparse.ArgumentParser:
        example = epilog or f"example\n  scripts/paper.py {name} --matrix configs/toy/matrix.json --only w64,rownorm\n"
        sub = commands.add_parser(name, help=text, description=text, epilog=example, formatter_class=raw)
        sub.set_defaults(action=action)
        matrix = ROOT / "configs" / "paper" / "matrix.json"
        sub.add_argument(
            "--matrix", type=Path, default=matrix, metavar="FILE", help="default configs/paper/matrix.json"
        )
        sub.add_argument("--only", metavar="WORDS", help="these runs alone, such as 190m,rownorm,seed=0")
        sub.add_argument("--runs", type=Path, metavar="DIR", help="folder of the runs, instead of the matrix's")
        return sub

    plan = command("plan", plan_command, "what each run is: parameters, updates, tokens, FLOPs, memory, hours")
    plan.add_argument("--tokens-per-second", metavar="N", help="of a run, or SCALE=N,...: gives the hours")
    starts = command("launch", launch_command, "starts or continues the runs", LAUNCH_EPILOG)
    starts.add_argument("--runner", choices=["local", "mpirun", "slurm"], required=True, help="see below")
    starts.add_argument("--dry-run", action="store_true", help="print the commands")
    starts.add_argument("--jobs", type=count, default=1, metavar="N", help="local, mpirun: runs at a time (default 1)")
    starts.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="for sbatch; repeatable")
    for sub in (plan, starts):
        sub.add_argument("--exe", metavar="FILE", help="default build/release/rownorm; for GPUs build/cuda/rownorm")
        sub.add_argument("--ranks", type=count, metavar="N", help="of a run, instead of the matrix's")
        sub.add_argument(
            "--set", action="append", default=[], metavar="PATH=VALUE", help="as rownorm train; repeatable"
        )
    command("status", status_command, "how far each run is")
    tables = command("tables", tables_command, "the paper's tables from the finished runs: tables.md, .tex, .csv")
    draws = command("figures", figures_command, "the paper's figures, a PDF and a PNG each, and overview.pdf, .png")
    reports = command("report", report_command, "tables, figures, configs and provenance in one file, report.html")
    for sub in (tables, draws, reports):
        sub.add_argument("--output", type=Path, metavar="DIR", help="default RUNS/results")
    for sub in (draws, reports):
        sub.add_argument(
            "--published",
            type=Path,
            metavar="DIR",
            help="histories exported from the published Weights & Biases runs, drawn over ours: a file a run, such as "
            "190m-adamw-seed0.jsonl, with the keys of metrics.jsonl, one JSON object a line",
        )
    options = parser.parse_args(arguments)
    if options.command == "launch":
        if options.runner == "slurm" and options.jobs > 1:
            starts.error("--jobs: Slurm decides how many run at a time; limit them with --sbatch=--array=...%N")
        if options.runner != "slurm" and options.sbatch:
            starts.error("--sbatch: only with --runner slurm")
        if options.runner == "local" and options.ranks:
            starts.error("--ranks: a local run is one process; use --runner mpirun")
    return options


def main(arguments: list[str]) -> int:
    def act() -> int:
        options = parse_arguments(arguments)
        if not options.matrix.is_file():
            raise ScriptError(
                f"{options.matrix}: no such file, --matrix names one such as configs/toy/matrix.json", USAGE
            )
        matrix = read_matrix(options.matrix)
        if options.runs:
            check_folder(options.runs)
            matrix = matrix._replace(folder=options.runs.resolve())
        check_folder(matrix.folder)
        return options.action(options, matrix, select(matrix, options.only))

    return run_main("paper", act)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
