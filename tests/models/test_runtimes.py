"""Adapters in the files of llama.cpp and MLX, and merged: what a reader makes of them computes the adapter, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from test_gguf import write_gguf

import loragate as lg
from loragate.errors import ArtifactError, LoragateError
from loragate.gates import constant_gate
from loragate.models import open_model, resolve, runtimes
from loragate.models.export import export_adapter
from loragate.models.runtimes import FAMILIES as KNOWN
from loragate.models.runtimes import GGUF_FILE, read_gguf, read_mlx
from test_families import FAMILIES
from tiny import logits, run, shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter

gguf = pytest.importorskip("gguf", reason="gguf is not installed (pip install loragate[gguf])")
IDS = torch.tensor([[5, 9, 20, 33, 7, 100, 101, 8]])
NATS = re.compile(r"([\d.e-]+) nats per token apart")


def saved(place: Path, base: Any, **lora: Any) -> tuple[Any, Path]:
    """(the model, folder of its adapter) on a base that is in the folder beside it."""
    base.save_pretrained(place / "base")
    tiny_tokenizer().save_pretrained(place / "base")
    model = tiny_adapter(base=base, **lora)
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    model.save_pretrained(place / "adapter")
    return model, place / "adapter"


def nats(out: Path) -> float:
    """What the card says."""
    return float(NATS.findall((out / "README.md").read_text())[0])


@pytest.mark.parametrize("to", ["gguf", "mlx"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "phi3",
        *(
            pytest.param(name, marks=pytest.mark.slow("families"))
            for name in ("mistral", "granite", "qwen2", "qwen3", "gemma", "gemma2")
        ),
    ],
)
def test_every_known_family(name: str, to: str, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    _, adapter = saved(tmp_path, tf.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval())
    run("export", adapter, "--to", to, "--out", tmp_path / "out")
    shown = capsys.readouterr().out
    assert "loaded again and compared" in shown
    assert {"gguf": "llama-cli -m BASE.gguf --lora", "mlx": "--adapter-path"}[to] in shown
    assert nats(tmp_path / "out") < 1e-4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        *({GGUF_FILE} if to == "gguf" else {"adapters.safetensors", "adapter_config.json"}),
    }


def test_another_reader_of_gguf_finds_the_adapter_there(tmp_path: Path) -> None:
    """Added to the base's own matrices inside a GGUF file, which transformers then reads by rules of its own."""
    file = write_gguf(tmp_path / "base.gguf", stored="F32")
    base = open_model(resolve(str(file))).model
    model = tiny_adapter(base=base)
    model.peft_config["default"].base_model_name_or_path = str(file)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model, IDS)
    run("export", tmp_path / "adapter", "--to", "gguf", "--out", tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / GGUF_FILE)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    factors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert factors["blk.1.ffn_down.weight.lora_a"].shape == (4, 96)
    (tmp_path / "summed").mkdir()
    summed = write_gguf(tmp_path / "summed" / "base.gguf", stored="F32")
    matrices = {tensor.name: tensor.data for tensor in gguf.GGUFReader(summed, "r+").tensors}
    for name in {name.rpartition(".")[0] for name in factors}:
        a_RD, b_OR = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        matrices[name] += np.float32(fields["adapter.lora.alpha"] / len(a_RD)) * (b_OR @ a_RD)
    found = open_model(resolve(str(summed))).model
    torch.testing.assert_close(logits(found, IDS), expected, rtol=1e-3, atol=1e-3)
    with model.disable_adapter():
        assert (logits(model, IDS) - expected).abs().max() > 0.1


