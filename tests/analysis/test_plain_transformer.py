"""What `diagnose` prints of a gated model, against a transformer in plain PyTorch that is written from the paper's definitions.

Of the package only the weights are taken: forward passes, λ, directions, terms and coordinates are computed anew in fp64, from
eq:rw-gated-delta to eq:rw-coordinate-signal.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.analysis.alignment import diagnose_alignment
from loragate.analysis.context import About, DiagnosticContext
from loragate.analysis.delta_entropy import measure_token_entropies
from loragate.analysis.gates import PAPER, measure_realised_gates
from loragate.analysis.rows import Reader, TokenClasses, row_weights
from loragate.analysis.settings import DiagnoseSettings
from loragate.data import encode_rows
from loragate.evaluation.prepared import Request
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.variants import ModelVariant, activate_variant
from tiny import tiny_gated, tiny_rows, tiny_tokenizer, write_rows

L, U, K, SCALING, HEADS, KV_HEADS, WIDTH = -2.0, 3.0, 20, 2.0, 4, 2, 32
LIMITS = {  # the paper's interventions
    "gated": lambda lam: lam,
    "noreverse": lambda lam: torch.maximum(lam, torch.zeros_like(lam)),
    "noextrapolate": lambda lam: torch.minimum(lam, torch.ones_like(lam)),
    "unit": lambda lam: torch.minimum(torch.maximum(lam, torch.zeros_like(lam)), torch.ones_like(lam)),
    "off": torch.ones_like,
}


class Plain:
    """A Qwen2 with gated LoRA modules, from the tensors of a PeftModel by name."""

    def __init__(self, peft):
        self.tensors = {
            name.removeprefix("base_model.model."): value.detach().double() for name, value in peft.named_parameters()
        }
        self.psi = {name: value.detach().double().requires_grad_() for name, value in lg.gate_parameters(peft).items()}
        self.paths = list(dict.fromkeys(name.rpartition(".")[0] for name in self.psi))

    def __call__(self, ids, *, stop=False, limit=LIMITS["gated"], given=None):
        """Logits [S, V] of a sequence, and {path: λ [S]}; `stop` detaches gate inputs, `given` has λ in place of the gates."""
        own, found = self.tensors, {}

        def module(path, x):
            output = x @ own[f"{path}.base_layer.weight"].T
            if f"{path}.base_layer.bias" in own:
                output = output + own[f"{path}.base_layer.bias"]
            delta = SCALING * (x @ own[f"{path}.lora_A.default.weight"].T) @ own[f"{path}.lora_B.default.weight"].T
            weight, bias = (
                next(v for n, v in self.psi.items() if n == f"{path}.{part}") for part in ("weight", "bias")
            )
            v = torch.tanh((x.detach() if stop else x) @ weight.reshape(-1) + bias)
            lam = 1 + torch.where(v < 0, (1 - L) * v, (U - 1) * v)
            found[path] = lam = limit(lam) if given is None else given[path]
            return output + lam[:, None] * delta

        def norm(name, x):
            return own[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

        def rotated(x):  # [S, heads, 8]
            half = x.shape[-1] // 2
            angles = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            one, other = x[..., :half], x[..., half:]
            return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

        x = own["model.embed_tokens.weight"][ids]
        for layer in range(2):
            at = f"model.layers.{layer}"
            h = norm(f"{at}.input_layernorm", x)
            q, k, v = (module(f"{at}.self_attn.{name}_proj", h).reshape(len(ids), -1, WIDTH // HEADS) for name in "qkv")
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (rotated(k), v))
            scores = torch.einsum("shd,thd->hst", rotated(q), k) / math.sqrt(WIDTH // HEADS)
            past = torch.tril(torch.ones(len(ids), len(ids), dtype=torch.bool))
            weights = torch.softmax(scores.masked_fill(~past, -math.inf), -1)
            x = x + module(f"{at}.self_attn.o_proj", torch.einsum("hst,thd->shd", weights, v).reshape(len(ids), -1))
            h = norm(f"{at}.post_attention_layernorm", x)
            up = module(f"{at}.mlp.up_proj", h)
            x = x + module(f"{at}.mlp.down_proj", torch.nn.functional.silu(module(f"{at}.mlp.gate_proj", h)) * up)
        return norm("model.norm", x) @ own["model.embed_tokens.weight"].T, found


@pytest.fixture(scope="module")
def models():
    peft, tokenizer = tiny_gated(L, U, seed=4), tiny_tokenizer()
    rows = list(encode_rows(tiny_rows(4), tokenizer, max_length=64))
    return peft, tokenizer, rows, Plain(peft)


def counted(row):
    """Positions that predict a response token."""
    return [at for at, label in enumerate(row["labels"][1:]) if label >= 0]


def test_interventions_entropies_and_shares_of_lambda(models):
    """eq:rw-delta-entropy; max(λ, 0), min(λ, 1), clip(λ, 0, 1) at every module and position; shares of λ over responses."""
    peft, tokenizer, rows, plain = models
    assert set(LIMITS) == {"gated", *PAPER}
    every, delta = [], measure_token_entropies(Reader(peft, tokenizer), "gated", rows)
    for row in rows:
        ids, seen = torch.tensor(row["input_ids"]), []
        for name, limit in LIMITS.items():
            variant = ModelVariant("gated") if name == "gated" else ModelVariant("gated", name, override=name)
            with torch.no_grad(), activate_variant(peft, variant, "gated"):
                found = peft(input_ids=ids[None]).logits[0]
            expected, lam = plain(ids, limit=limit)
            assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-4), name
            seen.append(expected.detach())
            if name == "gated":
                every.append(torch.stack(list(lam.values()))[:, counted(row)].reshape(-1))
        of = delta.rows == row["row"]
        base = plain(ids, given={path: torch.zeros(len(ids)).double() for path in plain.paths})[0]
        h_base, h_adapter, h_gated = (
            torch.special.entr(logits[counted(row)].softmax(-1)).sum(-1).detach().numpy()
            for logits in (base, seen[-1], seen[0])
        )
        assert delta.delta[of] == pytest.approx(h_adapter - h_base, abs=1e-4)
        assert delta.entropy["gated"][of] == pytest.approx(h_gated, abs=1e-4)
        assert all((one - seen[0]).abs().max() > 0.01 for one in seen[1:]), "each intervention acts"
    lam = torch.cat(every).detach()
    about = About("now", {}, "rows", 0, {}, {}, 1.0)
    record = measure_realised_gates(Reader(peft, tokenizer), rows, TokenClasses(tokenizer, {1}), about)
    shares = [float(part.double().mean()) for part in (lam < 0, (lam >= 0) & (lam <= 1), lam > 1, lam)]
    all_ = record.all
    assert [all_.below_zero, all_.zero_to_one, all_.above_one, all_.mean] == pytest.approx(shares, abs=1e-5)
    assert all_.count == len(lam)


def plain_figures(plain, row):
    """Of one row: sums over its response positions of Ĝ_k, G_k, ∇V_k and ∇V; of its single λ those with an effect, those with
    one sign, and both weighted by |∂V_k/∂λ|; and the positions whose likeliest action is the best."""
    ids, at, parameters = torch.tensor(row["input_ids"]), counted(row), list(plain.psi.values())
    with torch.no_grad():  # λ ≡ 0 is the base, whose log-probabilities are the action values
        base, _ = plain(ids, given={path: torch.zeros(len(ids)).double() for path in plain.paths})
    r = torch.log_softmax(base[at], -1)

    def scalars(logits):
        """Σ H(q_t), Σ E_q r, Σ E_π r; the support is that of the moment."""
        z = logits[at]
        top = z.topk(K, -1).indices
        q = torch.softmax(z.gather(-1, top), -1)
        return -(q * q.log()).sum(), (q * r.gather(-1, top)).sum(), (torch.softmax(z, -1) * r).sum()

    def gradient(scalar, of):
        return torch.cat([one.reshape(-1) for one in torch.autograd.grad(scalar, of, retain_graph=True)])

    logits, lam = plain(ids)
    entropy, value_k, value = scalars(logits)
    # −log k · F_k is minus the mean entropy
    found = {"stopped": gradient(-scalars(plain(ids, stop=True)[0])[0], parameters)}
    for name, scalar in (("complete", -entropy), ("value_k", value_k), ("value", value)):
        found[name] = gradient(scalar, parameters)
    leaves = {path: one.detach().requires_grad_() for path, one in lam.items()}
    entropy, value_k, _ = scalars(plain(ids, given=leaves)[0])
    wants, helps = (gradient(scalar, list(leaves.values())) for scalar in (-entropy, value_k))
    kept = (wants != 0) & (helps != 0)
    right = kept & (wants * helps > 0)
    counts = [part.double().sum() for part in (kept, right, kept * helps.abs(), right * helps.abs())]
    on = r.gather(-1, logits[at].topk(K, -1).indices)
    return found, np.array([float(one) for one in counts]), int((on[:, 0] == on.amax(-1)).sum())


def test_what_alignment_prints(models, tmp_path, monkeypatch):
    peft, tokenizer, rows, plain = models
    loaded = SimpleNamespace(model=peft, tokenizer=tokenizer, kind="gated", sources={}, max_positions=None, note="")
    loaded.endings = SimpleNamespace(token_ids={1})
    monkeypatch.setattr(DiagnosticContext, "loaded", loaded)
    context = DiagnosticContext(Request("gated", tmp_path / "out", TaskSettings()))
    file = write_rows(tmp_path / "rows.jsonl", tiny_rows(4))
    record = diagnose_alignment(context, DiagnoseSettings(rows=str(file), k=K))

    sums, coordinates, tokens, best = {}, np.zeros(4), [], 0
    for row in rows:
        found, counts, right = plain_figures(plain, row)
        for name, vector in found.items():
            sums.setdefault(name, []).append(vector.numpy())
        coordinates += counts
        tokens.append(len(counted(row)))
        best += right
    assert (record.rows, record.tokens, record.k) == (len(rows), sum(tokens), K)
    assert record.top_is_best == pytest.approx(best / sum(tokens))
    everything, (total, same, helped, agreed) = record.coordinates[0], coordinates
    # the first position's query sees one key, so that its λ changes nothing; fp32 may leave rounding in its derivative
    assert total <= everything.coordinates <= total + len(rows)
    assert everything.share.mean == pytest.approx(same / total, abs=len(rows) / total)
    assert everything.weighted.mean == pytest.approx(agreed / helped, rel=1e-3)

    norm, begin, draws = np.linalg.norm, 0, [row_weights(len(rows), count, 0) for count in (1000, 500)]
    assert [one.name for one in record.modules] == plain.paths
    for one in (record.all, *record.modules):
        parts = [value.numel() for name, value in plain.psi.items() if name.startswith(f"{one.name}.")]
        here = slice(begin, begin + sum(parts)) if parts else slice(None)
        begin += sum(parts)

        def mean(name, times, here=here):
            """⟨·⟩ over response positions, of rows that are there so many times."""
            return (times @ np.stack(sums[name])[:, here]) / (times @ np.array(tokens))

        def drawn(quantity, draws=draws[one is not record.all]):
            return np.quantile([quantity(times) for times in draws], (0.025, 0.975))

        stopped, complete, value_k, value = (mean(name, np.ones(len(rows))) for name in sums)
        assert one.stopped_error == pytest.approx(norm(stopped - complete) / norm(complete), rel=1e-2, abs=1e-3)
        assert one.tail_error == pytest.approx(norm(value_k - value) / norm(value), rel=1e-2)
        assert one.gain.mean == pytest.approx(value @ stopped, rel=1e-2)
        ends = drawn(lambda times, mean=mean: mean("value", times) @ mean("stopped", times))
        assert [one.gain.low, one.gain.high] == pytest.approx(ends, rel=1e-2, abs=1e-4)
        for shown, entropy, task in (
            (one.complete, "complete", "value_k"),
            (one.stopped, "stopped", "value_k"),
            (one.total, "stopped", "value"),
        ):

            def cosine(times, entropy=entropy, task=task, mean=mean):
                g, v = mean(entropy, times), mean(task, times)
                return g @ v / (norm(g) * norm(v))

            g, v = (mean(name, np.ones(len(rows))) for name in (entropy, task))
            assert (shown.entropy_norm, shown.value_norm) == pytest.approx((norm(g), norm(v)), rel=1e-2)
            assert shown.cosine.mean == pytest.approx(cosine(np.ones(len(rows))), abs=2e-3)
            low, high = drawn(cosine)
            assert [shown.cosine.low, shown.cosine.high] == pytest.approx([low, high], abs=5e-3)
            assert shown.verdict == ("holds" if low > 0 else "fails" if high <= 0 else "not shown")
            # the smallest ρ < 1 for which a β > 0 has ‖G − βv‖ ≤ ρβ‖v‖
            betas = np.geomspace(1e-2, 1e4, 401) * norm(g) / norm(v)
            rho = min(norm(g - beta * v) / (beta * norm(v)) for beta in betas)
            assert shown.rho.mean == pytest.approx(min(rho, 1), abs=2e-3)
