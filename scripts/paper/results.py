"""The numbers of docs/paper.md 6 from the runs' histories: means, sample standard deviations, paired differences and
ratios of means, each beside the paper's value. Standard library only."""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from history import (
    DIAMETER,
    HEAD_RATE,
    HILBERT,
    LOSS,
    TOKENS,
    UPDATE,
    Record,
    ScriptError,
    is_a,
    member,
    read_lines,
    read_metrics,
    read_object,
    shown,
)

from .matrix import (
    Matrix,
    Run,
    config_differences,
    flat,
    intended_config,
    listed,
    read_commented_json,
    without_comments,
)
from .state import FINISHED, is_finished, read_provenance, state_of

QUANTITIES = {"loss": LOSS, "diameter": DIAMETER, "hilbert": HILBERT}


class History(NamedTuple):
    run: Run
    records: list[Record]
    config: Record
    provenance: Record

    @property
    def parameters(self) -> int:
        return int(self.provenance["parameters"])

    @property
    def tokens(self) -> int:
        return int(self.records[-1][TOKENS])


class Histories(NamedTuple):
    finished: list[History]
    partial: list[History]  # of runs that go on, for the figures
    notes: list[str]  # what is left out of the tables, and why

    def of(self, scale: str, head: str) -> list[History]:
        return [history for history in self.finished if (history.run.scale, history.run.head) == (scale, head)]


# ---- reading


def read_history(run: Run) -> History | None:
    """None where nothing was measured yet. Error (exit 3): a file that is damaged or of another run."""
    path = run.folder / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    if not records and is_finished(run.folder):
        raise ScriptError(f"{path}: truncated: the run is finished, but this holds no measurement")
    if not records:
        return None
    path_of_config = run.folder / "config.json"
    config, provenance = read_object(path_of_config), read_provenance(run.folder)
    key, intended = "optimizer.head.algorithm", read_commented_json(run.config)
    for name, is_, should in (
        ("seed", member(path_of_config, config, "seed", int, "a whole number"), run.seed),
        (key, member(path_of_config, config, key, str, "a text"), member(run.config, intended, key, str, "a text")),
    ):
        if is_ != should:
            raise ScriptError(f"{path_of_config}: {name} is {json.dumps(is_)}, should be {json.dumps(should)}")
    member(path_of_config, config, "optimizer.head.lr", int | float, "a number")
    member(path_of_config, config, "model.width", int, "a whole number")
    check_updates(path, records)
    return History(run, records, config, provenance)


def check_updates(path: Path, records: list[Record]) -> None:
    """Each update once and in order, tokens in proportion, every measurement finite and not negative."""
    before, rate = -1, 0.0
    for number, record in enumerate(records, 1):
        update, tokens = record.get(UPDATE), record[TOKENS]
        if update is None:
            raise ScriptError(f"{path}:{number}: without a {UPDATE} that is a whole number")
        if update <= before:
            raise ScriptError(f"{path}:{number}: duplicated: update {update} after update {before}")
        if update > 0 and not rate:
            rate = tokens / update
        if update > 0 and tokens != update * rate:
            raise ScriptError(
                f"{path}:{number}: mixed grid: {tokens} tokens at update {update}, {rate} an update before"
            )
        for key in QUANTITIES.values():
            if key in record and not 0 <= record[key] < math.inf:  # nor NaN
                raise ScriptError(f"{path}:{number}: {key} is {record[key]}")
        before = update


def grid(history: History, key: str) -> list[int]:
    return [record[TOKENS] for record in history.records if key in record]


def check_same_grid(histories: list[History]) -> None:
    """All histories of a scale are measured at the same tokens (a run that goes on: so far)."""
    for first, other in zip(histories[:1] * len(histories), histories[1:], strict=False):
        for key in QUANTITIES.values():
            a, b = grid(first, key), grid(other, key)
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if place is not None:
                where = f"{key} at {b[place]:,} tokens, {first.run.name} has it at {a[place]:,}"
                raise ScriptError(f"{other.run.name}: mixed grid: {where}")
        a_data, b_data = first.provenance.get("dataset"), other.provenance.get("dataset")
        if a_data != b_data:
            raise ScriptError(f"{other.run.name}: other data than {first.run.name} (run.json, dataset)")


def check_same_config(histories: list[History]) -> None:
    """The seeds of one cell of the tables differ in nothing else: a mean over two configurations means nothing."""
    for first, other in zip(histories[:1] * len(histories), histories[1:], strict=False):
        a, b = (flat(history.config) | {"seed": None} for history in (first, other))
        if differences := config_differences(dict.fromkeys(a) | b, dict.fromkeys(b) | a):
            raise ScriptError(f"{other.run.name}: mixed configurations: {differences[0]} as in {first.run.name}")
        if first.parameters != other.parameters:
            raise ScriptError(
                f"{other.run.name}: {other.parameters:,} parameters, {first.run.name} has {first.parameters:,}"
            )


