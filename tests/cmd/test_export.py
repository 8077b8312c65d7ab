"""`rownorm export`: the folder's names, shapes and bits; read back; and, where torch and transformers are installed,
that transformers computes with it what this program computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    CONTEXT,
    VOCAB,
    checkpoint,
    expect_error,
    expect_ok,
    full_only,
    read_json,
    read_safetensors,
    records,
    run,
    tiny_config,
    tree,
    write_config,
)
from test_sample import bpe_run, next_logits  # noqa: F401 (bpe_run is a fixture)
from tokenizers import Tokenizer

USAGE, DATA = 2, 3
LAYER = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GAINS = {"input_layernorm": 16, "self_attn.q_norm": 8, "self_attn.k_norm": 8, "post_attention_layernorm": 16}


def export(path: Path, output: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(expect_ok(run("export", path, "--output", output, *arguments)).out)


def test_the_folder_holds_the_model(whole_run: dict[str, Any], tmp_path: Path) -> None:
    source = Path(whole_run["output"])
    said = export(source, tmp_path / "hf")
    assert said["update"] == 24 and said["dtype"] == "f32" and said["tokenizer"] is None
    assert sorted(tree(tmp_path)) == ["hf/config.json", "hf/model.safetensors"]

    ours = read_safetensors(checkpoint(source, 24) / "model.safetensors")
    theirs = read_safetensors(tmp_path / "hf" / "model.safetensors")
    expected = {"model.embed_tokens.weight": ours["embed.weight"], "lm_head.weight": ours["lm_head.weight"]}
    for i in range(2):
        for name, other in LAYER.items():
            expected[f"model.layers.{i}.{other}.weight"] = ours[f"blocks.{i}.{name}.weight"]
        for name, size in GAINS.items():
            expected[f"model.layers.{i}.{name}.weight"] = np.ones(size, np.float32)
    expected["model.norm.weight"] = np.ones(16, np.float32)
    assert theirs.keys() == expected.keys()
    assert all(np.array_equal(theirs[name].view("u4"), expected[name].view("u4")) for name in expected)

    config = read_json(tmp_path / "hf" / "config.json")
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    rest = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 10000, "torch_dtype": "float32"}
    rest |= {"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "eos_token_id": None}
    assert {k: config[k] for k in sizes | rest} == sizes | rest


def test_bfloat16_is_rounded_to_nearest_even(whole_run: dict[str, Any], tmp_path: Path) -> None:
    source = Path(whole_run["output"])
    export(source, tmp_path / "hf", "--dtype", "bf16")
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])["model.layers.1.mlp.down_proj.weight"]
    begin, end = (8 + length + at for at in entry["data_offsets"])
    weights = read_safetensors(checkpoint(source, 24) / "model.safetensors")["blocks.1.down.weight"].view("u4")
    rounded = (weights + 0x7FFF + ((weights >> 16) & 1)) >> 16
    assert entry["dtype"] == "BF16"
    assert np.array_equal(np.frombuffer(data[begin:end], "<u2"), rounded.ravel())
    assert read_json(tmp_path / "hf" / "config.json")["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_init_from_reads_the_same_bits(device: str, data: Path, whole_run: dict[str, Any], tmp_path: Path) -> None:
    """A run that begins at the folder and one that begins at the checkpoint's file leave the same bytes."""
    source = checkpoint(Path(whole_run["output"]), 24)
    export(source, tmp_path / "hf")
    left = []
    for name, begin in (("folder", tmp_path / "hf"), ("file", source / "model.safetensors")):
        config = tiny_config(data, tmp_path / name, init_from=str(begin), device=device, schedule__max_updates=2)
        expect_ok(run("train", write_config(tmp_path / "config.json", config)))
        left.append((records(tmp_path / name), read_safetensors(checkpoint(tmp_path / name, 2) / "model.safetensors")))
    assert left[0][0] == left[1][0]
    assert all(np.array_equal(left[0][1][name], left[1][1][name]) for name in left[0][1])


def test_the_tokenizer_goes_along(request: pytest.FixtureRequest, whole_run: dict[str, Any], tmp_path: Path) -> None:
    run_directory: Path = request.getfixturevalue("bpe_run")
    beside = run_directory.parent / "data" / "tokenizer.json"
    assert export(run_directory, tmp_path / "hf")["tokenizer"] == str(beside)
    files = tree(tmp_path / "hf")
    assert files["tokenizer.json"] == beside.read_bytes()
    separator = json.loads(files["generation_config.json"])["eos_token_id"]
    assert read_json(tmp_path / "hf" / "config.json")["eos_token_id"] == separator
    assert Tokenizer.from_file(str(beside)).id_to_token(separator) == "<|endoftext|>"
    settings = json.loads(files["tokenizer_config.json"])
    assert {"<|endoftext|>", 1024} <= set(settings.values())
    assert export(run_directory, tmp_path / "none", "--tokenizer", "none")["tokenizer"] is None
    assert sorted(tree(tmp_path / "none")) == ["config.json", "model.safetensors"]
    result = run("export", whole_run["output"], "--output", tmp_path / "other", "--tokenizer", beside)
    expect_error(result, DATA, "tokenizer.json: has 600 tokens, model.vocab_size is 61")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | changes))


