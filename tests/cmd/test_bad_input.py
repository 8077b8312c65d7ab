"""Whatever is wrong with what a user gives: one line that says what, where, which value and what would be right, the
exit code of the contract, and nothing left behind where nothing should be."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from support import (
    ADAMW,
    CONTEXT,
    EXE,
    FULL,
    TOKENS_PER_UPDATE,
    VOCAB,
    Result,
    checkpoint,
    checkpoints,
    expect_error,
    expect_ok,
    made_up_tokens,
    read_json,
    read_safetensors,
    records,
    run,
    shard_bytes,
    start,
    tiny_config,
    tree,
    wait_for,
    write_config,
    write_data,
    write_safetensors,
    write_shard,
)

USAGE, DATA, NUMBERS, DEVICE = 2, 3, 4, 5


def without_root_override() -> None:
    """In the child: root obeys file modes, as everyone else does."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@dataclass
class World:
    """A folder with data and a valid config, for a case to break."""

    folder: Path
    config: dict[str, Any]
    text: str | bytes | None = None  # the config file instead of `config`
    arguments: list[str] = field(default_factory=list)  # behind `train config.json`

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def set(self, **changes: object) -> None:
        self.config = tiny_config(self.data, self.output, **changes)

    def set_output(self, output: Path) -> None:
        self.config["output"] = str(output)

    def train_on(self, content: bytes) -> None:
        """The only training shard is train.bin with this content."""
        (self.folder / "train.bin").write_bytes(content)
        self.set(data__train=str(self.folder / "train.bin"))

    def train(self, *arguments: str) -> Result:
        path = self.folder / "config.json"
        if isinstance(self.text, bytes):
            path.write_bytes(self.text)
        elif isinstance(self.text, str):
            path.write_text(self.text)
        elif not path.exists():
            write_config(path, self.config)
        before = snapshot(self.folder)
        result = run("train", path, *self.arguments, *arguments, preexec=without_root_override)
        assert snapshot(self.folder) == before
        return result


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mode, p.lstat().st_size) for p in folder.rglob("*")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Everything that breaks a world also under two ranks: one line, the same code, no hang. The long lists of what can
    be wrong with a config are one kind of error and take their two ranks only in a full run."""
    if "ranks" in metafunc.fixturenames:
        one = metafunc.definition.get_closest_marker("one_rank") or (
            not FULL and metafunc.function in (test_value, test_json, test_override)
        )
        metafunc.parametrize("ranks", [1] if one else [1, 2], ids=lambda n: f"{n}-rank" + "s" * (n > 1))


@pytest.fixture
def world(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(support, "default_ranks", ranks)
    w = World(tmp_path, {})
    write_data(w.data)
    w.set()
    yield w
    for path in tmp_path.rglob("*"):  # so that pytest can remove them
        if path.is_dir():
            path.chmod(0o755)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[World], object]
    code: int
    parts: tuple[str, ...]


def case(name: str, make: Callable[[World], object], code: int, *parts: str) -> Case:
    return Case(name, make, code, parts)


def run_table(table: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table, ids=[c.name.replace(" ", "-") for c in table])


# ---- shards ----

TOKENS = made_up_tokens(3 * TOKENS_PER_UPDATE)
GOOD = shard_bytes(TOKENS)


def with_bad_token(position: int, value: int) -> bytes:
    tokens = TOKENS.copy()
    tokens[position] = value
    return shard_bytes(tokens)


def unreadable(w: World) -> None:
    w.train_on(GOOD)
    (w.folder / "train.bin").chmod(0)


def folder_among_shards(w: World) -> None:
    (w.data / "train_0.bin").mkdir()


SHARDS = [
    case("missing", lambda w: w.set(data__train="no/such/shard.bin"), DATA, "[shard] no/such/shard.bin: no such file"),
    case("missing validation", lambda w: w.set(data__validation="no/val.bin"), DATA, "[shard] no/val.bin: no such"),
    case("unreadable", unreadable, DATA, "[shard] ", "train.bin: cannot read: Permission denied"),
    case("empty", lambda w: w.train_on(b""), DATA, "[shard] ", "train.bin: the file is empty"),
    case("half a header", lambda w: w.train_on(GOOD[:500]), DATA, "train.bin", "500 bytes", "1024", "truncated?"),
    case("truncated", lambda w: w.train_on(GOOD[:-20]), DATA, "train.bin: header says 576 tokens", "566", "truncated?"),
    case("odd byte", lambda w: w.train_on(GOOD[:-1]), DATA, "train.bin: header says 576 tokens", "575 and an odd byte"),
    case("over-long", lambda w: w.train_on(GOOD + b"abcd"), DATA, "train.bin: header says 576", "578", "too long"),
    case("wrong magic", lambda w: w.train_on(shard_bytes(TOKENS, magic=1)), DATA, "magic number 1", "20240520"),
    case("wrong version", lambda w: w.train_on(shard_bytes(TOKENS, version=7)), DATA, "version 7, must be 1"),
    case("negative count", lambda w: w.train_on(shard_bytes(TOKENS, count=-3)), DATA, "-3 tokens", "at least 1"),
    case("zero count", lambda w: w.train_on(shard_bytes(TOKENS[:0])), DATA, "0 tokens", "at least 1"),
    case(
        "huge count", lambda w: w.train_on(shard_bytes(TOKENS, count=2**31 - 1)), DATA, "says 2147483647", "holds 576"
    ),
    case("text", lambda w: w.train_on(b"once upon a time " * 99), DATA, "magic number 1701015151", "token shard?"),
    case("folder", lambda w: w.set(data__train=str(w.data)), DATA, "/data: is a folder", "*.bin"),
    case("folder among shards", folder_among_shards, DATA, "train_0.bin: is a folder", "train_*.bin"),
    case("pipe", lambda w: (os.mkfifo(w.folder / "p"), w.set(data__train=str(w.folder / "p"))), DATA, "/p: is a pipe"),
    case("nothing matches", lambda w: w.set(data__train="no/t_*.bin"), DATA, "[shard] no/t_*.bin: no file matches"),
    case(
        "too few for an update",
        lambda w: w.train_on(shard_bytes(TOKENS[:TOKENS_PER_UPDATE])),
        DATA,
        "[data] no training shard holds one update",
        "192 tokens",
        "12 * 16 + 1 = 193",
    ),
    case(
        "too few for the evaluation",
        lambda w: w.set(evaluation__tokens=41 * CONTEXT),
        DATA,
        "[data] the validation shards hold 640 tokens",
        "evaluation.tokens 656",
    ),
    case(
        "token beyond the vocabulary",
        lambda w: w.train_on(with_bad_token(400, VOCAB)),
        DATA,
        "train.bin: token 400 of the train data is 61, must be less than model.vocab_size 61",
    ),
    case(
        "last token beyond", lambda w: w.train_on(with_bad_token(575, 65535)), DATA, "train.bin: token 575", "is 65535"
    ),
    case(
        "validation token beyond",
        lambda w: (w.data / "val_1.bin").write_bytes(with_bad_token(7, 99)),
        DATA,
        "val_1.bin: token 7 of the validation data is 99",
    ),
]

# ---- config: values, through --set and from the file ----

HUGE = "1" + 400 * "0"
VALUES = [
    ("model.width", "20", "20", "model.head_dim 8"),
    ("model.head_dim", "7", "7", "even"),
    ("model.head_dim", "0", "0", "[2, 1048576]"),
    ("model.head_dim", "-8", "-8", "[2, 1048576]"),
    ("model.head_dim", "32", "16", "model.width", "model.head_dim 32"),
    ("model.vocab_size", "0", "0", "[1, 65536]"),
    ("model.vocab_size", "65537", "65537", "[1, 65536]"),
    ("model.context", "0", "0", "[1, 1048576]"),
    ("model.context", "-16", "-16"),
    ("model.context", "16.5", "16.5", "integer"),
    ("model.layers", "5000", "5000", "[1, 4096]"),
    ("model.layers", "0", "0"),
    ("model.width", "1e300", "1e+300", "[1, 1048576]"),
    ("model.width", "1e999", "1e999", "finite"),
    ("model.width", HUGE, "finite"),
    ("model.width", "nan", "nan", "integer"),
    ("model.width", "true", "true", "integer"),
    ("model.width", '"16"', '"16"', "integer"),
    ("model.width", "null", "null", "integer"),
    ("model.mlp_ratio", "0", "0"),
    ("model.rope_base", "0", "0", "> 0"),
    ("model.rope_base", "-1e4", "-10000"),
    ("model.norm_eps", "-1e-6", "-1e-06", ">= 0"),
    ("model.init_std", "-0.02", "-0.02"),
    ("model.init_std", "Infinity", '"Infinity"', "number"),
    ("model", "3", "3", "object"),
    ("batch.micro_batch", "5", "5", "batch.sequences 12", " and 6 do"),  # 4 alone, 3 on two ranks
    ("batch.micro_batch", "13", "13", "12"),
    ("batch.micro_batch", "0", "0"),
    ("batch.sequences", "0", "0"),
    ("batch.sequences", "-12", "-12"),
    ("batch.sequences", "1e18", "1e+18"),
    ("schedule.updates", "0", "0", ">= 1"),
    ("schedule.updates", "1.5", "1.5", "integer"),
    ("schedule.updates", "9007199254740993", "9007199254740993", "9007199254740991"),
    ("schedule.updates", "1e16", "1e+16", "9007199254740991"),
    ("schedule.tokens_per_parameter", "0", "0", "> 0"),
    ("schedule.tokens_per_parameter", "1e-9", "at least one update of 192"),
    ("schedule.tokens_per_parameter", "1e300", "2^63"),
    ("schedule.warmup_updates", "24", "24 warmup updates", "fewer than the 24"),
    ("schedule.warmup_fraction", "1", "1", "[0, 1)"),
    ("schedule.warmup_fraction", "-0.1", "-0.1"),
    ("schedule.min_lr_ratio", "1.5", "1.5", "[0, 1]"),
    ("schedule.max_updates", "0", "0", ">= 1"),
    ("clip_norm", "0", "0", "> 0"),
    ("clip_norm", "-1", "-1"),
    ("seed", "-1", "-1", "18446744073709551615"),
    ("seed", "18446744073709551616", "18446744073709551615"),
    ("seed", "0.5", "0.5"),
    ("optimizer.hidden.lr", "-1", "-1", ">= 0"),
    ("optimizer.hidden.lr", "fast", '"fast"', "number"),
    ("optimizer.hidden.algorithm", "sgd", '"sgd"', "muon, adamw, rownorm"),
    ("optimizer.hidden.newton_schulz_steps", "101", "101", "[0, 100]"),
    ("optimizer.hidden.newton_schulz_precision", "fp8", '"fp8"', "fp32, tf32, bf16"),
    ("optimizer.hidden.newton_schulz_precision", "tf32", "tf32", "device cpu", "must be fp32"),
    ("optimizer.head.newton_schulz_precision", "tf32", "unknown key"),
    ("peak_tflops", "-1", "-1", "> 0"),
    ("optimizer.hidden.momentum", "1", "1", "[0, 1)"),
    ("optimizer.hidden.nesterov", "1", "1", "true or false"),
    ("optimizer.embedding.betas", "[0.9]", "[0.9]", "two numbers"),
    ("optimizer.embedding.betas", "[0.9, 1]", "betas[1]", "[0, 1)"),
    ("optimizer.embedding.eps", "-1", "-1"),
    ("optimizer.head.beta", "1", "1", "[0, 1)"),
    ("optimizer.head.weight_decay", "-0.1", "-0.1"),
    ("evaluation.tokens", "100", "100", "multiple of model.context 16", "112"),
    ("evaluation.tokens", "0", "0"),
    ("evaluation.every", "-1", "-1", ">= 0"),
    ("diagnostics.diameter_every", "-1", "-1"),
    ("diagnostics.hilbert_panel", "[[0, 401]]", "range 0 is [0, 401]", "evaluation.tokens 400"),
    ("diagnostics.hilbert_panel", "[[0, 10], [20, 12]]", "range 1 is [20, 12]", "begin < end"),
    ("diagnostics.hilbert_panel", "[[5, 5]]", "[5, 5]", "begin < end"),
    ("diagnostics.hilbert_panel", "[[0, 10], [5, 20]]", "range 1, [5, 20]", "ascending and apart"),
    ("diagnostics.hilbert_panel", "[[-1, 10]]", "hilbert_panel[0][0]", "-1"),
    ("diagnostics.hilbert_panel", "[[0]]", "hilbert_panel[0]", "[begin, end]"),
    ("diagnostics.hilbert_panel", "7", "7", "pairs"),
    ("log_every", "0", "0", ">= 1"),
    ("checkpoint.every", "-1", "-1"),
    ("checkpoint.keep", "0", "0", ">= 1"),
    ("checkpoint.keep_updates", "[3, 0]", "keep_updates[1]", "0"),
    ("device", "tpu", '"tpu"', "auto, cpu, cuda, reference"),
    ("precision", "fp8", '"fp8"', "auto, bf16, tf32, fp32, fp64"),
    ("precision", "bf16", "bf16", "cpu", "fp32"),
    ("precision", "fp64", "fp64", "cpu", "fp32"),
    ("recompute", "some", '"some"', "none, block"),
    ("data.train", "7", "7", "string"),
    ("data.train", "", '""', "non-empty"),
    ("output", "", '""', "non-empty"),
    ("output", "a\nb", "output", "control"),
    ("init_from", "3", "3", "string"),
    ("model.widht", "16", "unknown", "did you mean width?"),
    ("modell.width", "16", "modell", "unknown", "did you mean model?"),
    ("optimizer.head.beta1", "0.9", "unknown", "did you mean beta?"),
    ("optimizer.head.betas", "[0.9, 0.999]", "unknown", "did you mean beta?"),
    ("seed.deep", "1", "seed", "5", "no keys"),
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{v[0]}={v[1][:12]!r}" for v in VALUES])
def test_value(world: World, value: tuple[str, ...]) -> None:
    path, text, *parts = value
    blamed = path if not parts[0].startswith("16") else "model.width"
    expect_error(world.train("--set", f"{path}={text}"), USAGE, "[config] ", blamed.split(".")[0], *parts)


JSON = [
    case("empty file", lambda w: setattr(w, "text", ""), USAGE, "config.json: not valid JSON: line 1, column 1"),
    case("only a comment", lambda w: setattr(w, "text", "// later\n"), USAGE, "not valid JSON: line 2, column"),
    case("no comma", lambda w: setattr(w, "text", '{\n  "seed": 1\n  "name": 2 }'), USAGE, "JSON: line 3, column 8"),
    case("half", lambda w: setattr(w, "text", json.dumps(w.config)[:200]), USAGE, "not valid JSON: line 1, column 201"),
    case("two documents", lambda w: setattr(w, "text", "{} {}"), USAGE, "not valid JSON: line 1, column 4"),
    case("a list", lambda w: setattr(w, "text", "[1, 2]"), USAGE, "config.json: the file is [1,2]", "object"),
    case("empty object", lambda w: setattr(w, "text", "{}"), USAGE, "model", "missing, but required"),
    case("binary", lambda w: setattr(w, "text", bytes(range(256))), USAGE, "config.json: not valid JSON: line 1"),
    case("not UTF-8", lambda w: setattr(w, "text", b'{"name": "\xff"}'), USAGE, "not valid JSON: line 1, column"),
    case("deep", lambda w: setattr(w, "text", 9999 * "[" + 9999 * "]"), USAGE, "config.json: nested more than"),
    case(
        "1e999",
        lambda w: setattr(w, "text", '{"optimizer": {"head": {"lr": 1e999}}}'),
        USAGE,
        "optimizer.head.lr: ",
        "1e999",
        "finite",
    ),
    case("NaN", lambda w: setattr(w, "text", '{"clip_norm": NaN}'), USAGE, "not valid JSON: line 1, column 15"),
    case(
        "duplicate key",
        lambda w: setattr(w, "text", json.dumps(w.config)[:-1] + ', "model": {"width": 1, "width": 2}}'),
        USAGE,
        "config.json: model",
        "duplicate key",
    ),
    case("unknown key", lambda w: w.config.update(optimiser={}), USAGE, "optimiser: unknown key", "mean optimizer?"),
    case("mistyped", lambda w: w.config.update(log_every="often"), USAGE, 'config.json: log_every: "often"', "integer"),
    case("missing", lambda w: w.config["model"].pop("width"), USAGE, "config.json: model.width: missing, but required"),
    case("missing lr", lambda w: w.config["optimizer"]["head"].pop("lr"), USAGE, "optimizer.head.lr: missing"),
    case(
        "both lengths",
        lambda w: w.config["schedule"].update(tokens_per_parameter=20),
        USAGE,
        "schedule.",
        "tokens_per_parameter",
        "only one",
    ),
    case("no length", lambda w: w.config["schedule"].clear(), USAGE, "tokens_per_parameter or updates: missing"),
    case("a folder", lambda w: (w.folder / "config.json").mkdir(), DATA, "config.json: is a folder, expected a file"),
]


# ---- output ----


def output_is_a_file(w: World) -> None:
    w.output.write_text("precious")


def below_a_file(w: World) -> None:
    (w.folder / "file").write_text("precious")
    w.set_output(w.folder / "file" / "run")


def below_read_only(w: World) -> None:
    (w.folder / "locked").mkdir(mode=0o555)
    w.set_output(w.folder / "locked" / "run")


OUTPUT = [
    case("exists", lambda w: w.output.mkdir(), DATA, "[output] ", "/out: exists already", "--resume"),
    case("is a file", output_is_a_file, DATA, "[output] ", "/out: exists already"),
    case("dangling link", lambda w: w.output.symlink_to("nowhere"), DATA, "[output] ", "/out: exists already"),
    case("is a file, resume", lambda w: (output_is_a_file(w), w.arguments.append("--resume")), DATA, "not a directory"),
    case(
        "no run's folder, resume",
        lambda w: (w.output.mkdir(), (w.output / "thesis.tex").write_text("precious"), w.arguments.append("--resume")),
        DATA,
        "[output] ",
        "/out: not a run's directory",
        "config.json",
    ),
    case("below a file", below_a_file, DATA, "[output] ", "file/run: cannot be created: Not a directory"),
    case("below a file, resume", lambda w: (below_a_file(w), w.arguments.append("--resume")), DATA, "file/run: cannot"),
    case("read-only parent", below_read_only, DATA, "[output] ", "locked/run: cannot be created: Permission denied"),
    case("name too long", lambda w: w.set_output(w.folder / (300 * "x")), DATA, "xxx", "too long"),
]


# ---- initial weights ----


def weights(dtype: str = "<f4") -> dict[str, np.ndarray]:
    d, f, v = 16, 64, VOCAB
    shapes = {"embed.weight": (v, d)}
    for layer in range(2):
        block = {f"attn.{name}": (d, d) for name in ("q", "k", "v", "out")}
        block |= {"gate": (f, d), "up": (f, d), "down": (d, f)}
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["lm_head.weight"] = (v, d)
    rng = np.random.default_rng(0)
    return {name: (0.02 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def init_from(w: World, change: Callable[[dict[str, np.ndarray]], object], cut: int | None = None) -> None:
    tensors = weights()
    change(tensors)
    path = write_safetensors(w.folder / "init.safetensors", tensors)
    path.write_bytes(path.read_bytes()[:cut])
    w.set(init_from=str(path))


def misshape(tensors: dict[str, np.ndarray]) -> None:
    tensors["blocks.1.down.weight"] = tensors["blocks.1.down.weight"].T.copy()


def spoil(value: float) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors["blocks.0.gate.weight"].__setitem__((63, 15), value)


def nothing(_: object) -> None:
    pass


INIT = [
    case("missing", lambda w: w.set(init_from="no/w.safetensors"), DATA, "no/w.safetensors: no such file"),
    case("a folder", lambda w: w.set(init_from=str(w.data)), DATA, "/data/config.json: no such file"),
    case(
        "not safetensors", lambda w: w.set(init_from=str(w.data / "val_1.bin")), DATA, "val_1.bin", "not a safetensors"
    ),
    case("empty", lambda w: init_from(w, nothing, 0), DATA, "init.safetensors: holds 0 bytes"),
    case("truncated", lambda w: init_from(w, nothing, -5), DATA, "init.safetensors", "lm_head.weight", "truncated?"),
    case(
        "missing tensor",
        lambda w: init_from(w, lambda t: t.pop("lm_head.weight")),
        DATA,
        "has no tensor",
        "lm_head.weight",
    ),
    case(
        "extra tensor",
        lambda w: init_from(w, lambda t: t.update({"blocks.2.up.weight": t["blocks.1.up.weight"]})),
        DATA,
        "blocks.2.up.weight is not a parameter of this model (2 layers)",
    ),
    case("misshapen", lambda w: init_from(w, misshape), DATA, "blocks.1.down.weight", "(64, 16)", "expected (16, 64)"),
    case("not a number", lambda w: init_from(w, spoil(np.nan)), DATA, "blocks.0.gate.weight", "not finite"),
    case("infinite", lambda w: init_from(w, spoil(-np.inf)), DATA, "blocks.0.gate.weight", "not finite"),
]

# ---- device, memory ----

DEVICES = [
    case("no cuda", lambda w: w.set(device="cuda"), DEVICE, "[cuda] "),
    case("bf16 without cuda", lambda w: w.set(device="auto", precision="bf16"), USAGE, "[precision] bf16", "fp32"),
    case(
        "fp32 on reference", lambda w: w.set(device="reference", precision="fp32"), USAGE, "precision", "fp32", "fp64"
    ),
    case("fp64 on auto", lambda w: w.set(device="auto", precision="fp64"), USAGE, "precision", "fp64"),
    case(
        "too much memory",
        lambda w: w.set(model__width=2**15, model__layers=1000),
        DEVICE,
        "[memory] ",
        "needs",
        "available",
        "the plan: weights",
        "total",
    ),
    case(
        "beyond 63 bits",
        lambda w: w.set(model__width=2**20, model__layers=4096, device="reference"),
        DEVICE,
        "[memory]",
    ),
]


@run_table(SHARDS)
def test_shard(world: World, case: Case) -> None:
    case.make(world)
    expect_error(world.train(), case.code, *case.parts)


@run_table(JSON)
def test_json(world: World, case: Case) -> None:
    case.make(world)
    expect_error(world.train(), case.code, "[config] ", *case.parts)


@run_table(OUTPUT)
def test_output(world: World, case: Case) -> None:
    case.make(world)
    expect_error(world.train(), case.code, *case.parts)


@run_table(INIT)
def test_init_from(world: World, case: Case) -> None:
    case.make(world)
    expect_error(world.train(), case.code, *case.parts)


@run_table(DEVICES)
def test_device(world: World, case: Case) -> None:
    case.make(world)
    expect_error(world.train(), case.code, *case.parts)


def test_what_the_table_breaks_is_whole(world: World) -> None:
    """The same weights, shards and config without the fault do train."""
    init_from(world, nothing)
    world.config["schedule"]["max_updates"] = 1
    world.config["optimizer"]["head"] = ADAMW
    expect_ok(run("train", write_config(world.folder / "config.json", world.config)))
    assert (world.output / "summary.json").exists()
    np.testing.assert_array_equal(  # update 1 has a learning rate of 0
        read_safetensors(checkpoint(world.output, 1) / "model.safetensors")["blocks.0.gate.weight"],
        weights()["blocks.0.gate.weight"],
    )


def test_config_that_is_not_there(tmp_path: Path) -> None:
    expect_error(run("train", "no/config.json", cwd=tmp_path), DATA, "[config] no/config.json: no such file")
    (tmp_path / "c.json").touch(mode=0)
    expect_error(
        run("train", "c.json", cwd=tmp_path, preexec=without_root_override), DATA, "c.json", "Permission denied"
    )


# ---- the command line ----

USAGES = [
    ((), "subcommand"),
    (("trian",), "trian"),
    (("train",), "config"),
    (("train", "a.json", "b.json"), "b.json"),
    (("train", "a.json", "--resum"), "--resum"),
    (("train", "a.json", "--set"), "--set"),
    (("eval",), "checkpoint"),
    (("eval", "runs", "--tokens", "-1"), "--tokens", "-1"),
    (("eval", "runs", "--tokens", "many"), "--tokens", "many"),
    (("eval", "runs", "--micro-batch", "0"), "--micro-batch", "0"),
    (("eval", "runs", "--device", "tpu"), "tpu", "auto, cpu, cuda, reference"),
    (("eval", "runs", "--device", "cpu", "--precision", "bf16"), "bf16", "fp32"),
    (("inspect",), "path"),
    (("inspect", "a", "b"), "b"),
]


@pytest.mark.parametrize("usage", USAGES, ids=[" ".join(u[0]) or "nothing" for u in USAGES])
def test_usage(usage: tuple[Any, ...], tmp_path: Path) -> None:
    arguments, *parts = usage
    expect_error(run(*arguments, cwd=tmp_path), USAGE, *parts)
    assert not list(tmp_path.iterdir())


OVERRIDES = [
    ("seed", "path=value"),
    ("=3", "path"),
    ("model..width=3", "model..width"),
    (".=3", "path"),
    ("nosuch.key=1", "nosuch", "unknown"),
    ("optimizer.head.lr=1e999", "1e999", "finite"),
    ("schedule.updates={}", "{}", "integer"),
    ("name=\udcff", "UTF-8"),  # the byte 0xff
]


@pytest.mark.parametrize("override", OVERRIDES, ids=[ascii(o[0]) for o in OVERRIDES])
def test_override(world: World, override: tuple[str, ...]) -> None:
    expect_error(world.train("--set", override[0]), USAGE, "[config] --set ", *override[1:])


def test_help_and_version() -> None:
    assert "train" in expect_ok(run("--help")).out
    assert "--dry-run" in expect_ok(run("train", "--help")).out
    assert expect_ok(run("--version")).out.startswith("rownorm ")


# ---- --dry-run ----


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "reference"])
def test_dry_run_opens_nothing(world: World, device: str) -> None:
    os.mkfifo(world.data / "train_3.bin")  # would be refused if it were looked at
    world.output.write_text("precious")
    world.set(device=device, data__validation="no/val_*.bin")
    result = expect_ok(world.train("--dry-run"))
    assert result.err == ""
    lines = dict(line.split(maxsplit=1) for line in result.out.replace(": ", ":").splitlines())
    assert int(lines["parameters"]) == 2 * 16 * 16**2 + 2 * VOCAB * 16
    assert lines["updates"] == "24"
    assert "note" in result.out
    assert "no/val_*.bin" in result.out
    assert "memory: total" in result.out


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"optimizer__hidden__newton_schulz_precision": "tf32"}])
def test_dry_run_plans_what_only_cuda_has(world: World, changes: dict[str, str]) -> None:
    world.set(device="auto", **changes)
    assert "auto (planned for cuda)" in expect_ok(world.train("--dry-run")).out


def test_dry_run_plans_cuda_whole(world: World) -> None:
    """With its workspace: at least cuBLASLt's 32 MiB, and a micro-batch's logits in f32 and their gradients in bf16."""
    world.set(device="cuda", batch__micro_batch=6, model__vocab_size=20000)
    lines = expect_ok(world.train("--dry-run")).out.splitlines()
    (workspace,) = [line for line in lines if line.startswith("memory: workspace")]
    assert workspace.endswith(" MiB")
    assert float(workspace.split()[-2]) * 2**20 >= 32 * 2**20 + 6 * CONTEXT * 20000 * (4 + 2)
    # 8 MiB through which copies pass, and three micro-batches of ids and targets
    large = ["--set", f"batch.micro_batch={2**17 // CONTEXT}", "--set", f"batch.sequences={2**18 // CONTEXT}"]
    assert "pinned host memory     11.0 MiB\n" in expect_ok(world.train("--dry-run", *large)).out


def test_dry_run_refuses_heads_that_cuda_does_not_have(world: World) -> None:
    world.set(device="cuda", model__width=256, model__head_dim=256)
    expect_error(world.train("--dry-run"), USAGE, "[model] head_dim 256", "at most 128")


def test_newton_schulz_precision_where_auto_becomes_the_cpu(world: World) -> None:
    world.set(device="auto", optimizer__hidden__newton_schulz_precision="bf16")
    expected = "optimizer.hidden.newton_schulz_precision: bf16", "device cpu", '"auto"'
    expect_error(world.train(), USAGE, *expected)
    expect_error(run("bench", world.folder / "config.json"), USAGE, *expected)


def test_bench_on_no_device(world: World) -> None:
    path = write_config(world.folder / "config.json", world.config)
    expect_error(run("bench", path, "--device", ""), USAGE, "--device", "is empty")


def test_dry_run_checks_the_config(world: World) -> None:
    expect_error(world.train("--dry-run", "--set", "model.width=20"), USAGE, "model.width: 20")


# ---- while it runs ----


def later_shard(config: dict[str, Any], data: Path) -> Path:
    """The training shard that is used second (PAPER 3)."""
    order = np.arange(2)
    np.random.default_rng(np.random.SeedSequence([config["seed"], 0, 0])).shuffle(order)
    return sorted(data.glob("train_*.bin"))[order[1]]


def test_bad_token_in_a_later_shard(world: World) -> None:
    world.set(log_every=5)  # neither 6 nor 9 is a multiple: the running mean is cut in two
    config = write_config(world.folder / "config.json", world.config)
    expect_ok(run("train", config, "--set", f"output={world.folder / 'right'}"))

    shard = later_shard(world.config, world.data)
    done = {"train_1.bin": 6, "train_2.bin": 9}[shard.name]  # updates in the other one
    right = shard.read_bytes()
    shard.write_bytes(right[:1124] + (1000).to_bytes(2, "little") + right[1126:])
    expect_error(run("train", config), DATA, f"{shard}: token 50 of the train data is 1000", "model.vocab_size 61")
    assert checkpoints(world.output)[-1] == f"update-{done:08}"
    assert records(world.output)[-1]["progress/update"] <= done
    assert not (world.output / "summary.json").exists()
    session = read_json(world.output / "run.json")["sessions"][-1]
    assert session["last_update"] == done
    assert "token 50" in session["outcome"]

    # Still bad: the same line, and nothing lost. Repaired: as if it had never been bad.
    expect_error(run("train", config, "--resume"), DATA, f"{shard}: token 50")
    assert checkpoints(world.output)[-1] == f"update-{done:08}"
    shard.write_bytes(right)
    expect_ok(run("train", config, "--resume"))
    assert records(world.output) == records(world.folder / "right")
    assert tree(checkpoint(world.output, 24)).keys() == tree(checkpoint(world.folder / "right", 24)).keys()
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = checkpoint(world.output, 24) / name, checkpoint(world.folder / "right", 24) / name
        assert ours.read_bytes() == theirs.read_bytes()


def limit_file_size(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.one_rank  # a limit from the start stops MPI itself; test_ranks.py sets it later
def test_disk_full_while_a_checkpoint_is_written(world: World) -> None:
    config = write_config(world.folder / "config.json", world.config)
    expect_ok(run("train", config, "--set", f"output={world.folder / 'right'}"))
    expect_ok(run("train", config, "--set", "schedule.max_updates=8"))
    before = tree(world.output / "checkpoints")

    full = run("train", config, "--resume", preexec=limit_file_size(20_000))
    expect_error(full, DATA, "update-00000012", "model.safetensors: cannot write: File too large")
    assert tree(world.output / "checkpoints") == before
    assert checkpoints(world.output) == ["update-00000004", "update-00000008"]

    expect_ok(run("train", config, "--resume"))
    extra = [r for r in records(world.output) if r["progress/update"] != 8]  # due at the stop, not in the schedule
    right = [r for r in records(world.folder / "right") if r["progress/update"] != 8]
    assert extra[-1] == right[-1]
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = checkpoint(world.output, 24) / name, checkpoint(world.folder / "right", 24) / name
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.one_rank
def test_disk_full_from_the_start(world: World) -> None:
    """Limits from nothing up: exit 3 with the first file that did not fit, and --resume continues."""
    world.set(checkpoint__every=0)
    config = write_config(world.folder / "config.json", world.config)
    expect_ok(run("train", config, "--set", f"output={world.folder / 'right'}"))
    right = tree(checkpoint(world.folder / "right", 24))
    named = set()
    for size in (0, 100, 1500, len((world.folder / "right" / "run.json").read_bytes()), 2500, 4000):
        result = run("train", config, preexec=limit_file_size(size))
        expect_error(result, DATA, str(world.output), "File too large")
        named.add(result.last_line.split(str(world.output))[1].split(":")[0])
        if world.output.exists():
            assert not list(world.output.rglob("*.partial"))
            expect_ok(run("train", config, "--resume"))
            assert tree(checkpoint(world.output, 24))["model.safetensors"] == right["model.safetensors"]
            shutil.rmtree(world.output)
    assert {"/config.json.partial", "/metrics.jsonl"} <= named


def test_output_in_use(world: World) -> None:
    world.set(device="reference", model__layers=8, schedule__updates=10_000, log_every=1)
    config = write_config(world.folder / "config.json", world.config)
    first = start("train", config)
    try:
        wait_for(lambda: (world.output / "metrics.jsonl").exists() and (world.output / "metrics.jsonl").stat().st_size)
        expect_error(run("train", config, "--resume"), DATA, f"[output] {world.output}: in use by another run")
        expect_error(run("train", config), DATA, f"[output] {world.output}: exists already")
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


# ---- numbers ----

OVERFLOWS = {
    "init_std": {"model__init_std": 1e30},
    "init_std-beyond-float": {"model__init_std": 1e300},
    "hidden-lr": {"optimizer__hidden": {"algorithm": "muon", "lr": 1e30}},
    "hidden-lr-beyond-float": {"optimizer__hidden": {"algorithm": "adamw", "lr": 1e300}},
    "embedding-lr": {"optimizer__embedding": {"algorithm": "adamw", "lr": 1e25}},
    "head-lr": {"optimizer__head": {"algorithm": "rownorm", "lr": 1e38}},
    "head-lr-adamw": {"optimizer__head": {"algorithm": "adamw", "lr": 1e300}},
    "weight-decay": {"optimizer__embedding": ADAMW | {"weight_decay": 1e30}},
}


@pytest.mark.parametrize("diagnostics", [True, False], ids=["measured", "unmeasured"])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_numbers_overflow(world: World, ranks: int, overflow: str, diagnostics: bool) -> None:
    if ranks == 2 and not diagnostics and not FULL:
        pytest.skip("slow: runs with ROWNORM_FULL=1")
    every = 1 if diagnostics else 0
    measurements = {"evaluation__every": every, "diagnostics__diameter_every": every}
    world.set(**OVERFLOWS[overflow], **measurements, checkpoint__every=1, checkpoint__keep=9)
    config = write_config(world.folder / "config.json", world.config)
    result = run("train", config)
    expect_error(result, NUMBERS, "update ")
    line = result.last_line
    update = int(line.split("update ")[1].split(":")[0])
    where = r"(first found in|: )( the gradient of)? ?(embed|blocks|lm_head|the head's input)|: the logits or a sum"
    assert re.search(where, line), line
    assert "-nan" not in line
    assert "warning" not in result.err
    # The checkpoints are of the updates before, whose weights are finite.
    kept = checkpoints(world.output) if (world.output / "checkpoints").exists() else []
    assert kept == [f"update-{u:08}" for u in range(1, update)][-9:], line
    for name in kept:
        for tensors in ("model.safetensors", "optimizer.safetensors"):
            for tensor in read_safetensors(world.output / "checkpoints" / name / tensors).values():
                assert np.isfinite(tensor).all()
    # An update whose own numbers were right has its record, even if the weights that it made are infinite.
    assert all(r["progress/update"] < update + (line.startswith("[checkpoint]")) for r in records(world.output))
    # Again from there: the same end.
    again = run("train", config, "--resume")
    assert (again.code, again.last_line) == (NUMBERS, line)


# ---- --resume ----


@pytest.fixture
def finished(whole_run: dict[str, Any], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A copy of a finished run, and its config with the copy as output."""
    config = dict(whole_run, output=str(tmp_path / "run"))
    shutil.copytree(whole_run["output"], tmp_path / "run")
    return config, write_config(tmp_path / "config.json", config)


