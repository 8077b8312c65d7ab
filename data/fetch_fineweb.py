#!/usr/bin/env python3
"""Fetches the paper's data: FineWeb100B in GPT-2 tokens, ready-made shards in llm.c's format."""

import argparse
import json
import os
import re
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

import prepare
from prepare import DATA, HEADER_INTS, SHARD_MAGIC, SHARD_VERSION, Parser, PrepareError, Progress

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "kjj0/fineweb100B-gpt2"
VALIDATION = "fineweb_val_000000.bin"
PAPER_SHARDS = 890  # training shards: 89,000,000,000 tokens (docs/paper.md 3)
HEADER_BYTES = 4 * HEADER_INTS
SPARE_BYTES = 1 << 30  # left free on the disk
NETWORK = 5  # exit code

EPILOG = f"""\
Fetches {VALIDATION} and the first N training shards, 200 MB each, from the Hugging Face dataset
{REPOSITORY}, several at a time. Every file's size and header are checked before it gets its name; what is
there already and whole is kept, so that an interrupted fetch goes on with the first shard that is not whole. Ends with
dataset.json: names, sizes and digests of headers, as a run's run.json carries them under "dataset". Needs xxhash and,
without --from or --verify, huggingface_hub (both in .venv).

examples
  data/fetch_fineweb.py                         all {PAPER_SHARDS} + 1 shards of the paper, 178 GB
  data/fetch_fineweb.py --shards 8              enough for a trial
  data/fetch_fineweb.py --from /mnt/fineweb     from a local mirror
  data/fetch_fineweb.py --verify                check what is there

exit codes: 0 done; 2 usage; 3 data or file; 5 network
"""


def say(message: str) -> None:
    prepare.say(message, "fetch")


def training_name(number: int) -> str:
    return f"fineweb_train_{number:06d}.bin"


def wanted_names(shards: int) -> list[str]:
    return [VALIDATION, *(training_name(number) for number in range(1, shards + 1))]


# ---- shards


def check_shard(path: Path, size: int | None = None) -> None:
    """Size and header as llm.c writes them; `size` as the source says."""
    if not path.is_file():
        raise PrepareError(f"{path}: not a file")
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    held = path.stat().st_size
    if size is not None and held != size:
        raise PrepareError(f"{path}: {held:,} bytes, the source has {size:,} (truncated?)")
    if len(header) < HEADER_BYTES:
        raise PrepareError(f"{path}: {held:,} bytes, a header alone has {HEADER_BYTES:,} (truncated?)")
    magic, version, count, *rest = struct.unpack(f"<{HEADER_INTS}i", header)
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION) or any(rest):
        raise PrepareError(
            f"{path}: begins with {magic}, {version}; a shard begins with {SHARD_MAGIC}, {SHARD_VERSION}"
        )
    if held != HEADER_BYTES + 2 * count:
        raise PrepareError(f"{path}: header says {count:,} tokens, the file holds {(held - HEADER_BYTES) / 2:,.1f}")


def is_whole(path: Path, size: int | None) -> bool:
    if path.is_dir():
        raise PrepareError(f"{path}: is a folder, a shard is to get this name")
    if not path.exists():
        return False
    try:
        check_shard(path, size)
    except PrepareError as error:
        say(f"{error}; fetching it again")
        return False
    return True


def fingerprint(folder: Path, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """What run.json says under "dataset" of a run on these shards: name order, XXH3-128 of each header's 1024 bytes."""
    try:
        from xxhash import xxh3_128_hexdigest
    except ImportError:
        raise missing_package("xxhash") from None
    roles: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            digest = xxh3_128_hexdigest(file.read(HEADER_BYTES))
        size = (folder / name).stat().st_size
        role = roles["validation" if name == VALIDATION else "train"]
        role.append({"name": name, "bytes": size, "header_xxh128": digest})
    return roles


def missing_package(name: str) -> PrepareError:
    return PrepareError(
        f"{name}: not installed here; run scripts/setup.sh, then .venv/bin/python data/fetch_fineweb.py ..."
    )


# ---- sources


def local_source(mirror: Path, names: list[str]) -> tuple[dict[str, int], Callable[[str, Path], Path]]:
    """Sizes of the files, and a function that brings one below a folder."""
    if not mirror.is_dir():
        raise PrepareError(f"{mirror}: no such folder, --from wants the one that holds {VALIDATION}")
    for name in names:
        if not (mirror / name).is_file():
            raise PrepareError(f"{mirror / name}: no such file; fetch fewer with --shards")

    def bring(name: str, folder: Path) -> Path:
        return Path(shutil.copyfile(mirror / name, folder / name))

    return {name: (mirror / name).stat().st_size for name in names}, bring


def hub_source(names: list[str]) -> tuple[dict[str, int], Callable[[str, Path], Path]]:
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise missing_package("huggingface_hub") from None
    disable_progress_bars()

    def attempt(what: str, action: Callable[[], Any]) -> Any:  # noqa: ANN401
        try:
            return action()
        except PrepareError:
            raise
        except Exception as error:  # of the hub, of its HTTP client, of the network: a zoo
            reason = str(error).strip().split("\n", 1)[0] or "no answer"
            raise PrepareError(f"{what}: {type(error).__name__}: {reason}; start again to go on", NETWORK) from None

    entries = attempt(REPOSITORY, lambda: list(hub.HfApi().list_repo_tree(REPOSITORY, repo_type="dataset")))
    sizes = {entry.path: entry.size for entry in entries if isinstance(entry, hub.hf_api.RepoFile)}
    if absent := next((name for name in names if name not in sizes), None):
        raise PrepareError(f"{REPOSITORY}: has no {absent}; fetch fewer with --shards")

    def bring(name: str, folder: Path) -> Path:
        # Tries again from where it broke off, five times; a later start fetches the file anew.
        return Path(attempt(name, lambda: hub.hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)))

    return {name: sizes[name] for name in names}, bring


