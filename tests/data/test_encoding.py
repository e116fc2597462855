"""Prompts, responses and masks as token ids; whole datasets, their account and batches; what `preview` shows."""

from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_tokenizers import (
    CHATML,
    CHATML_DEFAULT,
    GEMMA,
    LLAMA2,
    LLAMA3,
    QWEN3,
    THINKING,
    byte_level,
    decoded,
    learned,
    space_adding,
)
from rich.console import Console
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace

from loragate.data import encoding
from loragate.data.encoding import (
    Collator,
    EncodedRows,
    Encoder,
    SegmentTokenizer,
    Summary,
    encode_rows,
    preview,
    prompt_ids,
    raw_text,
    render_prompt,
)
from loragate.data.formats import Turns, normalize
from loragate.data.rows import load_rows
from loragate.errors import ConfigError, DataError
from loragate.evaluation.tasks import Question, load_task
from loragate.evaluation.tasks.questions import render_questions
from loragate.generation.engine import tokenize_prompts

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


def test_there_is_one_bos_and_one_eos(talk):
    for name in ("llama3", "llama3-adds-bos", "gemma", "llama2"):
        tokenizer, _ = TOKENIZERS[name]
        encoded = encode(turns(talk("two", "four")), tokenizer)
        assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
        assert encoded.input_ids[0] == tokenizer.bos_token_id
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    assert prompt_ids("<bos>two", tokenizer).count(tokenizer.bos_token_id) == 1
    encoded = encode(Turns(prompt="a", completion="b<|endoftext|>"), tokenizer)
    assert encoded.input_ids.count(tokenizer.eos_token_id) == 1


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


@pytest.mark.parametrize("scheme", ["byte-level", "adds-bos", "first", "always", "normalizer"])
@pytest.mark.parametrize("text", ["Question: two?", " two", "\ntwo plus", "<s>two", "<bos>two"])
def test_a_raw_text_is_read_as_the_prompt_of_training(scheme, text):
    """Behind BOS, Llama's tokenizer ("first") puts no space in front of a text, and alone it does."""
    tokenizer = space_adding()
    if scheme in ("byte-level", "adds-bos"):
        tokenizer = byte_level(bos="<bos>", adds_bos=scheme == "adds-bos")
    elif scheme == "always":
        tokenizer.backend_tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    elif scheme == "normalizer":  # of the older files of Llama and Mistral
        tokenizer.backend_tokenizer.pre_tokenizer = None
        tokenizer.backend_tokenizer.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    ids = prompt_ids(text, tokenizer)
    assert ids == encode(Turns(prompt=text, completion="x"), tokenizer).input_ids[: len(ids)]
    question = Question("1", text, "", {}, "")
    (kept,) = render_questions(load_task("humaneval_raw"), [question], tokenizer)
    assert tokenize_prompts(tokenizer, [kept], 1, None)[0] == [ids]


def test_a_raw_text_that_no_text_is_read_as_is_refused():
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match=r"begins a plain text with tokens that it reads from no text, here .*<bos>"):
        raw_text("two", tokenizer)


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
    ],
)
def test_what_cannot_be_encoded_is_told_with_its_place(row, tokenizer, message):
    with pytest.raises(DataError, match=message):
        encode(row, tokenizer, where="f:7")


def test_nothing_comes_between_prompt_and_response():
    tokenizer = space_adding()
    encoded = encode(Turns(prompt="two plus", completion="two"), tokenizer)
    assert decoded(encoded, tokenizer).replace("<s> ", "<s>") == "<s>two plustwo</s>"


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
        (turns(talk("What?", "\n\n four", system="Be brief.")), "f:3"),
    ]
    encoder = Encoder(tokenizer, Summary("", 3), max_length=40)
    alone = [encoder.encode([row])[0] for row in rows]
    assert encoder.encode(rows) == alone


