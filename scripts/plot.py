#!/usr/bin/env python3
"""Plots validation loss, row diameter and Hilbert RMS of training runs, as the paper's figures do."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from history import (
    DIAMETER,
    HILBERT,
    LOSS,
    TOKENS,
    Parser,
    Record,
    ScriptError,
    points,
    read_metrics,
    read_object,
    run_main,
)

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
except ImportError:
    print(
        "[plot] matplotlib: not installed here; run scripts/setup.sh, then .venv/bin/python scripts/plot.py ...",
        file=sys.stderr,
    )
    sys.exit(3)

PANELS = [
    (LOSS, "validation loss (nats a token)"),
    (DIAMETER, "row diameter $D(S_t)$ of the head's step"),
    (HILBERT, "Hilbert RMS of the head's step (nats)"),
]
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"adamw": "#0072B2", "rownorm": "#D55E00", "muon": "#009E73"}
OTHER_COLOURS = ["#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINE_STYLES = ["-", "--", ":", "-."]

EPILOG = """\
Runs whose configurations differ in seed, name and output only are one curve: their mean, with a band of plus and minus
one sample standard deviation. The colour stands for the head's algorithm, the line style for other settings.
Prints the final values of every run, and where adamw and rownorm runs are given, how they compare.

example
  scripts/plot.py runs/190m-adamw-seed0 runs/190m-rownorm-seed0 --output 190m.png --title 190M

