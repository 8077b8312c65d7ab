"""The training of docs/paper.md in NumPy, on golden's trajectories: in float64, where its records are golden's, or with
all that the CUDA backend holds in bf16 rounded to it, which says how far bf16 alone moves a record.

usage: tests/cmd/numpy_training.py [RUNS]
Prints, for each trajectory and head, the largest relative deviation of each quantity from golden's float64 over the
updates of RUNS (default 12) bf16 runs. From the second on the initial weights are moved by 1e-6, far below what bf16
holds, so that every run rounds otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support import ROOT, read_safetensors

GOLDEN = ROOT / "tests" / "golden"
TRAJECTORIES, HEADS = ("trajectory_main", "trajectory_clipped"), ("adamw", "rownorm")
QUANTITIES = ("train_loss", "grad_norm_before_clip", "head_step_diameter", "validation_loss", "hilbert_rms")

Array = np.ndarray
Weights = dict[str, Array]


def to_bf16(x: Array) -> Array:
    """The nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def normed(x: Array, eps: float) -> tuple[Array, Array]:
    rstd = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * rstd, rstd


def normed_backward(dy: Array, y: Array, rstd: Array) -> Array:
    return rstd * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


class Model:
    """PAPER 2, with its backward; stored(x) is what is kept of x."""

    def __init__(self, model: dict[str, Any], stored: Callable[[Array], Array]) -> None:
        self.layers, self.head_dim, self.eps = model["layers"], model["head_dim"], model["rms_eps"]
        self.stored = stored
        context, half = model["seq_len"], model["head_dim"] // 2
        angle = np.arange(context)[:, None] * model["rope_theta"] ** (-np.arange(half) / half)
        self.cos, self.sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        self.ahead = np.triu(np.ones((context, context), bool), 1)

    def rotated(self, heads: Array, sign: int = 1) -> Array:
        a, b = np.split(heads, 2, axis=-1)
        return np.concatenate([a * self.cos - sign * b * self.sin, b * self.cos + sign * a * self.sin], axis=-1)

    def forward(self, w: Weights, tokens: Array) -> tuple[Array, list[Any]]:
        """Hidden states and what backward needs; `w` as products read it."""
        stored, kept = self.stored, []
        batch, context = tokens.shape
        x = w["embed.weight"][tokens]
        for i in range(self.layers):
            of = f"blocks.{i}."
            normed1, rstd1 = normed(x, self.eps)
            normed1 = stored(normed1)
            q, k, v = (
                stored(normed1 @ w[f"{of}attn.{c}.weight"].T).reshape(batch, context, -1, self.head_dim) for c in "qkv"
            )
            (q, q_rstd), (k, k_rstd) = normed(q, self.eps), normed(k, self.eps)
            q, k = stored(self.rotated(q)), stored(self.rotated(k))
            scores = np.einsum("bihc,bjhc->bhij", q, k) / np.sqrt(self.head_dim)
            scores[:, :, self.ahead] = -np.inf
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            att = stored(np.einsum("bhij,bjhc->bihc", stored(p), v)).reshape(x.shape)
            x = stored(x + att @ w[f"{of}attn.out.weight"].T)
            normed2, rstd2 = normed(x, self.eps)
            normed2 = stored(normed2)
            gate, up = (stored(normed2 @ w[f"{of}{c}.weight"].T) for c in ("gate", "up"))
            act = stored(gate / (1 + np.exp(-gate)) * up)
            x = stored(x + act @ w[f"{of}down.weight"].T)
            kept.append((normed1, rstd1, q, k, q_rstd, k_rstd, v, p, att, normed2, rstd2, gate, up, act))
        hidden, rstd = normed(x, self.eps)
        kept.append(rstd)
        return stored(hidden), kept

    def losses(
        self, w: Weights, tokens: Array, targets: Array, scale: float = 0, grads: Weights | None = None
    ) -> Array:
        """Cross entropies; adds the gradients of `scale` times their sum."""
        hidden, kept = self.forward(w, tokens)
        logits = hidden @ w["lm_head.weight"].T
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        onehot = np.eye(logits.shape[-1])[targets]
        if grads is not None:
            self.backward(w, tokens, hidden, kept, self.stored(scale * (p - onehot)), grads)
        return -np.log((p * onehot).sum(axis=-1))

    def backward(
        self, w: Weights, tokens: Array, hidden: Array, kept: list[Any], dlogits: Array, grads: Weights
    ) -> None:
        stored = self.stored

        def add(name: str, dy: Array, x: Array) -> None:
            grads[name] += flat(dy).T @ flat(x)

        add("lm_head.weight", dlogits, hidden)
        dx = stored(normed_backward(stored(dlogits @ w["lm_head.weight"]), hidden, kept.pop()))
        for i in reversed(range(self.layers)):
            of = f"blocks.{i}."
            normed1, rstd1, q, k, q_rstd, k_rstd, v, p, att, normed2, rstd2, gate, up, act = kept.pop()
            add(f"{of}down.weight", dx, act)
            dact, sigmoid = stored(dx @ w[f"{of}down.weight"]), 1 / (1 + np.exp(-gate))
            dgate, dup = stored(dact * up * sigmoid * (1 + gate * (1 - sigmoid))), stored(dact * gate * sigmoid)
            add(f"{of}gate.weight", dgate, normed2)
            add(f"{of}up.weight", dup, normed2)
            dnormed = stored(dgate @ w[f"{of}gate.weight"] + dup @ w[f"{of}up.weight"])
            dx = stored(dx + normed_backward(dnormed, normed2, rstd2))
            add(f"{of}attn.out.weight", dx, att)
            datt = stored(dx @ w[f"{of}attn.out.weight"]).reshape(v.shape)
            dv = stored(np.einsum("bhij,bihc->bjhc", stored(p), datt))
            delta = (datt * att.reshape(v.shape)).sum(axis=-1).transpose(0, 2, 1)[..., None]
            ds = stored(p * (np.einsum("bihc,bjhc->bhij", datt, v) - delta)) / np.sqrt(self.head_dim)
            dq, dk = stored(np.einsum("bhij,bjhc->bihc", ds, k)), stored(np.einsum("bhij,bihc->bjhc", ds, q))
            dq, dk = (  # the norm has no gain and commutes with the rotation
                stored(self.rotated(normed_backward(dz, z, rstd), -1))
                for dz, z, rstd in ((dq, q, q_rstd), (dk, k, k_rstd))
            )
            parts = {c: dz.reshape(dx.shape) for c, dz in (("q", dq), ("k", dk), ("v", dv))}
            for c, dz in parts.items():
                add(f"{of}attn.{c}.weight", dz, normed1)
            dnormed = stored(sum(dz @ w[f"{of}attn.{c}.weight"] for c, dz in parts.items()))
            dx = stored(dx + normed_backward(dnormed, normed1, rstd1))
        np.add.at(grads["embed.weight"], tokens.ravel(), flat(dx))