def test_a_piece_that_merges_with_the_newline_before_it_is_tokenised_alone():
    tokenizer = space_adding()
    tokenizer.add_tokens(["\n\n"])
    (ids,) = SegmentTokenizer(tokenizer)(["\nfour"], [True])
    assert tokenizer.decode(ids).strip(" ") == "\nfour"


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


def test_data_cannot_forge_the_marks():
    shown = shown_of(byte_level(), "⟦fake⟧", "true").plain
    assert shown.count("⟦") == shown.count("⟧") == 1
    assert r"\u27e6fake\u27e7" in shown


@pytest.fixture
def rows(talk):
    return [{"messages": talk(f"What is {n}?", f"It is {n}." + " four" * n)} for n in range(1, 11)]


def test_rows_and_their_account(rows):
    tokenizer = byte_level(CHATML_DEFAULT)
    encoded = encode_rows(rows, tokenizer, max_length=None)
    assert [item["row"] for item in encoded] == list(range(10))
    assert learned(encoded[2], tokenizer) == "It is 3. four four four<|im_end|>"
    assert decoded(encoded[0], tokenizer).startswith("<|im_start|>user\n")  # no default system message
    assert all(set(item) == {"input_ids", "labels", "row"} for item in encoded)
    summary = encoded.summary
    assert (summary.format, summary.rows, summary.dropped, summary.truncated) == ("messages", 10, 0, 0)
    assert summary.response_tokens == sum(label != -100 for item in encoded for label in item["labels"])
    assert summary.response_tokens + summary.prompt_tokens == sum(len(item["input_ids"]) for item in encoded)
    assert summary.last_turn_only == 0
    assert encoded[1:3] == [encoded[1], encoded[2]]


def test_rows_without_a_response_left_are_dropped_and_counted(rows, talk):
    tokenizer = byte_level()
    rows[4] = {"messages": talk("What is " + "this " * 80 + "?", "It is five.")}
    lengths = [len(item["input_ids"]) for item in encode_rows(rows, tokenizer, max_length=None)]
    limit = lengths[6]
    encoded = encode_rows(rows, tokenizer, max_length=limit)
    assert [item["row"] for item in encoded] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert encoded.summary.dropped == 1
    assert encoded.summary.truncated == sum(length > limit for length in lengths) - 1 == 3
    assert encoded.summary.rows == 10
    assert max(len(item["input_ids"]) for item in encoded) == limit
    with pytest.raises(DataError, match="rows in memory: max_length=2 cuts the whole response of every one of 10 rows"):
        encode_rows(rows, tokenizer, max_length=2)


def test_progress_is_told_batch_by_batch(rows, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 4)
    told = []
    encoded = encode_rows(
        rows, byte_level(), max_length=None, on_progress=lambda done, total: told.append((done, total))
    )
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert [item["row"] for item in encoded] == list(range(10))


GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
MASKED = {**GOOD, "keep_mask": [0, 1]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"messages": GOOD["messages"][:1]}], ":2: found user, but no assistant turn"),
        (
            [GOOD, {"instruction": "a", "output": "b"}],
            ":2: found the keys instruction, output, expected the format messages",
        ),
        ([{"text": str(i)} for i in range(9)], ":1: found the keys text, which fit no known row format"),
        (
            [MASKED, {**MASKED, "keep_mask": [1, 0, 1]}],
            ":2: keep_mask has 3 entries, expected 2: one per response token",
        ),
        ([MASKED, GOOD], ":2: the row has no keep_mask, unlike .*:1; give it on every row"),
    ],
)
def test_the_first_bad_row_is_named_by_line(rows, message, write):
    path = write("rows.jsonl", rows)
    with pytest.raises(DataError, match=f"{path}{message}"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
    if ":1:" in message:  # wherever the order of rows begins
        with pytest.raises(DataError, match=f"{path}{message}"):
            encode_rows(load_rows(path).shuffled(seed=3), byte_level(), max_length=None)


def test_a_keep_mask_is_spread_over_the_row():
    (encoded,) = encode_rows([MASKED], byte_level(), max_length=None)
    assert encoded["keep_mask"] == [0] * (len(encoded["input_ids"]) - 1) + [1]


def test_tool_calls_from_a_column_store_are_those_of_json_lines(write, tmp_path):
    """A column store writes null for the arguments of other rows' tools; rows of one fingerprint have one text."""
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    )
    tokenizer = byte_level("{% if tools %}{{ tools | tojson }}{% endif %}" + template)

    def row(name, argument):
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "x"}}}
        schema = {"type": "function", "function": {"name": name, "parameters": {argument: {"type": "string"}}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "q"}, answer], "tools": [schema]}

    data = [row("weather", "city"), row("search", "query")]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "rows.parquet")
    lines, columns = load_rows(write("rows.jsonl", data)), load_rows(tmp_path / "rows.parquet")
    assert lines.fingerprint == columns.fingerprint
    by_line, by_column = (list(encode_rows(rows, tokenizer, max_length=None)) for rows in (lines, columns))
    assert by_line == by_column
    assert '"arguments": {"query": "x"}' in learned(by_column[1], tokenizer)


