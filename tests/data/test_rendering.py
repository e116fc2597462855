from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace

import pytest
from chat_tokenizers import (
    CHATML,
    CHATML_DEFAULT,
    GEMMA,
    LLAMA2,
    LLAMA3,
    THINKING,
    byte_level,
    decoded,
    learned,
    space_adding,
)
from rich.console import Console

from loragate.data.encoding import Encoder, SegmentTokenizer, Summary, encode_rows, preview, prompt_ids, render_prompt
from loragate.data.formats import Turns, normalize
from loragate.errors import ConfigError, DataError

TOKENIZERS = {
    "chatml": (byte_level(CHATML), "<|im_end|>"),
    "qwen2.5": (byte_level(CHATML_DEFAULT), "<|im_end|>"),
    "llama3": (byte_level(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"), "<|eot_id|>"),
    "llama3-adds-bos": (byte_level(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>", adds_bos=True), "<|eot_id|>"),
    "gemma": (byte_level(GEMMA, bos="<bos>", adds_bos=True), "<end_of_turn>"),
    "llama2": (space_adding(LLAMA2), " </s>"),
}


@pytest.fixture(params=TOKENIZERS)
def model(request):
    return TOKENIZERS[request.param]


def encode(row, tokenizer, *, where="", **options):
    summary = Summary("", 1)
    (item,) = Encoder(tokenizer, summary, **options).encode([(row, where)])
    return item and SimpleNamespace(**item, truncated=summary.truncated, last_turn_only=summary.last_turn_only)


def responses(encoded):
    return sum(label != -100 and before == -100 for before, label in pairwise(encoded.labels))


def turns(messages, **kwargs):
    return Turns(messages=tuple(messages), **kwargs)


@pytest.mark.parametrize("system", ["none", "keep"])
def test_labels_are_the_response_and_its_end_of_turn(model, system, talk):
    tokenizer, end = model
    encoded = encode(turns(talk("What is two plus two?", "The answer is four.")), tokenizer, system=system)
    assert learned(encoded, tokenizer).strip() == "The answer is four." + end
    count = sum(label != -100 for label in encoded.labels)
    assert encoded.labels == [-100] * (len(encoded.labels) - count) + encoded.input_ids[-count:]
    assert len(encoded.labels) == len(encoded.input_ids)
    assert (responses(encoded), encoded.truncated, encoded.last_turn_only) == (1, 0, 0)


@pytest.mark.parametrize("system", ["none", "keep"])
def test_prompt_tokens_are_those_of_generation(model, system, talk):
    tokenizer, _ = model
    messages = talk("What is two plus two?", "\n\n four.")
    encoded = encode(turns(messages), tokenizer, system=system)
    prompt = [token for token, label in zip(encoded.input_ids, encoded.labels, strict=True) if label == -100]
    text = render_prompt(messages[:1], tokenizer, system=system)
    assert prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt == prompt_ids(messages[:1], tokenizer, system=system)
    if system == "keep":
        assert prompt == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)


def test_every_assistant_turn_is_learned(model, talk):
    tokenizer, end = model
    messages = talk("What is two?", "It is two.", "And four?", "It is four.")
    encoded = encode(turns(messages), tokenizer)
    assert learned(encoded, tokenizer).replace(" ", "") == f"Itistwo.{end}Itisfour.{end}".replace(" ", "")
    assert responses(encoded) == 2
    full = render_prompt(messages, tokenizer)  # with the header of a next turn
    assert full.startswith(decoded(encoded, tokenizer))
    second = prompt_ids(messages[:3], tokenizer)
    assert encoded.input_ids[: len(second)] == second


def test_one_bos_only(talk):
    for name in ("llama3", "llama3-adds-bos", "gemma", "llama2"):
        tokenizer, _ = TOKENIZERS[name]
        encoded = encode(turns(talk("two", "four")), tokenizer)
        assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
        assert encoded.input_ids[0] == tokenizer.bos_token_id


def test_rewritten_turns_are_context(talk):
    tokenizer = byte_level(THINKING)
    encoded = encode(turns(talk("a", "<think>x</think>b", "c", "<think>y</think>d")), tokenizer)
    assert encoded.last_turn_only
    assert responses(encoded) == 1
    assert learned(encoded, tokenizer) == "<think>y</think>d<|im_end|>"
    assert "<think>x" not in decoded(encoded, tokenizer)


@pytest.mark.parametrize("name", ["chatml", "llama3-adds-bos", "llama2"])
def test_plain_rows(name):
    tokenizer, _ = TOKENIZERS[name]
    encoded = encode(Turns(prompt="Question: two plus two?\nAnswer:", completion=" four."), tokenizer)
    prompt = tokenizer("Question: two plus two?\nAnswer:")["input_ids"]
    assert encoded.input_ids[: len(prompt)] == prompt == prompt_ids("Question: two plus two?\nAnswer:", tokenizer)
    assert encoded.labels[: len(prompt)] == [-100] * len(prompt)
    assert learned(encoded, tokenizer).strip() == "four." + tokenizer.eos_token
    assert encoded.labels[-1] == tokenizer.eos_token_id
    assert render_prompt("as it is", tokenizer) == "as it is"


def test_a_plain_completion_ends_in_one_eos():
    tokenizer = byte_level()
    encoded = encode(Turns(prompt="a", completion="b<|endoftext|>"), tokenizer)
    assert encoded.input_ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "tokenizer", "message"),
    [
        (Turns(prompt="", completion="b"), byte_level(), "f:7: the prompt is empty"),
        (Turns(prompt="a", completion="b"), byte_level(eos=None), "f:7: the tokenizer .* has no end-of-sequence token"),
        (
            normalize({"problem": "a", "solution": "b"}, "prompt_completion"),
            byte_level(None),
            "f:7: this is a conversation, but the tokenizer .* no chat template",
        ),
        (
            Turns(prompt="a", completion="b", keep_mask=(1, 1, 1)),
            byte_level(),
            "f:7: keep_mask has 3 entries, expected 2",
        ),
    ],
)
def test_what_cannot_be_encoded_is_told_with_its_place(row, tokenizer, message):
    with pytest.raises(DataError, match=message):
        encode(row, tokenizer, where="f:7")


def test_nothing_comes_between_prompt_and_response():
    tokenizer = space_adding()
    encoded = encode(Turns(prompt="two plus", completion="two"), tokenizer)
    assert decoded(encoded, tokenizer).replace("<s> ", "<s>") == "<s>two plustwo</s>"


def test_an_empty_prompt_is_fine_after_bos():
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    assert encode(Turns(prompt="", completion="b"), tokenizer).input_ids[0] == tokenizer.bos_token_id


def test_truncation_cuts_on_the_right(talk):
    tokenizer = byte_level()
    row = turns(talk("What is two?", "It is two.", "And four?", "It is four."))
    whole = encode(row, tokenizer)
    starts = [i for i in range(1, len(whole.labels)) if whole.labels[i] != -100 and whole.labels[i - 1] == -100]
    for length in (len(whole.input_ids), len(whole.input_ids) - 1, starts[1], starts[0] + 1):
        cut = encode(row, tokenizer, max_length=length)
        assert cut.input_ids == whole.input_ids[:length]
        assert cut.labels == whole.labels[:length]
        assert cut.truncated == (length < len(whole.input_ids))
    for length in (starts[0], 2):
        assert encode(row, tokenizer, max_length=length) is None
    with pytest.raises(ConfigError, match="found max_length=1, expected at least 2 tokens"):
        encode(row, tokenizer, max_length=1)


def test_keep_mask_is_laid_over_all_responses(talk):
    tokenizer = byte_level()
    messages = talk("a", "b", "c", "d")
    encoded = encode(turns(messages, keep_mask=(1, 0, 0, 1)), tokenizer)
    assert learned(encoded, tokenizer) == "b<|im_end|>d<|im_end|>"
    kept = [token for token, keep in zip(encoded.input_ids, encoded.keep_mask) if keep]
    assert tokenizer.decode(kept) == "b<|im_end|>"
    assert sum(encoded.keep_mask) == 2
    cut = encode(turns(messages, keep_mask=(1, 0, 0, 1)), tokenizer, max_length=len(encoded.input_ids) - 1)
    assert cut.keep_mask == encoded.keep_mask[:-1]
    with pytest.raises(
        DataError, match=r"keep_mask has 4 entries, expected .* of the last assistant turn, the only one"
    ):
        encode(turns(talk("a", "<think>b</think>e", "c", "d"), keep_mask=(1, 1, 1, 1)), byte_level(THINKING))


def test_many_rows_at_once_are_as_one_by_one(talk):
    tokenizer = byte_level(CHATML_DEFAULT)
    rows = [
        (turns(talk("a", "b", "c", "d")), "f:1"),
        (Turns(prompt="two", completion=" four"), "f:2"),
        (turns(talk("What?", "\n\n", system="Be brief.")), "f:3"),
    ]
    encoder = Encoder(tokenizer, Summary("", 3), max_length=40)
    alone = [encoder.encode([row])[0] for row in rows]
    assert encoder.encode(rows) == alone


def test_a_piece_that_merges_with_the_newline_before_it_is_tokenised_alone():
    tokenizer = space_adding()
    tokenizer.add_tokens(["\n\n"])
    (ids,) = SegmentTokenizer(tokenizer)(["\nfour"], [True])
    assert tokenizer.decode(ids).strip(" ") == "\nfour"


def test_bos_is_not_doubled():
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    assert prompt_ids("<bos>two", tokenizer).count(tokenizer.bos_token_id) == 1


ATTACK = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e\u200b\u2028[red]markup[/red]"


def shown_of(tokenizer, *contents):
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]
    return preview(encode_rows([{"messages": messages}], tokenizer, max_length=None)[0], tokenizer)


