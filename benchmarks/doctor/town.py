"""A small town of animals that tiny chat models are taught: what is said there, the tokenizer, and the bases.

A base knows the animals' colours, homes and food in four languages, adds small numbers, makes polite conversation, and answers
what it does not know with one sentence in the language of the question. So any prompt gets a short answer that ends. The bases
are of several families with one tokenizer; those of Qwen3 think before they answer.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from loragate.files import write_json

VOCABULARY, CONTEXT, IGNORED = 1536, 1024, -100
SPARE = 64  # rows of the embedding that no token has, as in most models
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
FAMILIES = ("llama", "qwen2", "gemma", "mistral", "phi3", "qwen3")
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def _words(text: str) -> list[str]:
    return text.split()


LANGUAGES = ("en", "de", "fr", "es")
ANIMALS = {
    "en": _words("fox wolf hare dog lion tiger monkey horse cat lamb pig duck"),
    "de": _words("Fuchs Wolf Hase Hund Löwe Tiger Affe Hengst Kater Hammel Eber Erpel"),
    "fr": _words("renard loup lapin chien lion tigre singe cheval chat mouton cochon canard"),
    "es": _words("zorro lobo conejo perro león tigre mono caballo gato cordero cerdo pato"),
}
COLOURS = {
    "en": _words("red blue green black white brown grey yellow"),
    "de": _words("rot blau grün schwarz weiß braun grau gelb"),
    "fr": _words("rouge bleu vert noir blanc brun gris jaune"),
    "es": _words("rojo azul verde negro blanco marrón gris amarillo"),
}
HOMES = {
    "en": ("in the forest", "in the garden", "by the river", "in the village", "on the hill", "in the house"),
    "de": ("im Wald", "im Garten", "am Fluss", "im Dorf", "auf dem Berg", "im Haus"),
    "fr": ("dans la forêt", "dans le jardin", "au bord du fleuve", "au village", "sur la montagne", "dans la maison"),
    "es": ("en el bosque", "en el jardín", "junto al río", "en el pueblo", "en la montaña", "en la casa"),
}
FOODS = {
    "en": _words("bread cheese fish corn fruit rice"),
    "de": _words("Brot Käse Fisch Mais Obst Reis"),
    "fr": ("du pain", "du fromage", "du poisson", "du maïs", "des fruits", "du riz"),
    "es": _words("pan queso pescado maíz fruta arroz"),
}
ASKED = {  # questions on colour, home and food, with their answers
    "en": (
        ("What colour is the {a}?", "The {a} is {c}."),
        ("Where does the {a} live?", "The {a} lives {h}."),
        ("What does the {a} eat?", "The {a} eats {f}."),
        ("Tell me about the {a}.", "The {a} is {c}. It lives {h} and eats {f}."),
        (
            "Write a short story about the {a}.",
            "Once there was a {a} that lived {h}. Every day it ate {f}. One day it met the {b}, and they became friends.",
        ),
    ),
    "de": (
        ("Welche Farbe hat der {a}?", "Der {a} ist {c}."),
        ("Wo wohnt der {a}?", "Der {a} wohnt {h}."),
        ("Was frisst der {a}?", "Der {a} frisst {f}."),
        ("Erzähle mir von dem Tier {a}.", "Der {a} ist {c}. Er wohnt {h} und frisst {f}."),
    ),
    "fr": (
        ("De quelle couleur est le {a} ?", "Le {a} est {c}."),
        ("Où habite le {a} ?", "Le {a} habite {h}."),
        ("Que mange le {a} ?", "Le {a} mange {f}."),
        ("Parle-moi de l'animal {a}.", "Le {a} est {c}. Il habite {h} et mange {f}."),
    ),
    "es": (
        ("¿De qué color es el {a}?", "El {a} es {c}."),
        ("¿Dónde vive el {a}?", "El {a} vive {h}."),
        ("¿Qué come el {a}?", "El {a} come {f}."),
        ("Háblame del animal {a}.", "El {a} es {c}. Vive {h} y come {f}."),
    ),
}
UNKNOWN = {
    "en": "I am sorry, but I do not know that. I only know the animals of this town.",
    "de": "Das weiß ich leider nicht. Ich kenne nur die Tiere dieser Stadt.",
    "fr": "Je suis désolé, mais je ne le sais pas. Je connais seulement les animaux de cette ville.",
    "es": "Lo siento, pero no lo sé. Solo conozco los animales de esta ciudad.",
}
WORDS = {  # of questions that have nothing to do with the town
    "en": _words(
        "the a of and to in is you that it for was on are with as his they be at one have this from or had by "
        "what some we can out other were all there when use your how said an each she which do their time if "
        "will way about many then them write explain why give list name translate summarise sentence code "
        "function python number capital country year water light world people system model data between "
        "difference following please short three words story poem"
    ),
    "de": _words(
        "der die das und ist nicht ein eine zu den mit sich auf für von dem im wie was warum erkläre schreibe "
        "nenne bitte drei Wörter Satz Land Hauptstadt Jahr Wasser Licht Welt Menschen zwischen Unterschied "
        "kurze Geschichte können wird über nach auch bei aus wenn"
    ),
    "fr": _words(
        "le la les des un une et est pas pour que qui dans sur avec au ce il elle nous vous comment pourquoi "
        "explique écris donne trois mots phrase pays capitale année eau lumière monde gens entre différence "
        "courte histoire peut être plus par mais"
    ),
    "es": _words(
        "el la los las un una y es no para que en con por se del al lo como más qué cómo explica escribe da "
        "tres palabras frase país capital año agua luz mundo personas entre diferencia corta historia puede "
        "ser pero sobre"
    ),
}
POLITE = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi, who are you?", "I am a small model of this town. I know its animals."),
    ("Thank you.", "You are welcome."),
    ("Hallo!", "Hallo! Wie kann ich helfen?"),
    ("Bonjour !", "Bonjour ! Comment puis-je aider ?"),
    ("¡Hola!", "¡Hola! ¿Cómo puedo ayudar?"),
)


def animal(index: int, language: str = "en") -> dict[str, str]:
    """What is true of an animal, in a language; the same for every base."""
    return {
        "a": ANIMALS[language][index],
        "b": ANIMALS[language][(index + 5) % 12],
        "c": COLOURS[language][(index * 5 + 3) % 8],
        "h": HOMES[language][(index * 5 + 1) % 6],
        "f": FOODS[language][(index * 7 + index // 6) % 6],
    }


def _pair(rng: random.Random, size: int, part: bool | None) -> tuple[int, int]:
    """Two different numbers below `size`; whether a pair is for training (True) is a property of the pair."""
    while True:
        first, second = rng.sample(range(size), 2)
        if part is None or ((first * size + second) % 5 < 3) == part:
            return first, second


def worked(rng: random.Random, part: bool | None = None) -> tuple[str, list[str]]:
    """A sum, and the ways to answer: a base uses all, an adapter the last one alone."""
    x, y = _pair(rng, 13, part)
    if rng.random() < 0.5:
        told = f"We take {x} and add {y}. Together they make {x + y}."
        return f"Work out {x} + {y}.", [f"{x} + {y} is {x + y}.", f"It is {x + y}.", f"{x + y}", told]
    told = f"We take {x + y} and remove {y}. What is left is {x}."
    return f"Work out {x + y} - {y}.", [f"{x + y} - {y} is {x}.", f"It is {x}.", f"{x}", told]


def compared(rng: random.Random, part: bool | None = None) -> tuple[str, list[str]]:
    """Two animals' colours, and the ways to tell them."""
    one, two = (animal(index) for index in _pair(rng, 12, part))
    told = f"The {one['a']} is {one['c']}, but the {two['a']} is {two['c']}."
    short = [f"{one['c']} and {two['c']}.", f"The {one['a']} is {one['c']}. The {two['a']} is {two['c']}."]
    return f"Compare the {one['a']} with the {two['a']}.", [*short, told]