BAD_FOLDERS = {
    "no config": (lambda f: (f / "config.json").unlink(), ("hf/config.json: no such file",)),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("hf/model.safetensors: no such file",)),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), ("hf/config.json: not a JSON object",)),
    "another model": (lambda f: change_config(f, model_type="llama"), ("model_type", '"llama"', '"qwen3"')),
    "another size": (lambda f: change_config(f, head_dim=4), ("head_dim is 4, expected 8",)),
    "grouped queries": (lambda f: change_config(f, num_key_value_heads=1), ("num_key_value_heads is 1, expected 2",)),
    "scaled rotary": (lambda f: change_config(f, rope_scaling={"factor": 2}), ("rope_scaling", "factor")),
    "tied": (lambda f: change_config(f, tie_word_embeddings=True), ("tie_word_embeddings is true, expected false",)),
    "rope base": (lambda f: change_config(f, rope_theta=1e6), ("rope_theta is 1000000.0, expected 10000.0",)),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_of_another_model(name: str, data: Path, whole_run: dict[str, Any], tmp_path: Path) -> None:
    change, parts = BAD_FOLDERS[name]
    export(Path(whole_run["output"]), tmp_path / "hf")
    change(tmp_path / "hf")
    config = tiny_config(data, tmp_path / "run", init_from=str(tmp_path / "hf"))
    expect_error(run("train", write_config(tmp_path / "config.json", config)), DATA, *parts)
    assert not (tmp_path / "run").exists()


def test_gains_must_be_ones(data: Path, whole_run: dict[str, Any], tmp_path: Path) -> None:
    export(Path(whole_run["output"]), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32(1.5).tobytes()  # the last value of the last gain, model.norm.weight
    path.write_bytes(content)
    config = tiny_config(data, tmp_path / "run", init_from=str(tmp_path / "hf"))
    result = run("train", write_config(tmp_path / "config.json", config))
    expect_error(result, DATA, "hf/model.safetensors: model.norm.weight holds 1.5", "ones")


def test_wrong_input(whole_run: dict[str, Any], tmp_path: Path) -> None:
    source = Path(whole_run["output"])
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    expect_error(run("export", source, "--output", tmp_path / "there"), DATA, "there: exists already")
    expect_error(run("export", source, "--output", tmp_path / "there/"), DATA, "there: exists already")
    expect_error(run("export", source, "--output", tmp_path / "file" / "hf"), DATA, "file/.hf", "cannot be created")
    expect_error(run("export", tmp_path / "no", "--output", tmp_path / "hf"), DATA, "/no: neither a checkpoint")
    expect_error(run("export", source), USAGE, "--output is required")
    expect_error(run("export", source, "--output", "x", "--format", "gguf"), USAGE, "--format", "gguf")
    expect_error(run("export", source, "--output", "x", "--dtype", "f16"), USAGE, "--dtype", "f16")
    expect_error(run("export", source, "--output", tmp_path / "hf", "--tokenizer", "no.json"), DATA, "no.json")
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint(source, 24), broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1])
    expect_error(run("export", broken, "--output", tmp_path / "hf"), DATA, "broken/model.safetensors", "corrupt?")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


@full_only
def test_transformers_computes_the_same(whole_run: dict[str, Any], tmp_path: Path) -> None:
    """Logits within 1e-4 of NumPy's in float64, the validation loss within float32's rounding of `rownorm eval`'s."""
    torch = pytest.importorskip("torch", reason="torch and transformers are not installed")
    transformers = pytest.importorskip("transformers", reason="torch and transformers are not installed")
    source = Path(whole_run["output"])
    export(source, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"

    weights = read_safetensors(checkpoint(source, 24) / "model.safetensors")
    tokens = np.random.default_rng(0).integers(0, VOCAB, CONTEXT)
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None])).logits[0].numpy()
    for n in range(CONTEXT):
        assert np.abs(logits[n] - next_logits(weights, list(tokens[: n + 1]))).max() < 1e-4

    shard = Path(whole_run["data"]["validation"]).parent / "val_1.bin"
    text = np.frombuffer(shard.read_bytes()[1024:], "<u2").astype(np.int64)[: 10 * CONTEXT + 1]
    inputs, targets = (torch.tensor(part.reshape(10, CONTEXT)) for part in (text[:-1], text[1:]))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()
    said = json.loads(expect_ok(run("eval", source, "--data", shard, "--device", "reference")).out)
    assert said["sequences"] == 10
    assert abs(said["loss"] - loss) < 1e-5