def test_rows_without_a_response_are_counted(talk, write):
    rows = [{"messages": talk("a", "b")}, {"messages": talk("a", "")}, {"messages": talk("a", "\n")}]
    summary = encode_rows(rows, byte_level(), max_length=None).summary
    assert (summary.rows, summary.empty, summary.dropped) == (3, 2, 0)
    path = write("rows.jsonl", rows[1:])
    with pytest.raises(DataError, match="the response of every one of 2 rows is empty"):
        encode_rows(load_rows(path), byte_level(), max_length=None)


def test_rows_that_are_left_out_or_cut_are_warned_of_once(talk, write, monkeypatch):
    told = []
    monkeypatch.setattr(encoding.logger, "warning", lambda text, *values: told.append(text % values))
    tokenizer = byte_level(THINKING)
    whole = {"messages": talk("a", "b")}
    rows = [whole, {"messages": talk("a", "")}, {"messages": talk("a " * 80, "b")}, {"messages": talk("a", "b " * 80)}]
    rows.append({"messages": talk("a", "<think>x</think>b", "c", "d")})
    path = write("account.jsonl", rows)
    for _ in range(2):
        encode_rows(load_rows(path), tokenizer, max_length=64)
    assert told == [
        f"{path}: of 5 rows 1 left out without a response, or switched off; 1 left out, as max_length cuts the whole response; "
        "1 cut by max_length; 1 trained on their last answer only, as the template rewrites earlier turns"
    ]
    encode_rows([whole], tokenizer, max_length=64)
    assert len(told) == 1, "nothing to say of whole rows"
    encode_rows([whole, {"messages": talk(" ", "b")}], tokenizer, max_length=64)
    assert told[1:] == ["rows in memory: of 2 rows 1 with an empty user turn"]
    none = [{"instruction": "a", "input": given, "output": "b"} for given in ("<noinput>", "c", "<noinput>")]
    summary = encode_rows([*none, {**none[1], "train": False}], tokenizer, max_length=64).summary
    assert (summary.no_input, summary.empty) == (2, 1)
    assert told[2:] == [
        "rows in memory: of 4 rows 1 left out without a response, or switched off; 2 whose input says that there is none "
        "(<noinput>), which is left out of the prompt"
    ]


