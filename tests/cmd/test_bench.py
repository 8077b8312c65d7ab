"""`rownorm bench`: its counts against counts by hand, its parts against its wholes; never its times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import CONTEXT, TOKENS_PER_UPDATE, VOCAB, default_ranks, expect_error, expect_ok, run, tiny_config, tree
from support import write_config as write

USAGE, DATA, NUMBERS, DEVICE = 2, 3, 4, 5

# tiny_config: 3 micro-steps of N = 64 tokens; 2 layers of width 16, 2 heads, MLP width 64.
STEPS, N, LAYERS, D, HEADS, F, T, V = 3, 64, 2, 16, 2, 64, CONTEXT, VOCAB
HIDDEN = LAYERS * 16 * D * D
PARAMETERS = HIDDEN + 2 * V * D
UPDATE = ("forward and backward", "optimizer")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Holds a config whose data are not there; nothing else may be there afterwards."""
    write(tmp_path / "config.json", tiny_config(tmp_path / "nowhere", tmp_path / "out"))
    yield tmp_path
    assert list(tree(tmp_path)) == ["config.json"]


def bench(folder: Path, *arguments: object, updates: int = 1) -> dict[str, Any]:
    result = expect_ok(run("bench", "config.json", "--updates", updates, "--json", *arguments, cwd=folder))
    return json.loads(result.out)


def counted(report: dict[str, Any]) -> dict[tuple[str, str], tuple[int, float, float]]:
    return {(o["phase"], o["operation"]): (o["calls"], o["flops"], o["bytes"]) for o in report["operations"]}


def linear_bytes(sizes: list[tuple[int, int]], size: int) -> int:
    """Of y = x W^T, or of dx = dy W, for each (outputs, inputs)."""
    return size * sum(N * m + N * k + m * k for m, k in sizes)


