"""One HTML file with everything: tables, figures, the resolved configs, where each run comes from."""

import base64
import hashlib
import html
import json

from matplotlib.figure import Figure

from .figures import svg_text
from .matrix import ROOT
from .results import History
from .tables import Table, html_tables

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
td:first-child { white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1rem; }
.figures img { width: 100%; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 12px; }
.wide { overflow-x: auto; }
"""


def config_text(history: History) -> str:
    """The resolved config; where the run lies is said as seen from the repository, whoever has it where."""
    output = history.run.folder
    shown = str(output.relative_to(ROOT)) if output.is_relative_to(ROOT) else history.config.get("output")
    return json.dumps(history.config | {"output": shown}, indent=2)


def data_line(history: History) -> str:
    dataset = history.provenance["dataset"]
    digest = hashlib.sha256(json.dumps(dataset, sort_keys=True).encode()).hexdigest()[:16]
    counts = [f"{len(dataset[role])} {role}" for role in ("train", "validation")]
    return f"{' and '.join(counts)} shards, {digest}"


def provenance_table(histories: list[History]) -> Table:
    """One row a session; `data` ends with the start of SHA-256 of the dataset's fingerprint in run.json."""
    rows = []
    for history in histories:
        for session in history.provenance["sessions"]:
            end = session.get("end")
            updates = f"{session['first_update']:,} to {session.get('last_update') or 0:,}" if end else "killed"
            cells = [
                history.run.name,
                session["program"],
                session["device"],
                session["ranks"],
                updates,
                session["start"],
                end or "-",
                session["outcome"] if end else "killed, or running",
                data_line(history),
            ]
            rows.append([html.escape(str(cell)) for cell in cells])
    header = ["run", "program", "device", "ranks", "updates", "start", "end", "outcome", "data"]
    return Table("Provenance, one row a session", header, rows)


def report_html(
    title: str,
    tables: list[Table],
    legend: str,
    notes: list[str],
    drawn: dict[str, Figure],
    histories: list[History],
) -> str:
    images = []
    for stem, figure in drawn.items():
        if stem == "overview":  # the same panels once more
            continue
        encoded = base64.b64encode(svg_text(figure).encode()).decode()
        images.append(f'<img alt="{html.escape(stem)}" src="data:image/svg+xml;base64,{encoded}">')
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    configs = "".join(
        f"<details><summary>{html.escape(history.run.name)}</summary>"
        f"<pre>{html.escape(config_text(history))}</pre></details>\n"
        for history in histories
    )
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">
<style>{STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
<h2>Results</h2>
{html_tables(tables)}
<p>{html.escape(legend)}</p>
{f"<h3>Notes</h3><ul>{remarks}</ul>" if notes else ""}
<h2>Figures</h2>
<p>Mean over the seeds, with a band of plus and minus one sample standard deviation.</p>
<div class="figures">
{chr(10).join(images)}
</div>
<h2>Where the runs come from</h2>
<div class="wide">{html_tables([provenance_table(histories)])}</div>
<h2>Configurations, resolved</h2>
{configs}</body>
</html>
"""
