#!/usr/bin/env python3
"""Turns text into token shards in llm.c's format, split into training and validation by document."""

import argparse
import base64
import binascii
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import struct
import sys
import sysconfig
import tempfile
import types
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple, NoReturn

USAGE, DATA = 2, 3  # exit codes
SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256
END_OF_TEXT = "<|endoftext|>"
GPT2_VOCABULARY, GPT2_END_OF_TEXT = 50257, 50256
# The pattern that cuts text before GPT-2's merges apply, in tiktoken's faster but equivalent spelling.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BPE_TRAINING_BYTES = 64 << 20
ENCODE_BYTES = 1 << 20  # text encoded in one call: enough for every core, small enough for the progress bar

EPILOG = f"""\
what a document is
  A file; with --separator LINE, each part of a file between lines that equal LINE ('' splits at blank lines). Empty
  documents are dropped, and so are exact duplicates. In a folder, hidden files and files with a zero byte are skipped;
  a file named itself is always read.
  --source python-docs reads the Python that runs this script: each language topic, each source file of the standard
  library (without tests, tables of encodings and build settings), and the docstrings of each module written in C.

the split
  Documents are put in the order of their SHA-256 and the first ones, until they hold --validation-fraction of the
  bytes, are the validation set. So neither depends on names or on the order of the inputs.

tokenizers, with the token that goes before every document
  bytes         0, the byte that text never holds; 256 entries, byte = token; takes any input, needs no package
  train-bpe:N   0, {END_OF_TEXT}; byte-level BPE with exactly N entries, 257 <= N <= 65536, trained on the training
                documents (at most the first {BPE_TRAINING_BYTES >> 20} MiB) and saved as tokenizer.json
  gpt2          {GPT2_END_OF_TEXT}, {END_OF_TEXT}; GPT-2's {GPT2_VOCABULARY} entries, which tiktoken downloads once;
                without a network give --vocab FILE: GPT-2's merges (vocab.bpe, merges.txt) or a tiktoken rank file
                (r50k_base.tiktoken)
  The last two read UTF-8, an invalid byte as U+FFFD, and a text's own {END_OF_TEXT} as text.

examples
  data/prepare.py --source python-docs --tokenizer train-bpe:4096 --output data/python-docs
  zcat books.gz | data/prepare.py - --separator '***' --tokenizer bytes --output data/books

exit codes: 0 done; 2 usage; 3 data or file
"""


class PrepareError(Exception):
    def __init__(self, message: str, code: int = DATA) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PrepareError(f"{message} (see --help)", USAGE)


class Tokenizer(NamedTuple):
    vocab_size: int
    separator: int
    encode: Callable[[list[bytes]], Iterable[Sequence[int]]]
    json: str | None = None  # what goes into tokenizer.json


class Split(NamedTuple):
    documents: int
    bytes: int
    tokens: int
    shards: list[str]


def say(message: str, program: str = "prepare") -> None:
    print(f"[{program}] {message}", file=sys.stderr, flush=True)


class Progress:
    """A bar on a terminal, a line at each quarter elsewhere."""

    def __init__(self, what: str, total: int, program: str = "prepare") -> None:
        self.what, self.total, self.program = what, total, program
        self.done, self.bar = 0, sys.stderr.isatty()

    def advance(self, amount: int) -> None:
        before, self.done = self.done, self.done + amount
        fraction = self.done / self.total
        if self.bar:
            bar, end = "#" * int(30 * fraction), "\n" if self.done == self.total else ""
            line = f"\r[{self.program}] {self.what} [{bar:<30}] {fraction:4.0%} of {self.total / 1e6:.1f} MB"
            print(line, end=end, file=sys.stderr, flush=True)
        elif 4 * before // self.total != 4 * self.done // self.total:
            say(f"{self.what}: {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB", self.program)


# ---- documents


def input_texts(name: str) -> Iterator[bytes]:
    path = Path(name)
    if name == "-":
        yield sys.stdin.buffer.read()
    elif path.is_dir():
        binary = 0
        for file in sorted(path.rglob("*")):
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
                text = file.read_bytes()
                if b"\0" in text:
                    binary += 1
                else:
                    yield text
        if binary:
            say(f"{path}: skipped {binary} binary files (they hold a zero byte)")
    else:
        yield path.read_bytes()