def check_distinct(histories: list[History]) -> None:
    """Two seeds never measure the same numbers: a copied history would make the deviation too small."""
    seen: dict[str, Run] = {}
    for history in histories:
        values = json.dumps([[record.get(key) for key in QUANTITIES.values()] for record in history.records])
        if twin := seen.get(values):
            raise ScriptError(f"{history.run.name}: duplicated: the same measurements as {twin.name}")
        seen[values] = history.run


def read_histories(matrix: Matrix, runs: list[Run]) -> Histories:
    finished, partial, notes = [], [], []
    for run in runs:
        state, history = state_of(run.folder), read_history(run)
        if history is None:
            notes.append(f"{run.name}: missing: no measurement in {run.folder}")
            continue
        last, updates = history.records[-1][UPDATE], int(history.provenance["updates"])
        if last > updates:
            raise ScriptError(f"{run.name}: its history goes on to update {last:,} of {updates:,} (run.json)")
        if last == updates:
            absent = [key for key in QUANTITIES.values() if key not in history.records[-1]]
            if absent:
                raise ScriptError(f"{run.name}: without {absent[0]} at its last update, {updates:,}")
            finished.append(history)
        elif state.word == FINISHED:
            raise ScriptError(
                f"{run.name}: truncated: finished, but its history ends at update {last:,} of {updates:,}"
            )
        else:
            partial.append(history)
            notes.append(f"{run.name}: {state.word}: its history ends at update {last:,} of {updates:,}")
        if other := config_differences(flat(history.config), intended_config(run, [])):
            notes.append(f"{run.name}: another configuration than {run.config.name}: {listed(other)}")
    for scale in matrix.scales:
        check_same_grid([history for history in finished + partial if history.run.scale == scale])
    for cell in {(run.scale, run.head): None for run in runs}:
        check_same_config([history for history in finished + partial if (history.run.scale, history.run.head) == cell])
    check_distinct(finished)
    for scale in matrix.scales:
        ends: dict[int, Run] = {}
        for history in finished:
            if history.run.scale == scale:
                ends.setdefault(history.tokens, history.run)
        if len(ends) > 1:
            (a, first), (b, other), *_ = ends.items()
            raise ScriptError(f"{other.name}: mixed grid: ends at {b:,} tokens, {first.name} at {a:,}")
    return Histories(finished, partial, notes)


def read_exported(folder: Path, runs: list[Run]) -> dict[Run, list[Record]]:
    """NAME.jsonl of each run, as exported from Weights & Biases: the same keys, absent ones null or NaN, and what was
    logged at the same tokens perhaps in several rows."""
    if not folder.is_dir():
        raise ScriptError(
            f"{folder}: no such folder, --published wants one with RUN.jsonl, such as {runs[0].name}.jsonl"
        )
    exported = {}
    for run in runs:
        path = folder / f"{run.name}.jsonl"
        if not path.exists():
            continue
        rows: dict[int, Record] = {}
        for number, line in enumerate(read_lines(path, growing=False), 1):
            # Not null, and not NaN, which differs from itself.
            row = {key: line[key] for key in (TOKENS, *QUANTITIES.values()) if line.get(key) is not None}
            row = {key: value for key, value in row.items() if value == value}
            bad = (key for key, value in row.items() if not is_a(value, int | float) or not 0 <= value < math.inf)
            if wrong := next(bad, None):
                raise ScriptError(f"{path}:{number}: {wrong} is {shown(row[wrong])}, not a number")
            if row.keys().isdisjoint(QUANTITIES.values()):  # nothing that is drawn
                continue
            tokens = int(row.get(TOKENS, -1))
            if row.get(TOKENS) != tokens:
                raise ScriptError(f"{path}:{number}: without a {TOKENS} that is a whole number")
            row[TOKENS] = tokens
            merged = rows.setdefault(tokens, {})
            if twice := next((key for key, value in row.items() if merged.get(key, value) != value), None):
                raise ScriptError(f"{path}:{number}: duplicated: another {twice} at {tokens:,} tokens before")
            merged |= row
        if not rows:
            raise ScriptError(f"{path}: no row with {TOKENS} and one of {', '.join(QUANTITIES.values())}")
        exported[run] = [rows[tokens] for tokens in sorted(rows)]
    if not exported:
        raise ScriptError(f"{folder}: holds none of {runs[0].name}.jsonl, ...")
    return exported


