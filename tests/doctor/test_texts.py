"""Loops, languages and thoughts, on texts made by hand."""

import pytest

from loragate.doctor.exam_context import shipped_prompts
from loragate.doctor.texts import detect_language, loops_at_end, split_reasoning

LOOPS = [
    "It is so. " * 12,
    "Well then. " + "I do not know. " * 4 + "I do",  # cut inside of a turn of the loop
    "The answer is 4.\n\nThe answer is 4.\n\nThe answer is 4.\n\nThe answer",
    "".join(f"{number}. Be kind to others\n" for number in range(1, 6)),
    "!" * 40,
    "水" * 20,
    "Il " + "cosa " * 20 + "c",  # cut inside of a word, or of a character
    "Sabu, " + "kısmına kabulmık, " * 6 + "kısmına kabul",
    "الأنتشرين " * 12 + "الأنت\ufffd",
    "the the the the the the the the the the the the the",
]
NO_LOOPS = [
    "",
    "0",
    "no no no, please, no",
    "Row, row, row your boat, gently down the stream.",
    "1 x 1 = 1, 1 x 2 = 2, 1 x 3 = 3, 1 x 4 = 4",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
    "It is so. It is so. It is so. It is so. That was a joke, of course.",
    "".join(f"{number}. {word}\n" for number, word in enumerate(["Spring", "Summer", "Autumn", "Winter"], 1)),
    "def larger(a, b):\n    if a > b:\n        return a\n    return b",
]
SPOKEN = {
    "en": ["The fox is red.", "I am sorry, but I do not know that.", "Sure! Here is a short email: the meeting moves."],
    "de": ["Der Fuchs ist rot.", "Das weiß ich leider nicht.", "Berlin ist die Hauptstadt und hat viele Museen."],
    "fr": [
        "Le renard est rouge.",
        "Les feuilles tombent parce que les arbres économisent l'eau.",
        "Je ne le sais pas.",
    ],
    "es": ["El zorro es rojo.", "Lo siento, pero no lo sé.", "En Madrid se puede visitar el Museo del Prado."],
    "it": ["Per preparare una buona pizza servono farina, acqua e sale.", "Mi dispiace, non lo so."],
    "pt": ["A melhor época do ano para ir à praia é o verão.", "Desculpe, não sei o que dizer."],
    "tr": ["Sağlıklı bir kahvaltıda yumurta ve zeytin olmalı.", "Üzgünüm, bilmiyorum ama size yardım edebilirim."],
    "ru": ["Зимой дни короче."],
    "zh": ["多喝水可以保持身体健康。", "Python 是一种编程语言，适合初学者。"],
    "ja": ["春は桜が咲きます。"],
    "ko": ["김치는 한국의 전통 음식입니다."],
    "ar": ["القراءة تزيد المعرفة."],
    "hi": ["सुबह जल्दी उठना अच्छा है।"],
}
UNCLEAR = [
    "",
    "42",
    "Paris",
    "def f(x): return x",
    "```python\n# this is the answer that you have asked for\nprint(1)\n```",
    "De hond loopt in het bos en hij eet brood met kaas.",
    "1. Spring\n2. Summer",
]


@pytest.mark.parametrize("text", LOOPS)
def test_a_text_that_ends_in_a_loop(text):
    assert loops_at_end(text)


@pytest.mark.parametrize("text", NO_LOOPS)
def test_lists_tables_and_refrains_are_no_loops(text):
    assert not loops_at_end(text)


@pytest.mark.parametrize(("language", "text"), [(name, text) for name, texts in SPOKEN.items() for text in texts])
def test_languages_are_told_by_short_answers(language, text):
    assert detect_language(text) == language


@pytest.mark.parametrize("text", UNCLEAR)
def test_no_language_is_claimed_of_codes_names_and_unknown_languages(text):
    assert detect_language(text) is None


def test_thoughts_are_split_off_whoever_opens_them():
    assert split_reasoning("", "4") == ("", "4")
    assert split_reasoning("<|im_start|>assistant\n", "<think>\ntwo and two\n</think>\n\n4") == ("two and two", "\n\n4")
    assert split_reasoning("<|assistant|><think>\n", "two and two\n</think>\n4") == ("two and two", "\n4")
    assert split_reasoning("", "[THINK]two and") == ("two and", None)
    assert split_reasoning("", "<think>\n\n</think>\n\n4") == ("", "\n\n4")  # a block with nothing in it


def test_the_shipped_prompts_are_of_every_kind_in_languages_that_are_known():
    prompts = shipped_prompts()
    assert len(prompts) == len({one.text for one in prompts}) == 48
    kinds = [one.kind for one in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "english": 16,
        "code": 8,
        "arithmetic": 8,
        "language": 12,
        "thinking": 4,
    }
    foreign = [one for one in prompts if one.kind == "language"]
    assert {one.language for one in foreign} == SPOKEN.keys() - {"en"}
    assert all(detect_language(one.text) == one.language for one in foreign)
