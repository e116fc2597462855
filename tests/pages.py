"""Records for the tests of the page, hostile strings included."""

import base64

HOSTILE = '</script><script>window.stolen=1</script><img src=x onerror="window.stolen=2">&amp;\u2028" onmouseover="window.stolen=3'


def estimate(mean):
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}


def row(variant, mean, control=None, **more):
    """A result of an evaluation, 10 points from the adapter's; for the base no difference is shown."""
    versus = None if (variant, control) == ("adapter", None) else {**estimate(0.1), "p": 0.001}
    shown = "no difference shown" if variant == "base" else "better"
    return {
        "task": "t",
        "variant": variant,
        "control": control,
        "temperature": None,
        "scale": None,
        "avg_at_k": {**estimate(mean), "questions": 10, "samples": 4},
        "comparison": versus,
        "verdict": None if versus is None else shown,
        "majority_at_k": None,
        "reasons": {"ok": 3, "wrong": 5},
        "truncated": 0.01,
        "no_eos": 0.01,
        "tokens": 20.0,
        "entropy": 0.5,
        **more,
    }


def evaluation_record(*rows, warnings=(HOSTILE,)):
    task = {"name": "t", "version": "1", "grader": "exact", "sampling": {"samples": 4, "temperature": 1.0}}
    task |= {"dataset": "d", "dataset_revision": None}
    record = {"tasks": [task], "suites": [], "sandbox": None, "models": {}, "versions": {"torch": "0"}}
    rows = rows or (row("adapter", 0.2), row("base", 0.3), row("gated", 0.4))
    return {**record, "results": list(rows), "warnings": list(warnings)}


def gates_record():
    shares = {"count": 10, "below_zero": 0.3, "zero_to_one": 0.4, "above_one": 0.3, "at_lower": 0.0, "at_upper": 0.0}
    modules = [
        {"module": f"model.layers.{layer}.mlp.{kind}", "layer": layer, "type": kind, "all": {**shares, "mean": mean}}
        for layer, mean in ((0, -0.5), (1, 1.7))
        for kind in ("gate_proj", "down_proj")
    ]
    groups = {"all": modules[0]["all"], "by_class": {}, "by_type": {}, "by_layer": {"0": modules[0]["all"]}}
    histogram = {"edges": [-6.0, 0.0, 3.0], "counts": [1, 3]}
    record = {"kind": "realised gates", "conclusion": [f"They reverse. {HOSTILE}"], "lower": -6.0, "upper": 3.0}
    return {**record, **groups, "modules": modules, "histogram": histogram}


HISTORY = [
    {"step": step, "topk_entropy": 0.3 / step, "gate_mean": 1.0, "gate_below_zero": 0.1 * step, "gate_above_one": 0.0}
    for step in (1, 2, 3)
]


def traces(questions=2, tokens=5, modules=("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")):
    """Module 0 has λ = L at every token, module 1 has λ = U."""
    gates = base64.b64encode(bytes([0] * tokens + [255] * tokens)).decode()
    answer = {
        "finish_reason": "length",
        "tokens": [HOSTILE, " a", "\n", "", " b"][:tokens] + [" x"] * (tokens - 5),
        "log_prob": [-1.25] * tokens,
        "entropy": [0.5] * tokens,
        "delta_entropy": [-0.5] * tokens,
        "top": [[[HOSTILE, 0.75], [" a", 0.25]]] * tokens,
        "gates": gates,
    }
    answers = [
        {**answer, "variant": variant, "verdict": {"correct": variant == "gated", "reason": HOSTILE}}
        for variant in ("base", "adapter", "gated")
    ]
    question = {"id": "0", "prompt": f"what is {HOSTILE}", "gold": HOSTILE, "answers": answers}
    return {
        "schema": 1,
        "kind": "token traces",
        "lower": -6.0,
        "upper": 3.0,
        "modules": list(modules),
        "questions": [question] * questions,
    }


def selection_record():
    """A selection among adapter, base and two ranges."""
    variants = []
    kinds = {"adapter": "adapter", "base": "base"}
    for label, mean in (("adapter", 0.4), ("base", 0.3), ("gated [0,1]", 0.42), ("gated [-6,3]", 0.48)):
        versus = {**estimate(mean - 0.4), "p": 0.1, "z": (mean - 0.4) / 0.03} if label != "adapter" else None
        variants.append(
            {
                **estimate(mean),
                "label": f"{label} greedy",
                "weights": kinds.get(label, "gates"),
                "temperature": 0.0,
                "samples": 1,
                "difference": versus,
                "truncated": 0.0,
                "no_eos": 0.0,
                "tokens": 20.0,
                "retention": None,
            }
        )
    return {
        "recommendation": {
            "label": variants[-1]["label"],
            "weights": "gates",
            "temperature": 0.0,
            "scale": None,
            "range": [-6.0, 3.0],
            "trial": "entropy_-6_3_seed42",
            "score": estimate(0.48),
            "reason": "it beats the greedy adapter with z = 2.7",
        },
        "baseline": "adapter greedy",
        "variants": variants,
        "dev": {
            "source": "dev.jsonl",
            "questions": 64,
            "samples": 4,
            "max_new_tokens": 32,
            "task": "dev v1",
            "grader": "default",
            "unread": 0.0,
        },
        "rule": "The highest mean is taken where it beats the greedy adapter by z of 1.28 or more.",
    }


def sweep_record(ranges, chosen=(-3, 1)):
    """A selection among ranges that score from 10 % to 90 % in this order, on an adapter of 35 %."""
    record = selection_record()
    own, base, *_, gates = record["variants"]
    variants = [{**own, **estimate(0.35), "label": "adapter greedy"}, base]
    for number, (lower, upper) in enumerate(ranges):
        mean = 0.1 + 0.8 * number / max(1, len(ranges) - 1)
        versus = {**estimate(mean - 0.35), "p": 0.001}
        variants.append(
            {**gates, **estimate(mean), "label": f"gated [{lower:g},{upper:g}] greedy", "difference": versus}
        )
    picked = next((one for one in variants if one["label"].startswith(f"gated [{chosen[0]},{chosen[1]}]")), own)
    found = {**record["recommendation"], "label": picked["label"], "range": list(chosen)}
    return {**record, "recommendation": found, "variants": variants}