# ---- the command


def fetch(output: Path, shards: int, mirror: Path | None, jobs: int) -> None:
    names = wanted_names(shards)
    sizes, bring = local_source(mirror, names) if mirror else hub_source(names)
    output.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not is_whole(output / name, sizes[name])]
    needed, free = sum(sizes[name] for name in missing), shutil.disk_usage(output).free
    if needed + SPARE_BYTES > free:
        raise PrepareError(
            f"{output}: {needed / 1e9:.1f} GB to fetch, {free / 1e9:.1f} GB free (and 1 GB is to stay so); fetch fewer "
            "with --shards or name another --output"
        )
    say(f"{len(names) - len(missing)} of {len(names)} shards are there; {needed / 1e9:.1f} GB to fetch")
    partial = output / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a fetch that was killed
    if missing:
        partial.mkdir()
        progress = Progress("fetching", needed, "fetch")

        def fetch_one(name: str) -> str:
            path = bring(name, partial)
            check_shard(path, sizes[name])
            path.replace(output / name)
            return name

        with ThreadPoolExecutor(jobs) as pool:
            pending = {pool.submit(fetch_one, name) for name in missing}
            try:
                for future in as_completed(pending):
                    progress.advance(sizes[future.result()])
            except BaseException:  # those under way are finished, no other is begun
                pool.shutdown(cancel_futures=True)
                raise
        shutil.rmtree(partial)
    finish(output, names)


def verify(output: Path, shards: int | None) -> None:
    """The validation shard and the training shards up to --shards, or up to the last one there. Names all that are
    missing or wrong."""
    if not output.is_dir():
        raise PrepareError(f"{output}: no such folder; data/fetch_fineweb.py makes it")
    found = [int(path.stem[-6:]) for path in output.glob("fineweb_train_[0-9]*.bin") if path.stem[-6:].isdigit()]
    names = wanted_names(shards or max(found, default=0))
    wrong = 0
    for missing, group in groupby(names, lambda name: not (output / name).exists()):
        members = list(group)
        if missing:
            say(f"{output / members[0]}{f' to {members[-1]}' if len(members) > 1 else ''}: missing")
            wrong += len(members)
            continue
        for name in members:
            try:
                check_shard(output / name)
            except PrepareError as error:
                say(str(error))
                wrong += 1
    if wrong:
        raise PrepareError(f"{output}: {wrong:,} of {len(names):,} shards are missing or wrong; fetch them again")
    finish(output, names)


def finish(output: Path, names: list[str]) -> None:
    dataset = fingerprint(output, names)
    text = json.dumps(dataset, indent=2) + "\n"
    partial = output / "dataset.json.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(output / "dataset.json")
    for role, entries in dataset.items():
        tokens = sum((entry["bytes"] - HEADER_BYTES) // 2 for entry in entries)
        print(f"{role}: {len(entries):,} shards, {tokens:,} tokens")
    print(f"fingerprint: {output / 'dataset.json'}")


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:  # the digits of a shard's name
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 to 999999")
    return int(text)


def run(arguments: list[str]) -> None:
    parser = Parser(
        prog="fetch_fineweb.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shards", type=count, metavar="N", help=f"training shards (default {PAPER_SHARDS}; --verify: what is there)")
    add("--output", type=Path, default=ROOT / "data" / "fineweb100B", metavar="DIR", help="default data/fineweb100B")
    add("--jobs", type=count, default=8, metavar="N", help="files at a time (default 8)")
    add(
        "--from", dest="mirror", type=Path, metavar="DIR", help="a local folder with the same files, instead of the hub"
    )
    add("--verify", action="store_true", help="check sizes and headers of what is there, fetch nothing")
    options = parser.parse_args(arguments)
    if options.verify and options.mirror:
        parser.error("--from: not with --verify, which fetches nothing")
    if options.verify:
        verify(options.output, options.shards)
    else:
        fetch(options.output, options.shards or PAPER_SHARDS, options.mirror, options.jobs)


def stop(number: int, _: object) -> None:
    """At once, without waiting for the threads: what they were fetching has no final name yet."""
    say("interrupted; start again to go on")
    os._exit(128 + number)


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        run(arguments)
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except PrepareError as error:
        say(str(error))
        return error.code
    except OSError as error:
        path = error.filename2 or error.filename or "output"  # of two the one that was to be written
        say(f"{path}: {(error.strerror or str(error)).lower()}")
        return DATA
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
