"""`loragate mask` on small local files, and the two objectives that read what it writes."""

import datetime
import json
import re
import shutil

import datasets
import pytest
import torch
from peft import PeftModel

from loragate.cli.main import main
from loragate.training import token_mask
from tiny import TEMPLATE, run, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer, write_base, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, an adapter on it, another full model, and rows."""
    root = tmp_path_factory.mktemp("mask")
    write_base(root / "base")
    write_base(root / "tuned", seed=3)
    tiny_adapter(r=2).save_pretrained(root / "adapter")
    write_rows(root / "rows.jsonl", [{**row, "id": at} for at, row in enumerate(tiny_rows(21))])
    return root


def mask(place, out, *more, reference="adapter"):
    given = ["--model", place / "base", "--reference", place / reference, "--data", place / "rows.jsonl"]
    return main(["mask", *map(str, (*given, "--out", out, *more))])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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


@pytest.mark.parametrize("objective", ["mask", "forgetting"])
def test_sft_reads_what_mask_wrote(place, tmp_path, capsys, fails, objective):
    assert mask(place, tmp_path / "m.jsonl") == 0
    common = ["sft", "--model", place / "base", "--batch-size", 8, "--per-device-train-batch-size", 8, "--max-steps", 2]
    chosen = ["--max-length", 64, "--objective", objective]
    run(*common, *chosen, "--data", tmp_path / "m.jsonl", "--out", tmp_path / "a")
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()
    said = fails(*common, *chosen, "--data", place / "rows.jsonl", "--out", tmp_path / "b")
    assert f"objective '{objective}' needs a keep_mask" in said
    assert "loragate mask" in said
    capsys.readouterr()
    run(*common, "--data", tmp_path / "m.jsonl", "--out", tmp_path / "c")
    assert "the keep_mask column is not read by the objective sft" in capsys.readouterr().out


def test_resume_scores_only_what_is_missing(place, tmp_path, fails, monkeypatch):
    own, calls = token_mask.response_log_probs, []
    one = ("--per-device-train-batch-size", "1")
    assert mask(place, tmp_path / "whole.jsonl", *one) == 0

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:  # the pass of the reference
            raise KeyboardInterrupt
        yield from own(*arguments, **options)

    monkeypatch.setattr(token_mask, "response_log_probs", stopped)
    assert mask(place, tmp_path / "m.jsonl", *one) == 130
    assert not (tmp_path / "m.jsonl").exists()
    assert [path.name for path in (tmp_path / "m.jsonl.partial").glob("*.npy")] == ["base.npy"]
    given = ("--model", place / "base", "--reference", place / "adapter", "--data", place / "rows.jsonl")
    assert "continue it with --resume" in fails("mask", *given, "--out", tmp_path / "m.jsonl")
    assert mask(place, tmp_path / "m.jsonl", *one, "--resume") == 0
    assert len(calls) == 3
    assert (tmp_path / "m.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_what_cannot_work_is_refused(place, tmp_path, fails):
    common = ["mask", "--model", place / "base", "--data", place / "rows.jsonl"]
    out, reference = ["--out", tmp_path / "m.jsonl"], ["--reference", place / "adapter"]
    good = [*common, *reference]
    assert "needs --reference" in fails(*common, *out)
    assert "the base itself" in fails(*common, "--reference", place / "base", *out)
    assert "ends in .jsonl" in fails(*good, "--out", tmp_path / "m.parquet")
    assert "share of the tokens" in fails(*good, *out, "--keep", "1.5")
    shutil.copytree(place / "tuned", tmp_path / "other")
    words = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    assert "the tokenizers of base and reference differ: 'w1'" in fails(
        *common, "--reference", tmp_path / "other", *out
    )
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    dated = datasets.Dataset.from_list([{**row, "made": datetime.date(2026, 1, 2)} for row in rows])
    dated.to_parquet(tmp_path / "dated.parquet")
    given = [*common[:-1], tmp_path / "dated.parquet", *reference, *out]
    assert "row 0: cannot be written as JSON (Object of type date" in fails(*given)
    assert not (tmp_path / "m.jsonl.partial").exists(), "nothing was scored"
    assert mask(place, tmp_path / "m.jsonl") == 0
    assert "exists already" in fails(*good, *out)
    run(*good, "--out", tmp_path / "rows.jsonl", "--scope", "row", "--max-length", "9")
    whole = gains(place, "adapter")
    kept = [row["keep_mask"] for row in read(tmp_path / "rows.jsonl")]
    assert [len(bits) for bits in kept] == [len(values) for values in whole], "tokens beyond the limit are not kept"
    assert 0 < sum(map(sum, kept)) < 0.6 * sum(map(len, whole))
    again = [*common[:-1], tmp_path / "m.jsonl", *reference, "--out", tmp_path / "n.jsonl"]
    assert "carry a keep_mask already" in fails(*again)


def test_a_reference_with_another_template_is_refused(place, tmp_path, fails):
    shutil.copytree(place / "adapter", tmp_path / "own")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<user> {{", "<user> w1 w1 {{")
    tokenizer.save_pretrained(tmp_path / "own")
    common = ["mask", "--model", place / "base", "--reference", tmp_path / "own", "--out", tmp_path / "m.jsonl"]
    given = [*common, "--data", place / "rows.jsonl"]
    said = fails(*given)
    assert f"the chat template of the reference {tmp_path / 'own'} is not the base's. " in said
    assert "--chat-template FILE" in said
    assert not (tmp_path / "m.jsonl.partial").exists()
    (tmp_path / "own.jinja").write_text(tokenizer.chat_template)
    run(*given, "--chat-template", tmp_path / "own.jinja")
    # no template renders plain rows
    write_rows(tmp_path / "plain.jsonl", [{"prompt": "w1", "completion": "w2 w3"}] * 3)
    run(*common[:-1], tmp_path / "p.jsonl", "--data", tmp_path / "plain.jsonl")


def test_half_a_surrogate_is_told_before_anything_is_scored(place, tmp_path, fails):
    rows = [{**row, "note": "cut \ud83d" if at == 3 else ""} for at, row in enumerate(tiny_rows(5))]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    common = ["mask", "--model", place / "base", "--reference", place / "adapter", "--out", tmp_path / "m.jsonl"]
    said = fails(*common, "--data", data)
    assert f"{data}:4: a text holds half of a surrogate pair" in said
    assert not (tmp_path / "m.jsonl.partial").exists()


def test_rows_longer_than_the_positions_of_a_model_are_refused(place, tmp_path, fails):
    write_base(tmp_path / "short", max_position_embeddings=8)
    for model, reference in (("short", place / "tuned"), (place / "base", "short")):
        given = ["--model", tmp_path / model, "--reference", tmp_path / reference, "--data", place / "rows.jsonl"]
        said = fails("mask", *given, "--out", tmp_path / "m.jsonl")
        assert re.search(
            r"rows\.jsonl:\d+ has \d+ tokens, but the model has 8 positions; set max_length to 8 or less", said
        )
        partial = tmp_path / "m.jsonl.partial"
        assert partial.exists() == (reference == "short"), "what was scored is kept, and nothing else"
        shutil.rmtree(partial, ignore_errors=True)
    run("mask", *given, "--max-length", 8, "--out", tmp_path / "m.jsonl")


def test_a_tilde_is_the_home_folder(place, tmp_path, fails, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "rows.jsonl", tmp_path / "rows.jsonl")
    models = ["--model", place / "base", "--reference", place / "adapter"]
    run("mask", *models, "--data", "~/rows.jsonl", "--out=~/m.jsonl", "--max-length", 8)
    assert (tmp_path / "m.jsonl").is_file()
    assert not (tmp_path / "~").exists()
    common = ["sft", "--model", place / "base", "--data", "~/m.jsonl", "--objective", "mask", "--max-steps", 1]
    assert "was masked with max_length 8" in fails(*common, "--out", "a")
    (tmp_path / "sft.yaml").write_text("out: ~/adapter\n")
    run(*common, "--max-length", 8, "--batch-size", 4, "--config", "sft.yaml")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
