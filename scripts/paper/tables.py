"""The tables as Markdown, LaTeX, CSV and HTML. Standard library only."""

import csv
import html
import io
from typing import NamedTuple

from .results import Histories, Markup, Row, in_deviations, label, ours, paper_s

MARKDOWN = Markup("±", lambda text, exponent: f"({text})e{exponent}", str, "D(S_T)")
LATEX = Markup(
    r"\pm", lambda text, exponent: rf"({text}) \times 10^{{{exponent}}}", lambda text: f"${text}$", "$D(S_T)$"
)
HTML = Markup(
    "±", lambda text, exponent: f"({text})&#8239;·&#8239;10<sup>{exponent}</sup>", str, "<i>D</i>(<i>S<sub>T</sub></i>)"
)

TITLES = {
    "final": "Final update: mean ± sample standard deviation over the seeds",
    "difference": "Paired differences of the validation loss, rownorm - adamw",
    "ratio": "Ratios of means, adamw / rownorm",
    "prediction": "D(S_t) over the prediction of docs/paper.md 5: 2 lr for RowNorm, "
    "lr sqrt(d) (1 - b1) / sqrt(1 - b2) sqrt(1 - b2^t) for AdamW",
}


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def result_tables(rows: list[Row], markup: Markup) -> list[Table]:
    """One table a kind; the paper's columns where there is a published value."""
    tables = []
    for kind, title in TITLES.items():
        members = [row for row in rows if row.table == kind]
        if not members:
            continue
        with_paper = any(row.paper for row in members)
        header = ["scale", "head", "quantity", "ours"] + (["paper", "difference"] if with_paper else [])
        if kind == "prediction":
            header = ["scale", "head", "quantity", "predicted at the end", "measured / predicted"]
        body = []
        for row in members:
            paper = [paper_s(row, markup), in_deviations(row)] if with_paper else []
            predicted = [markup.number(f"{row.predicted:.4g}")] if row.predicted is not None else []
            body.append([row.scale, row.head, label(row, markup), *predicted, ours(row, markup), *paper])
        tables.append(Table(title, header, body))
    return tables


def size_table(histories: Histories) -> Table:
    """What was trained: the tokens a parameter are those that the updates give."""
    rows = {}
    for history in histories.finished:
        optimizer = history.config["optimizer"]
        rows[history.run.scale, history.run.head] = [
            history.run.scale,
            history.run.head,
            str(history.config["model"]["width"]),
            f"{history.parameters:,}",
            f"{history.provenance['updates']:,}",
            f"{history.tokens:,}",
            f"{history.tokens / history.parameters:.2f}",
            f"{optimizer['head']['lr']:.6g}",
        ]
    header = ["scale", "head", "width", "parameters", "updates", "tokens", "tokens a parameter", "head's peak rate"]
    return Table("Runs", header, list(rows.values()))


def legend(rows: list[Row], section: str | None) -> str:
    if not any(row.paper for row in rows):
        return ""
    return (
        f"Paper: {section}. Difference: ours minus the paper's mean, in units of the paper's sample standard deviation "
        "(of a ratio it is not printed, but follows from those of its two means)."
    )


def markdown(tables: list[Table], text: str, notes: list[str]) -> str:
    parts = []
    for table in tables:
        lines = [f"| {' | '.join(row)} |" for row in [table.header, ["---"] * len(table.header), *table.rows]]
        parts.append(f"### {table.title}\n\n" + "\n".join(lines))
    if text:
        parts.append(text)
    if notes:
        parts.append("Notes:\n" + "\n".join(f"* {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def latex(tables: list[Table], text: str, notes: list[str]) -> str:
    """Plain tabulars that need no package. Cells are words of the matrix, labels, formulas and numbers."""

    def cell(value: str) -> str:
        if "$" in value:
            return value
        return value.replace("_", r"\_").replace("±", r"$\pm$").replace("^", r"\textasciicircum{}")

    parts = []
    for table in tables:
        body = [" & ".join(map(cell, row)) + r" \\" for row in table.rows]
        head = " & ".join(map(cell, table.header)) + r" \\ \hline"
        tabular = rf"\begin{{tabular}}{{{'l' * len(table.header)}}}"
        parts.append("\n".join([f"{cell(table.title)}\n", tabular, head, *body, r"\end{tabular}"]))
    comments = [f"% {line}" for line in ([text] if text else []) + [f"note: {note}" for note in notes]]
    return "\n\n".join([*parts, *comments]) + "\n"


def csv_text(rows: list[Row]) -> str:
    """Full precision: numbers read back exactly."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    header = ["table", "scale", "head", "quantity", "seeds", "of", "mean", "deviation"]
    writer.writerow([*header, "paper_mean", "paper_deviation", "difference_in_paper_deviations", "predicted"])
    for row in rows:
        paper = row.paper or ("", "")
        numbers = [row.mean, row.deviation, *paper, row.difference, row.predicted]
        texts = ["" if number is None else str(number) for number in numbers]
        writer.writerow([row.table, row.scale, row.head, row.quantity, row.seeds, row.of, *texts])
    return file.getvalue()


def html_tables(tables: list[Table]) -> str:
    parts = []
    for table in tables:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
        # Numbers hold markup of ours; every other cell is a word of the matrix (letters, digits) or a label.
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in table.rows)
        parts.append(f"<h3>{html.escape(table.title)}</h3>\n<table><tr>{head}</tr>{body}</table>")
    return "\n".join(parts)