def test_rows_that_hold_tokens_of_the_template_are_warned_of(monkeypatch):
    said, tokenizer = [], byte_level(CHATML)
    monkeypatch.setattr(encoding, "_warn_once", said.append)
    clean = [{"prompt": "a", "response": "b <b>"}]
    encode_rows([*clean, {"prompt": "<|im_start|>user\na", "response": "b<|im_end|>"}], tokenizer, max_length=None)
    assert said == [
        "rows in memory: of 2 rows 1 hold <|im_end|>, 1 hold <|im_start|> in their own text, which the chat template writes as "
        "well; take such tokens out of the rows"
    ]
    said.clear()
    encode_rows([*clean, {"prompt": "a", "response": f"b{tokenizer.eos_token}"}], tokenizer, max_length=None)
    assert "1 hold <|endoftext|> in their own text" in said[0]
    said.clear()
    encode_rows([{"prompt": "<|im_start|>user\na", "completion": "b<|im_end|>"}], tokenizer, max_length=None)
    encode_rows(clean, tokenizer, max_length=None)
    assert not said, "a plain text is written as it stands"


def test_rows_tokenised_by_hand_are_counted_and_held_together():
    item = {"input_ids": [4, 5, 6], "labels": [-100, 5, 6], "row": 0}
    masked = {**item, "keep_mask": [0, 1, 0]}
    encoded = EncodedRows([masked, {**masked, "row": 1}])
    assert encoded[1] == {**masked, "row": 1}
    assert (encoded.summary.rows, encoded.summary.response_tokens, encoded.summary.prompt_tokens) == (2, 4, 2)
    with pytest.raises(DataError, match="item 1 has 3 input_ids, 2 labels; give every token a label"):
        EncodedRows([item, {**item, "labels": [-100, 5]}])
    with pytest.raises(DataError, match="item 1 has 3 input_ids, 3 labels, 2 keep_mask"):
        EncodedRows([masked, {**masked, "keep_mask": [1, 0]}])
    for pair in ([masked, item], [item, masked]):
        with pytest.raises(DataError, match=r"item 1 has 3 input_ids, 3 labels.* to every item or to none"):
            EncodedRows(pair)


def test_switches_of_turns_and_rows_are_obeyed(talk):
    tokenizer = byte_level(QWEN3)
    ask, wrong, again, right = talk("a", "WRONG", "b", "right")
    rows = [
        {"messages": [ask, {**wrong, "weight": 0}, again, right]},
        {"messages": [ask, right], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [ask, {**wrong, "train": False}]},
        {"messages": [ask, right]},
    ]
    encoded = encode_rows(rows, tokenizer, max_length=None)
    assert [learned(item, tokenizer) for item in encoded] == ["right<|im_end|>"] * 3
    assert "WRONG<|im_end|>" in decoded(encoded[0], tokenizer), "it stays as context"
    assert ["</think>" in decoded(item, tokenizer) for item in encoded] == [False, True, False]
    assert (encoded.summary.empty, encoded.summary.template_kwargs) == (1, 1)


def test_what_nothing_reads_is_named_once(talk, write, monkeypatch):
    """Variables that the template does not read, and columns."""
    told = []
    monkeypatch.setattr(encoding.logger, "warning", lambda text, *values: told.append(text % values))
    rows = [{"messages": talk("a", "b"), "chat_template_kwargs": {"verbosity": size}} for size in (1, 2, 3)]
    encode_rows(rows, byte_level(), max_length=None)
    path = write("rows.jsonl", [{"messages": talk("a", "b"), name: "x"} for name in ("source", "id", "source")])
    for _ in range(2):
        summary = encode_rows(load_rows(path), byte_level(), max_length=None).summary
    assert summary.unused == ("source", "id")
    assert told == [
        "chat_template_kwargs: the chat template reads no verbosity, which has no effect",
        f"{path}: columns that are not used: source, id",
    ]


TWO = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 4}, {"input_ids": [8], "labels": [-100], "row": 2}]


def test_a_batch_is_padded_on_the_right():
    batch = Collator(9)(TWO)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert batch["row"].tolist() == [4, 2]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    masked = Collator(9)([{**TWO[0], "keep_mask": [0, 1, 0]}, {**TWO[1], "keep_mask": [1]}])
    assert set(masked) - set(batch) == {"keep_mask"}
    assert masked["keep_mask"].dtype == torch.bool
    assert masked["keep_mask"].tolist() == [[False, True, False], [True, False, False]]
