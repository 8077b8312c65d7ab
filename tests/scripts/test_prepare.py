"""data/prepare.py, run as a user runs it."""

import base64
import hashlib
import json
import os
import pty
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

SCRIPT = Path(__file__).parents[2] / "data" / "prepare.py"
ISOLATED = (sys.executable, "-S", "-I")  # as a bare python3: neither site-packages nor the environment
WORDS = ["loss", "head", "row", "norm", "step", "update", "token", "batch", "shard", "layer", "width"]


def prepare(
    *arguments: str | Path,
    python: tuple[str, ...] = (sys.executable,),
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*python, SCRIPT, *arguments], capture_output=True, timeout=60, check=False, **options)


def prepared(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    """What prepare.json says after a run that succeeds."""
    result = prepare(*arguments, **options)
    assert result.returncode == 0, result.stderr.decode()
    output = Path(arguments[arguments.index("--output") + 1])
    return json.loads((output / "prepare.json").read_text())


def read_shard(path: Path) -> list[int]:
    data = path.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] == (20240520, 1)
    assert not any(header[3:])
    assert len(data) == 1024 + 2 * header[2]
    return list(struct.unpack(f"<{header[2]}H", data[1024:]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents_of(tokens: list[int]) -> list[bytes]:
    """The documents of a shard of bytes."""
    assert tokens[0] == 0
    return bytes(tokens[1:]).split(b"\0")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    for i in range(40):
        text = " ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(1, 60))
        (folder / ("deeper" if i % 2 else "") / f"{i}.txt").write_text(f"Document {i}: {text} — {i * i}.\n")
    return folder


def test_shards_hold_exactly_the_documents_in_the_order_of_their_hashes(tmp_path: Path) -> None:
    documents = [b"first", b"second document\n", "drei — ü".encode(), b"\xff\xfe not UTF-8"]
    for i, document in enumerate(documents):
        (tmp_path / f"{i}.txt").write_bytes(document)
    output = tmp_path / "out"
    record = prepared(*sorted(tmp_path.glob("*.txt")), "--tokenizer", "bytes", "--output", output)
    validation, *train = sorted(documents, key=lambda text: hashlib.sha256(text).digest())
    assert read_shard(output / "text_val_000000.bin") == list(b"\0" + validation)
    assert read_shard(output / "text_train_000001.bin") == list(b"\0" + b"\0".join(train))
    assert sorted(path.name for path in output.iterdir()) == [
        "prepare.json",
        "text_train_000001.bin",
        "text_val_000000.bin",
    ]
    assert record == {
        "tokenizer": "bytes",
        "vocab_size": 256,
        "separator_token": 0,
        "source": None,
        "validation_fraction": 0.05,
        "duplicates_dropped": 0,
        "train": {
            "documents": 3,
            "bytes": sum(map(len, train)),
            "tokens": sum(map(len, train)) + 3,
            "shards": ["text_train_000001.bin"],
        },
        "validation": {
            "documents": 1,
            "bytes": len(validation),
            "tokens": len(validation) + 1,
            "shards": ["text_val_000000.bin"],
        },
    }


def test_shards_are_cut_at_the_asked_size(texts: Path, tmp_path: Path) -> None:
    common = (texts, "--tokenizer", "bytes", "--validation-fraction", "0.3")
    whole = prepared(*common, "--output", tmp_path / "whole")
    cut = prepared(*common, "--output", tmp_path / "cut", "--shard-tokens", "1000", "--prefix", "a-b.c")
    for split, stem, first in (("train", "train", 1), ("validation", "val", 0)):
        names = [f"a-b.c_{stem}_{i:06d}.bin" for i in range(first, first + len(cut[split]["shards"]))]
        assert cut[split]["shards"] == names
        shards = [read_shard(tmp_path / "cut" / name) for name in names]
        assert {len(shard) for shard in shards[:-1]} == {1000}
        assert 1 <= len(shards[-1]) <= 1000
        assert [token for shard in shards for token in shard] == read_shard(
            tmp_path / "whole" / whole[split]["shards"][0]
        )


def test_output_depends_on_the_contents_alone(texts: Path, tmp_path: Path) -> None:
    files = sorted(path for path in texts.rglob("*") if path.is_file())
    for name, inputs in (("a", [texts]), ("b", files), ("c", files[::-1])):
        prepared(*inputs, "--tokenizer", "bytes", "--output", tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_a_document_is_in_one_split_once(texts: Path, tmp_path: Path) -> None:
    asked = ("--tokenizer", "bytes", "--validation-fraction", "0.25")
    record = prepared(texts, texts, *asked, "--output", tmp_path / "out")
    train = documents_of(read_shard(tmp_path / "out" / "text_train_000001.bin"))
    validation = documents_of(read_shard(tmp_path / "out" / "text_val_000000.bin"))
    assert sorted(train + validation) == sorted(path.read_bytes() for path in texts.rglob("*.txt"))
    assert record["duplicates_dropped"] == 40
    held = record["validation"]["bytes"] / (record["validation"]["bytes"] + record["train"]["bytes"])
    assert 0.25 <= held < 0.25 + 1 / 30  # at most one document more than asked


@pytest.mark.parametrize(
    ("separator", "text", "documents"),
    [
        ("***", b"a\nb\n***\nc ***\n***\r\nd", [b"a\nb\n", b"c ***\n", b"d"]),
        ("", b"a\nb\n\n\n\nc\n\n", [b"a\nb\n", b"c\n"]),
        (".*", b"a\n.*\nb\n.*", [b"a\n", b"b\n"]),
    ],
)
def test_separator_line(tmp_path: Path, separator: str, text: bytes, documents: list[bytes]) -> None:
    output = tmp_path / "out"
    prepared("-", "--separator", separator, "--tokenizer", "bytes", "--output", output, input=text)
    found = documents_of(read_shard(output / "text_train_000001.bin"))
    assert sorted(found + documents_of(read_shard(output / "text_val_000000.bin"))) == sorted(documents)


def test_folders_leave_out_hidden_and_binary_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    for name, text in (("a", b"a"), ("b", b"b"), (".hidden", b"h"), (".git/x", b"x"), ("c.bin", b"\0c"), ("e", b" \n")):
        (folder / name).write_bytes(text)
    arguments = ("--tokenizer", "bytes", "--output", tmp_path / "out")
    result = prepare(folder, *arguments)
    assert b"skipped 1 binary files" in result.stderr
    record = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert record["train"]["documents"] + record["validation"]["documents"] == 2
    record = prepared(folder, folder / "c.bin", *arguments, "--overwrite")
    assert record["train"]["documents"] + record["validation"]["documents"] == 3


def test_trained_bpe_decodes_to_the_documents(texts: Path, tmp_path: Path) -> None:
    (texts / "strange.txt").write_bytes(b"a<|endoftext|>b \xff 'll\t\r\n  \xf0\x9f\x99\x82" + b"x" * 50)
    output = tmp_path / "out"
    record = prepared(texts, "--tokenizer", "train-bpe:330", "--output", output, "--validation-fraction", "0.5")
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == record["vocab_size"] == 330
    assert tokenizer.token_to_id("<|endoftext|>") == record["separator_token"] == 0
    decoded = []
    for name in ("text_train_000001.bin", "text_val_000000.bin"):
        tokens = read_shard(output / name)
        assert tokens[0] == 0
        assert max(tokens) < 330
        starts = [i for i, token in enumerate(tokens) if token == 0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            decoded.append(tokenizer.decode(tokens[start + 1 : end], skip_special_tokens=False))
    expected = [path.read_bytes().decode(errors="replace") for path in texts.rglob("*.txt")]
    assert sorted(decoded) == sorted(expected)


def test_trained_bpe_is_deterministic(texts: Path, tmp_path: Path) -> None:
    for name, threads in (("a", "1"), ("b", "2"), ("c", "7")):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        prepared(texts, "--tokenizer", "train-bpe:390", "--output", tmp_path / name, env=environment)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def gpt2_bytes() -> list[int]:
    """The bytes in the order of their GPT-2 tokens: '!' is 0, space 220."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in printable]


def test_gpt2_vocabulary_from_a_file(texts: Path, tmp_path: Path) -> None:
    # 50,000 made-up merges of two bytes, the first of them GPT-2's first, "Ġ t".
    order = gpt2_bytes()
    pairs = [b" t", *(pair for a in order for b in order if (pair := bytes([a, b])) != b" t")][:50000]
    characters = {byte: chr(byte) if i < 188 else chr(256 + i - 188) for i, byte in enumerate(order)}
    merges, ranks = tmp_path / "vocab.bpe", tmp_path / "r50k_base.tiktoken"
    lines = ["#version: 0.2", *(" ".join(characters[byte] for byte in pair) for pair in pairs)]
    merges.write_text("\n".join(lines) + "\n", encoding="utf-8")
    entries = [*(bytes([byte]) for byte in order), *pairs]
    ranks.write_bytes(b"".join(base64.b64encode(entry) + b" %d\n" % i for i, entry in enumerate(entries)))
    text = tmp_path / "text"
    text.write_text("\n t~\n<|endoftext|>")
    for name, vocabulary in (("merges", merges), ("ranks", ranks)):
        arguments = ("--tokenizer", "gpt2", "--vocab", vocabulary, "--output", tmp_path / name)
        record = prepared(text, *texts.glob("*.txt"), *arguments, "--validation-fraction", "0.9")
        assert (record["vocab_size"], record["separator_token"]) == (50257, 50256)
    assert contents(tmp_path / "merges") == contents(tmp_path / "ranks")
    pair = {entry: i for i, entry in enumerate(entries)}
    # GPT-2's pattern cuts "\n", " t", "~", "\n", "<|", "endoftext", "|>".
    expected = [198, 256, 93, 198, pair[b"<|"], *(pair[b] for b in (b"en", b"do", b"ft", b"ex", b"t")), pair[b"|>"]]
    tokens = read_shard(tmp_path / "ranks" / "text_train_000001.bin") + read_shard(
        tmp_path / "ranks" / "text_val_000000.bin"
    )
    found = " ".join(map(str, tokens))
    assert f"50256 {' '.join(map(str, expected))}" in found
    assert tokens.count(50256) == 21


def test_earlier_output_is_replaced_only_on_request(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    prepared(texts, "--tokenizer", "train-bpe:300", "--output", output, "--shard-tokens", "500")
    (output / "other_train_000001.bin").write_bytes(b"not ours")
    before = contents(output)
    refused = prepare(texts, "--tokenizer", "bytes", "--output", output)
    assert refused.returncode == 3
    assert b"text_train_000001.bin: exists; name another --output or add --overwrite" in refused.stderr
    assert contents(output) == before
    prepared(texts, "--tokenizer", "bytes", "--output", output, "--overwrite")
    assert sorted(contents(output)) == [
        "other_train_000001.bin",
        "prepare.json",
        "text_train_000001.bin",
        "text_val_000000.bin",
    ]


def test_a_failed_write_changes_nothing(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    asked = (texts, "--tokenizer", "bytes", "--output", output)
    prepared(*asked)
    before = contents(output)
    result = prepare(
        *asked,
        "--overwrite",
        "--validation-fraction=0.5",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert result.returncode == 3
    assert result.stderr.decode().splitlines()[-1].startswith("[prepare] ")
    assert b"file too large" in result.stderr
    assert contents(output) == before


def test_python_docs_with_a_bare_interpreter(tmp_path: Path) -> None:
    output = tmp_path / "out"
    record = prepared("--source", "python-docs", "--tokenizer", "bytes", "--output", output, python=ISOLATED)
    assert record["train"]["bytes"] + record["validation"]["bytes"] > 6_000_000
    assert record["source"] == f"python-docs {sys.version.split()[0]}"
    documents = documents_of(read_shard(output / "text_train_000001.bin"))
    documents += documents_of(read_shard(output / "text_val_000000.bin"))
    assert sum(b"def namedtuple(" in document for document in documents) == 1  # a source
    assert sum(document.startswith(b"builtins\n\n") for document in documents) == 1  # docstrings
    assert sum(document.startswith(b'The "assert" statement\n') for document in documents) == 1  # a topic


def test_progress_and_summary(texts: Path, tmp_path: Path) -> None:
    result = prepare(texts, "--tokenizer", "bytes", "--output", tmp_path / "out")
    assert all(line.startswith("[prepare] encoding text_") for line in result.stderr.decode().splitlines())
    assert b"\r" not in result.stderr
    train, validation, config = result.stdout.decode().splitlines()
    assert train.startswith("train: ")
    assert validation.startswith("validation: ")
    assert json.loads("{" + config.removeprefix("config: ") + "}") == {
        "model": {"vocab_size": 256},
        "data": {
            "train": str(tmp_path / "out" / "text_train_*.bin"),
            "validation": str(tmp_path / "out" / "text_val_*.bin"),
        },
    }


def test_progress_bar_on_a_terminal(texts: Path, tmp_path: Path) -> None:
    terminal, inner = pty.openpty()
    command = [sys.executable, SCRIPT, texts, "--tokenizer", "bytes", "--output", tmp_path / "out"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=inner, check=True)
    os.close(inner)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert shown.count("[" + "#" * 30 + "] 100% of 0.0 MB\r\n") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("a.txt b.txt --output out", 2, "--tokenizer"),
        ("a.txt b.txt --tokenizer bytes", 2, "--output"),
        ("a.txt b.txt --tokenizer chars --output out", 2, "--tokenizer chars: bytes, gpt2 or train-bpe:N with 257"),
        ("a.txt b.txt --tokenizer train-bpe:256 --output out", 2, "train-bpe:256"),
        ("a.txt b.txt --tokenizer train-bpe:65537 --output out", 2, "train-bpe:65537"),
        ("--tokenizer bytes --output out", 2, "nothing to read: give an INPUT or --source python-docs"),
        ("--source books --tokenizer bytes --output out", 2, "'books'"),
        ("a.txt b.txt --tokenizer bytes --output out --validation-fraction 1", 2, "--validation-fraction 1.0: more"),
        ("a.txt b.txt --tokenizer bytes --output out --validation-fraction nan", 2, "--validation-fraction nan: more"),
        ("a.txt b.txt --tokenizer bytes --output out --shard-tokens 0", 2, "--shard-tokens 0: from 1"),
        ("a.txt b.txt --tokenizer bytes --output out --prefix a/b", 2, "--prefix a/b: letters"),
        ("a.txt b.txt --tokenizer bytes --output out --vocab a.txt", 2, "--vocab: only with --tokenizer gpt2"),
        ("missing.txt --tokenizer bytes --output out", 3, "missing.txt: no such file or directory"),
        ("a.txt b.txt --tokenizer bytes --output a.txt", 3, "a.txt: is a file, --output must name a folder"),
        ("a.txt b.txt --tokenizer bytes --output a.txt/out", 3, "not a directory"),
        ("a.txt --tokenizer bytes --output out", 3, "a.txt: 1 distinct documents with text"),
        ("a.txt a.txt --tokenizer bytes --output out", 3, "--separator splits a file"),
        ("empty.txt --tokenizer bytes --output out", 3, "empty.txt: 0 distinct documents"),
        ("a.txt b.txt --tokenizer gpt2 --vocab missing --output out", 3, "missing: no such file or directory"),
        ("a.txt b.txt --tokenizer gpt2 --vocab a.txt --output out", 3, "a.txt: neither GPT-2 merges nor"),
        ("a.txt b.txt --tokenizer gpt2 --vocab few --output out", 3, "few: holds 1 tokens, GPT-2 has 50256"),
        ("a.txt b.txt --tokenizer gpt2 --vocab merges --output out", 3, "merges: neither GPT-2 merges nor"),
        ("a.txt b.txt --tokenizer gpt2 --output out", 3, "gpt2: tiktoken cannot download the vocabulary"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: str, code: int, message: str) -> None:
    for name, text in (("a.txt", "alpha beta"), ("b.txt", "b"), ("empty.txt", ""), ("few", "YQ== 0\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "merges").write_text("#version: 0.2\na b c\n")
    offline = {"https_proxy": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache")}
    result = prepare(*arguments.split(), cwd=tmp_path, env=os.environ | offline)
    assert result.returncode == code
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("[prepare] ")
    assert message in line
    assert not result.stdout
    assert not (tmp_path / "out").exists()


def test_too_little_text_for_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two")
    (tmp_path / "b").write_text("three")
    result = prepare(tmp_path, "--tokenizer", "train-bpe:1000", "--output", tmp_path / "out")
    assert result.returncode == 3
    assert "train-bpe:1000: the text yields 2" in result.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize(("tokenizer", "package"), [("train-bpe:300", "tokenizers"), ("gpt2", "tiktoken")])
def test_missing_packages_are_named(texts: Path, tmp_path: Path, tokenizer: str, package: str) -> None:
    result = prepare(texts, "--tokenizer", tokenizer, "--output", tmp_path / "out", python=ISOLATED)
    assert result.returncode == 3
    assert result.stderr.decode() == (
        f"[prepare] {package}: not installed here; run scripts/setup.sh, then .venv/bin/python data/prepare.py ...\n"
    )
