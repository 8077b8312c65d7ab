"""`rownorm sample`: against a network, a sampler and a byte-level BPE of others, and on models whose text is known."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    CONTEXT,
    EXE,
    ROOT,
    VOCAB,
    checkpoint,
    environment,
    expect_error,
    expect_ok,
    read_safetensors,
    run,
    shard_bytes,
    start,
    tiny_config,
    tree,
    wait_for,
    write_config,
    write_safetensors,
)
from tokenizers import Tokenizer

USAGE, DATA = 2, 3


def sample(path: Path, *arguments: object, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The JSON records, one a sample."""
    out = expect_ok(run("sample", path, "--json", *arguments, env=env)).out
    return [json.loads(line) for line in out.split("\n")[:-1]]


def listed(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


# ---- the network and the sampler again, in numpy ----


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def next_logits(weights: dict[str, np.ndarray], tokens: list[int], head_dim: int = 8) -> np.ndarray:
    """Logits after `tokens`, the whole sequence at once, by the equations of docs/paper.md 2 in float64."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = w["embed.weight"][tokens]
    length, width = x.shape
    angle = np.arange(length)[:, None] * 10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(heads: np.ndarray) -> np.ndarray:
        a, b = np.split(heads, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for i in range(sum(name.endswith("attn.q.weight") for name in w)):
        normed = norm(x)
        q, k, v = (
            (normed @ w[f"blocks.{i}.attn.{part}.weight"].T).reshape(length, -1, head_dim) for part in ("q", "k", "v")
        )
        scores = np.einsum("ihc,jhc->hij", rotate(norm(q)), rotate(norm(k))) / np.sqrt(head_dim)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        att = np.einsum("hij,jhc->ihc", p / p.sum(axis=-1, keepdims=True), v).reshape(length, width)
        x = x + att @ w[f"blocks.{i}.attn.out.weight"].T
        gate, up = (norm(x) @ w[f"blocks.{i}.{part}.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blocks.{i}.down.weight"].T
    return norm(x)[-1] @ w["lm_head.weight"].T


def pick(logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return int(np.searchsorted(np.cumsum(p / p.sum()), uniform, side="right"))


def expected_tokens(
    weights: dict[str, np.ndarray], prompt: list[int], count: int, rule: dict[str, float], seed: int = 0, index: int = 0
) -> list[int]:
    generator = np.random.default_rng(np.random.SeedSequence([seed, index]))
    rule = {"temperature": 1, "top_k": 0, "top_p": 1} | rule
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(pick(next_logits(weights, prompt + tokens), uniform=generator.random(), **rule))
    return tokens


RULES: list[dict[str, float]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.5},
    {"temperature": 3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.5},
]


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_those_of_numpy(rule: dict[str, float], device: str, whole_run: dict[str, Any]) -> None:
    """Every token of every sample. (cpu: float32 logits differ by 1e-6, which moves a draw once in 1e5.)"""
    path = checkpoint(Path(whole_run["output"]), 24)
    weights = read_safetensors(path / "model.safetensors")
    flags = [part for key, value in rule.items() for part in (f"--{key.replace('_', '-')}", value)]
    for seed, prompt in ((0, [3]), (2**63 + 5, [60, 0, 17, 4, 4, 9])):
        count = CONTEXT - len(prompt)
        got = sample(
            path, "--tokenizer", "none", "--prompt-tokens", listed(prompt), "--samples", 2, "--seed", seed,
            "--device", device, *flags,
        )  # fmt: skip
        assert [r["tokens"] for r in got] == [
            expected_tokens(weights, prompt, count, rule, seed, index) for index in range(2)
        ]
        assert [r["sample"] for r in got] == [0, 1]
        assert all(r["prompt_tokens"] == prompt and r["seed"] == seed and r["update"] == 24 for r in got)
        assert not any(r["stopped"] or "text" in r for r in got)


def test_same_seed_same_bytes(whole_run: dict[str, Any]) -> None:
    output = Path(whole_run["output"])
    before = tree(output)

    def tokens(*rest: object, threads: int = 2) -> list[list[int]]:
        arguments = ("--tokenizer", "none", "--prompt-tokens", "1,2", *rest)
        return [r["tokens"] for r in sample(output, *arguments, env={"OMP_NUM_THREADS": str(threads)})]

    three = tokens("--samples", 3)
    assert all(tokens("--samples", 3, threads=n) == three for n in (1, 3, 7))
    assert tokens() == three[:1]
    assert tokens("--tokens", 5) == [three[0][:5]]  # a shorter text is the beginning of a longer one
    assert len({tuple(t) for t in (*three, *tokens("--seed", 1))}) == 4
    assert tree(output) == before


# ---- models whose text is known ----


def known_model(
    folder: Path, following: dict[int, int], vocab: int = 256, context: int = 48, scale: float = 1, device: str = "cpu"
) -> Path:
    """A run of a network that, at temperature 0, has after token a the token following[a] (else 0)."""
    width = 256  # the embedding of token a is e_a, the head's row b the sum of e_a over the a that b follows
    embed = np.eye(vocab, width, dtype=np.float32)
    head = np.zeros((vocab, width), np.float32)
    for a in range(vocab):
        head[following.get(a, 0), a] = scale
    zero = {
        f"blocks.0.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in {
            **{f"attn.{part}": (width, width) for part in ("q", "k", "v", "out")},
            "gate": (width, width),
            "up": (width, width),
            "down": (width, width),
        }.items()
    }
    folder.mkdir()
    init = write_safetensors(folder / "init.safetensors", {"embed.weight": embed, **zero, "lm_head.weight": head})
    (folder / "data").mkdir()
    (folder / "data" / "text.bin").write_bytes(shard_bytes(np.arange(2 * context + 1) % vocab))
    data = str(folder / "data" / "text.bin")
    config = tiny_config(
        folder,
        folder / "run",
        model={
            "vocab_size": vocab, "context": context, "layers": 1, "width": width, "head_dim": width, "mlp_ratio": 1,
        },
        batch={"sequences": 1, "micro_batch": 1},
        schedule={"updates": 20, "max_updates": 1},  # the first update has rate 0: the weights stay as they are
        evaluation={"every": 0},
        diagnostics={"diameter_every": 0, "hilbert_panel": []},
        init_from=str(init),
        device=device,
    )  # fmt: skip
    config["data"] = {"train": data, "validation": data}
    expect_ok(run("train", write_config(folder / "config.json", config)))
    return folder / "run"


CYCLE = "aé☃🙂~".encode()  # every byte once


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says CYCLE again and again; after anything else, NUL, then a."""
    following = dict(zip(CYCLE, CYCLE[1:] + CYCLE[:1], strict=True))
    return known_model(tmp_path_factory.mktemp("cycle") / "model", {**following, 0: CYCLE[0]})


def raw(*arguments: object, stdin: bytes = b"") -> bytes:
    done = subprocess.run([EXE, "sample", *map(str, arguments)], capture_output=True, input=stdin, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_of_bytes(cycle: Path, tmp_path: Path) -> None:
    greedy = ("--temperature", 0)
    text = (CYCLE * 9)[1:]  # what follows "a"
    assert raw(cycle, *greedy, "--prompt", "a", "--tokens", 22) == text[:22] + b"\n"
    assert raw(cycle, *greedy, "--prompt", "a") == text[:47] + b"\n"  # to the end of the context
    assert raw(cycle, *greedy, "--prompt-file", "-", "--tokens", 11, stdin=b"x\xff\0a") == text[:11] + b"\n"
    (tmp_path / "prompt").write_bytes(b'"--x"\na')
    assert raw(cycle, *greedy, "--prompt-file", tmp_path / "prompt", "--tokens", 11) == text[:11] + b"\n"
    # No prompt, and an empty one: the separator, which a follows.
    for nothing in ((), ("--prompt", ""), ("--prompt-file", "-")):
        assert raw(cycle, *greedy, *nothing, "--tokens", 3) == CYCLE[:3] + b"\n"
    # A character that is cut off is written at the end, as are bytes that are no text.
    for count in range(1, 12):
        assert raw(cycle, *greedy, "--prompt", "a", "--tokens", count) == text[:count] + b"\n"
    assert raw(cycle, *greedy, "--prompt-tokens", CYCLE[1], "--tokens", 3) == CYCLE[2:5] + b"\n"
    two = raw(cycle, *greedy, "--prompt", "a", "--tokens", 2, "--samples", 2)
    assert two == b"\xc3\xa9\n---\n\xc3\xa9\n"
    assert raw(cycle, *greedy, "--prompt-tokens", 97, "--tokens", 2, "--tokenizer", "none") == b"195 169\n"


def test_stop(cycle: Path) -> None:
    greedy = ("--temperature", 0, "--prompt", "a", "--tokens", 20)
    assert raw(cycle, *greedy, "--stop", ord("~")) == CYCLE[1:-1] + b"\n"
    assert raw(cycle, *greedy, "--stop", CYCLE[1]) == b"\n"
    assert raw(cycle, *greedy, "--stop", ord("X")) == (CYCLE * 3)[1:21] + b"\n"
    (record,) = sample(cycle, *greedy, "--stop", ord("~"))
    assert record["stopped"] and record["tokens"] == list(CYCLE[1:-1]) and record["text"] == CYCLE[1:-1].decode()


def test_json_text_is_unicode(cycle: Path) -> None:
    """The tokens are exact; in the text, U+FFFD stands for what is not UTF-8."""
    (record,) = sample(cycle, "--temperature", 0, "--prompt", "a", "--tokens", 4)
    assert record["tokens"] == list(CYCLE[1:5])
    assert record["text"] == "é\ufffd"
    assert record["prompt_tokens"] == [97]


def test_only_whole_characters_are_written(cycle: Path) -> None:
    """A socket that keeps the limits of every write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [EXE, "sample", cycle, "--temperature", "0", "--prompt", "a", "--tokens", "30"]
        child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment())
        theirs.close()
        pieces = []
        while piece := ours.recv(1 << 16):
            pieces.append(piece)
        assert child.wait(60) == 0
    text = (CYCLE * 4)[1:31]
    assert b"".join(pieces) == text + b"\n"
    whole = text.decode(errors="ignore")
    assert [p.decode(errors="replace") for p in pieces[: len(whole)]] == list(whole)
    assert len(pieces) == len(whole) + 1  # what is left, and the end of the line


def test_shares_of_a_known_distribution(tmp_path: Path) -> None:
    """400 samples of one token: each count within 5 deviations of its binomial."""
    model = known_model(tmp_path / "model", {1: 2}, vocab=8, context=9)
    weights = read_safetensors(checkpoint(model, 1) / "model.safetensors")
    logits = next_logits(weights, [1], head_dim=256)
    assert np.sort(logits)[-2:] == pytest.approx([0, 16 / np.sqrt(1 + 256e-6)])  # e_1 normed
    p = np.exp(logits / 10) / np.sum(np.exp(logits / 10))
    records = sample(
        model, "--prompt-tokens", 1, "--tokens", 1, "--samples", 400, "--temperature", 10, "--tokenizer", "none"
    )
    counts = np.bincount([r["tokens"][0] for r in records], minlength=8)
    assert np.all(np.abs(counts - 400 * p) < 5 * np.sqrt(400 * p * (1 - p))), counts


# ---- byte-level BPE against the `tokenizers` library ----

ALPHABET = [
    *"aabcdeeinorstAEIN'''  \n\t0123.,;:!?()[]{}<>=+-*/_\"#@\\",
    *["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", " '", "   ", "\n\n", " \n", "\r\n", "\t\t", "\x0b", "\x0c"],
    *["\x00", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u3000", "\ufeff"],
    *[
        "é",
        "ß",
        "ñ",
        "e\u0301",
        "Ω",
        "λ",
        "ж",
        "Я",
        "א",
        "ש",
        "ع",
        "ر",
        "ह",
        "ि",
        "न",
        "ก",
        "็",
        "漢",
        "字",
        "か",
        "ガ",
        "한",
    ],
    *[
        "\u200b",
        "\u200d",
        "½",
        "²",
        "٣",
        "५",
        "Ⅷ",
        "\u3007",
        "\U0001d7d8",
        "𐍈",
        "\U0001d518",
        "ʰ",
        "ª",
        "ǅ",
        "€",
        "—",
        "“",
        "”",
        "…",
        "°",
    ],
    *["🙂", "👩\u200d🚀", "👋🏽", "🇩🇪", "\ufffd", "\U000e0001", "\U0010ffff", "<|endoftext|>", "<|", "|>"],
]
TEXTS = [
    "It's what we'll say: they've 12 dogs, I'm sure you're 'tis'll'd; CAN'T won't x's's ''s' 's",
    "def f(x):\n    if x:\n\t\treturn  x + 1   \n\n\n    # done   ",
    "  leading, trailing  ",
    " ",
    "\n",
    "a  b   c    d \n e\n \nf\t \tg",
    "1234567890 12,345.67 3x 4² ½ Ⅷ ٣٤٥",
    "naïve café Ωμέγα привет שלום مرحبا हिन्दी ภาษาไทย 漢字かな 한국어",
    "👩\u200d🚀👋🏽 🇩🇪🙂🙂\ufe0f",
    "aaaaaaaaaaaaaaaa" * 20,
    "<|endoftext|> in text <|endoftext|>",
]
INVALID = [
    b"\xff",
    b"a\x80b",
    b"caf\xc3",
    b"\xe2\x82 \xe2\x82",
    b"\xf0\x9f\x99",
    b"\xed\xa0\x80x",
    b"\xc0\xaf's \xf5",
    b"\0\0",
]


def mixed(generator: np.random.Generator, pieces: int) -> str:
    """Runs of a few pieces, so that merges and classes meet."""
    return "".join(str(generator.choice(ALPHABET)) * generator.integers(1, 4) for _ in range(pieces))


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on data from prepare.py train-bpe:600, with room for long prompts."""
    folder = tmp_path_factory.mktemp("bpe")
    generator = np.random.default_rng(1)
    for i in range(8):
        text = "\n".join([*TEXTS, *(mixed(generator, 400) for _ in range(6))])
        (folder / f"{i}.txt").write_text(text[i:], encoding="utf-8", newline="")
    prepare = [
        sys.executable,
        ROOT / "data" / "prepare.py",
        "--tokenizer",
        "train-bpe:600",
        "--output",
        folder / "data",
    ]
    texts = sorted(folder.glob("*.txt"))
    subprocess.run(
        [*prepare, "--output", folder / "data", "--validation-fraction", "0.3", *texts], check=True, capture_output=True
    )
    config = tiny_config(
        folder,
        folder / "run",
        model={"vocab_size": 600, "context": 1024, "layers": 1, "width": 8, "head_dim": 2},
        batch={"sequences": 1, "micro_batch": 1},
        schedule={"updates": 2},
        evaluation={"every": 0},
        diagnostics={"diameter_every": 0, "hilbert_panel": []},
    )
    shards = {"train": "text_train_*.bin", "validation": "text_val_*.bin"}
    config["data"] = {name: str(folder / "data" / pattern) for name, pattern in shards.items()}
    expect_ok(run("train", write_config(folder / "config.json", config)))
    return folder / "run"


def library(run_directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(run_directory.parent / "data" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a text's own <|endoftext|> is text, as in prepare.py
    return tokenizer


def prompt_tokens(run_directory: Path, text: bytes, folder: Path, *rest: object) -> list[int]:
    (folder / "prompt.txt").write_bytes(text)
    (record,) = sample(run_directory, "--prompt-file", folder / "prompt.txt", "--tokens", 1, *rest)
    return record["prompt_tokens"]


def test_bpe_encodes_as_the_library(bpe_run: Path, tmp_path: Path) -> None:
    tokenizer = library(bpe_run)
    generator = np.random.default_rng(2)
    texts = [text.encode() for text in (*TEXTS, *(mixed(generator, 150) for _ in range(40)))] + INVALID
    lengths = []
    for text in texts:
        expected = tokenizer.encode(text.decode(errors="replace")).ids
        assert prompt_tokens(bpe_run, text, tmp_path) == expected, text
        lengths.append((len(expected), len(text)))
    assert sum(n for n, _ in lengths) < 0.8 * sum(n for _, n in lengths)  # merges were at work


def test_bpe_in_the_form_of_gpt2s_file(bpe_run: Path, tmp_path: Path) -> None:
    """Merges as "a b", no model.type, no use_regex; the same tokens. (A prompt on the command line this time.)"""
    file = json.loads((bpe_run.parent / "data" / "tokenizer.json").read_text())
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    del file["model"]["type"], file["pre_tokenizer"]["use_regex"]
    (tmp_path / "gpt2.json").write_text(json.dumps(file, ensure_ascii=False))
    for text in TEXTS:
        (record,) = sample(bpe_run, "--tokenizer", tmp_path / "gpt2.json", f"--prompt={text}", "--tokens", 1)
        assert record["prompt_tokens"] == library(bpe_run).encode(text).ids


def test_bpe_text_is_that_of_its_tokens(bpe_run: Path) -> None:
    tokenizer = library(bpe_run)
    for seed in range(3):
        arguments = ("--seed", seed, "--temperature", 2, "--prompt", "def ")
        (record,) = sample(bpe_run, *arguments)
        assert len(record["prompt_tokens"]) + len(record["tokens"]) == 1024
        assert record["text"] == tokenizer.decode(record["tokens"], skip_special_tokens=False)
        assert raw(bpe_run, *arguments).decode(errors="replace") == record["text"] + "\n"
    (record,) = sample(bpe_run, "--tokens", 1)
    assert record["prompt_tokens"] == [0]  # <|endoftext|>, before every document


def test_which_tokenizer_is_used_is_said(bpe_run: Path, cycle: Path, tmp_path: Path) -> None:
    beside = bpe_run.parent / "data" / "tokenizer.json"
    result = expect_ok(run("sample", bpe_run, "--tokens", 1))
    assert f"tokenizer: {beside}, beside the run's data" in result.err
    assert "tokens/s" in result.err and "tokens/s" not in result.out
    assert "tokenizer:" not in run("sample", cycle, "--tokens", 1).err
    # Another's: its size shows.
    expect_error(run("sample", cycle, "--tokenizer", beside), DATA, str(beside), "has 600 tokens", "vocab_size is 256")
    shutil.copy(beside, cycle.parent / "data" / "tokenizer.json")
    assert raw(cycle, "--temperature", 0, "--prompt", "a", "--tokens", 2) == CYCLE[1:3] + b"\n"  # 256: bytes
    # Nothing beside the data, or two different files.
    nothing = known_model(tmp_path / "none", {}, vocab=9, context=9)
    expect_error(run("sample", nothing), USAGE, "the model has 9 tokens", "no tokenizer.json", "--tokenizer")
    config = json.loads((bpe_run.parent / "config.json").read_text())
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
        for file in beside.parent.iterdir():
            shutil.copy(file, tmp_path / part)
        config["data"][part] = str(tmp_path / part / Path(config["data"][part]).name)
    config["output"] = str(tmp_path / "run")
    expect_ok(run("train", write_config(tmp_path / "config.json", config)))
    both = [str(tmp_path / part / "tokenizer.json") for part in ("train", "validation")]
    expect_error(run("sample", tmp_path / "run"), USAGE, *both, "give one of them")
    expect_ok(run("sample", tmp_path / "run", "--tokenizer", both[0], "--tokens", 1))


# ---- what is wrong ----

BAD: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    ((), USAGE, ("--tokenizer none", "needs --prompt-tokens")),
    (("--prompt", "x"), USAGE, ("--tokenizer none", "needs --prompt-tokens")),
    (("--prompt-tokens", ""), USAGE, ("--prompt-tokens", '""', f"from 0 to {VOCAB - 1}")),
    (("--prompt-tokens", "1,,2"), USAGE, ("--prompt-tokens", '""')),
    (("--prompt-tokens", "1,2,"), USAGE, ("--prompt-tokens", '""')),
    (("--prompt-tokens", "1 2"), USAGE, ("--prompt-tokens", '"1 2"')),
    (("--prompt-tokens", "1,61"), USAGE, ("--prompt-tokens", '"61"', "from 0 to 60")),
    (("--prompt-tokens=-1",), USAGE, ("--prompt-tokens", '"-1"')),
    (("--prompt-tokens", "99999999999999999999"), USAGE, ("--prompt-tokens", "from 0 to 60")),
    (("--prompt-tokens", listed([1] * 16)), USAGE, ("16 tokens", "context, 16")),
    (("--prompt-tokens", listed([1] * 999)), USAGE, ("999 tokens", "context, 16")),
    (("--prompt-tokens", "1", "--tokens", "16"), USAGE, ("1 tokens", "--tokens 16", "context, 16")),
    (("--prompt-tokens", "1", "--tokens", "9223372036854775807"), USAGE, ("context, 16",)),
    (("--prompt-tokens", "1", "--tokens", "0"), USAGE, ("--tokens", '"0" must be an integer from 1 to')),
    (("--prompt-tokens", "1", "--tokens", "many"), USAGE, ("--tokens", '"many" must be an integer')),
    (("--prompt-tokens", "1", "--samples", "0"), USAGE, ("--samples", '"0" must be an integer from 1 to')),
    (("--prompt-tokens", "1", "--temperature", "-0.5"), USAGE, ("--temperature -0.5", "at least 0")),
    (("--prompt-tokens", "1", "--temperature", "nan"), USAGE, ("--temperature nan",)),
    (("--prompt-tokens", "1", "--temperature", "inf"), USAGE, ("--temperature inf", "finite")),
    (("--prompt-tokens", "1", "--top-k", "-1"), USAGE, ("--top-k", '"-1" must be an integer from 0 to')),
    (("--prompt-tokens", "1", "--top-p", "0"), USAGE, ("--top-p 0", "more than 0")),
    (("--prompt-tokens", "1", "--top-p", "1.01"), USAGE, ("--top-p 1.01", "at most 1")),
    (("--prompt-tokens", "1", "--top-p", "nan"), USAGE, ("--top-p nan",)),
    (("--prompt-tokens", "1", "--seed", "-1"), USAGE, ("--seed", "-1")),
    (("--prompt-tokens", "1", "--seed", "1.5"), USAGE, ("--seed", "1.5")),
    (("--prompt-tokens", "1", "--seed", "18446744073709551616"), USAGE, ("from 0 to 18446744073709551615",)),
    (("--prompt-tokens", "1", "--samples", "9223372036854775808"), USAGE, ("from 1 to 9223372036854775807",)),
    (("--prompt-tokens", "1", "--stop", "61"), USAGE, ("--stop", '"61"', "from 0 to 60")),
    (("--prompt-tokens", "1", "--stop", "end"), USAGE, ("--stop", '"end"')),
    (("--prompt-tokens", "1", "--prompt", "a"), USAGE, ("--prompt", "--prompt-tokens", "give one")),
    (("--prompt-tokens", "1", "--device", "tpu"), USAGE, ("tpu", "auto, cpu, cuda, reference")),
    (("--prompt-tokens", "1", "--device", "cpu", "--precision", "bf16"), USAGE, ("bf16", "fp32")),
    (("--prompt-tokens", "1", "--tokenizer", "bytes"), USAGE, ("--tokenizer bytes", "256", "61")),
    (("--prompt-tokens", "1", "--tokenizer", "no/such.json"), DATA, ("no/such.json", "no such file")),
    (("--prompt-tokens", "1", "--tokenizer", "/"), DATA, ("[tokenizer] /", "is a folder")),
    (("--prompt-tokens", "1", "--tokenizer", EXE), DATA, (str(EXE), "not a JSON object")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "parts"), BAD, ids=lambda value: str(value)[:60])
def test_bad_input(arguments: tuple[object, ...], code: int, parts: tuple[str, ...], whole_run: dict[str, Any]) -> None:
    rest = () if "--tokenizer" in arguments else ("--tokenizer", "none")
    result = run("sample", whole_run["output"], *arguments, *rest)
    expect_error(result, code, *parts)
    assert result.out == ""


def test_of_what_is_no_checkpoint(tmp_path: Path, cycle: Path) -> None:
    expect_error(run("sample", "no/run", cwd=tmp_path), DATA, "no/run", "checkpoint")
    expect_error(run("sample"), USAGE, "checkpoint")
    expect_error(run("sample", cycle, "--prompt-file", "no/such.txt"), DATA, "[prompt] no/such.txt", "no such file")
    # Endless: no more is read than could fit.
    endless = run("sample", cycle, "--prompt-file", "/dev/zero", timeout=20)
    expect_error(endless, USAGE, "[sample] the prompt has more than", "context")
    expect_error(run("sample", cycle, "--prompt-file", tmp_path), DATA, "[prompt]", "is a folder")


def test_logits_that_overflow(tmp_path: Path) -> None:
    """Logits of 16e38 are none in float32."""
    model = known_model(tmp_path / "model", {1: 2}, vocab=8, context=9, scale=1e38, device="reference")
    arguments = ("--tokenizer", "none", "--prompt-tokens", "3,1")
    assert sample(model, *arguments, "--tokens", 1, "--device", "reference")[0]["tokens"] == [2]
    result = run("sample", model, *arguments, "--device", "cpu")
    expect_error(result, 4, str(model), "a logit after position 1 is not finite")


def test_output_that_cannot_be_written(cycle: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([EXE, "sample", cycle], stdout=full, stderr=subprocess.PIPE, env=environment())
    assert done.returncode == DATA
    assert b"[output] standard output: No space left on device" in done.stderr.splitlines()[-1]


def test_a_reader_that_goes_away_ends_it(bpe_run: Path) -> None:
    child = subprocess.Popen(
        [EXE, "sample", bpe_run, "--samples", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait(60) == DATA
    assert child.stderr.read().splitlines()[-1] == b"[output] standard output: Broken pipe"
    child.stderr.close()


def test_interrupted_it_dies_of_the_signal(bpe_run: Path) -> None:
    child = start("sample", bpe_run, "--samples", "100000")
    wait_for(lambda: Path(f"/proc/{child.pid}/task").exists())
    child.terminate()
    assert child.wait(60) == -15