def input_documents(inputs: list[str], separator: str | None) -> Iterator[bytes]:
    for text in (text for name in inputs for text in input_texts(name)):
        if separator is None:
            yield text
        else:
            yield from re.split(rb"(?m)^%s\r?(?:\n|\Z)" % re.escape(os.fsencode(separator)), text)


def python_sources() -> Iterator[bytes]:
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if skipped.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")) or not file.is_file():
            continue
        text = file.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
            text.decode()
            yield text


def python_docstrings() -> Iterator[bytes]:
    """The docstrings of the modules written in C, which no source file holds."""
    methods = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
    for name in sorted(sys.stdlib_module_names):
        # readline writes to the terminal when imported; _test* and _xx* are the interpreter's own tests.
        spec = None if name.startswith(("_test", "_xx", "readline")) else importlib.util.find_spec(name)
        if not spec or not (spec.origin or "").endswith(("built-in", *EXTENSION_SUFFIXES)):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # a library that the module wraps is missing
            continue
        entries: list[tuple[str, object]] = [(name, module)]
        for key, value in sorted(vars(module).items()):
            if isinstance(value, type):
                entries += [(f"{key}.{method}", entry) for method, entry in sorted(vars(value).items())]
            if isinstance(value, (type, *methods)):
                entries.append((key, value))
        paragraphs = [
            f"{key}\n\n{entry.__doc__}"
            for key, entry in entries
            if isinstance(entry, (types.ModuleType, type, *methods)) and isinstance(entry.__doc__, str)
        ]
        yield "\n\n\n".join(paragraphs).encode()


def python_documents() -> Iterator[bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise PrepareError("pydoc_data: not in this Python, python-docs needs its full standard library") from None
    yield from (text.encode() for text in topics.values())
    with warnings.catch_warnings(action="ignore"):  # of deprecated modules
        yield from python_docstrings()
    yield from python_sources()


def split_documents(documents: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents, both in the order of their hashes."""
    documents = sorted(documents, key=lambda text: hashlib.sha256(text).digest())
    wanted = fraction * sum(map(len, documents))
    count, held = 0, 0
    while held < wanted and count < len(documents) - 1:
        held += len(documents[count])
        count += 1
    return documents[count:], documents[:count]


# ---- tokenizers


def train_bpe(size: int, documents: list[bytes]) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise missing_package("tokenizers") from None
    texts, used = [], 0
    for document in documents:
        texts.append(document[: BPE_TRAINING_BYTES - used].decode(errors="replace"))
        used += len(document)
        if used >= BPE_TRAINING_BYTES:
            break
    say(f"training a BPE with {size} entries on {min(used, BPE_TRAINING_BYTES) / 1e6:.1f} MB")
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],  # becomes token 0
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    if model.get_vocab_size() != size:
        raise PrepareError(
            f"train-bpe:{size}: the text yields {model.get_vocab_size()} entries only; give more text or a smaller N"
        )
    model.encode_special_tokens = True  # as text: only prepare.py itself places the separator

    def encode(block: list[bytes]) -> list[list[int]]:
        return [encoding.ids for encoding in model.encode_batch_fast([text.decode(errors="replace") for text in block])]

    return Tokenizer(size, 0, encode, model.to_str(pretty=True) + "\n")


def gpt2_ranks(path: Path) -> dict[bytes, int]:
    """Byte string -> token, from GPT-2's merges or from a tiktoken rank file."""
    lines = path.read_bytes().splitlines()
    ranks: dict[bytes, int] = {}
    try:
        if lines and lines[0].startswith(b"#version"):
            # GPT-2 writes bytes as characters: the printable ones as themselves, the others from U+0100 on. Its tokens
            # are the bytes in that order, then one for each merge.
            order = sorted(range(256), key=lambda byte: (not chr(byte).isprintable() or byte == 0x20, byte))
            printable = sum(chr(byte).isprintable() for byte in range(256)) - 1
            byte_of = {chr(b) if i < printable else chr(256 + i - printable): b for i, b in enumerate(order)}
            ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
            for line in filter(None, lines[1:]):
                left, right = line.decode().split()
                ranks[bytes(byte_of[character] for character in left + right)] = len(ranks)
        else:
            for line in filter(None, lines):
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, KeyError, binascii.Error):
        raise PrepareError(f"{path}: neither GPT-2 merges nor a tiktoken rank file, at {line[:40]!r}") from None
    single_bytes = sum(len(token) == 1 for token in ranks)
    if sorted(ranks.values()) != list(range(GPT2_END_OF_TEXT)) or single_bytes != 256:
        raise PrepareError(f"{path}: holds {len(ranks)} tokens, GPT-2 has {GPT2_END_OF_TEXT}, numbered from 0")
    return ranks


def gpt2(vocabulary: str | None) -> Tokenizer:
    try:
        import tiktoken
    except ImportError:
        raise missing_package("tiktoken") from None
    if vocabulary:
        model = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=gpt2_ranks(Path(vocabulary)),
            special_tokens={END_OF_TEXT: GPT2_END_OF_TEXT},
        )
    else:
        try:
            model = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # every network error is an OSError, a spoilt download a ValueError
            raise PrepareError(
                f"gpt2: tiktoken cannot download the vocabulary ({type(error).__name__}); give it with --vocab FILE"
            ) from None

    def encode(block: list[bytes]) -> list[list[int]]:
        return model.encode_ordinary_batch([text.decode(errors="replace") for text in block])

    return Tokenizer(GPT2_VOCABULARY, GPT2_END_OF_TEXT, encode)