def test_a_base_that_is_a_folder_or_a_cached_file_is_found(tmp_path: Path, monkeypatch: Any, fails: Any) -> None:
    """As training finds it: a folder that holds one GGUF file, and such a file in the hub's cache."""
    repository, commit = tmp_path / "hub" / "models--me--tiny", "a" * 40
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny_adapter(base=open_model(resolve(str(write_gguf(snapshot / "base.gguf", stored="F32")))).model)
    for name, base in (("of-folder", snapshot), ("of-file", "me/tiny/base.gguf")):
        write_adapter(tmp_path / name, base, model)
        for to in ("gguf", "merged"):
            run("export", tmp_path / name, "--to", to, "--out", tmp_path / f"{name}-{to}")
    (snapshot / "other.gguf").touch()
    line = ("export", tmp_path / "of-folder", "--constant", "0.5", "--out", tmp_path / "out")
    assert "holds several GGUF files (base.gguf, other.gguf); name one" in fails(*line)
    run(*line, "--skip-comparison")  # which needs no base
    for path in snapshot.iterdir():
        path.unlink()
    said = fails("export", tmp_path / "of-folder", "--to", "gguf", "--out", tmp_path / "none", status=1)
    assert f"{snapshot} cannot be loaded: ValueError: Unrecognized model" in said


@pytest.mark.parametrize("to", ["gguf", "mlx"])
@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.up_proj": 2}},
        {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 5},
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
    ],
    ids=["rslora and patterns", "ranks", "two modules", "one layer"],
)
def test_every_kind_of_scale(to: str, lora: dict[str, Any], tmp_path: Path) -> None:
    _, adapter = saved(tmp_path, tiny_base(), **lora)
    run("export", adapter, "--to", to, "--out", tmp_path / "out")
    assert nats(tmp_path / "out") < 1e-4


@pytest.mark.parametrize("to", ["gguf", "mlx", "merged"])
def test_gates_and_constants_are_folded_first(to: str, tmp_path: Path, capsys: Any) -> None:
    model, adapter = saved(tmp_path, tiny_base())
    with constant_gate(model, 0.5, part="lower"):
        half = logits(model, IDS)
    run("export", f"{adapter}@lower=0.5", "--to", to, "--out", tmp_path / "half")
    card = (tmp_path / "half" / "README.md").read_text()
    assert "λ is one constant, 0.5, laid over lower; it is 1 elsewhere" in card
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2, granularity="module")), 0.7, 4)
    gated = logits(model, IDS)
    lg.save_gates(model, tmp_path / "gated", adapter_source=adapter)
    run("export", tmp_path / "gated", "--to", to, "--out", tmp_path / "out")
    assert nats(tmp_path / "out") < 1e-4
    for folder, expected in ((tmp_path / "half", half), (tmp_path / "out", gated)):
        if to == "merged":
            found = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            assert tf.AutoTokenizer.from_pretrained(folder).chat_template == tiny_tokenizer().chat_template
        else:
            read, base = tmp_path / f"read-{folder.name}", tf.AutoConfig.from_pretrained(tmp_path / "base")
            read.mkdir()
            runtimes.RUNTIMES[to].read(folder, read, base)
            found = open_model(resolve(read, str(tmp_path / "base"))).model
        torch.testing.assert_close(logits(found, IDS), expected, rtol=1e-4, atol=1e-4)
    assert "Learned gates" not in capsys.readouterr().out


@pytest.mark.parametrize("to", ["gguf", "mlx"])
@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"use_dora": True}, "DoRA's magnitudes"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "a tensor beside A and B"),
        ({"bias": "lora_only"}, "a tensor beside A and B"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "a tensor beside A and B"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head is no matrix that an adapter of"),
    ],
    ids=["DoRA", "modules to save", "biases", "embedding", "tied head"],
)
def test_what_a_form_cannot_hold_is_refused(
    to: str, lora: dict[str, Any], said: str, tmp_path: Path, fails: Any
) -> None:
    _, adapter = saved(tmp_path, tiny_base(), **lora)
    text = fails("export", adapter, "--to", to, "--out", tmp_path / "out")
    assert said in text
    assert "--to merged" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["gguf", "mlx"])
def test_an_alora_does_not_become_a_plain_adapter(to: str, tmp_path: Path, fails: Any) -> None:
    _, adapter = saved(tmp_path, tiny_base(), alora_invocation_tokens=[9, 20])
    text = fails("export", adapter, "--to", to, "--out", tmp_path / "out", "--skip-comparison")
    assert "alora_invocation_tokens is set" in text
    assert "would run it as plain LoRA" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["gguf", "mlx"])