def same_as(config: dict[str, Any], whole_run: dict[str, Any]) -> None:
    ours, theirs = Path(config["output"]), Path(whole_run["output"])
    assert records(ours) == records(theirs)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint(ours, 24) / name).read_bytes() == (checkpoint(theirs, 24) / name).read_bytes()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {"flipped": flip, "truncated": halve, "emptied": lambda p: p.write_bytes(b""), "missing": Path.unlink,
          "a-folder": make_folder}  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_corrupt_newest_checkpoint(
    finished: tuple[dict[str, Any], Path], whole_run: dict[str, Any], name: str, damage: str
) -> None:
    config, path = finished
    newest = checkpoint(Path(config["output"]), 24) / name
    DAMAGE[damage](newest)
    result = expect_ok(run("train", path, "--resume"))
    warnings = [line for line in result.err.splitlines() if "warning" in line]
    assert len(warnings) == 1, result.err
    assert str(newest) in warnings[0]
    assert "skipped" in warnings[0]
    assert "exception" not in warnings[0]
    assert "update-00000020" in result.err
    same_as(config, whole_run)


def test_all_checkpoints_corrupt(finished: tuple[dict[str, Any], Path]) -> None:
    config, path = finished
    for update in (20, 24):
        flip(checkpoint(Path(config["output"]), update) / "model.safetensors")
    before = tree(Path(config["output"]))
    result = run("train", path, "--resume")
    assert result.err.count("skipped") == 2
    expect_error(result, 3, "[checkpoint]", "none of its 2 checkpoints is whole")
    assert tree(Path(config["output"])) == before


