"""The words of the world by the role they play; one token each in the tokenizer of the tiny base.

The role words `<q>` and `<a>` are plain words, not special tokens: decoding with `skip_special_tokens=True` keeps them, and a
response that wanders into a new turn stays visible to the verifier.

A vocabulary a little larger than 100 lets a top-100 entropy differ from the full one. Openers, connectives, closers, fillers
and the equality words are the talkative style: rare in what the base reads, everywhere in the demonstrations.
"""

from __future__ import annotations

EOS = "<eos>"
DIGITS = tuple("0123456789")
OPERATORS = ("+", "-", "*")
LETTERS = tuple("abcdefghijklmnopqrst")

OPENERS = ("okay", "well", "sure", "right", "alright", "first", "start", "look")
CONNECTIVES = ("then", "next", "so", "and", "now", "after", "also", "again")
EQUALITIES = ("=", "is", "gives", "makes", "equals", "becomes")
CLOSERS = ("finally", "thus", "hence", "therefore", "overall", "lastly", "done", "conclude")
FILLERS = ("hmm", "um", "uh", "wait", "oh", "ah")

SUBJECTS = ("fox", "owl", "bear", "wolf", "hare", "deer", "frog", "crow", "seal", "goat", "mole", "swan")
FACT_VALUES = {
    "color": ("red", "blue", "green", "black", "white", "brown", "gray", "pink", "gold"),
    "food": ("corn", "fish", "nuts", "seeds", "roots", "grass", "honey", "fruit", "bread"),
    "home": ("cave", "nest", "pond", "barn", "hill", "field", "forest", "tower", "island"),
    "tool": ("rope", "drum", "lamp", "spoon", "brush", "clock", "ladder", "mirror", "basket"),
    "friend": SUBJECTS,
}
FACT_JOINER = "of"
