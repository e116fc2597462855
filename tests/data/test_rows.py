"""Rows know their place, from whatever they are read; what is wrong with a file is told with its line."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragate.data.rows import Rows, load_rows
from loragate.errors import ConfigError, DataError


def rows_of(items):
    return Rows(items, source="f.jsonl", place="f.jsonl:", numbers=[2 * index + 1 for index in range(len(items))])


def test_a_row_keeps_its_place_through_views():
    rows = rows_of([{"n": n} for n in range(20)])
    view = rows.shuffled(3).take(7)[2:5]
    assert len(view) == 3
    for index, row in enumerate(view):
        assert view.where(index) == f"f.jsonl:{2 * row['n'] + 1}"
    assert view.source == "f.jsonl"


def test_shuffling_depends_on_the_seed_alone_and_changes_nothing_else():
    rows = rows_of([{"n": n} for n in range(50)])
    first, again, other = rows.shuffled(1), rows.shuffled(1), rows.shuffled(2)
    assert list(first) == list(again) != list(other)
    assert sorted(row["n"] for row in first) == list(range(50))
    assert [row["n"] for row in rows] == list(range(50))
    assert [row["n"] for row in rows_of([{"n": n} for n in range(6)]).shuffled(0)] == [4, 2, 1, 0, 5, 3]


def test_fingerprint_is_of_content_and_order():
    a, b = {"x": 1, "y": [1.0, 2.5], "z": None}, {"x": 2, "y": []}
    fingerprint = rows_of([a, b]).fingerprint
    assert fingerprint == rows_of([{"y": [1, 2.5], "x": 1}, b]).fingerprint
    changed = [[b, a], [a], [a, {**b, "x": 3}], [a, {**b, "w": 0}], [{**a, "y": [1, 2.25]}, b]]
    assert len({fingerprint, *(rows_of(items).fingerprint for items in changed)}) == 6
    # of canonical JSON lines
    rows = rows_of([{"prompt": "ä", "completion": "b"}, {"n": 2.0}])
    assert rows.fingerprint == hashlib.sha256(b'{"completion":"b","prompt":"\\u00e4"}\n{"n":2}\n').hexdigest()


def test_a_row_nested_too_deeply_is_a_data_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match=r"f.jsonl:1: the row is nested too deeply"):
        _ = rows_of([{"a": deep}]).fingerprint


def test_a_column_store_gives_the_same_rows_and_hashes():
    items = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(8)]
    given = rows_of(items).shuffled(3)
    stored = Rows(datasets.Dataset.from_list(items), source="hub", place="hub row ").shuffled(3)
    assert list(stored) == list(given)
    assert stored.as_record() == given.as_record()
    sorted_, shuffled = rows_of(items).as_record(), given.as_record()
    assert sorted_["content_sha256"] == shuffled["content_sha256"] != rows_of(items[1:]).as_record()["content_sha256"]
    assert sorted_["order_sha256"] != shuffled["order_sha256"]


ROWS = [
    {"messages": [{"role": "user", "content": "ä?"}, {"role": "assistant", "content": "ö", "name": "x"}], "score": 1.0},
    {"messages": [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "b"}], "score": 2.5},
    {"messages": [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "c"}], "score": None},
]


def bare(rows):
    """Rows without the nulls that a column store adds."""
    return json.loads(json.dumps(list(rows)), object_hook=lambda item: {k: v for k, v in item.items() if v is not None})


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    return path


def test_every_file_format_gives_the_same_rows_and_fingerprint(write, parquet):
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    files = [
        write("rows.jsonl", text),
        write("rows.json", json.dumps(ROWS, indent=1)),
        write("rows.jsonl.gz", gzip.compress(text, mtime=0)),
        write("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        parquet,
    ]
    loaded = [load_rows(path) for path in files] + [load_rows(ROWS), load_rows(datasets.Dataset.from_list(ROWS))]
    assert all(bare(rows) == bare(ROWS) for rows in loaded)
    assert len({rows.fingerprint for rows in loaded}) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'q,a\n2+2?,4\n"say ""a, b""\nnow","a, b"\n,x\n'),
        ("a.csv", b'\xef\xbb\xbfq,a\r\n2+2?,4\r\n"say ""a, b""\nnow","a, b"\r\n,x\r\n'),
        ("a.csv", b'q;a\n2+2?;4\n"say ""a, b""\nnow";a, b\n;x\n'),
        ("a.tsv", b'q\ta\n2+2?\t4\n"say ""a, b""\nnow"\ta, b\n\tx\n'),
        ("a.csv.gz", gzip.compress(b'q,a\n2+2?,4\n"say ""a, b""\nnow","a, b"\n,x', mtime=0)),
    ],
    ids=["csv", "of a spreadsheet", "semicolons", "tabs", "zipped"],
)
def test_csv_is_read_with_the_lines_of_its_rows(write, name, content):
    path = write(name, content)
    rows = load_rows(path)
    assert list(rows) == [{"q": "2+2?", "a": "4"}, {"q": 'say "a, b"\nnow', "a": "a, b"}, {"q": "", "a": "x"}]
    assert [rows.where(i) for i in range(3)] == [f"{path}:2", f"{path}:3", f"{path}:5"]


def test_the_index_of_pandas_is_a_column_of_that_name(write):
    assert load_rows(write("a.csv", b",q,a\n0,2+2?,4\n"))[0] == {"Unnamed: 0": "0", "q": "2+2?", "a": "4"}


def tables():
    """Rows in memory as people have them; those of a table in columns have null where a row has no value."""
    yield pandas.DataFrame(ROWS)
    yield pa.Table.from_pylist(ROWS)
    yield datasets.Dataset.from_list(ROWS).with_format("numpy")
    yield datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    yield (row for row in ROWS)


@pytest.mark.parametrize("table", range(5), ids=["pandas", "pyarrow", "datasets", "iterable", "generator"])
def test_rows_in_memory_are_read_as_people_have_them(table):
    rows = load_rows(list(tables())[table])
    assert bare(rows) == bare(ROWS)
    assert rows.fingerprint == load_rows(ROWS).fingerprint
    assert bare(load_rows(list(tables())[table], limit=2)) == bare(ROWS[:2])


def test_a_transform_is_refused_as_it_would_not_be_applied():
    plain = datasets.Dataset.from_list(ROWS)
    with pytest.raises(DataError, match=r"a data set with a transform .* Apply it once with \.map"):
        load_rows(plain.with_transform(lambda batch: {"q": batch["q"]}))


def test_lists_and_numbers_of_numpy_in_a_table_are_plain(tmp_path):
    """What pandas reads from parquet."""
    pq.write_table(
        pa.Table.from_pylist([{"messages": [{"role": "user"}], "keep_mask": [1, 0], "n": 3}]), tmp_path / "a.parquet"
    )
    (row,) = load_rows(pandas.read_parquet(tmp_path / "a.parquet"))
    assert row == {"messages": [{"role": "user"}], "keep_mask": [1, 0], "n": 3}
    assert [type(row[key]) for key in row] == [list, list, int]


def test_an_endless_iterator_is_read_up_to_the_limit():
    assert len(load_rows(({"a": index} for index in itertools.count()), limit=3)) == 3


def test_a_list_of_something_else_is_told_with_the_row():
    with pytest.raises(DataError, match="row 1: found a value of type str, expected a row"):
        list(load_rows([{"a": 1}, "hello"]))


def test_lines_are_counted_as_an_editor_does(write):
    path = write("a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "x\\ny"}\r\n{"a": 3}')
    rows = load_rows(str(path))
    assert list(rows) == [{"a": 1}, {"a": "x\ny"}, {"a": 3}]
    assert [rows.where(i) for i in range(3)] == [f"{path}:1", f"{path}:4", f"{path}:5"]
    assert rows.source == str(path)


def test_limit_stops_reading(write, parquet):
    path = write("a.jsonl", b'{"a": 1}\n{"a": 2}\n\xff not even text\n')
    assert list(load_rows(path, limit=2)) == [{"a": 1}, {"a": 2}]
    with pytest.raises(DataError):
        load_rows(path, limit=3)
    assert len(load_rows(parquet, limit=2)) == 2
    assert len(load_rows(ROWS, limit=1)) == 1
    for source in (path, parquet, ROWS):
        with pytest.raises(ConfigError, match="found limit=-2, expected a number of rows: 0 or more"):
            load_rows(source, limit=-2)
    with pytest.raises(ConfigError, match="found take=-1"):
        load_rows(ROWS).take(-1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty: expected at least one row"),
        (
            "a.jsonl",
            b'{"a": 1}\n\n{"a": 1,, "b"}\n',
            r"a.jsonl:3: malformed JSON at column 9: .*, near '\{\"a\": 1,, \"b\"\}'",
        ),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', r"a.jsonl:2: found '\[1, 2\]', expected one JSON object per line"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a.jsonl:2: byte 8 of the line is b'\\xff', which is not UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "a.jsonl is UTF-16; save it as UTF-8"),
        (
            "a.jsonl",
            b'{"a": {"b": 1, "c": 2, "b": 3}}',
            "a.jsonl:1: JSON that cannot be read: .the key 'b' stands twice in one object; remove",
        ),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000, "a.jsonl:1: JSON that cannot be read: .*recursion"),
        ("a.jsonl", b'{"\x1b[31m": 1\n', r"a.jsonl:1: malformed JSON at column 3: .*near '\{\"\\x1b\[31m\": 1'"),
        ("a.json", b'[\n{"a": 1},\n{"a": tru}\n]', r"a.json:3: malformed JSON at column 7: .*near '\{\"a\": tru\}'"),
        (
            "a.json",
            b'{"rows": [], "n": 0}',
            "a.json: found an object with the keys rows, n, expected an array of objects",
        ),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "a.json:2: malformed JSON.*looks like JSON lines: name it .jsonl"),
        ("a.json", b'[{"a":\n "\xe9"}]', r"a.json:2: byte 3 of the line is b'\\xe9', which is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "a.jsonl.gz cannot be read: .*complete"),
        ("a.xlsx", b"PK", r"found .*a.xlsx with the ending .xlsx; expected .jsonl"),
        ("a.parquet", b"PAR1" + b"0" * 40, "a.parquet is not a readable parquet file: .* cut off"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "a.parquet is not a readable.*git lfs pull"),
        ("a.csv", b"a,b", r"a.csv is empty: expected at least one row"),
        ("a.csv", b"a,a\n1,2\n", r"a.csv:1: found 'a,a', expected different names of columns"),
        ("a.csv", b"a,\n1,2\n", r"a.csv:1: found 'a,', expected different names of columns"),
        ("a.csv", b"a,b\n1,2\n\n1,2,3\n", r"a.csv:4: found 3 values for the 2 columns a, b; text that holds commas"),
        ("a.csv", b'a,b\n1,2\n1,"x\ny', r"a.csv:3: malformed CSV .* begins here: unexpected end of data. .* cut off"),
        ("a.csv", b'a,b\n1,"2\n"\n\xe9,2\n', r"a.csv:4: byte 1 of the line is b'\\xe9', which is not UTF-8"),
        (
            "a.jsonl",
            b'[\n  {"a": 1}\n]\n',
            r"a.jsonl:1: found '\[', expected one JSON object per line. .*ends in .json",
        ),
        ("a.jsonl", b'{\n  "a": 1\n}\n', r"a.jsonl:1: malformed JSON .* every row stands on one line"),
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": "so',
            r"a.jsonl:2: malformed JSON .*near .*so'. The file ends in the middle of a row",
        ),
        (
            "a.json",
            b'[{"a": 1},\n{"a":',
            r"a.json:2: malformed JSON .* The file ends in the middle of a row: it was cut off",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place(write, name, content, message):
    path = write(name, content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(path)
    assert str(path) in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_missing_file_names_the_nearest_and_how_a_hub_id_looks(write):
    path = write("train.jsonl", "{}")
    write("other.txt", "")
    with pytest.raises(
        DataError, match=r"found no file .*trian\.jsonl; did you mean 'train\.jsonl'\? A hub dataset is"
    ):
        load_rows(path.parent / "trian.jsonl")
    with pytest.raises(
        DataError, match=r"found no file .*nowhere/train\.jsonl, nor a folder .*nowhere\. A hub dataset is"
    ):
        load_rows(path.parent / "nowhere" / "train.jsonl")


@pytest.mark.parametrize("source", ["train", "data/train.csv", "data/train.jsonl", "a/b/c", "../x/y"])
def test_what_cannot_be_a_hub_id_is_a_missing_file(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"found no file {source}"):
        load_rows(source)


@pytest.fixture
def hub(monkeypatch):
    """Stand-in for the network call; records its arguments."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if kwargs["split"] not in ("train", "test"):
            raise ValueError(f"Unknown split \"{kwargs['split']}\". Should be one of ['train', 'test'].")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_hub_id_is_loaded_with_split_and_revision(hub):
    rows = load_rows("org/some.data-set", limit=2, revision="abc")
    assert hub == [(("org/some.data-set",), {"split": "train", "revision": "abc"})]
    assert len(rows) == 2
    assert rows.where(1) == "org/some.data-set[train] row 1"
    assert rows.fingerprint == load_rows(ROWS[:2]).fingerprint
    assert load_rows("org/data:main", split="test").where(0) == "org/data:main[test] row 0"
    assert hub[1] == (("org/data", "main"), {"split": "test", "revision": None})