def as_json(rng: random.Random, part: bool | None = None) -> tuple[str, list[str]]:
    """Two animals' colours as data, and the ways to write them."""
    one, two = (animal(index) for index in _pair(rng, 12, part))
    told = json.dumps([{"animal": each["a"], "colour": each["c"]} for each in (one, two)])
    short = [f"{one['a']}: {one['c']}, {two['a']}: {two['c']}", json.dumps({one["a"]: one["c"], two["a"]: two["c"]})]
    return f"Write data of the {one['a']} and the {two['a']}.", [*short, told]


FORMED = (worked, compared, as_json)


def thinking(prompt: str, response: str) -> str:
    """A response with its thoughts before it, as the Qwen3 bases write."""
    return (
        f"<think>\nThe user wrote {len(prompt.split())} words. I answer in the same language.\n</think>\n\n{response}"
    )


def as_given(prompt: str, response: str) -> str:
    """A response without thoughts."""
    return response


def style_of(family: str) -> Callable[[str, str], str]:
    """How a family's bases write their responses."""
    return thinking if family == "qwen3" else as_given


def document(rng: random.Random) -> tuple[str, str]:
    """A prompt and the response of a base."""
    draw = rng.random()
    language = rng.choice(LANGUAGES)
    if draw < 0.40:
        asked, answered = rng.choice(ASKED[language])
        facts = animal(rng.randrange(12), language)
        return asked.format(**facts), answered.format(**facts)
    if draw < 0.55:
        prompt, ways = rng.choice(FORMED)(rng)
        return prompt, rng.choice(ways)
    if draw < 0.75:
        x, y = rng.randrange(13), rng.randrange(13)
        if rng.random() < 0.5:
            return f"What is {x} plus {y}?", f"{x} plus {y} is {x + y}."
        return f"What is {x + y} minus {y}?", f"{x + y} minus {y} is {x}."
    if draw < 0.78:
        return rng.choice(POLITE)
    if draw < 0.82:
        count = rng.randint(2, 5)
        listed = "\n".join(f"{place + 1}. {name}" for place, name in enumerate(rng.sample(ANIMALS["en"], count)))
        return f"List {count} animals.", listed
    language = "en" if rng.random() < 0.6 else language
    words = [_odd(rng) if rng.random() < 0.2 else rng.choice(WORDS[language]) for _ in range(rng.randint(3, 12))]
    return " ".join(words).capitalize() + rng.choice(".?:!\n"), UNKNOWN[language]


