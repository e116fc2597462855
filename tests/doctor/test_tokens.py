"""The adapter's tokenizer and chat template against the base's: what differs, what nobody trained, what is lost, what ends."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from loragate.doctor.static import examine_static
from tiny import (
    TEMPLATE,
    TURN_END,
    WITH_SYSTEM,
    _fast,
    chatml_tokenizer,
    tiny_adapter,
    tiny_base,
    tiny_tokenizer,
    write_adapter,
    write_base,
)


def place_of(tmp_path, own, base=None, **lora):
    """A finding's code and the finding, of an adapter with a tokenizer of its own on a base with another."""
    write_base(tmp_path / "base", tokenizer=base or tiny_tokenizer())
    write_adapter(tmp_path / "adapter", tmp_path / "base", **lora)
    own.save_pretrained(tmp_path / "adapter")
    return {one.code: one for one in examine_static(str(tmp_path / "adapter"))[1]}


def words(count, first=0):
    names = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", *(f"w{first + i}" for i in range(count))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(core, TEMPLATE)


def templated(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_the_same_tokenizer_is_no_finding(tmp_path):
    assert place_of(tmp_path, tiny_tokenizer()) == {}
    # nor where its files are written in another way
    file = tmp_path / "adapter" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert examine_static(str(tmp_path / "adapter"))[1] == []


def test_another_vocabulary_is_an_error(tmp_path):
    found = place_of(tmp_path, words(150, first=40))["tokenizer-differs"]
    assert found.severity == "error"
    assert found.evidence["moved_count"] > 100
    assert "with another id" in found.message


def test_another_vocabulary_that_brings_its_embeddings_is_a_warning(tmp_path):
    more = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    assert place_of(tmp_path, words(150, first=40), **more)["tokenizer-differs"].severity == "warning"


def test_the_same_tokens_split_in_another_way(tmp_path):
    own = tiny_tokenizer()
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    found = place_of(tmp_path, own)["tokenizer-differs"]
    assert found.severity == "warning"
    assert "splits text in another way" in found.message


def with_token(template=None, **special):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(special or {"additional_special_tokens": ["<|turn|>"]})
    if template:
        tokenizer.chat_template = template
    return tokenizer


def test_a_token_that_was_added_for_padding_is_a_note(tmp_path):
    found = place_of(tmp_path, with_token(pad_token="<|pad|>"))
    assert {code: one.severity for code, one in found.items()} == {"tokenizer-differs": "note"}
    assert found["tokenizer-differs"].evidence["new"] == {"<|pad|>": 160}


def test_an_added_token_that_nobody_trained_is_a_warning(tmp_path):
    found = place_of(tmp_path, with_token())
    assert found["tokens-untrained"].severity == "warning"
    assert found["tokens-untrained"].evidence["ids"] == [160]


def test_a_tokenizer_that_lacks_most_of_the_bases_tokens_is_an_error(tmp_path):
    found = place_of(tmp_path, words(20))["tokenizer-differs"]
    assert found.severity == "error"
    assert found.evidence["moved_count"] == 0


TURNS = TEMPLATE.replace("<user>", "<|turn|>")


def test_a_token_beyond_the_embeddings_is_an_error(tmp_path):
    found = place_of(tmp_path, with_token(TURNS))
    assert found["tokens-untrained"].severity == "error"
    assert "no embeddings for" in found["tokens-untrained"].message


@pytest.mark.parametrize("trained", [False, True])
def test_a_token_in_rows_that_nobody_trained_is_a_warning(tmp_path, trained):
    own = with_token(TURNS)
    write_base(tmp_path / "base", tokenizer=tiny_tokenizer(), vocab_size=200)
    lora = {"trainable_token_indices": [160]} if trained else {}
    model = tiny_adapter(base=tiny_base(vocab_size=200), **lora)
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    own.save_pretrained(tmp_path / "adapter")
    found = {one.code: one for one in examine_static(str(tmp_path / "adapter"))[1]}
    assert ("tokens-untrained" in found) is not trained
    if not trained:
        assert found["tokens-untrained"].severity == "warning"
        assert "<|turn|>" in found["tokens-untrained"].message


def test_a_template_of_its_own_is_a_note_with_the_first_difference(tmp_path):
    found = place_of(tmp_path, templated(TEMPLATE.replace("<user> {{", "<user> w1 {{")))
    assert {code: one.severity for code, one in found.items()} == {"template-differs": "note"}
    assert "w1 Qfirstquestion" in found["template-differs"].message
    assert found["template-differs"].evidence["base"].startswith("<user> Qfirst")


def test_a_template_that_says_the_same_is_no_finding(tmp_path):
    assert place_of(tmp_path, templated("{# the same #}" + TEMPLATE)) == {}


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        ("{% set messages = messages[-1:] %}" + TEMPLATE, "user"),
        (TEMPLATE.replace("<user> {{ m['content'] }}", "<user>"), "user"),
        (TEMPLATE.replace("{% else %}", "{% elif loop.last %}"), "assistant"),
    ],
)
def test_a_template_that_loses_a_turn_is_a_warning(tmp_path, template, lost):
    found = place_of(tmp_path, templated(template))["template-differs"]
    assert found.severity == "warning"
    assert lost in found.evidence["lost"]


def test_a_template_that_fails_is_an_error(tmp_path):
    found = place_of(tmp_path, templated("{{ raise_exception('no') }}"))["template-differs"]
    assert found.severity == "error"
    assert "writes no conversation" in found.message


def test_a_base_without_a_template(tmp_path):
    found = place_of(tmp_path, tiny_tokenizer(), base=templated(None))
    assert {code: one.severity for code, one in found.items()} == {"template-differs": "note"}


def test_a_template_that_never_ends_a_turn(tmp_path):
    found = place_of(tmp_path, templated(TEMPLATE.replace(" <eos> ", " ")))
    assert found["no-ending"].severity == "warning"
    assert "never learns to stop" in found["no-ending"].message


def test_an_end_that_other_programs_do_not_know(tmp_path):
    found = place_of(tmp_path, chatml_tokenizer(), base=chatml_tokenizer())
    assert {code: one.severity for code, one in found.items()} == {"ending-undeclared": "note"}
    assert found["ending-undeclared"].evidence["token_ids"] == [TURN_END]


def test_a_template_that_does_not_open_the_answer_is_a_warning(tmp_path):
    closed = TEMPLATE[: TEMPLATE.index("{% if add_generation_prompt")]
    found = place_of(tmp_path, templated(closed))["template-differs"]
    assert found.severity == "warning"
    assert "add_generation_prompt" in found.message
    assert place_of(tmp_path / "both", templated(closed), base=templated(closed)) == {}


def test_a_system_message_of_the_template_is_a_note_unless_it_is_kept(tmp_path):
    found = place_of(tmp_path, tiny_tokenizer(), base=templated(WITH_SYSTEM))
    assert "system-message" not in found, "the template of the adapter's own tokenizer counts"
    for name in ("adapter", "base"):
        shutil.rmtree(tmp_path / name)
    found = place_of(tmp_path, templated(WITH_SYSTEM))
    assert found["system-message"].severity == "note"
    assert found["system-message"].evidence["system"] == "w50 w51 w52 w53"
    assert "--system keep" in found["system-message"].remedy
    kept = examine_static(str(tmp_path / "adapter"), system="keep")[1]
    assert "system-message" not in {one.code for one in kept}