def missing_package(name: str) -> PrepareError:
    return PrepareError(f"{name}: not installed here; run scripts/setup.sh, then .venv/bin/python data/prepare.py ...")


# ---- shards


def write_shard(path: Path, tokens: "array[int]") -> None:
    if sys.byteorder == "big":
        tokens.byteswap()
    header = struct.pack(f"<{HEADER_INTS}i", SHARD_MAGIC, SHARD_VERSION, len(tokens), *[0] * (HEADER_INTS - 3))
    path.write_bytes(header + tokens.tobytes())


def blocks(documents: list[bytes]) -> Iterator[list[bytes]]:
    block, size = [], 0
    for document in documents:
        block.append(document)
        size += len(document)
        if size >= ENCODE_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def write_split(
    folder: Path, stem: str, first: int, documents: list[bytes], tokenizer: Tokenizer, shard_tokens: int
) -> Split:
    """Writes `stem`_00000N.bin from N = first on."""
    names: list[str] = []
    pending, tokens, size = array("H"), 0, sum(map(len, documents))
    progress = Progress(f"encoding {stem}", size)

    def flush(count: int) -> None:
        names.append(f"{stem}_{first + len(names):06d}.bin")
        write_shard(folder / names[-1], pending[:count])
        del pending[:count]

    for block in blocks(documents):
        for ids in tokenizer.encode(block):
            pending.append(tokenizer.separator)
            pending.extend(ids)
            tokens += 1 + len(ids)
        while len(pending) >= shard_tokens:
            flush(shard_tokens)
        progress.advance(sum(map(len, block)))
    if pending:
        flush(len(pending))
    return Split(len(documents), size, tokens, names)


# ---- the command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="prepare.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="text file, folder (read recursively) or - for standard input")
    add("--tokenizer", required=True, metavar="bytes|train-bpe:N|gpt2", help="see below")
    add("--output", required=True, metavar="DIR", help="folder of the shards, made if missing")
    add("--source", choices=["python-docs"], help="a text that needs no download, besides any INPUT")
    add("--separator", metavar="LINE", help="split every INPUT into documents at lines that equal LINE")
    add("--validation-fraction", type=float, default=0.05, metavar="F", help="share of the bytes (default 0.05)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens a shard (default 100000000)")
    add("--vocab", metavar="FILE", help="GPT-2's vocabulary, see below")
    add("--prefix", default="text", metavar="NAME", help="of the shards' file names (default text)")
    add("--overwrite", action="store_true", help="replace what an earlier run wrote")
    options = parser.parse_args(arguments)
    trained = re.fullmatch(r"train-bpe:(\d{1,6})", options.tokenizer)
    options.bpe_entries = int(trained[1]) if trained else 0
    if options.tokenizer not in ("bytes", "gpt2") and not 257 <= options.bpe_entries <= 65536:
        parser.error(f"--tokenizer {options.tokenizer}: bytes, gpt2 or train-bpe:N with 257 <= N <= 65536")
    if not options.inputs and not options.source:
        parser.error("nothing to read: give an INPUT or --source python-docs")
    if not 0 < options.validation_fraction < 1:
        parser.error(f"--validation-fraction {options.validation_fraction}: more than 0 and less than 1")
    if not 1 <= options.shard_tokens < 1 << 31:
        parser.error(f"--shard-tokens {options.shard_tokens}: from 1 to {(1 << 31) - 1}")
    if not re.fullmatch(r"\w[\w.-]*", options.prefix):
        parser.error(f"--prefix {options.prefix}: letters, digits, '_', '.' and '-', not a path")
    if options.vocab and options.tokenizer != "gpt2":
        parser.error("--vocab: only with --tokenizer gpt2")
    return options


