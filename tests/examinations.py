"""A complete record of an examination, for tests of its page."""

import math

from loragate.analysis.rows import ClassEntropy, Interval
from loragate.doctor.record import (
    Answering,
    AnswerPair,
    Answers,
    Cell,
    ChangedToken,
    Effect,
    Learned,
    Measures,
    Module,
    Point,
    Static,
    Strength,
    build_examination,
)
from loragate.gates.adapter_rules import Finding

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALES = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)
FINDINGS = (
    Finding(
        "forgets",
        "warning",
        "the base's own answers became 0.31 nats per token less likely (0.26 to 0.37); an adapter of one task costs 0.1 or less",
        "use it at strength 0.5, which gives back 0.22 of them and keeps the task",
        {"nats": 0.31},
    ),
    Finding("base-unnamed", "note", "adapter_config.json names no revision of the base", ""),
)


def about(mean, half=0.05):
    return Interval(mean, mean - half, mean + half)


def _weight(layer, layers, kind):
    return math.exp(-(((layer - 0.7 * layers) / (0.25 * layers + 1)) ** 2)) * (0.3 + 0.1 * KINDS.index(kind))


def static_part(layers=2):
    norms = {(layer, kind): _weight(layer, layers, kind) for layer in range(layers) for kind in KINDS}
    whole = sum(norm**2 for norm in norms.values())
    modules = tuple(
        Module(
            f"model.layers.{layer}.x.{kind}",
            kind,
            layer,
            16,
            2.0,
            norm,
            1 + 9 * norm / max(norms.values()),
            norm**2 / whole,
        )
        for (layer, kind), norm in norms.items()
    )
    return Static(
        adapter="runs/support-adapter",
        base="Qwen/Qwen2.5-0.5B-Instruct",
        rank=16,
        alpha=32.0,
        parameters=8_798_208,
        modules=modules,
        beside=("embeddings of 2 new tokens",),
        gateable={"gate": len(modules)},
        cost={"gate_parameters": 1e5},
        training="training gates takes 3.1 TFLOP for a million tokens and 4.2 GiB",
        endings=("<|im_end|>", "<|endoftext|>"),
        stops=True,
    )


def answers_part(prompts=2):
    kinds = ("english", "code", "arithmetic", "language", "thinking", "yours")
    pairs = tuple(
        AnswerPair(
            f"Question {n}: explain in two sentences why the sky is blue, and say it so that a child of seven understands it.",
            kinds[n % len(kinds)],
            "The sky is blue because air scatters blue light more than red light.\n\nThat is why sunsets are red.",
            "blue light is scattered. " * (8 if n % 5 == 1 else 1),
            0.1 * n,
            ("cut", "repeats") if n % 5 == 1 else (),
        )
        for n in range(prompts)
    )
    base, adapter = Answering(61.3, 0.22, 0.02, 0.75, 1.0), Answering(33.8, 0.06, 0.11, 0.0, 0.58)
    return Answers(96, base, adapter, {"0.5": about(0.09, 0.02), "1": about(0.31)}, about(0.62), about(0.55), pairs)


def effect_part(layers=2):
    classes = tuple(
        ClassEntropy(
            name, tokens, about(delta, 0.04), about(0.5), about(0.5), about(kl, kl / 6), about(1.4), about(1.4 + delta)
        )
        for name, tokens, kl, delta in (
            ("all", 4321, 0.41, -0.21),
            ("words", 3100, 0.38, -0.18),
            ("punctuation", 601, 0.33, -0.3),
            ("digits", 402, 0.71, 0.12),
            ("space", 120, 0.2, -0.1),
            ("end", 98, 1.35, -0.6),
        )
    )
    cells = [Cell(layer, kind, 0.05 * _weight(layer, layers, kind)) for layer in range(layers) for kind in KINDS]
    cells += [Cell(layer, None, 0.11 * _weight(layer, layers, "q_proj")) for layer in range(layers)]
    cells += [Cell(None, kind, 0.2 * (0.3 + 0.1 * KINDS.index(kind))) for kind in KINDS]
    changed = tuple(
        ChangedToken(
            "customer: my parcel did not arrive\nagent: I am ",
            token,
            " to hear that. Please send me the number of your order",
            5.2 - n,
            (("sorry", 0.61), (" the", 0.12), ("glad", 0.04)),
            ((token, 0.93), (" sorry", 0.03), ("\n", 0.001)),
        )
        for n, token in enumerate((" sad", "\n", "<|im_end|>", ""))
    )
    return Effect("64 of the examples", 64, 4321, 0.781, classes, 512, tuple(cells), changed)


def learned_part():
    scales = {f"{s:g}": about(1.9 - 1.1 * s + 0.55 * s * s) for s in SCALES}
    return Learned(
        "train.jsonl",
        64,
        5120,
        about(1.9),
        about(1.35),
        about(0.55),
        scales,
        heldout=about(1.42),
        heldout_base=about(1.93),
    )


def strength_part():
    points = [Point(f"{s:g}", "scale", s, about(1.9 - 1.1 * s + 0.55 * s * s), about(0.31 * s**2)) for s in SCALES]
    points += [
        Point(
            f"{band} {s:g}",
            "band",
            s,
            about(1.35 + 0.1 * n + 0.1 * (1 - s)),
            about(0.31 - 0.05 * n - 0.05 * (1 - s), 0.03),
        )
        for n, band in enumerate(("lower", "middle", "upper"))
        for s in (0, 0.5)
    ]
    points += [
        Point(f"{part} {s:g}", "kind", s, about(1.4 + 0.2 * n), about(0.25 - 0.1 * n, 0.03))
        for n, part in enumerate(("attention", "mlp"))
        for s in (0, 0.5)
    ]
    points.append(Point("gates", "gates", None, about(1.36), about(0.2, 0.03)))
    sentences = (
        "At strength 0.75 the task is kept (loss 1.38 against 1.35) and 0.14 of the 0.31 forgotten nats come back.",
        "Load it with lora_alpha 24 in place of 32, or serve it at scale 0.75.",
    )
    return Strength("loss", "forgetting", "loss", tuple(points), "0.75", None, sentences)


def examination(layers=2, prompts=2, findings=FINDINGS, unfinished=(), **without):
    """Every part measured, but those that are named None."""
    parts = {
        "answers": answers_part(prompts),
        "effect": effect_part(layers),
        "learned": learned_part(),
        "strength": strength_part(),
    }
    seconds = {"static": 1.2, **{name: 61.0 for name in parts if name not in unfinished}}
    measures = Measures(static_part(layers), **{**parts, **without, **dict.fromkeys(unfinished)})
    return build_examination(findings, measures, unfinished=tuple(unfinished), seconds=seconds)
