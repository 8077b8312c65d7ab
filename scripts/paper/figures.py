"""The paper's nine figures (docs/paper.md 6), each quantity of each scale against tokens, and their overview."""

import io
from pathlib import Path

import matplotlib as mpl
from history import DIAMETER, HILBERT, LOSS, Record, whole_file
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from plot import COLOURS, OTHER_COLOURS, PANELS, Curve, add_legend, draw_panel, set_style

from .matrix import Matrix, Run
from .results import Histories

STEMS = {LOSS: "loss", DIAMETER: "diameter", HILBERT: "hilbert"}
TITLE_SIZE = 9
# No date and fixed ids: the same histories give the same bytes.
METADATA = {"pdf": {"CreationDate": None, "ModDate": None}, "svg": {"Date": None}}


def curves_of(
    matrix: Matrix, runs: list[Run], histories: Histories, exported: dict[Run, list[Record]], scale: str
) -> tuple[list[Curve], str]:
    """The mean of the finished runs of each head (where none is finished: of those that go on, as far as all of them
    are), and over it, dashed and darker, that of the published histories. Also a title, which says where seeds are
    wanting."""
    others = [head for head in matrix.heads if head not in COLOURS]
    colours = COLOURS | {head: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, head in enumerate(others)}
    curves, published, counts = [], [], []
    for head in matrix.heads:
        members = [run for run in runs if (run.scale, run.head) == (scale, head)]
        found = histories.of(scale, head) or [history for history in histories.partial if history.run in members]
        if found:
            curves.append(Curve(head, colours[head], "-", [history.records for history in found]))
        if len(found) < len(members):
            counts.append(f"{head} {len(found)} of {len(members)} seeds")
        if theirs := [exported[run] for run in members if run in exported]:
            red, green, blue = to_rgb(colours[head])
            dark = to_hex((0.45 * red, 0.45 * green, 0.45 * blue))
            published.append(Curve(f"{head}, published", dark, "--", theirs))
    return curves + published, f"{scale} ({', '.join(counts)})" if counts else scale


def figures(
    matrix: Matrix, runs: list[Run], histories: Histories, exported: dict[Run, list[Record]]
) -> dict[str, Figure]:
    """Stem of the file -> figure."""
    set_style()
    mpl.rcParams.update({"svg.hashsalt": "rownorm", "svg.fonttype": "path", "pdf.fonttype": 42})
    drawn = {}
    scales = [scale for scale in matrix.scales if any(run.scale == scale for run in runs)]
    overview = Figure(
        figsize=(12, 3.4 * len(scales)), dpi=150, layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08)
    )
    rows = overview.subplots(len(scales), len(PANELS), squeeze=False)
    labelled = None
    for scale, row in zip(scales, rows, strict=True):
        curves, title = curves_of(matrix, runs, histories, exported, scale)
        last = max([1, *(records[-1]["progress/tokens"] for curve in curves for records in curve.histories)])
        for panel, (key, label) in zip(row, PANELS, strict=True):
            draw_panel(panel, curves, key, label, last)
            panel.set_title(title, fontsize=TITLE_SIZE)
            figure = Figure(figsize=(4.2, 3.4), dpi=200, layout="constrained")
            single = figure.subplots()
            draw_panel(single, curves, key, label, last)
            single.set_title(title, fontsize=TITLE_SIZE)
            if curves:
                add_legend(figure, single, columns=2)
                labelled = labelled or row[0]
            drawn[f"{scale}-{STEMS[key]}"] = figure
    if labelled is not None:
        add_legend(overview, labelled)
    return {"overview": overview, **drawn}


def save_figures(folder: Path, drawn: dict[str, Figure]) -> list[Path]:
    paths = []
    for stem, figure in drawn.items():
        for form in ("pdf", "png"):
            paths.append(folder / f"{stem}.{form}")
            with whole_file(paths[-1]) as partial:
                file = io.BytesIO()  # a full disk in the middle of its work leaves Matplotlib in disorder
                figure.savefig(file, format=form, metadata=METADATA.get(form))
                partial.write_bytes(file.getvalue())
    return paths


def svg_text(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=METADATA["svg"])
    return file.getvalue()
