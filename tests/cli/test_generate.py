"""What `generate` feeds a model, and when it prints the answers."""

import json
from types import SimpleNamespace

import pytest
from transformers import LlamaTokenizer

from loragate.cli.main import main
from loragate.data import prompt_ids
from loragate.generation import TransformersEngine
from loragate.generation.engine import Sample

TOKENS = ["<unk>", "<s>", "</s>", "▁", "▁H", "H", "i", "▁Hi"]


@pytest.fixture
def fed(monkeypatch):
    """(a tokenizer of Llama's kind, the prompts that an engine gets with it)."""
    tokenizer = LlamaTokenizer(
        vocab={token: index for index, token in enumerate(TOKENS)}, merges=[("▁", "H"), ("▁H", "i")]
    )
    tokenizer.add_bos_token = True
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = []

    def draw(self, given, sampling, rows):
        prompts.extend(given)
        yield []

    monkeypatch.setattr("loragate.models.resolve", lambda *_, **__: SimpleNamespace(sampling=None, override=None))
    monkeypatch.setattr("loragate.models.open_model", lambda *_: SimpleNamespace(model=None, tokenizer=tokenizer))
    monkeypatch.setattr(TransformersEngine, "__init__", lambda *_: None)
    monkeypatch.setattr(TransformersEngine, "draw", draw)
    return tokenizer, prompts


def test_a_raw_prompt_has_the_tokens_of_training(fed):
    tokenizer, prompts = fed
    assert main(["generate", "--model", "x", "--raw", "--prompt", "Hi"]) == 0
    assert prompts == [prompt_ids("Hi", tokenizer)] == [tokenizer("Hi")["input_ids"]]
    assert tokenizer.convert_ids_to_tokens(prompts[0]) == ["<s>", "▁Hi"]


def test_a_line_of_a_file_is_one_prompt_whatever_it_holds(fed, tmp_path):
    lines = ["one\u2028line", "\u0085 and\x0canother"]
    (tmp_path / "prompts.txt").write_text("\r\n".join([*lines, "", " "]), encoding="utf-8", newline="")
    assert main(["generate", "--model", "x", "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert fed[1] == lines


def test_a_mark_of_the_encoding_is_no_part_of_a_prompt_and_another_encoding_is_refused(fed, fails, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n", encoding="utf-8-sig")
    assert main(["generate", "--model", "x", "--prompts", str(file)]) == 0
    assert fed[1] == ["one", "two"]
    file.write_bytes("one\nWie heißt er?\n".encode("latin-1"))
    told = fails("generate", "--model", "x", "--prompts", file)
    assert f"--prompts {file}: line 2 is not UTF-8 text; save the file as UTF-8" in told


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_answers_are_printed_in_order_as_they_come_and_kept_when_stopped(fed, monkeypatch, capsys, tmp_path, form):
    def draw(self, given, sampling, rows):
        for question, printed in ((2, 0), (0, 0), (3, 2)):
            assert len(capsys.readouterr().out.splitlines()) == printed
            yield [Sample(question, number, f"{question}.{number}", (1,), "stop", 0.5) for number in range(2)]
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersEngine, "draw", draw)
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    assert (
        main(["generate", "--model", "x", "--prompts", str(tmp_path / "prompts.txt"), "--samples", "2", *form]) == 130
    )
    beyond = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert beyond == (["2.0", "2.1", "3.0", "3.1"] if form else [])
