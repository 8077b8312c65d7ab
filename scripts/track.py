#!/usr/bin/env python3
"""Sends a run's metrics.jsonl to Weights & Biases, live or afterwards: the same keys, against progress/tokens."""

import argparse
import hashlib
import sys
import time
from pathlib import Path

from history import DATA, TOKENS, UPDATE, Parser, ScriptError, member, read_lines, read_object, run_main
from paper.state import FAILED, FINISHED, STOPPED, read_provenance, state_of

NETWORK = 5  # exit code
SECONDS = 5.0  # between two looks at a file that grows

EPILOG = """\
The run's id is made from its name and first start: sent again, or live after an interruption, it goes on in the same
place, and what is there already is not sent twice. --follow ends with the run; while that is interrupted it waits.
Without a network use --offline, later `wandb sync RUN_DIR/wandb/offline-run-*`. Needs wandb
(.venv/bin/python -m pip install -r scripts/requirements-track.txt) and its login.

examples
  scripts/track.py runs/paper/190m-*-seed? --project rownorm
  scripts/track.py runs/paper/190m-rownorm-seed0 --project rownorm --follow

exit codes: 0 done; 2 usage; 3 data or file; 5 network
"""


def track(folder: Path, project: str, entity: str | None, offline: bool, follow: bool) -> None:
    try:
        import wandb
    except ImportError:
        raise ScriptError(
            "wandb: not installed here; .venv/bin/python -m pip install -r scripts/requirements-track.txt, then "
            ".venv/bin/python scripts/track.py ..."
        ) from None
    metrics = folder / "metrics.jsonl"
    config, provenance = read_object(folder / "config.json"), read_provenance(folder)
    for record in read_lines(metrics):  # a damaged file is refused before anything is sent
        member(metrics, record, UPDATE, int, "a whole number")
    name = member(folder / "config.json", config, "name", str, "a text")
    start = provenance["sessions"][0]["start"]
    digest = hashlib.sha256(f"{name} {start}".encode()).hexdigest()[:8]
    # No code, git state or machine load: this may well run elsewhere than the trainer.
    settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True)
    run = wandb.init(
        entity=entity,
        project=project,
        name=name,
        id=f"{name}-{digest}",
        config=config | {"provenance": provenance},
        dir=folder,
        mode="offline" if offline else "online",
        resume=None if offline else "allow",
        settings=settings,
    )
    run.define_metric(TOKENS)
    run.define_metric("*", step_metric=TOKENS)
    sent = run.step - 1  # W&B's step is our update; of a new run 0
    while True:
        over = not follow or state_of(folder).word in (FINISHED, STOPPED, FAILED)
        # Read whole each time: a resumed run cuts its newest records off, and repeats them bit for bit.
        for record in read_lines(metrics):
            if record[UPDATE] > sent:
                run.log(record, step=record[UPDATE])
                sent = record[UPDATE]
        if over:
            break
        time.sleep(SECONDS)
    run.finish()
    where = f"wandb sync {run.settings.sync_dir}" if offline else run.url
    print(f"{name}: up to update {sent:,}: {where}")


def check_folder(folder: Path) -> None:
    for name in ("config.json", "run.json", "metrics.jsonl"):
        if not (folder / name).exists():
            raise ScriptError(f"{folder}: not a run's directory (no {name} in it)", DATA)


def main(arguments: list[str]) -> int:
    def act() -> None:
        parser = Parser(
            prog="track.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with metrics.jsonl")
        parser.add_argument("--project", required=True, help="of Weights & Biases")
        parser.add_argument("--entity", help="of Weights & Biases: a user or team")
        parser.add_argument("--follow", action="store_true", help="live: send what one run adds until it ends")
        parser.add_argument("--offline", action="store_true", help="write files for a later `wandb sync`, send nothing")
        options = parser.parse_args(arguments)
        if options.follow and len(options.runs) > 1:
            parser.error("--follow: one run at a time")
        for folder in options.runs:
            check_folder(folder)
        for folder in options.runs:
            try:
                track(folder, options.project, options.entity, options.offline, options.follow)
            except (ScriptError, OSError):
                raise
            except Exception as error:  # wandb's own, of many kinds
                reason = str(error).strip().split("\n", 1)[0]
                raise ScriptError(f"{folder}: {type(error).__name__}: {reason}", NETWORK) from None

    return run_main("track", act)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