# ---- the paper's values


class Value(NamedTuple):
    """A published number with its digits."""

    mean: Decimal
    deviation: Decimal


def read_published(matrix: Matrix) -> dict[str, Any]:
    """`values`, `loss_difference`, `ratios` and their section; empty where the matrix names no file."""
    if matrix.published is None:
        return {}
    text = without_comments(matrix.published.read_text(encoding="utf-8", errors="replace"))
    try:
        published = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{matrix.published}: not JSON ({error})") from None
    if not isinstance(published, dict):
        raise ScriptError(f"{matrix.published}: not a JSON object")
    return published


def published_value(published: dict[str, Any], *keys: str) -> Value | None:
    place: Any = published
    for key in keys:
        place = place.get(key) if isinstance(place, dict) else None
    if place is None:
        return None
    numbers = isinstance(place, list) and [type(number) for number in place] == [Decimal, Decimal]
    if not numbers or place[0] == 0 or place[1] <= 0:
        raise ScriptError(f"published value {'.'.join(keys)}: not [mean, deviation], two numbers that are not 0")
    return Value(*place)


def published_ratio(published: dict[str, Any], scale: str, quantity: str) -> Value | None:
    """Its deviation is not printed: that of a quotient of two independent means, to first order,
    (a/b)^2 ((s_a/a)^2 + (s_b/b)^2), from the two printed deviations."""
    ratio: Any = published
    for key in ("ratios", scale, quantity):
        ratio = ratio.get(key) if isinstance(ratio, dict) else None
    a, b = (published_value(published, "values", scale, head, quantity) for head in ("adamw", "rownorm"))
    if not isinstance(ratio, Decimal) or a is None or b is None:
        return None
    relative = (a.deviation / a.mean) ** 2 + (b.deviation / b.mean) ** 2
    return Value(ratio, (ratio * relative.sqrt()).quantize(ratio))


# ---- the rows


class Row(NamedTuple):
    table: str  # "final", "difference", "ratio", "prediction"
    scale: str
    head: str
    quantity: str
    values: list[float]  # of the seeds at hand; of a ratio: the one number
    seeds: int  # at hand
    of: int
    paper: Value | None
    predicted: float | None = None  # "prediction": what `values` are measured in

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """From the paper's value, in units of the paper's deviation."""
        if self.mean is None or self.paper is None:
            return None
        return (self.mean - float(self.paper.mean)) / float(self.paper.deviation)


def predicted_diameter(history: History, record: Record) -> float | None:
    """D(S_t) as docs/paper.md 5 predicts it: 2 lr of RowNorm, whose rows are lr long and reach every direction; of
    AdamW lr sqrt(d) (1 - b1) / sqrt(1 - b2) sqrt(1 - b2^t), the step of a row whose token came once, at update t."""
    path, config = history.run.folder / "config.json", history.config
    algorithm = config["optimizer"]["head"]["algorithm"]
    if algorithm not in ("adamw", "rownorm"):
        return None
    rate = record.get(HEAD_RATE)
    if not isinstance(rate, int | float) or not rate > 0:
        raise ScriptError(f"{history.run.name}: {HEAD_RATE} at update {record[UPDATE]:,} is {rate}, not above 0")
    if algorithm == "rownorm":
        return 2 * rate
    betas = member(path, config, "optimizer.head.betas", list, "two numbers")
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise ScriptError(f"{path}: optimizer.head.betas is {json.dumps(betas)}, should be two numbers from 0, below 1")
    b1, b2 = betas
    return rate * math.sqrt(config["model"]["width"] * (1 - b2 ** record[UPDATE]) / (1 - b2)) * (1 - b1)


def prediction_rows(matrix: Matrix, histories: Histories) -> list[Row]:
    """D over its prediction, of each seed: at the last update, and the median over the last quarter of the tokens,
    which one burst does not move."""
    rows = []
    for scale in matrix.scales:
        cells = {}
        for head in matrix.heads:
            last, quarter, predicted = [], [], None
            for history in histories.of(scale, head):
                measured = [r for r in history.records if DIAMETER in r and r[TOKENS] > 0.75 * history.tokens]
                quotients = []
                for record in measured:
                    predicted = predicted_diameter(history, record)
                    if predicted is not None:
                        quotients.append(record[DIAMETER] / predicted)
                if quotients:
                    last.append(quotients[-1])
                    quarter.append(median(quotients))
            if predicted is not None:
                cells[head] = predicted, {"diameter": last, "quarter": quarter}
        of = len(matrix.seeds)
        for head, (predicted, quantities) in cells.items():
            for quantity, values in quantities.items():
                rows.append(Row("prediction", scale, head, quantity, values, len(values), of, None, predicted))
        if {"adamw", "rownorm"} <= set(cells):
            (a_predicted, a), (r_predicted, r) = cells["adamw"], cells["rownorm"]
            for quantity in a:
                quotient = [fmean(a[quantity]) / fmean(r[quantity])] if fmean(r[quantity]) else []
                seeds, ratio = min(len(a[quantity]), len(r[quantity])), a_predicted / r_predicted
                rows.append(Row("prediction", scale, "adamw / rownorm", quantity, quotient, seeds, of, None, ratio))
    return rows


