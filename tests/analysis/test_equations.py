"""Every equation that can be tested as numbers has a test that quotes its label, and no test quotes another one."""

import ast
import re
from pathlib import Path

LABELS = [
    "sft",
    "policy",
    "entropy-advantage",
    "ray",
    "gated-delta",
    "margin",
    "transform",
    "topk",
    "gate-credit",
    "alignment-identity",
    "value-improvement",
    "is-sft",
    "mixture-path",
    "ce-probability-path",
    "weight-derivative",
    "causal-jacobian",
    "all-position-credit",
    "topk-logit-gradient",
    "topk-policy",
    "entropy-tail",
    "full-module-jacobian",
    "stopped-directions",
    "stopped-alignment",
    "total-error",
    "drift",
    "proof-entropy",
    "shared-ce",
    "centered-score",
    "two-policy-gradients",
    "signal-decomposition",
    "projected-delta",
    "coordinate-signal",
    "positive-inner-product",
    "finite-value-bound",
    "binary-components",
    "multiclass-margin",
    "transform-branches",
    "module-bound",
    "boundary-proof",
]


def quoted():
    """{label: test functions whose docstring begins with it}."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_equations_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                assert text.startswith(("eq:rw-", "(no label)")), f"{path.name}: {node.name} does not say its equation"
                for label in re.match(r"(eq:rw-[\w-]+(?:, )?)*", text).group().split(", "):
                    if label:
                        found.setdefault(label.removeprefix("eq:rw-"), []).append(node.name)
    return found


def test_every_label_has_a_test():
    found = quoted()
    assert len(LABELS) == len(set(LABELS)) == 39
    assert sorted(set(LABELS) - set(found)) == []
    assert sorted(set(found) - set(LABELS)) == []