def test_prompt_is_dim_response_bold_green_and_special_tokens_literal():
    tokenizer = byte_level()
    text = shown_of(tokenizer, "two?", "four\n\tü")
    pieces = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert pieces == [
        ("<|im_start|>", "dim cyan"),
        ("user\ntwo?", "dim"),
        ("<|im_end|>", "dim cyan"),
        ("\n", "dim"),
        ("<|im_start|>", "dim cyan"),
        ("assistant\n", "dim"),
        ("four\n\tü", "bold green"),
        ("<|im_end|>", "bold cyan"),
    ]
    assert text.plain.endswith("<|im_start|>assistant\n⟦four\n\tü<|im_end|>⟧")


@pytest.mark.parametrize("tokenizer", [byte_level(), space_adding()], ids=["byte-level", "space-adding"])
def test_data_cannot_send_escape_codes_or_markup(tokenizer):
    screen = io.StringIO()
    Console(file=screen, force_terminal=False, width=400).print(shown_of(tokenizer, ATTACK, ATTACK))
    shown = screen.getvalue()
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.count("[red]markup[/red]") == 2


def test_escapes_are_readable():
    shown = shown_of(byte_level(), "hi", ATTACK).plain
    assert r"\x1b[2J\x1b]0;owned\x07\x9b31m\x0d\x08\u202e\u200b\u2028[red]" in shown


def test_data_cannot_forge_the_marks():
    shown = shown_of(byte_level(), "⟦fake⟧", "true").plain
    assert shown.count("⟦") == shown.count("⟧") == 1
    assert r"\u27e6fake\u27e7" in shown