@pytest.mark.parametrize(("device", "size"), [("cpu", 4), ("reference", 8)])
def test_counts(folder: Path, device: str, size: int) -> None:
    """Every operation of an update and of the measurements: calls, FLOPs, bytes; `size` is that of an element."""
    maps = [(3 * D, D), (D, D), (2 * F, D), (D, F)] * LAYERS * STEPS  # qkv, out, gate_up, down
    products = sum(2 * N * m * k for m, k in maps)
    accumulated = size * N * 2 * D * LAYERS * STEPS  # out and down add to x
    weights = size * sum(m * k for m, k in maps)
    blocks, norms = LAYERS * STEPS, (2 * LAYERS + 1) * STEPS
    pairs = (N // T) * sum(range(1, T + 1))  # (i, j), j <= i, of a micro-batch
    head = 2 * N * V * D
    # (count, side with fewer rows, other side) a layer: q, k, v, out; gate, up; down
    newton_schulz = sum(5 * c * 2 * (2 * s * s * o + s**3) for c, s, o in [(4, D, D), (2, D, F), (1, D, F)]) * LAYERS
    validation_blocks = LAYERS  # one micro-batch
    forward, optimizer = UPDATE
    expected = {
        (forward, "upload"): (2 * STEPS, 0, 2 * 2 * STEPS * N * 4),
        # loss, squares; gradients; dx
        (forward, "fill"): (5 + LAYERS + STEPS, 0, 3 * 8 + size * (PARAMETERS + STEPS * N * D)),
        (forward, "embedding"): (STEPS, 0, STEPS * N * (4 + 2 * D * size)),
        (forward, "embedding_backward"): (STEPS, 0, STEPS * N * (4 + 3 * D * size)),
        (forward, "rmsnorm"): (norms, 0, norms * N * (2 * D + 1) * size),
        (forward, "rmsnorm_backward"): (norms, 0, norms * N * (4 * D + 1) * size),
        (forward, "linear"): (len(maps), products, linear_bytes(maps, size) + accumulated),
        (forward, "linear_input_grad"): (len(maps), products, linear_bytes(maps, size)),
        (forward, "linear_weight_grad"): (len(maps), products, linear_bytes(maps, size) + weights),
        (forward, "qk_norm_rope"): (blocks, 0, blocks * size * (2 * N * 2 * D + N * 2 * HEADS + T * D // HEADS)),
        (forward, "qk_norm_rope_backward"): (
            blocks,
            0,
            blocks * size * (3 * N * 2 * D + N * 2 * HEADS + T * D // HEADS),
        ),
        (forward, "attention"): (blocks, blocks * 2 * 2 * D * pairs, blocks * size * N * (D + 3 * D + HEADS)),
        (forward, "attention_backward"): (
            blocks,
            blocks * 5 * 2 * D * pairs,
            blocks * size * N * (2 * D + 2 * 3 * D + HEADS),
        ),
        (forward, "swiglu"): (blocks, 0, blocks * size * N * 3 * F),
        (forward, "swiglu_backward"): (blocks, 0, blocks * size * N * 5 * F),
        (forward, "head_loss"): (STEPS, STEPS * 3 * head, STEPS * (size * (2 * N * D + 3 * V * D) + 4 * N)),
        (optimizer, "fill"): (3, 0, 3 * 8),
        (optimizer, "squared_norm"): (7 * LAYERS + 2, 0, size * PARAMETERS),
        (optimizer, "clip"): (1, 0, 0),
        (optimizer, "momentum"): (7 * LAYERS + 1, 0, 4 * size * (HIDDEN + V * D)),
        (optimizer, "newton_schulz"): (3 * LAYERS, newton_schulz, 2 * size * HIDDEN),
        (optimizer, "scale"): (7 * LAYERS + 1, 0, 2 * size * (HIDDEN + V * D)),
        (optimizer, "adamw"): (1, 0, 6 * size * V * D),
        (optimizer, "row_normalize"): (1, 0, 2 * size * V * D),
        (optimizer, "apply_step"): (7 * LAYERS + 2, 0, 3 * size * PARAMETERS),
        ("diameter", "row_diameter"): (1, V * (V - 1) // 2 * 2 * D, size * V * D),
        ("diameter", "row_norms"): (1, 0, size * V * D + 8 * V),
        ("diameter", "download"): (2, 0, 2 * (2 * 4 + 8 * V)),
        ("diameter", "read"): (1, 0, 0),
        ("hilbert", "row_range"): (1, 2 * 70 * V * D, size * (70 * D + V * D + 2 * 70)),
        ("hilbert", "download"): (2, 0, 2 * 2 * size * 70),
        ("validation", "upload"): (2, 0, 2 * 2 * N * 4),
        ("validation", "fill"): (2, 0, 8 + size * 70 * D),
        ("validation", "copy"): (1, 0, 2 * size * 10 * D),  # of the panel, [0, 10) lies in the micro-batch
        ("validation", "embedding"): (1, 0, N * (4 + 2 * D * size)),
        ("validation", "rmsnorm"): (2 * LAYERS + 1, 0, (2 * LAYERS + 1) * N * (2 * D + 1) * size),
        ("validation", "linear"): tuple(
            x // STEPS for x in (len(maps), products, linear_bytes(maps, size) + accumulated)
        ),
        ("validation", "qk_norm_rope"): (
            validation_blocks,
            0,
            validation_blocks * size * (2 * N * 2 * D + N * 2 * HEADS + T * D // HEADS),
        ),
        ("validation", "attention"): (
            validation_blocks,
            validation_blocks * 2 * 2 * D * pairs,
            validation_blocks * size * N * (D + 3 * D + HEADS),
        ),
        ("validation", "swiglu"): (validation_blocks, 0, validation_blocks * size * N * 3 * F),
        ("validation", "head_loss"): (1, head, size * (N * D + V * D) + 4 * N),
        ("validation", "read"): (1, 0, 0),
    }
    report = bench(folder, "--device", device)
    assert counted(report) == expected

    assert report["parameters"] == PARAMETERS
    update = report["update"]
    assert update["tokens"] == TOKENS_PER_UPDATE
    assert update["newton_schulz_flops"] == newton_schulz
    # A weight: 2 forward, 4 backward; attention: the same of 2 products with T / 2 keys on average.
    assert update["model_flops"] == TOKENS_PER_UPDATE * (6 * (HIDDEN + V * D) + 3 * LAYERS * 2 * 2 * D * T // 2)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_products(folder: Path, device: str) -> None:
    """Every product of the update's linear maps, head and Newton-Schulz, once a shape, with its count."""
    report = bench(folder, "--device", device)
    expected: dict[tuple[str, tuple[int, int, int]], tuple[int, set[str]]] = {}

    def add(product: str, sizes: tuple[int, int, int], count: int, within: str) -> None:
        already, users = expected.get((product, sizes), (0, set()))
        expected[product, sizes] = (already + count, users | {within})

    blocks = LAYERS * STEPS
    for product in ("linear", "linear_input_grad", "linear_weight_grad"):
        for m, k in [(3 * D, D), (D, D), (2 * F, D), (D, F)]:
            add(product, (N, m, k), blocks, product)
        rows = N if device == "cpu" else 1  # the reference takes one token at a time
        add(product, (rows, V, D), STEPS * N // rows, "head_loss")
    square, tall, wide = 5 * 4 * LAYERS, 5 * 2 * LAYERS, 5 * LAYERS  # q, k, v, out (D, D); gate, up (F, D); down (D, F)
    add("linear", (D, D, D), square, "newton_schulz")
    add("linear_weight_grad", (F, D, D), tall, "newton_schulz")
    add("linear", (D, D, F), wide, "newton_schulz")
    add("linear_input_grad", (D, D, D), square + tall + wide, "newton_schulz")  # A A
    add("linear_input_grad", (D, D, D), square, "newton_schulz")
    add("linear_input_grad", (F, D, D), tall, "newton_schulz")
    add("linear_input_grad", (D, D, F), wide, "newton_schulz")
    found = {(p["product"], tuple(p["sizes"])): (p["count"], set(p["within"])) for p in report["products"]}
    assert found == expected
    for p in report["products"]:
        n, m, k = p["sizes"]
        assert p["flops"] == 2 * n * m * k
        assert p["flops_per_second_alone"] > 0
        assert (p["flops_per_second_in_update"] is not None) == (p["product"] in p["within"])
        if device == "cpu":
            assert p["of_peak_alone"] == pytest.approx(p["flops_per_second_alone"] / report["peak"]["flops_per_second"])


def test_parts_add_up_to_wholes(folder: Path) -> None:
    report = bench(folder, updates=5)  # of which the middle 3 are reported
    assert report["updates"] == 5
    update = report["update"]
    phases = {p["phase"]: p for p in report["phases"]}
    assert list(phases) == ["forward and backward", "optimizer", "diameter", "hilbert", "validation"]
    operations = report["operations"]
    for name, phase in phases.items():
        attributed = sum(o["seconds"] for o in operations if o["phase"] == name)
        assert attributed + phase["unattributed_seconds"] == pytest.approx(phase["measured_seconds"], rel=1e-9)
        assert 0 <= phase["unattributed_seconds"] <= phase["measured_seconds"]
    assert sum(phases[p]["seconds"] for p in UPDATE) == pytest.approx(update["seconds"], rel=1e-9)
    shares = sum(o["share"] for o in operations if o["phase"] in UPDATE)
    assert 0 < shares <= 1
    assert shares + sum(phases[p]["unattributed_share"] for p in UPDATE) == pytest.approx(1, rel=1e-9)
    assert update["tokens_per_second"] == pytest.approx(TOKENS_PER_UPDATE / update["seconds"])

    assert {p["phase"]: p["every"] for p in report["phases"]} == {
        "forward and backward": 1,
        "optimizer": 1,
        "diameter": 2,
        "hilbert": 5,
        "validation": 5,
    }
    for phase in phases.values():  # 25 sequences of validation, of which one micro-batch of 4 is measured
        scale = 25 / 4 if phase["phase"] == "validation" else 1
        assert phase["seconds"] == pytest.approx(scale * phase["measured_seconds"], rel=1e-9)
        assert phase["seconds_per_update"] == pytest.approx(phase["seconds"] / phase["every"], rel=1e-9)

    peak, bandwidth = report["peak"]["flops_per_second"], report["bandwidth"]["bytes_per_second"]
    assert update["mfu_peak"] == peak
    assert update["mfu"] == pytest.approx(update["model_flops"] / update["seconds"] / peak)
    whole = update["model_flops"] + update["newton_schulz_flops"]
    assert update["mfu_with_newton_schulz"] == pytest.approx(whole / update["seconds"] / peak)
    for q in (report["peak"]["quartiles"], report["bandwidth"]["quartiles"], update["quartiles"]):
        assert 0 < q[0] <= q[1] <= q[2]
    for o in operations:
        products, traffic = o["flops"] / peak, o["bytes"] / bandwidth
        if products == traffic == 0:
            assert o["bound"] is None and o["of_bound"] is None
            continue
        # The bound is the sum over calls of the larger of the two, and no less than the larger sum.
        assert max(products, traffic) * (1 - 1e-9) <= o["of_bound"] * o["seconds"] <= (products + traffic) * (1 + 1e-9)
        assert o["bound"] in ("peak", "bandwidth")
        if o["flops"] == 0:
            assert o["bound"] == "bandwidth"
            assert o["of_bound"] * o["seconds"] == pytest.approx(traffic)


def test_training_records_the_mfu_of_a_known_peak(data: Path, tmp_path: Path) -> None:
    for peak in (None, 1.5):
        config = tiny_config(data, tmp_path / f"run-{peak}", schedule__updates=4, peak_tflops=peak)
        expect_ok(run("train", write(tmp_path / "train.json", config)))
        lines = (tmp_path / f"run-{peak}" / "metrics.jsonl").read_text().splitlines()
        logged = [r for r in map(json.loads, lines) if "performance/tokens_per_second" in r]
        assert len(logged) == 2
        for record in logged:
            if peak is None:
                assert "performance/mfu" not in record
                continue
            flops = 6 * (HIDDEN + V * D) + 3 * LAYERS * 2 * 2 * D * T // 2  # a token, as in test_counts
            rate = record["performance/tokens_per_second"]
            assert record["performance/mfu"] == pytest.approx(rate * flops / 1.5e12 / default_ranks)


def test_a_peak_of_the_config_is_that_of_mfu(folder: Path) -> None:
    """It goes before the measured one, and serves where none is measured; other bounds stay the measured ones."""
    for device in ("cpu", "reference"):
        report = bench(folder, "--device", device, "--set", "peak_tflops=1.5")
        update = report["update"]
        assert update["mfu_peak"] == 1.5e12
        assert update["mfu"] == pytest.approx(update["model_flops"] / update["seconds"] / 1.5e12)
        whole = update["model_flops"] + update["newton_schulz_flops"]
        assert update["mfu_with_newton_schulz"] == pytest.approx(whole / update["seconds"] / 1.5e12)
        assert (report["peak"] is None) == (device == "reference")


def test_text_and_json_agree(folder: Path) -> None:
    """In all that does not depend on time; a row of the text for each of the JSON."""
    report = bench(folder)
    text = expect_ok(run("bench", "--config", "config.json", "--updates", 1, cwd=folder)).out
    assert f"{PARAMETERS} parameters, {TOKENS_PER_UPDATE} tokens an update, 1 updates" in text
    assert report["device"] in text
    rows = re.findall(r"^([a-z_]+) +(\d+) +[\d.]+ +[\d.]+% +([\d.]+|-) +[\d.]+ +(peak|bandwidth) +", text, re.M)
    rows += re.findall(r"^([a-z_]+) +(\d+) +[\d.]+ +[\d.]+% +(-) +- +(-) +n/a$", text, re.M)  # no work to count
    operations = report["operations"]
    assert sorted((name, int(calls)) for name, calls, _, _ in rows) == sorted(
        (o["operation"], o["calls"]) for o in operations
    )
    # Which bound is the longer may depend on the run, but not where there are no products.
    assert sorted((name, bound) for name, _, flops, bound in rows if flops == "-") == sorted(
        (o["operation"], o["bound"] or "-") for o in operations if o["flops"] == 0
    )
    for p in report["phases"]:
        assert re.search(rf"^{p['phase']} +[\d.]+ +{p['every']} +[\d.]+$", text, re.M)
    for p in report["products"]:
        n, m, k = p["sizes"]
        row = rf"^{p['product']} {n} x {m} x {k} +{p['count']} .* {', '.join(p['within'])}$"
        assert re.search(row, text, re.M), row
    assert f"model {report['update']['model_flops'] / 1e9:.4g} GFLOP an update" in text
    assert f"Newton-Schulz {report['update']['newton_schulz_flops'] / 1e9:.4g} GFLOP" in text


def test_the_reference_has_no_bounds(folder: Path) -> None:
    report = bench(folder, "--device", "reference")
    assert report["peak"] is None and report["bandwidth"] is None
    assert all(report["update"][key] is None for key in ("mfu_peak", "mfu", "mfu_with_newton_schulz"))
    assert all(o["bound"] is None and o["of_bound"] is None for o in report["operations"])
    assert all(p["of_peak_alone"] is None for p in report["products"])
    text = expect_ok(run("bench", "config.json", "--updates", 1, "--set", "device=reference", cwd=folder)).out
    assert re.search(r"^peak of products +n/a$", text, re.M)


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        (["diagnostics.diameter_every=0"], ["hilbert", "validation"]),
        (["diagnostics.hilbert_panel=[]"], ["diameter", "validation"]),
        (["evaluation.every=0", "diagnostics.hilbert_panel=[]"], ["diameter"]),
        (["recompute=block"], ["diameter", "hilbert", "validation"]),
        (["optimizer.head.projected=true"], ["diameter", "hilbert", "validation"]),
        (
            ['optimizer.head={"algorithm":"muon","lr":1e-3}', 'optimizer.hidden={"algorithm":"adamw","lr":1e-3}'],
            ["diameter", "hilbert", "validation"],
        ),
    ],
)
def test_measures_what_the_config_asks_for(folder: Path, changes: list[str], phases: list[str]) -> None:
    report = bench(folder, *[word for change in changes for word in ("--set", change)])
    assert [p["phase"] for p in report["phases"]] == [*UPDATE, *phases]
    work = counted(report)
    linears = work["forward and backward", "linear"][0]
    assert linears == 4 * LAYERS * STEPS * (2 if changes == ["recompute=block"] else 1)
    if changes == ["optimizer.head.projected=true"]:
        assert work["optimizer", "column_sum"] == (2, 0, 2 * (4 * V * D + 8 * D))
    if changes[0].startswith("optimizer.head={"):
        assert work["optimizer", "newton_schulz"][1] == report["update"]["newton_schulz_flops"]
        assert work["optimizer", "newton_schulz"][:2] == (1, 5 * 2 * (2 * D * D * V + D**3))


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], USAGE, ["config"]),
        (["missing.json"], DATA, ["missing.json"]),
        (["."], DATA, ["."]),
        (["config.json", "--updates", "0"], USAGE, ["--updates", "0"]),
        (["config.json", "--updates", "-1"], USAGE, ["--updates", "-1"]),
        (["config.json", "--updates", "many"], USAGE, ["--updates", "many"]),
        (["config.json", "--updates", "10001"], USAGE, ["--updates", "10001"]),
        (["config.json", "--set", "model.widht=8"], USAGE, ["model.widht", "width"]),
        (["config.json", "--set", "batch.micro_batch=5"], USAGE, ["batch.micro_batch", "5"]),
        (["config.json", "--device", "tpu"], USAGE, ["tpu", "reference"]),
        (["config.json", "--device", "cuda"], DEVICE, ["cuda"]),
        (["config.json", "--set", "precision=fp64"], USAGE, ["fp64", "cpu"]),
        (["config.json", "--resume"], USAGE, ["--resume"]),
        (["config.json", "other.json"], USAGE, ["other.json"]),
        (["config.json", "--set", "optimizer.hidden.lr=1e300"], NUMBERS, ["update 2", "must be finite"]),
        (["config.json", "--set", "model.width=65536"], DEVICE, ["weights", "total"]),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], code: int, parts: list[str]) -> None:
    result = run("bench", *arguments, cwd=folder)
    expect_error(result, code, *parts)
    assert result.out == ""