def test_corrupt_checkpoints_do_not_displace_whole_ones(world: World) -> None:
    world.set(checkpoint__keep=3)
    config = write_config(world.folder / "config.json", world.config)
    expect_ok(run("train", config))
    assert checkpoints(world.output) == [f"update-{u:08}" for u in (16, 20, 24)]
    for update in (20, 24):
        halve(checkpoint(world.output, update) / "optimizer.safetensors")
    stop = ("--set", "schedule.max_updates=18", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=2")
    expect_ok(run("train", config, "--resume", *stop))
    assert {"update-00000017", "update-00000018"} <= set(checkpoints(world.output))
    result = expect_ok(run("train", config, "--resume"))
    assert f"resumed from {checkpoint(world.output, 18)}" in result.err


def test_resume_with_other_keys(finished: tuple[dict[str, Any], Path]) -> None:
    config, path = finished
    before = tree(Path(config["output"]))
    result = run("train", path, "--resume", "--set", "seed=6", "--set", "optimizer.head.lr=0.5",
                 "--set", "schedule.updates=25")  # fmt: skip
    expect_error(result, USAGE, "[resume] ", "update-00000024", "seed: 5 in the checkpoint, 6 now", ", 0.5 now",
                 "optimizer.head.lr: ", "schedule.updates: 24 in the checkpoint, 25 now")  # fmt: skip
    result = run("train", path, "--resume", "--set", "model.width=32")
    expect_error(result, USAGE, "model.width: 16 in the checkpoint, 32 now")
    assert tree(Path(config["output"])) == before


def test_resume_with_changed_data(world: World) -> None:
    config = write_config(world.folder / "config.json", world.config)
    expect_ok(run("train", config, "--set", "schedule.max_updates=4"))
    before = tree(world.output)

    def refused(*parts: str) -> None:
        expect_error(run("train", config, "--resume"), DATA, "[resume] ", *parts)
        assert tree(world.output) == before

    shard = world.data / "train_2.bin"
    right = shard.read_bytes()
    write_shard(shard, 6 * TOKENS_PER_UPDATE + 2)
    refused("train shard 1", "train_2.bin")
    shard.write_bytes(right[:1020] + b"\1\0\0\0" + right[1024:])  # the same size, another header
    refused("train shard 1", "train_2.bin", "header")
    shard.rename(world.data / "train_3.bin")
    refused("train shard 1", "train_2.bin", "train_3.bin")
    (world.data / "train_3.bin").unlink()
    refused("train shard 1", "nothing")
    shard.write_bytes(right)
    write_shard(world.data / "val_3.bin", 100)
    refused("validation shard 2", "val_3.bin")


# ---- eval and inspect ----


def make_bad_run(folder: Path, whole_run: dict[str, Any]) -> Path:
    shutil.copytree(whole_run["output"], folder / "run")
    for update in (20, 24):
        flip(checkpoint(folder / "run", update) / "model.safetensors")
    return folder / "run"


def test_eval_of_what_is_no_checkpoint(whole_run: dict[str, Any], tmp_path: Path) -> None:
    expect_error(run("eval", "no/run", cwd=tmp_path), DATA, "no/run", "checkpoint")
    expect_error(run("eval", 300 * "x", cwd=tmp_path), DATA, "xxx")
    expect_error(run("eval", EXE), DATA, str(EXE), "checkpoint")
    (tmp_path / "empty").mkdir()
    expect_error(run("eval", "empty", cwd=tmp_path), DATA, "empty", "checkpoint")
    bad = make_bad_run(tmp_path, whole_run)
    result = run("eval", bad)
    expect_error(result, DATA, str(bad), "none of its 2 checkpoints is whole")
    assert result.err.count("model.safetensors") == result.err.count("skipped") == 2
    expect_error(run("eval", checkpoint(bad, 20)), DATA, "update-00000020/model.safetensors", "corrupt?")
    (checkpoint(bad, 20) / "state.json").write_text("{")
    expect_error(run("eval", checkpoint(bad, 20)), DATA, "update-00000020/state.json")


def test_eval_of_bad_data(whole_run: dict[str, Any], tmp_path: Path) -> None:
    good = whole_run["output"]

    def refused(code: int, *rest: str) -> Callable[..., None]:
        result = run("eval", good, *rest, cwd=tmp_path)
        return lambda *parts: expect_error(result, code, *parts)

    refused(DATA, "--data", "no_*.bin")("no_*.bin", "no file matches")
    refused(USAGE, "--tokens", "100")("--tokens", "100", "multiple of the context 16")
    refused(USAGE, "--tokens", 25 * "9")("--tokens")
    refused(DATA, "--tokens", "656")("640 tokens", "656")
    refused(DATA, "--tokens", str(2**63 - 16))("640 tokens", str(2**63 - 16))
    refused(DEVICE, "--device", "cuda")("[cuda] ")
    (tmp_path / "short.bin").write_bytes(shard_bytes(TOKENS[:CONTEXT]))
    refused(DATA, "--data", "short.bin")("short.bin", "no whole sequence of 16")
    (tmp_path / "bad.bin").write_bytes(with_bad_token(17, VOCAB))
    refused(DATA, "--data", "bad.bin")("bad.bin: token 17", "61")
    (tmp_path / "cut.bin").write_bytes(GOOD[:-1])
    refused(DATA, "--data", "cut.bin")("cut.bin: header says 576")
    refused(USAGE, "--data", "")("--data", "is empty")


def test_inspect_of_bad_paths(whole_run: dict[str, Any], tmp_path: Path) -> None:
    def refused(code: int, *rest: object) -> Callable[..., None]:
        result = run("inspect", *rest, cwd=tmp_path)
        return lambda *parts: expect_error(result, code, *parts)

    good = Path(whole_run["output"])
    model = checkpoint(good, 24) / "model.safetensors"
    refused(DATA, "nothing")("nothing", "no such file")
    refused(DATA, "no_*.bin")("no_*.bin", "no file matches")
    refused(DATA, 300 * "x")("xxx")
    refused(DATA, "/")("/", "neither a run's nor a checkpoint's directory")
    refused(DATA, good / "metrics.jsonl")("metrics.jsonl", "magic number")
    refused(DATA, "no.safetensors")("no.safetensors: no such file")
    refused(DATA, model, "--diameter", "nothing.weight")("model.safetensors", "nothing.weight")
    refused(USAGE, good / "metrics.jsonl", "--diameter", "x")("--diameter", "not a safetensors file")
    refused(DATA, good, "--diameter", "nothing")("no tensor", "nothing")
    refused(USAGE, good, "--diameter", "")("--diameter", "is empty")

    (tmp_path / "cut.bin").write_bytes(GOOD[:-2])
    refused(DATA, "cut.bin")("cut.bin: header says 576 tokens, the file holds 575")
    halved = tmp_path / "half.safetensors"
    halved.write_bytes(model.read_bytes()[:20_000])
    refused(DATA, "half.safetensors")("half.safetensors", "truncated?")
    tensors = {"flat": np.ones(5, "<f4"), "none": np.ones((0, 3), "<f4"), "nan": np.array([[1, np.nan]], "<f4")}
    write_safetensors(tmp_path / "odd.safetensors", tensors)
    refused(USAGE, "odd.safetensors", "--diameter", "flat")("flat", "1 dimensions", "matrix")
    refused(USAGE, "odd.safetensors", "--diameter", "none")("none", "0 elements", "matrix")
    refused(NUMBERS, "odd.safetensors", "--diameter", "nan")("nan", "not finite")

    bad = make_bad_run(tmp_path, whole_run)
    refused(DATA, checkpoint(bad, 24))("update-00000024/model.safetensors", "corrupt?")
    (bad / "metrics.jsonl").write_text("{}\n")
    refused(DATA, bad)("metrics.jsonl", "byte 0")
    (bad / "config.json").write_text("{")
    refused(USAGE, bad)("config.json: not valid JSON")


def test_standard_output_full(whole_run: dict[str, Any]) -> None:
    """What cannot be printed is an error, not a success."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        result = run("inspect", whole_run["output"], preexec=lambda: os.dup2(full, 1))
    finally:
        os.close(full)
    expect_error(result, DATA, "standard output", "No space left on device")


def test_shard_cut_off_while_in_use(world: World) -> None:
    """Its pages are gone under the mapping: one line instead of a death by SIGBUS, and the checkpoints stay."""
    world.set(schedule__updates=100_000, checkpoint__every=5, evaluation__every=0, diagnostics__hilbert_panel=[])
    process = start("train", write_config(world.folder / "config.json", world.config), stderr=subprocess.PIPE)
    wait_for(lambda: (world.output / "checkpoints").is_dir() and len(checkpoints(world.output)) >= 2)
    for shard in world.data.glob("train_*.bin"):
        os.truncate(shard, 0)
    _, err = process.communicate(timeout=60)
    result = Result(process.returncode, "", err.decode())
    lines = min(2, result.err.count("became shorter"))  # each rank that meets it says so and ends
    expect_error(result, 3, "[file]", "train_", "became shorter while in use", lines=lines)
    expect_ok(run("inspect", checkpoint(world.output, int(checkpoints(world.output)[-1].removeprefix("update-")))))


def test_shard_overwritten_while_in_use(world: World) -> None:
    """Tokens that were good when scanned and are not when read must not reach the embedding."""
    world.set(schedule__updates=100_000, checkpoint__every=5, evaluation__every=0, diagnostics__hilbert_panel=[])
    process = start("train", write_config(world.folder / "config.json", world.config), stderr=subprocess.PIPE)
    wait_for(lambda: (world.output / "checkpoints").is_dir() and len(checkpoints(world.output)) >= 2)
    for shard in world.data.glob("train_*.bin"):
        with shard.open("r+b") as file:
            file.seek(1024)
            file.write(b"\xff" * (shard.stat().st_size - 1024))
    _, err = process.communicate(timeout=60)
    expect_error(Result(process.returncode, "", err.decode()), DATA, "[shard]", "changed while in use", "65535")


@pytest.mark.parametrize("kind", ["dangling", "file", "unreadable"])
def test_checkpoints_that_cannot_be_listed(finished: tuple[dict[str, Any], Path], kind: str) -> None:
    """Not the same as none: nothing is trained again and no metrics are lost."""
    config, path = finished
    folder = Path(config["output"]) / "checkpoints"
    shutil.move(folder, folder.with_name("elsewhere"))
    if kind == "dangling":
        folder.symlink_to("nowhere")
    elif kind == "file":
        folder.write_text("")
    else:
        shutil.copytree(folder.with_name("elsewhere"), folder)
        folder.chmod(0)
    metrics = (Path(config["output"]) / "metrics.jsonl").read_bytes()
    result = run("train", path, "--resume", preexec=without_root_override)
    if kind == "unreadable":
        folder.chmod(0o755)
    expect_error(result, DATA, "[checkpoint]", "checkpoints: cannot be listed")
    assert (Path(config["output"]) / "metrics.jsonl").read_bytes() == metrics


def test_resume_after_a_kill_before_the_config_was_whole(world: World) -> None:
    world.output.mkdir()
    (world.output / "config.json.partial").write_text('{ "na')
    expect_ok(run("train", write_config(world.folder / "config.json", world.config), "--resume"))


def test_file_names_that_are_not_utf8(world: World) -> None:
    folder = Path(os.fsdecode(os.fsencode(world.folder) + b"/d\xff"))
    folder.mkdir()
    write_shard(folder / "train_1.bin", 9 * TOKENS_PER_UPDATE + 20)
    done = subprocess.run([EXE, "inspect", folder / "train_1.bin"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["tokens"] == 9 * TOKENS_PER_UPDATE + 20


def test_closed_standard_streams(world: World) -> None:
    path = write_config(world.folder / "config.json", world.config)
    command = f'exec "{EXE}" train "{path}" 0<&- 1>&- 2>&-'
    assert subprocess.run(["/bin/bash", "-c", command], timeout=60, check=False).returncode == 0
    assert records(world.output)[-1]["progress/update"] == 24


def test_metrics_with_garbage_or_holes(finished: tuple[dict[str, Any], Path]) -> None:
    config, path = finished
    output = Path(config["output"])
    metrics = output / "metrics.jsonl"
    whole = metrics.read_bytes()
    shutil.rmtree(checkpoint(output, 24))
    metrics.write_bytes(whole + b"\0\0\0\n{")  # behind the checkpoint's record: cut off
    expect_ok(run("train", path, "--resume"))
    lines = metrics.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(whole.splitlines())

    shutil.rmtree(checkpoint(output, 24))
    metrics.write_bytes(b"garbage\n" + whole)
    expect_error(run("train", path, "--resume"), DATA, "metrics.jsonl: byte 0")

    metrics.write_bytes(lines[0])
    result = expect_ok(run("train", path, "--resume"))
    assert "is missing" in result.err
