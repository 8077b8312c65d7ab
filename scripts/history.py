"""What the scripts share: reading a run's metrics.jsonl, their errors and exit codes. Standard library only."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

USAGE, DATA = 2, 3  # exit codes
LOSS, DIAMETER, HILBERT = "validation/loss", "diagnostics/lm_head_step/diameter_exact", "validation/hilbert_step/rms"
UPDATE, TOKENS, HEAD_RATE = "progress/update", "progress/tokens", "train/lr/head"

Record = dict[str, Any]


class ScriptError(Exception):
    def __init__(self, message: str, code: int = DATA) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ScriptError(f"{message} (see --help)", USAGE)


def open_closed_streams() -> None:
    """Where the caller has closed stdout or stderr (`>&-`), what goes there is dropped, and no file that is opened
    later takes its place."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def run_main(name: str, action: Callable[[], int | None]) -> int:
    """The exit code of a script; an error is one line on stderr."""
    open_closed_streams()
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"[{name}] interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ScriptError as error:
        print(f"[{name}] {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        path = error.filename2 or error.filename or "output"  # of two the one that was to be written
        print(f"[{name}] {path}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return DATA


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what gets the name `path` when it is whole, and leaves nothing where it does not get so far."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write
            error.filename = str(path)
        raise


def parse_object(path: Path, text: str, line: int = 1) -> Record:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{path}:{line}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ScriptError(f"{path}:{line}: not a JSON object")
    return value


def read_text(path: Path) -> str:
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise ScriptError(f"{path}: is not a regular file")
    return path.read_text(encoding="utf-8", errors="replace")


def read_object(path: Path) -> Record:
    return parse_object(path, read_text(path))


def shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_a(value: object, kind: type | UnionType) -> bool:
    """JSON's true is no number, and a whole number of more than 64 bits none of a trainer's."""
    return isinstance(value, kind) and not isinstance(value, bool) and not (isinstance(value, int) and value >> 63)


def member(path: Path, document: Record, keys: str, kind: type | UnionType, what: str) -> Any:  # noqa: ANN401
    """`document` (read from `path`) at `a.b.c`. Error (exit 3): not there, or not `what`. Whole numbers are from 0."""
    value: Any = document
    for key in keys.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not is_a(value, kind):
        raise ScriptError(f"{path}: {keys} is {shown(value)}, not {what}")
    return value


def read_lines(path: Path, growing: bool = True) -> list[Record]:
    """One object a line; a last line that a running or killed trainer has not finished is left out of what grows."""
    lines = read_text(path).split("\n")
    last = lines.pop()
    records = [parse_object(path, text, number) for number, text in enumerate(lines, 1)]
    if not last:
        return records
    with contextlib.suppress(ScriptError) if growing else contextlib.nullcontext():
        records.append(parse_object(path, last, len(lines) + 1))
    return records


def read_metrics(path: Path) -> list[Record]:
    """The records of metrics.jsonl: each with whole `progress/tokens`, updates that are whole, measurements that are
    numbers."""
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        if not is_a(record.get(TOKENS), int):
            raise ScriptError(f"{path}:{number}: without a {TOKENS} that is a whole number")
        if UPDATE in record and not is_a(record[UPDATE], int):
            raise ScriptError(f"{path}:{number}: {UPDATE} is {shown(record[UPDATE])}, not a whole number")
        for key in (LOSS, DIAMETER, HILBERT):
            if key in record and not is_a(record[key], int | float):
                raise ScriptError(f"{path}:{number}: {key} is {shown(record[key])}, not a number")
    return records


def points(records: list[Record], key: str) -> dict[int, float]:
    """Training tokens -> value."""
    return {record[TOKENS]: record[key] for record in records if key in record}
