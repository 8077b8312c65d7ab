"""The runs of a study: scales x heads x seeds of one small JSON file. Standard library only.

The file (`//` comments allowed); paths in it are relative to the repository's root:

  scales, heads, seeds  the runs SCALE-HEAD-seedN; the config of each is SCALE-HEAD.json beside the file
  ranks                 of one run, where the runner has several
  runs                  the folder that holds the runs' directories
  device                of every run: so that a paper's run is never trained on a CPU because a GPU was not seen
  published             optional: a file of the paper's values, beside this one
  data                  optional: {command: makes the data, automatic: `launch` runs it where data are missing,
                        training_shards: how many there must be}
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from history import USAGE, ScriptError, is_a

ROOT = Path(__file__).resolve().parents[2]


# What the trainer lets a resumed run change (README, Configuration), and so no other run: in these
# a run's configuration may differ from its file. Data are compared by their digests.
FREE = re.compile(
    r"(name|output|device|precision|recompute|log_every|peak_tflops|batch\.micro_batch|schedule\.max_updates"
    r"|(checkpoint|comm|debug|data)\..*|.*\.newton_schulz_precision)"
)
# Setting one drops the other.
ALTERNATIVES = [
    ("schedule.updates", "schedule.tokens_per_parameter"),
    ("schedule.warmup_updates", "schedule.warmup_fraction"),
]


class Data(NamedTuple):
    command: str
    automatic: bool
    training_shards: int | None


class Run(NamedTuple):
    number: int  # in the whole matrix, whatever is selected
    scale: str
    head: str
    seed: int
    config: Path
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.scale}-{self.head}-seed{self.seed}"


class Matrix(NamedTuple):
    path: Path
    scales: list[str]
    heads: list[str]
    seeds: list[int]
    ranks: int
    folder: Path
    device: str
    published: Path | None
    data: Data | None

    def runs(self) -> list[Run]:
        cells = [(scale, head) for scale in self.scales for head in self.heads]
        keys = [(scale, head, seed) for scale, head in cells for seed in self.seeds]
        return [
            Run(i, *key, self.path.parent / f"{key[0]}-{key[1]}.json", self.folder / f"{key[0]}-{key[1]}-seed{key[2]}")
            for i, key in enumerate(keys)
        ]


def without_comments(text: str) -> str:
    """JSON without its `//` comments; what looks like one inside a string stays."""
    return re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda match: match[1] or "", text)


def read_commented_json(path: Path) -> dict[str, Any]:
    """A JSON object with `//` comments, as rownorm's configs are; a key given twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ScriptError(f"{path}: {twice}: given twice", USAGE)
        return dict(pairs)

    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(without_comments(text), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: not JSON ({error})", USAGE) from None
    if not isinstance(value, dict):
        raise ScriptError(f"{path}: not a JSON object", USAGE)
    return value


def flat(document: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`a.b.c` -> value."""
    leaves = {}
    for key, value in document.items():
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return leaves


def intended_config(run: Run, overrides: list[str]) -> dict[str, Any]:
    """What the run's file, the matrix and `--set PATH=VALUE` say, flat; not the defaults of what they leave out."""
    leaves = flat(read_commented_json(run.config)) | {"seed": run.seed}
    for override in overrides:
        key, _, text = override.partition("=")
        for pair in ALTERNATIVES:
            if key in pair:
                leaves = {name: value for name, value in leaves.items() if name not in pair}
        try:
            leaves[key] = json.loads(text)
        except (ValueError, RecursionError):
            leaves[key] = text
    return leaves


def config_differences(is_: dict[str, Any], should: dict[str, Any]) -> list[str]:
    """Of two flat configurations, where both say something that is not free."""
    return [
        f"{key}: {json.dumps(is_.get(key))}, not {json.dumps(value)}"
        for key, value in should.items()
        if not FREE.fullmatch(key) and is_.get(key) != value
    ]


def listed(differences: list[str]) -> str:
    more = f"; {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def is_count(value: object) -> bool:
    return is_a(value, int) and value != 0


def check_keys(path: Path, where: str, value: object, keys: dict[str, bool]) -> None:
    """`keys`: name -> required."""
    if not isinstance(value, dict):
        raise ScriptError(f"{path}: {where}{json.dumps(value)}: not a JSON object", USAGE)
    if unknown := next((key for key in value if key not in keys), None):
        raise ScriptError(f"{path}: {where}{unknown}: unknown key; known are {', '.join(keys)}", USAGE)
    if missing := next((key for key, required in keys.items() if required and key not in value), None):
        raise ScriptError(f"{path}: {where}{missing}: missing", USAGE)


def read_matrix(path: Path) -> Matrix:
    file = read_commented_json(path)
    required = ["scales", "heads", "seeds", "ranks", "runs", "device"]
    check_keys(path, "", file, dict.fromkeys(required, True) | {"published": False, "data": False})

    def check(key: str, valid: bool, right: str) -> None:
        if not valid:
            raise ScriptError(f"{path}: {key}: {json.dumps(file[key])}, {right}", USAGE)

    for key in ("scales", "heads"):
        names = file[key]
        valid = isinstance(names, list) and all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in names)
        check(key, bool(valid and names and len(set(names)) == len(names)), "must be different words, at least one")
    check("heads", not set(file["heads"]) & set(file["scales"]), "a word that is also one of scales")
    seeds = file["seeds"]
    valid = isinstance(seeds, list) and all(is_a(seed, int) for seed in seeds)
    check("seeds", bool(valid and seeds and len(set(seeds)) == len(seeds)), "must be different whole numbers from 0")
    check("ranks", is_count(file["ranks"]), "must be a whole number from 1")
    for key in ("runs", "device", *(["published"] if "published" in file else [])):
        check(key, isinstance(file[key], str) and file[key] != "", "must be a text")
    data = None
    if "data" in file:
        check_keys(path, "data.", file["data"], {"command": True, "automatic": True, "training_shards": False})
        shards = file["data"].get("training_shards")
        valid = isinstance(file["data"]["command"], str) and isinstance(file["data"]["automatic"], bool)
        check("data", valid and (shards is None or is_count(shards)), "must be a text, true or false, a whole number")
        data = Data(file["data"]["command"], file["data"]["automatic"], shards)
    matrix = Matrix(
        path=path.resolve(),
        scales=file["scales"],
        heads=file["heads"],
        seeds=seeds,
        ranks=file["ranks"],
        folder=ROOT / file["runs"],
        device=file["device"],
        published=path.resolve().parent / file["published"] if "published" in file else None,
        data=data,
    )
    for run in matrix.runs():
        if not run.config.is_file():
            raise ScriptError(f"{run.config}: no such file, {path} names it with scales and heads", USAGE)
    return matrix


def select(matrix: Matrix, only: str | None) -> list[Run]:
    """The runs that agree with `190m,rownorm,seed=0`: one of the words of each kind that is given."""
    scales, heads, seeds = set(), set(), set()
    for word in only.split(",") if only is not None else []:
        if word in matrix.scales:
            scales.add(word)
        elif word in matrix.heads:
            heads.add(word)
        elif (seed := re.fullmatch(r"seed=(\d{1,18})", word)) and int(seed[1]) in matrix.seeds:
            seeds.add(int(seed[1]))
        else:
            known = [*matrix.scales, *matrix.heads, *(f"seed={seed}" for seed in matrix.seeds)]
            raise ScriptError(f"--only {only}: {word or 'an empty word'}: not one of {', '.join(known)}", USAGE)
    return [
        run
        for run in matrix.runs()
        if (not scales or run.scale in scales) and (not heads or run.head in heads) and (not seeds or run.seed in seeds)
    ]
