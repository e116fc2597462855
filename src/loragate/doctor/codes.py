"""Every code that a finding of `loragate doctor` can have: one table, which the documentation shows and tests hold complete."""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """A kind of finding.

    Attributes:
        severities: that it can have, as "error or note".
        meaning: what was found.
        remedy: what to do.
    """

    severities: str
    meaning: str
    remedy: str


CODES: dict[str, Code] = {
    # the files
    "config-unreadable": Code(
        "error", "`adapter_config.json` is missing, damaged or of something else", "fetch or write it again"),
    "config-invalid": Code(
        "error or warning", "a key of `adapter_config.json` has a value that no loader takes, or is not known to this PEFT",
        "correct the key, or upgrade `peft`"),
    "weights-absent": Code("error", "the weights are missing, cut off or empty", "fetch the whole folder; gather ZeRO-3's shards"),
    "weights-not-finite": Code(
        "error", "NaN or infinity among the weights", "take an earlier checkpoint, or a lower learning rate"),
    "weights-zero": Code("warning", "every B is 0: the adapter changes nothing", "take the adapter after its training"),
    "weights-partly-zero": Code("warning", "some modules have B = 0: they were not trained", "check what was trained"),
    "other-format": Code(
        "error", "no LoRA adapter in PEFT's form: MLX, GGUF, shards, a Git LFS pointer, …", "convert or fetch it"),
    "keys-missing": Code(
        "error", "weights that the configuration or the base asks for are not in the file", "fetch both files again"),
    "gates-unreadable": Code("error", "the gates of a gated folder were changed or are damaged", "fetch the folder again"),
    # configuration and base
    "base-unreachable": Code("warning", "the base that the adapter names is not here", "say where it is with `--base`"),
    "keys-unknown": Code("error", "weights for modules that the base does not have", "name its own base with `--base`"),
    "shape-mismatch": Code("error", "weights of another shape than the base's or the configuration's", "name its own base"),
    "not-loadable": Code("error", "PEFT cannot put the adapter on its base", "write it again with the PEFT of its training"),
    "task-type": Code("error or note", "an adapter of a classifier or encoder, or labelled as one", "load it in Python"),
    "scale-unusual": Code("warning or note", "α/r (α/√r) is zero, negative or far from usual", "check α, r and `use_rslora`"),
    "layer-replication": Code("error", "the adapter repeats layers of its base", "make that model once, and train on it"),
    "base-changing-init": Code(
        "error or warning", "PiSSA, OLoRA, LoftQ, …: the adapter changes its base when it is loaded", "convert it to plain LoRA"),
    "base-changed-beside": Code(
        "note", "embeddings, norms, heads or biases are saved along", "nothing; strengths do not reach them"),
    "not-gateable": Code("note", "DoRA and other variants, or a delta on the output head", "use it without gates"),
    "not-servable": Code("note", "vLLM does not serve its rank, copies or biases", "merge it, or generate with transformers"),
    # tokenizer and template
    "tokenizer-unreadable": Code("error or note", "the adapter's own tokenizer (or the base's) cannot be read", "copy it there"),
    "tokenizer-differs": Code(
        "error or warning or note", "other ids for the base's tokens, another split, or added tokens", "use the right base"),
    "tokens-untrained": Code(
        "error or warning", "conversations use tokens whose embeddings nobody trained", "train these tokens too"),
    "template-differs": Code(
        "error or warning or note", "the adapter's chat template fails, loses a turn or is not the base's", "use its template"),
    "no-ending": Code("warning or note", "nothing ends an answer, or only ordinary text does", "mend the template"),
    "ending-undeclared": Code("note", "an answer ends with a token that other programs do not know as an end", "tell them"),
    # behaviour on prompts
    "never-stops": Code("warning or note", "answers do not end where the base's do", "train on the end of a turn"),
    "repeats": Code("warning", "answers end in loops, the base's do not", "use it weaker; train less"),
    "empty-answers": Code("warning", "the adapter answers nothing where the base answers", "look at what its examples end with"),
    "lost-thinking": Code(
        "warning", "the base thinks before it answers, the adapter does not", "train on thoughts, or use it weaker"),
    "language-drift": Code("warning", "answers are in another language than asked for", "use it weaker; mix languages in"),
    "forgets": Code("warning or note", "the base's own answers became unlikely", "use it weaker, as the strength curve says"),
    # what it does, and whether it learnt
    "not-applied": Code("error", "predictions are the base's: the adapter does nothing", "check base, keys and scale"),
    "wrong-base": Code(
        "error or warning", "worse than the base on its own examples, or moved far for a small gain",
        "name the base that it was trained on"),
    "too-strong": Code("error or warning", "a smaller scale is better on the examples", "use the scale that is named"),
    "too-weak": Code("warning", "a larger scale is better on the examples", "train longer, or use the scale that is named"),
    "memorised": Code("warning or note", "the examples are known by heart, questions like them are not", "train less, or on more"),
    "nothing-learned": Code("warning", "no better than the base on its own examples", "check the training's rows and rate"),
}  # fmt: skip


def codes_table() -> str:
    """The codes as a Markdown table."""
    rows = [f"| `{name}` | {one.severities} | {one.meaning} | {one.remedy} |" for name, one in CODES.items()]
    return "\n".join(["| code | severity | what was found | what to do |", "|---|---|---|---|", *rows])