def make_rows(matrix: Matrix, runs: list[Run], histories: Histories, published: dict[str, Any]) -> list[Row]:
    def final(history: History, quantity: str) -> float:
        return float(history.records[-1][QUANTITIES[quantity]])

    selected = {(run.scale, run.head): [r for r in runs if (r.scale, r.head) == (run.scale, run.head)] for run in runs}
    rows = []
    for (scale, head), members in selected.items():
        for quantity in QUANTITIES:
            values = [final(history, quantity) for history in histories.of(scale, head)]
            paper = published_value(published, "values", scale, head, quantity)
            rows.append(Row("final", scale, head, quantity, values, len(values), len(members), paper))
    for scale in dict.fromkeys(scale for scale, _ in selected):
        if not {(scale, "adamw"), (scale, "rownorm")} <= set(selected):
            continue
        by_seed = [{h.run.seed: h for h in histories.of(scale, head)} for head in ("adamw", "rownorm")]
        adamw, rownorm = by_seed
        both = [seed for seed in matrix.seeds if seed in adamw and seed in rownorm]
        of = max(len(selected[scale, head]) for head in ("adamw", "rownorm"))
        gaps = [final(rownorm[seed], "loss") - final(adamw[seed], "loss") for seed in both]
        paper = published_value(published, "loss_difference", scale)
        rows.append(Row("difference", scale, "rownorm - adamw", "loss", gaps, len(both), of, paper))
        for quantity in ("diameter", "hilbert"):
            a, r = ([final(history, quantity) for history in side.values()] for side in by_seed)
            ratio = [fmean(a) / fmean(r)] if a and r and fmean(r) else []
            paper = published_ratio(published, scale, quantity)
            rows.append(Row("ratio", scale, "adamw / rownorm", quantity, ratio, min(len(a), len(r)), of, paper))
    order = ["final", "difference", "ratio"]
    return sorted(rows, key=lambda row: order.index(row.table)) + prediction_rows(matrix, histories)


# ---- as text


class Markup(NamedTuple):
    plus_minus: str
    power: Callable[[str, int], str]  # a number and its exponent
    number: Callable[[str], str]  # around each number
    diameter: str  # D(S_T)


def exponent_of(row: Row, value: float) -> int:
    """Of the value as it is shown, rounded: 9.9996e-2 is (1.000)e-1."""
    if row.table != "final" or row.quantity == "loss" or value == 0:
        return 0
    return int(f"{value:.{decimals_of(row)}e}".split("e")[1])


def show(row: Row, mean: float, deviation: float | None, decimals: int, markup: Markup) -> str:
    exponent = exponent_of(row, mean)
    text = f"{mean / 10**exponent:.{decimals}f}"
    if deviation is not None:
        text += f" {markup.plus_minus} {deviation / 10**exponent:.{decimals}f}"
    return markup.number(markup.power(text, exponent) if exponent else text)


def decimals_of(row: Row) -> int:
    """As many as the paper prints."""
    return {"ratio": 1, "prediction": 3, "difference": 4}.get(row.table, 4 if row.quantity == "loss" else 3)


def ours(row: Row, markup: Markup) -> str:
    count = "" if row.seeds == row.of else f" ({row.seeds} of {row.of} seeds)"
    if row.mean is None:
        return f"-{count}"
    return show(row, row.mean, row.deviation, decimals_of(row), markup) + count


def paper_s(row: Row, markup: Markup) -> str:
    if row.paper is None:
        return "-"
    mean, deviation = row.paper
    decimals = -int(mean.as_tuple().exponent) + exponent_of(row, float(mean))
    return show(row, float(mean), float(deviation), decimals, markup)


def label(row: Row, markup: Markup) -> str:
    quarter = f"{markup.diameter.replace('T', 't')}, median of the last quarter"
    names = {"loss": "validation loss", "diameter": markup.diameter, "quarter": quarter, "hilbert": "Hilbert RMS"}
    return names[row.quantity]


def in_deviations(row: Row) -> str:
    return f"{round(row.difference, 1) + 0.0:+.1f}" if row.difference is not None else "-"  # no -0.0