def test_a_head_of_its_own(to: str, tmp_path: Path, fails: Any) -> None:
    base = tiny_base(tie_word_embeddings=False)
    _, adapter = saved(tmp_path, base, target_modules=["q_proj", "lm_head"])
    line = ("export", adapter, "--to", to, "--out", tmp_path / "out")
    if to == "mlx":
        assert "lm_head is no matrix that an adapter of MLX can change" in fails(*line)
        return
    run(*line)
    assert nats(tmp_path / "out") < 1e-4
    assert any(
        tensor.name == "output.weight.lora_a" for tensor in gguf.GGUFReader(tmp_path / "out" / GGUF_FILE).tensors
    )


@pytest.mark.parametrize("to", ["gguf", "mlx"])
def test_what_is_not_known_or_has_no_effect_is_refused(to: str, tmp_path: Path, fails: Any) -> None:
    _, adapter = saved(tmp_path, tf.AutoModelForCausalLM.from_config(FAMILIES["gpt2"]()).eval())
    line = ("export", adapter, "--to", to, "--out", tmp_path / "out")
    assert f"a base of type 'gpt2' is not among those ({', '.join(KNOWN)})"[:40] in fails(*line)
    assert "--dtype is that of a merged model" in fails(*line, "--dtype", "bfloat16")
    assert f"--uniform has no effect with --to {to}" in fails(*line, "--uniform")
    (tmp_path / "base").rename(tmp_path / "moved")
    assert "needs the base, and the base" in fails(*line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "broken"),
    [("gguf", "_permute_rotary_rows"), ("mlx", "_in_layer")],
)
def test_files_that_compute_something_else_are_refused(
    to: str, broken: str, tmp_path: Path, fails: Any, monkeypatch: Any
) -> None:
    base = tf.AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval()
    _, adapter = saved(tmp_path, base)
    right = getattr(runtimes, broken)
    wrong = {
        "_permute_rotary_rows": lambda b, heads, back=False: right(b, heads, back) if back else b,
        "_in_layer": lambda path: right(path).replace("up_proj", "gate_proj"),
    }
    monkeypatch.setattr(runtimes, broken, wrong[broken])
    said = fails("export", adapter, "--to", to, "--out", tmp_path / "out", status=1 if to == "gguf" else 2)
    assert {"gguf": "does not compute what", "mlx": "mlx-lm would leave"}[to] in said
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_runtime_would_refuse_is_named(tmp_path: Path) -> None:
    _, adapter = saved(tmp_path, tiny_base(), target_modules=["q_proj"])
    base = tf.AutoConfig.from_pretrained(tmp_path / "base")
    for to in ("gguf", "mlx"):
        run("export", adapter, "--to", to, "--out", tmp_path / to)
    with pytest.raises(ArtifactError, match=r"'general.architecture' must be 'llama', found 'qwen2'"):
        read_gguf(tmp_path / "gguf", tmp_path, FAMILIES["llama"]())
    (tmp_path / "gguf" / GGUF_FILE).write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_gguf(tmp_path / "gguf", tmp_path, base)
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    for change, said in (
        ({"num_layers": 1}, r"would leave model\.layers\.0"),
        ({"lora_parameters": {**config["lora_parameters"], "rank": 8}}, "has rank 4, adapter_config.json 8"),
        ({"fine_tune_type": "dora"}, "fine_tune_type 'dora'"),
        ({"lora_parameters": {}}, "not a readable adapter of MLX"),
    ):
        (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ArtifactError, match=said):
            read_mlx(tmp_path / "mlx", tmp_path, base)


def test_a_gguf_file_that_a_full_disk_cut_off_is_called_so(tmp_path: Path, monkeypatch: Any) -> None:
    """The last flush of gguf's writer fails in silence; nothing is then left under the name that was asked for."""
    _, adapter = saved(tmp_path, tiny_base())
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", lambda self: None)
    with pytest.raises(LoragateError, match=f"{tmp_path}/out/{GGUF_FILE} was not written: the disk is full"):
        export_adapter(str(adapter), tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()