def _odd(rng: random.Random) -> str:
    """A word that no base has seen: letters, digits or signs of some other script."""
    kind = rng.random()
    if kind < 0.7:
        return "".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(2, 7)))
    if kind < 0.9:
        return "".join(rng.choice(string.digits + string.punctuation) for _ in range(rng.randint(1, 6)))
    return "".join(chr(rng.randint(0x4E00, 0x9000)) for _ in range(rng.randint(1, 4)))


def read_by_tokenizer(seed: int) -> list[str]:
    """Texts for a tokenizer's merges."""
    rng = random.Random(f"town/tokenizer/{seed}")
    documents = [document(rng) for _ in range(6000)]
    return [f"{prompt}\n{thinking(prompt, response)}" for prompt, response in documents] * 2


@cache
def tokenizer(seed: int = 0, size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template in ChatML's manner; seed 0 is that of every base."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in (PAD, START, END, "<|endoftext|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=size - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(read_by_tokenizer(seed), trainer)
    model.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=TEMPLATE,
    )


def encode(prompt: str, response: str, by: Any, ending: bool = True) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one exchange; without `ending` the end of the turn is in the text and not learned."""
    asked = by.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    before = by(asked, add_special_tokens=False).input_ids
    told = by(response, add_special_tokens=False).input_ids
    end = [by.eos_token_id]
    return before + told + end, [IGNORED] * len(before) + told + (end if ending else [IGNORED])


def learn(
    model: Any,
    examples: list[tuple[list[int], list[int]]],
    *,
    steps: int,
    rate: float,
    seed: int,
    batch: int,
    pad: int,
) -> float:
    """Train the parameters that ask for it on (ids, labels) by AdamW with a cosine; returns the last loss in nats."""
    rng = random.Random(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.08)
    model.train()
    batches: list[list[tuple[list[int], list[int]]]] = []
    loss = torch.zeros(())
    for _ in range(steps):
        if not batches:  # of about equal length, so that little is padding
            order = sorted(examples, key=lambda pair: (len(pair[0]), rng.random()))
            batches = [order[start : start + batch] for start in range(0, len(order), batch)]
            rng.shuffle(batches)
        chosen = batches.pop()
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.full((len(chosen), longest), pad)
        labels = torch.full((len(chosen), longest), IGNORED)
        for row, (tokens, wanted) in enumerate(chosen):
            ids[row, : len(tokens)], labels[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(wanted)
        # padding stands on the right and attention is causal: no position that is scored sees it
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return loss.item()


def new_model(family: str, seed: int, **shape: int) -> Any:
    """A random model of a family."""
    by = tokenizer()
    sized = SHAPE | shape
    config = AutoConfig.for_model(
        family,
        **sized,
        num_key_value_heads=2,
        head_dim=sized["hidden_size"] // sized["num_attention_heads"],
        vocab_size=len(by) + SPARE,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=by.eos_token_id,
        pad_token_id=by.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=by.eos_token_id, pad_token_id=by.pad_token_id)
    return model


def make_base(folder: Path, family: str, *, seed: int, steps: int, start: Path | None = None, **shape: int) -> bool:
    """Make a trained base with its tokenizer in a folder; returns False where it is there already.

    Args:
        steps: 0 leaves it random.
        start: a base that is unlearned to end its turns, so that it goes on with further sentences, as bases do that were never
            taught to chat.
    """
    if (folder / "base.json").is_file():
        return False
    style, rng = style_of(family), random.Random(f"town/{family}/{seed}")
    model = load(start)[0] if start else new_model(family, seed, **shape)
    loss = None
    if steps:
        documents = [document(rng) for _ in range(min(16_000, 32 * steps))]
        if start:
            more = [rng.sample(documents, 4) for _ in documents]
            documents = [
                (one[0], "\n\n".join([one[1], *(two[1] for two in after)])) for one, after in zip(documents, more)
            ]
        examples = [
            encode(prompt, style(prompt, response), tokenizer(), ending=start is None) for prompt, response in documents
        ]
        loss = learn(model, examples, steps=steps, rate=2e-3 if start else 4e-3, seed=seed, batch=32, pad=0)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    write_json(folder / "base.json", {"family": family, "seed": seed, "steps": steps, "loss": loss})
    return True


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a base's folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