exit codes: 0 done; 2 usage; 3 data or file
"""


class Run(NamedTuple):
    name: str
    head: str
    settings: str  # the configuration without what may differ between the seeds of one experiment
    records: list[Record]

    def final(self, key: str) -> float | None:
        return next(reversed(points(self.records, key).values()), None)

    def last_quarter(self, key: str) -> float | None:
        start = 0.75 * self.records[-1][TOKENS]
        values = [value for tokens, value in points(self.records, key).items() if tokens > start]
        return median(values) if values else None


# ---- reading


def read_run(name: str) -> Run:
    folder = Path(name)
    if not folder.is_dir():
        raise ScriptError(f"{folder}: no such folder, a run directory holds metrics.jsonl and config.json")
    path = folder / "metrics.jsonl"
    records = read_metrics(path)
    if not any(key in record for record in records for key, _ in PANELS):
        raise ScriptError(f"{path}: {len(records)} records, none with {', '.join(key for key, _ in PANELS)}")
    config: Record = {}
    if (path := folder / "config.json").exists():
        config = read_object(path)
    run_name = str(config.get("name", folder.resolve().name))
    try:
        head = str(config["optimizer"]["head"]["algorithm"])
    except (KeyError, TypeError):
        head = run_name
    settings = {key: value for key, value in config.items() if key not in ("seed", "name", "output")}
    return Run(run_name, head, json.dumps(settings, sort_keys=True), records)


# ---- drawing


class Curve(NamedTuple):
    label: str
    colour: str
    style: str
    histories: list[list[Record]]  # of the seeds


def curve(histories: Sequence[list[Record]], key: str, positive: bool) -> tuple[list[int], list[float], list[float]]:
    """Tokens, mean and sample standard deviation, where every history has a value (a positive one, for a log axis)."""
    values_at = [points(records, key) for records in histories]
    shared = sorted(set.intersection(*map(set, values_at)))
    columns = {tokens: [values[tokens] for values in values_at] for tokens in shared}
    columns = {
        tokens: values
        for tokens, values in columns.items()
        if all(math.isfinite(value) and (value > 0 or not positive) for value in values)
    }
    deviations = [stdev(values) if len(values) > 1 else 0.0 for values in columns.values()]
    return list(columns), [fmean(values) for values in columns.values()], deviations


def token_unit(tokens: int) -> tuple[float, str]:
    for unit, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if tokens >= 2 * unit:
            return unit, f"training tokens ({name})"
    return 1, "training tokens"


def group(runs: Iterable[Run]) -> list[Curve]:
    curves: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        curves.setdefault(run.head, {}).setdefault(run.settings, []).append(run)
    others = [head for head in curves if head not in COLOURS]
    colours = COLOURS | {head: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, head in enumerate(others)}
    groups = []
    for head, variants in curves.items():
        for index, members in enumerate(variants.values()):
            label = head if len(variants) == 1 else f"{head}, {members[0].name}"
            label += f" ({len(members)} runs)" if len(members) > 1 else ""
            histories = [run.records for run in members]
            groups.append(Curve(label, colours[head], LINE_STYLES[index % len(LINE_STYLES)], histories))
    return groups


def set_style() -> None:
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})


def draw_curves(panel: Axes, curves: list[Curve], key: str, unit: float, start: float, width: float) -> list[float]:
    """From `start` tokens on: means, with a band of plus and minus one sample standard deviation; returns the means."""
    drawn = []
    for label, colour, style, histories in curves:
        tokens, mean, deviation = curve(histories, key, positive=key != LOSS)
        kept = [i for i, count in enumerate(tokens) if count >= start]
        x, y, spread = [tokens[i] / unit for i in kept], [mean[i] for i in kept], [deviation[i] for i in kept]
        marker = "o" if len(kept) == 1 else None
        panel.plot(x, y, style, color=colour, linewidth=width, label=label, marker=marker, markersize=3)
        if any(spread):
            lower = [value - by if value > by else value for value, by in zip(y, spread, strict=True)]
            upper = [value + by for value, by in zip(y, spread, strict=True)]
            panel.fill_between(x, lower, upper, color=colour, alpha=0.2, linewidth=0)
        drawn += y
    return drawn


def draw_panel(panel: Axes, curves: list[Curve], key: str, label: str, last: int) -> None:
    """One quantity against training tokens up to `last`, as in the paper: the loss with its last third enlarged, the
    others on a log axis."""
    unit, x_label = token_unit(last)
    values = draw_curves(panel, curves, key, unit, 0, 1.3)
    panel.set(xlabel=x_label, ylabel=label, xlim=(0, 1.02 * last / unit))
    panel.grid(alpha=0.25, linewidth=0.5)
    if not values:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color="grey")
    elif key != LOSS:
        panel.set_yscale("log")
    if key != LOSS:
        return
    # The curves fall steeply and then hardly differ: the free upper right corner shows the last third enlarged.
    to_corner = panel.transScale + panel.transLimits  # data to fractions of the panel
    corner_is_free = not any(
        x > 0.38 and y > 0.38 for line in panel.lines for x, y in to_corner.transform(line.get_xydata())
    )
    inset = panel.inset_axes((0.45, 0.45, 0.53, 0.5))
    if corner_is_free and len(draw_curves(inset, curves, key, unit, 2 / 3 * last, 1.0)) > 2 * len(curves):
        inset.tick_params(labelsize=7)
        inset.grid(alpha=0.25, linewidth=0.5)
        inset.set_title("last third", fontsize=7, pad=2)
    else:
        inset.remove()


def add_legend(figure: Figure, panel: Axes, columns: int = 4) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))


def draw(runs: list[Run], title: str | None) -> Figure:
    set_style()
    figure = Figure(
        figsize=(12, 3.7), dpi=200, layout=ConstrainedLayoutEngine(wspace=0.06)
    )  # without pyplot: Agg, no window
    axes = figure.subplots(1, 3)
    last = max(1, *(run.records[-1][TOKENS] for run in runs))
    for panel, (key, label) in zip(axes, PANELS, strict=True):
        draw_panel(panel, group(runs), key, label, last)
    add_legend(figure, axes[0])
    if title:
        figure.suptitle(title)
    return figure


# ---- numbers


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_table(runs: list[Run]) -> None:
    rows: list[tuple[str, ...]] = [
        ("run", "head", "tokens", "loss", "D", "Hilbert RMS", "D, median", "Hilbert RMS, median")
    ]
    for run in runs:
        tokens = f"{run.records[-1][TOKENS]:,}"
        steps = [number(value(key), ".4g") for value in (run.final, run.last_quarter) for key in (DIAMETER, HILBERT)]
        rows.append((run.name, run.head, tokens, number(run.final(LOSS), ".4f"), *steps))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells))
    print("median: over the last quarter of the tokens")


def print_comparison(runs: list[Run]) -> None:
    """Ratios of means over the runs of each head, as in the paper's tables."""
    adamw, rownorm = ([run for run in runs if run.head == head] for head in ("adamw", "rownorm"))
    if not adamw or not rownorm:
        return
    if len({run.records[-1][TOKENS] for run in adamw + rownorm}) > 1:
        print("[plot] the runs end at different tokens, so their final values compare badly", file=sys.stderr)
    for title, value in (("final", Run.final), ("median of the last quarter", Run.last_quarter)):
        means = {}
        for key, _ in PANELS:
            a, r = (
                [known for run in members if (known := value(run, key)) is not None] for members in (adamw, rownorm)
            )
            if a and r:
                means[key] = fmean(a), fmean(r)
        ratios = {key: a / r for key, (a, r) in means.items() if r}
        gap = means[LOSS][1] - means[LOSS][0] if LOSS in means else None
        print(
            f"{title}: adamw / rownorm D {number(ratios.get(DIAMETER), '.3g')}, "
            f"Hilbert RMS {number(ratios.get(HILBERT), '.3g')}; rownorm - adamw loss {number(gap, '+.4f')}"
        )


# ---- the command


def plot(arguments: list[str]) -> None:
    parser = Parser(
        prog="plot.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folder with metrics.jsonl and config.json")
    parser.add_argument("--output", required=True, metavar="FILE.png", help="the figure: .png, .pdf, .svg, ...")
    parser.add_argument("--title", help="above the panels")
    options = parser.parse_args(arguments)
    output = Path(options.output)
    formats = Figure().canvas.get_supported_filetypes()
    if output.suffix[1:].lower() not in formats:
        parser.error(
            f"--output {output}: the name must end in one of {', '.join('.' + name for name in sorted(formats))}"
        )
    runs = [read_run(name) for name in options.runs]
    draw(runs, options.title).savefig(output)
    print_table(runs)
    print_comparison(runs)


def main(arguments: list[str]) -> int:
    return run_main("plot", lambda: plot(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