def earlier_files(output: Path, prefix: str) -> list[Path]:
    if output.exists() and not output.is_dir():
        raise PrepareError(f"{output}: is a file, --output must name a folder")
    shards = sorted(path for split in ("train", "val") for path in output.glob(f"{prefix}_{split}_*.bin"))
    return shards + [path for name in ("tokenizer.json", "prepare.json") if (path := output / name).exists()]


def prepare(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if (earlier := earlier_files(output, options.prefix)) and not options.overwrite:
        raise PrepareError(f"{earlier[0]}: exists; name another --output or add --overwrite")

    documents = list(input_documents(options.inputs, options.separator))
    if options.source:
        documents += python_documents()
    documents = [text for text in documents if text.strip()]
    distinct = list(dict.fromkeys(documents))
    if len(distinct) < 2:
        raise PrepareError(
            f"{' '.join(options.inputs)}: {len(distinct)} distinct documents with text, training and validation need "
            "one each; --separator splits a file"
        )
    train, validation = split_documents(distinct, options.validation_fraction)

    if options.tokenizer == "bytes":
        tokenizer = Tokenizer(256, 0, lambda block: block)
    elif options.tokenizer == "gpt2":
        tokenizer = gpt2(options.vocab)
    else:
        tokenizer = train_bpe(options.bpe_entries, train)

    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=output) as temporary:
        folder, prefix, size = Path(temporary), options.prefix, options.shard_tokens
        splits = {
            "train": write_split(folder, f"{prefix}_train", 1, train, tokenizer, size),
            "validation": write_split(folder, f"{prefix}_val", 0, validation, tokenizer, size),
        }
        record = {
            "tokenizer": options.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "separator_token": tokenizer.separator,
            "source": f"{options.source} {sys.version.split()[0]}" if options.source else None,
            "validation_fraction": options.validation_fraction,
            "duplicates_dropped": len(documents) - len(distinct),
            **{name: split._asdict() for name, split in splits.items()},
        }
        if tokenizer.json:
            (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        # prepare.json goes first and comes last: a folder that has one is whole.
        for path in reversed(earlier):
            path.unlink()
        for path in sorted(folder.iterdir()):
            path.replace(output / path.name)
        (folder / "prepare.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "prepare.json").replace(output / "prepare.json")
    held = sum(map(len, validation)) / sum(map(len, distinct))
    if held > 2 * options.validation_fraction:
        say(f"warning: whole documents only: validation holds {held:.0%} of the bytes; --separator makes smaller ones")
    report(options, tokenizer, splits)


def report(options: argparse.Namespace, tokenizer: Tokenizer, splits: dict[str, Split]) -> None:
    for name, split in splits.items():
        print(
            f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes:,} bytes "
            f"({split.bytes / split.tokens:.2f} a token), {len(split.shards)} shard{'s' * (len(split.shards) > 1)}"
        )
    paths = {
        name: str(Path(options.output, f"{options.prefix}_{part}_*.bin"))
        for name, part in (("train", "train"), ("validation", "val"))
    }
    print(f'config: "model": {{"vocab_size": {tokenizer.vocab_size}}}, "data": {json.dumps(paths)}')


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary files go
    try:
        prepare(parse_arguments(arguments))
    except PrepareError as error:
        say(str(error))
        return error.code
    except OSError as error:
        say(f"{error.filename or 'output'}: {(error.strerror or str(error)).lower()}")
        return DATA
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
