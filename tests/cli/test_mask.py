"""`loragate mask` on small local files, and the two objectives that read what it writes."""

import json
import shutil

import pytest
import torch
from peft import PeftModel

from loragate.cli.main import main
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, an adapter on it, another full model, and rows."""
    root = tmp_path_factory.mktemp("mask")
    for name, model in (("base", tiny_base()), ("tuned", tiny_base(3)), ("adapter", tiny_adapter(r=2))):
        model.save_pretrained(root / name)
    for name in ("base", "tuned"):
        tiny_tokenizer().save_pretrained(root / name)
    (root / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "id": at}) + "\n" for at, row in enumerate(tiny_rows(21)))
    )
    return root


def mask(place, out, *more, reference="adapter"):
    arguments = [
        "--model",
        place / "base",
        "--reference",
        place / reference,
        "--data",
        place / "rows.jsonl",
        "--out",
        out,
    ]
    return main(["mask", *[str(argument) for argument in (*arguments, *more)]])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fails(capsys, status, *argv):
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == status
    captured = capsys.readouterr()
    assert captured.err.count("loragate: error:") == 1
    return " ".join(captured.err.split())


def gains(place, reference):
    """ℓ(base) − ℓ(reference) of every response token by plain forwards: the definition."""
    tokenizer, found = tiny_tokenizer(), []
    other = PeftModel.from_pretrained(tiny_base(), place / "adapter") if reference == "adapter" else tiny_base(3)
    for row in read(place / "rows.jsonl"):
        prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        values = []
        for model in (tiny_base(), other):
            with torch.no_grad():
                log_p = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
            values.append(torch.stack([log_p[at - 1, ids[at]] for at in range(start, len(ids))]))
        found.append((values[1] - values[0]).tolist())
    return found


@pytest.mark.parametrize("reference", ["adapter", "tuned"])
def test_the_global_mask_is_its_definition(place, tmp_path, reference, capsys):
    assert mask(place, tmp_path / "m.jsonl", "--keep", "0.5", reference=reference) == 0
    text = capsys.readouterr().out
    expected = gains(place, reference)
    tokens = sorted((value for row in expected for value in row), reverse=True)
    count = int(len(tokens) * 0.5)
    assert f"kept {count} of {len(tokens)} scored response tokens (" in text
    assert "--objective mask" in text
    rows = read(tmp_path / "m.jsonl")
    assert [row["id"] for row in rows] == list(range(21))
    border = tokens[count - 1]
    for row, values in zip(rows, expected, strict=True):
        assert len(row["keep_mask"]) == len(values)
        for bit, value in zip(row["keep_mask"], values, strict=True):
            if abs(value - border) > 1e-4:
                assert bit == int(value > border)
    record = json.loads((tmp_path / "m.jsonl.record.json").read_text())
    assert (record["keep"], record["scope"], record["kept"]) == (0.5, "global", count)
    assert record["influence_kept"] > record["influence_dropped"]
    assert not (tmp_path / "m.jsonl.partial").exists()


def test_row_scope_and_cut_rows(place, tmp_path, capsys):
    assert mask(place, tmp_path / "m.jsonl", "--scope", "row", "--max-length", "9") == 0
    assert "beyond --max-length and are not kept" in capsys.readouterr().out
    whole = gains(place, "adapter")
    for row, values in zip(read(tmp_path / "m.jsonl"), whole, strict=True):
        assert len(row["keep_mask"]) == len(values)
    kept = sum(sum(row["keep_mask"]) for row in read(tmp_path / "m.jsonl"))
    assert 0 < kept < 0.6 * sum(map(len, whole))


@pytest.mark.parametrize("objective", ["mask", "forgetting"])
def test_sft_reads_what_mask_wrote(place, tmp_path, capsys, objective):
    assert mask(place, tmp_path / "m.jsonl") == 0
    common = [
        "--model",
        place / "base",
        "--batch-size",
        8,
        "--micro-batch-size",
        8,
        "--max-steps",
        2,
        "--max-length",
        64,
    ]
    arguments = ["sft", *common, "--data", tmp_path / "m.jsonl", "--objective", objective, "--out", tmp_path / "a"]
    assert main([str(argument) for argument in arguments]) == 0
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()
    said = fails(
        capsys, 2, "sft", *common, "--data", place / "rows.jsonl", "--objective", objective, "--out", tmp_path / "b"
    )
    assert f"objective '{objective}' needs a keep_mask" in said
    assert "loragate mask" in said
    capsys.readouterr()
    arguments = ["sft", *common, "--data", tmp_path / "m.jsonl", "--out", tmp_path / "c"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "the keep_mask column is not read by the objective sft" in capsys.readouterr().out


def test_a_mask_of_the_wrong_length_names_its_line(place, tmp_path, capsys):
    assert mask(place, tmp_path / "m.jsonl") == 0
    rows = read(tmp_path / "m.jsonl")
    rows[4]["keep_mask"].append(1)
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = fails(
        capsys,
        1,
        "sft",
        "--model",
        place / "base",
        "--data",
        tmp_path / "m.jsonl",
        "--objective",
        "mask",
        "--out",
        tmp_path / "a",
    )
    assert "m.jsonl:5: keep_mask has" in said


def test_resume_scores_only_what_is_missing(place, tmp_path, capsys, monkeypatch):
    import loragate.training.token_influence as module

    assert mask(place, tmp_path / "whole.jsonl", "--micro-batch-size", "1") == 0
    calls = []
    own = module.response_log_probs

    def stopped(*arguments, **options):
        for at, window in enumerate(own(*arguments, **options)):
            if len(calls) == 0 and at == 1:
                calls.append(1)
                raise KeyboardInterrupt
            yield window

    monkeypatch.setattr(module, "response_log_probs", stopped)
    assert mask(place, tmp_path / "m.jsonl", "--micro-batch-size", "1") == 130
    assert not (tmp_path / "m.jsonl").exists()
    assert (tmp_path / "m.jsonl.partial" / "base.f32").stat().st_size > 0
    said = fails(
        capsys, 2, "mask", "--model", place / "base", "--reference", place / "adapter", "--data", place / "rows.jsonl",
        "--out", tmp_path / "m.jsonl",
    )  # fmt: skip
    assert "go on with --resume" in said
    assert mask(place, tmp_path / "m.jsonl", "--micro-batch-size", "1", "--resume") == 0
    assert (tmp_path / "m.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_what_cannot_work_is_refused(place, tmp_path, capsys):
    common = ["--model", place / "base", "--data", place / "rows.jsonl"]
    out = ["--out", tmp_path / "m.jsonl"]
    good = [*common, "--reference", place / "adapter"]
    assert "needs --reference" in fails(capsys, 2, "mask", *common, *out)
    assert "the base itself" in fails(capsys, 2, "mask", *common, "--reference", place / "base", *out)
    assert "ends in .jsonl" in fails(capsys, 2, "mask", *good, "--out", tmp_path / "m.parquet")
    assert "share of the tokens" in fails(capsys, 2, "mask", *good, *out, "--keep", "1.5")
    assert 'Did you mean "row"?' in fails(capsys, 2, "mask", *good, *out, "--scope", "rows")
    assert "does not exist" in fails(capsys, 2, "mask", *common, "--reference", tmp_path / "nothing", *out)
    shutil.copytree(place / "tuned", tmp_path / "other")
    words = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    said = fails(capsys, 2, "mask", *common, "--reference", tmp_path / "other", *out)
    assert "the tokenizers of base and reference differ: 'w1'" in said
    assert mask(place, tmp_path / "m.jsonl") == 0
    assert "exists already" in fails(capsys, 2, "mask", *good, *out)
    said = fails(
        capsys,
        1,
        "mask",
        *common[:2],
        "--reference",
        place / "adapter",
        "--data",
        tmp_path / "m.jsonl",
        "--out",
        tmp_path / "n.jsonl",
    )
    assert "carry a keep_mask already" in said
