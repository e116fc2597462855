"""The 144 words of the world, grouped by the role they play.

A vocabulary a little larger than 100 lets a top-100 entropy differ from the full one. Openers, connectives, closers,
fillers and the equality words are the talkative style: rare in what the base reads, everywhere in the demonstrations.
Only words live here; how they are put together is told in `problems` and `demonstrations`.
"""

from __future__ import annotations

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