def newton_schulz(x: Array, eps: float, steps: int) -> Array:
    x = x / (np.linalg.norm(x) + eps)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Optimizer:
    """PAPER 4, as golden's config names the recipes."""

    def __init__(self, recipes: dict[str, Any]) -> None:
        self.hidden = recipes["backbone"]
        self.others = recipes["auxiliary_adamw"]["groups"]
        self.betas = recipes["auxiliary_adamw"]["betas"]
        self.state: dict[str, tuple[Array, Array]] = {}

    def step(self, name: str, w: Array, grad: Array, rates: dict[str, float], t: int) -> tuple[Array, Array]:
        """The new weights and the increment."""
        first, second = self.state.get(name, (np.zeros_like(w), np.zeros_like(w)))
        if name.startswith("blocks."):
            recipe, lr, mu = self.hidden, rates["backbone"], self.hidden["momentum"]
            first = mu * first + grad
            rows, columns = w.shape
            direction = newton_schulz(grad + mu * first, recipe["eps"], recipe["ns_steps"])
            increment = -lr * np.sqrt(max(1, rows / columns)) * direction
        else:
            role = "input_embedding" if name == "embed.weight" else "lm_head"
            recipe, lr = self.others[role], rates[role]
            if recipe.get("algorithm") == "rownorm":
                first = recipe["beta"] * first + (1 - recipe["beta"]) * grad
                mean = first / (1 - recipe["beta"] ** t)
                increment = -lr * mean / (np.linalg.norm(mean, axis=1, keepdims=True) + recipe["eps"])
            else:
                b1, b2 = self.betas
                first, second = b1 * first + (1 - b1) * grad, b2 * second + (1 - b2) * grad * grad
                increment = -lr * first / (1 - b1**t) / (np.sqrt(second / (1 - b2**t)) + recipe["eps"])
        self.state[name] = first, second
        return (1 - lr * recipe["weight_decay"]) * w + increment, increment


