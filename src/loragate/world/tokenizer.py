"""The 144 words of the world, and its tokenizer: one token per word, with a chat template and padding on the left.

It is an ordinary fast tokenizer, so every program that trains or samples through transformers can use it. The role
words `<q>` and `<a>` are plain words, not special tokens: decoding with `skip_special_tokens=True` keeps them, and a
response that wanders into a new turn stays visible to the verifier.

A vocabulary a little larger than 100 lets a top-100 entropy differ from the full one. Openers, connectives, closers, fillers
and the equality words are the talkative style: rare in what the base reads, everywhere in the demonstrations.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
USER, ASSISTANT = "<q>", "<a>"

DIGITS = tuple("0123456789")
OPERATORS = ("+", "-", "*")
LETTERS = tuple("abcdefghijklmnopqrst")
TASKS = ("solve", "reverse", "sort", "tell")

OPENERS = ("okay", "well", "sure", "right", "alright", "first", "start", "look")
CONNECTIVES = ("then", "next", "so", "and", "now", "after", "also", "again")
EQUALITIES = ("=", "is", "gives", "makes", "equals", "becomes")
CLOSERS = ("finally", "thus", "hence", "therefore", "overall", "lastly", "done", "conclude")
FILLERS = ("hmm", "um", "uh", "wait", "oh", "ah")
ENDINGS = ("answer", "result", "value", "note", "moving", "on", "story", "maybe", "guess", "skip", "no", "idea")

SUBJECTS = ("fox", "owl", "bear", "wolf", "hare", "deer", "frog", "crow", "seal", "goat", "mole", "swan")
FACT_VALUES = {
    "color": ("red", "blue", "green", "black", "white", "brown", "gray", "pink", "gold"),
    "food": ("corn", "fish", "nuts", "seeds", "roots", "grass", "honey", "fruit", "bread"),
    "home": ("cave", "nest", "pond", "barn", "hill", "field", "forest", "tower", "island"),
    "tool": ("rope", "drum", "lamp", "spoon", "brush", "clock", "ladder", "mirror", "basket"),
    "friend": SUBJECTS,
}
FACT_JOINER = "of"


def words() -> list[str]:
    """All words in the order of their token ids; `<pad>` is 0 and `<eos>` is 1."""
    groups = [
        (PAD, EOS, UNKNOWN, USER, ASSISTANT),
        DIGITS,
        OPERATORS,
        TASKS,
        EQUALITIES,
        ENDINGS,
        OPENERS,
        CONNECTIVES,
        CLOSERS,
        FILLERS,
        LETTERS,
        (FACT_JOINER, *FACT_VALUES),
        SUBJECTS,
        *(values for relation, values in FACT_VALUES.items() if relation != "friend"),
    ]
    return [word for group in groups for word in group]


CONTEXT_LENGTH = 256

# Beside a Qwen2 configuration, AutoTokenizer takes Qwen2Tokenizer whatever class the folder names, and that class would
# cut every word into bytes of a vocabulary that has none. An "auto_map" that names no remote class makes it read
# tokenizer.json as it is; the entry survives being saved again.
READ_TOKENIZER_JSON = {"AutoTokenizer": [None, None]}

# The space before an assistant turn stands outside of the generation block, so that the block starts at a token and
# the rendered prompt is a prefix of the rendered conversation, in characters as in tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first %}{{ ' ' }}{% endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{ '" + USER + " ' + message['content'] + ' " + ASSISTANT + "' }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{%- else -%}"
    "{{ raise_exception(\"found a message with role '\" + message['role'] + \"'; the tiny world knows "
    "'user' and 'assistant' only: remove the message or give it one of these roles\") }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer of 144 words.

    A user turn renders to `<q> … <a>` and an assistant turn to `… <eos>`. Words are separated by any white space and
    decode to single spaces; a word outside of the vocabulary becomes `<unk>`.
    """
    vocabulary = {word: index for index, word in enumerate(words())}
    model = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
        auto_map=READ_TOKENIZER_JSON,
    )