def test_the_reason_of_a_failing_hub_call_is_told(hub):
    with pytest.raises(
        DataError, match=r"org/data\[val\] cannot be loaded: ValueError: .*Unknown split \"val\".*\['train'"
    ):
        load_rows("org/data", split="val")


def test_a_folder_is_read_as_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), folder / "test.parquet")
    assert load_rows(folder).fingerprint == load_rows(ROWS[:2]).fingerprint
    assert load_rows(str(folder), split="test").where(0) == f"{folder}[test] row 0"
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"void\[train\] cannot be loaded"):
        load_rows(tmp_path / "void")


def test_settings_without_effect_are_refused(write, tmp_path):
    path = write("a.jsonl", "{}")
    with pytest.raises(ConfigError, match=r"found split='train' for the file .*a.jsonl, where it would have no effect"):
        load_rows(path, split="train")
    with pytest.raises(ConfigError, match="found revision='main' for rows in memory"):
        load_rows(ROWS, revision="main")
    with pytest.raises(ConfigError, match="found revision='main' for the folder"):
        load_rows(tmp_path, revision="main")


LINES = st.lists(
    st.binary(max_size=30) | st.sampled_from([b"{}", b'{"a": [1e400, -0.0, "\\ud800"]}', b"[" * 999, b"\xef\xbb\xbf"])
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, ending=st.sampled_from([b"\n", b"\r\n"]), suffix=st.sampled_from([".jsonl", ".json"]))
def test_any_bytes_are_rows_or_a_data_error(lines, ending, suffix, tmp_path):
    path = tmp_path / f"any{suffix}"
    path.write_bytes(ending.join(lines))
    try:
        outcome = load_rows(path)
    except DataError as error:
        outcome = error
    if isinstance(outcome, Rows):
        assert len(outcome) > 0
        assert all(isinstance(row, dict) for row in outcome)
        assert len(outcome.fingerprint) == 64
    else:
        assert str(path) in str(outcome)


@pytest.mark.parametrize(("name", "form"), [("a.jsonl", "{}"), ("a.json", "[{}]")])
def test_what_pandas_writes_for_a_missing_value_is_missing(name, form, tmp_path):
    path = tmp_path / name
    path.write_text(form.format('{"a": NaN, "b": [NaN, -Infinity, 2]}'))
    assert list(load_rows(path)) == [{"a": None, "b": [None, -math.inf, 2]}]