def groups(golden: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Shard and group of every update (PAPER 3)."""
    run, epoch = golden["run"], 0
    tokens = golden["data"]["train_tokens_per_shard"]

    def shuffled(count: int, *entropy: int) -> list[int]:
        order = np.arange(count)
        np.random.default_rng(np.random.SeedSequence([run["data_seed"], epoch, *entropy])).shuffle(order)
        return order.tolist()

    while True:
        for shard in shuffled(len(tokens), 0):
            blocks = (tokens[shard] - 1) // golden["model"]["seq_len"]
            yield from ((shard, group) for group in shuffled(blocks // run["sequences_per_update"], shard, 1))
        epoch += 1


def read_tokens(path: Path) -> Array:
    return np.fromfile(path, "<u2", offset=1024).astype(np.int64)


def train(trajectory: str, head: str, bf16: bool, seed: int = 0) -> list[dict[str, float]]:
    """A record an update, in golden's keys. Weights between updates are f32 where products are bf16."""
    folder = GOLDEN / trajectory
    golden = json.loads((folder / "config.json").read_text())
    expected = json.loads((folder / f"expected_{head}_f64.json").read_text())
    stored: Callable[[Array], Array] = to_bf16 if bf16 else lambda x: x
    model, optimizer = Model(golden["model"], stored), Optimizer(golden["heads"][head])
    noise = np.random.default_rng(seed)
    weights = {
        name: w.astype(np.float64) * (1 + (1e-6 * noise.standard_normal(w.shape) if seed else 0))
        for name, w in read_safetensors(folder / "init.safetensors").items()
    }
    shards = [read_tokens(folder / name) for name in golden["data"]["train"]]
    run, context = golden["run"], golden["model"]["seq_len"]
    count, micro = run["sequences_per_update"], run["micro_batch"]
    records = []
    for right, (shard, group) in zip(expected, groups(golden), strict=False):
        part = shards[shard][group * count * context : (group + 1) * count * context + 1]
        tokens, targets = part[:-1].reshape(count, context), part[1:].reshape(count, context)
        read = {name: stored(w) for name, w in weights.items()}
        grads = {name: np.zeros_like(w) for name, w in weights.items()}
        losses = [
            model.losses(read, tokens[i : i + micro], targets[i : i + micro], 1 / tokens.size, grads)
            for i in range(0, count, micro)
        ]
        norm = np.sqrt(sum((g * g).sum() for g in grads.values()))
        clip = min(1, run["clip_norm"] / (norm + 1e-6))
        for name, g in grads.items():
            w, increment = optimizer.step(name, weights[name], clip * g, right["lr"], right["update"])
            weights[name] = w.astype(np.float32).astype(np.float64) if bf16 else w
            if name == "lm_head.weight":
                s = increment
        squares = (s * s).sum(axis=1)
        largest = (squares[:, None] + squares - 2 * s @ s.T).max()
        record = {
            "train_loss": np.mean(losses),
            "grad_norm_before_clip": norm,
            "head_step_diameter": np.sqrt(max(largest, 0)),
        }
        if "validation_loss" in right:
            read = {name: stored(w) for name, w in weights.items()}
            part = read_tokens(folder / golden["data"]["val"][0])[: golden["eval"]["tokens"] + 1]
            tokens, targets = part[:-1].reshape(-1, context), part[1:].reshape(-1, context)
            record["validation_loss"] = model.losses(read, tokens, targets).mean()
            z = flat(model.forward(read, tokens)[0])[: golden["panel"]["tokens"]] @ s.T
            record["hilbert_rms"] = np.sqrt(((z.max(axis=1) - z.min(axis=1)) ** 2).mean())
        records.append({key: float(value) for key, value in record.items()})
    return records


def deviations(records: list[dict[str, float]], trajectory: str, head: str) -> dict[str, float]:
    """The largest of each quantity, relative to golden's float64."""
    exact = json.loads((GOLDEN / trajectory / f"expected_{head}_f64.json").read_text())
    return {
        key: max(abs(r[key] - e[key]) / abs(e[key]) for r, e in zip(records, exact, strict=True) if e.get(key, 0) != 0)
        for key in QUANTITIES
    }


def main() -> None:
    for trajectory in TRAJECTORIES:
        for head in HEADS:
            runs = [
                deviations(train(trajectory, head, bf16=True, seed=seed), trajectory, head)
                for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
            ]
            print(trajectory, head, {key: float(f"{max(r[key] for r in runs):.1e}") for key in QUANTITIES})


if __name__ == "__main__":
    main()
