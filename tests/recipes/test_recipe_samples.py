"""The stand-ins have the columns of the hub's data sets and are read as their rows would be."""

from loragate.data import encode_rows, load_rows
from loragate.recipes import Library, read_recipe
from loragate.recipes.samples import magicoder_rows, numina_rows, tiny, write_samples
from loragate.world.tokenizer import build_tokenizer

MAGICODER = ["lang", "raw_index", "index", "seed", "openai_fingerprint", "problem", "solution"]


def test_columns_of_the_hub():
    assert list(numina_rows(1)[0]) == ["source", "problem", "solution", "messages"]
    assert list(magicoder_rows(1)[0]) == MAGICODER


def test_both_schemas_are_read_and_give_the_same_kind_of_row(tmp_path):
    write_samples(tmp_path, 12)
    math, code = load_rows(tmp_path / "math.parquet"), load_rows(tmp_path / "code.parquet")
    tokenizer = build_tokenizer()
    first, second = (encode_rows(rows, tokenizer, max_length=96) for rows in (math, code))
    assert (first.summary.format, second.summary.format) == ("messages", "prompt_completion")
    assert first.summary.plain == second.summary.plain == 0, "a problem and its solution are two turns, not plain text"
    same = encode_rows(magicoder_rows(12, seed=0), tokenizer, max_length=96)
    assert [item["input_ids"] for item in same] == [item["input_ids"] for item in first]


def test_a_tiny_recipe_keeps_what_it_is_about(tmp_path):
    recipe = tiny(read_recipe("code/qwen2.5-math-7b/full-entropy", Library()), tmp_path, "code")
    sft, calibrate, evaluation = recipe.stages
    assert calibrate.values["k"] == 0
    assert calibrate.values["range"] == "0,6"
    assert sft.values["learning_rate"] == 5e-5
    assert sft.values["data"] == str(tmp_path / "code.parquet")
    assert "revision" not in sft.values
    assert sft.values["max_steps"] == calibrate.values["max_steps"] == 2
    assert evaluation.values["model"] == "{last}"
