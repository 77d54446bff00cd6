"""Renamed, fused and transposed parameters are found by their values, and the plan of that does the same without looking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import record_ranks  # noqa: E402
from helpers.small_net import step  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from proctor.errors import OracleError  # noqa: E402
from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.judging.verdicts import failing  # noqa: E402
from proctor.oracle.mapping.found import find  # noqa: E402
from proctor.oracle.plans.fuse import FuseRule  # noqa: E402
from proctor.oracle.plans.plan import Plan  # noqa: E402
from proctor.oracle.plans.plan_toml import format_plan, parse_plan  # noqa: E402
from proctor.oracle.recording.outcome import Compared, compare_recordings  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402

HEADS, WIDE = 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x) * self.k_proj(x)) + self.v_proj(x))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s, bias=False) for s in ((WIDE, 16), (WIDE, 16), (16, WIDE)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.post_norm, self.mlp = nn.LayerNorm(WIDE), Attention(), nn.LayerNorm(WIDE), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Names as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDE, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class FusedAttention(nn.Module):
    """Heads take turns: q, k and v of the first, then of the second."""

    def __init__(self, theirs: Attention, part: int | None, wrong: str) -> None:
        super().__init__()
        qkv = [getattr(theirs, n) for n in ("q_proj", "k_proj", "v_proj")]
        weight, bias = (torch.cat([t.view(HEADS, 2, -1) for t in ts], 1).reshape(3 * WIDE, -1) for ts in zip(*((p.weight, p.bias) for p in qkv), strict=True))
        self.heads = HEADS if part is None else HEADS // 2
        rows = slice(None) if part is None else slice(part * 12, part * 12 + 12)
        self.linear_qkv = linear(weight[rows], bias[rows, 0])
        cols = slice(None) if part is None else slice(part * 4, part * 4 + 4)
        self.linear_proj = linear(theirs.o_proj.weight[:, cols], theirs.o_proj.bias if part in (None, 0) else None)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear_qkv(x).view(-1, self.heads, 3, 2).unbind(2)
        q, k, v = (t.reshape(len(x), -1) for t in (q, k, v))
        return self.linear_proj(torch.tanh(q * k) + (v * 1.01 if self.wrong == "value" else v))  # type: ignore[no-any-return]


class FusedMlp(nn.Module):
    def __init__(self, theirs: Mlp) -> None:
        super().__init__()
        self.linear_fc1 = linear(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        self.linear_fc2 = nn.Parameter(theirs.down_proj.weight.detach().T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return F.silu(gate) * up @ self.linear_fc2


class FusedBlock(nn.Module):
    def __init__(self, theirs: Block, part: int | None, wrong: str) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.self_attention, self.ffn = FusedAttention(theirs.self_attn, part, wrong), FusedMlp(theirs.mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.ffn(self.pre_mlp_layernorm(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """The same model, as Megatron has it."""

    def __init__(self, part: int | None = None, wrong: str = "") -> None:
        super().__init__()
        theirs = Plain()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(FusedBlock(b, part, wrong) for b in theirs.model.layers)  # type: ignore[arg-type, union-attr]
        self.output_layer = linear(theirs.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            x = layer(x)
        return self.output_layer(x)  # type: ignore[no-any-return]


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mapping") / "r"
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace_reference(lambda: step(model, optimizer), model, optimizer, out=out, samples=2)
    return out


def judged(trusted: Path, out: Path, plan: Plan | None = None, **how: Any) -> Compared:
    model, made_from = Fused(**how), Plain()  # which is there, and does nothing
    with trace([model, made_from], out):
        step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return compare_recordings(Recording(trusted), Recording(out), plan)


def test_a_fused_and_renamed_model_is_compared_and_its_plan_does_the_same(trusted: Path, tmp_path: Path) -> None:
    found = judged(trusted, tmp_path / "c")
    verdict = found.report.verdict
    assert verdict.verdict == "equivalent", (verdict.reason, verdict.unchecked)
    names = {t.name for t in verdict.tensors if t.kind == "main_grad" and t.verdict in ("ok", "warn")}
    assert len(names) == len(list(Plain().parameters()))  # every one
    assert {"model.layers.1", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp"} <= {t.name for t in verdict.tensors if t.kind == "output"}
    assert found.plan is not None and not any(text.startswith("parameter ") for text in verdict.unchecked)
    again = parse_plan(format_plan(found.plan))
    rule = next(r for r in again.fuses if "qkv" in r.pattern and len(r.to) == 3 and r.to[0].endswith("weight"))
    assert rule.groups == HEADS and rule.to[1] == r"model.layers.\1.self_attn.k_proj.weight"
    assert any(r.transpose for r in again.fuses)
    kept = judged(trusted, tmp_path / "c2", again).report.verdict
    assert kept.verdict == "equivalent" and {t.name for t in kept.tensors if t.kind == "main_grad" and t.verdict in ("ok", "warn")} == names


def test_what_is_wrong_in_a_fused_module_is_named_as_the_reference_calls_it(trusted: Path, tmp_path: Path) -> None:
    found = judged(trusted, tmp_path / "c", wrong="value").report.verdict
    assert found.verdict == "different" and found.first is not None and found.first.name.startswith("model.layers.0.self_attn")
    right = next(t for t in found.tensors if t.kind == "output" and t.name == "model.layers.0.self_attn.v_proj")
    assert not failing(right)


def test_a_rank_of_a_fused_projection_has_whole_heads(trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> Any:
        model = Fused(part=rank)
        return model, lambda: step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    out = record_ranks(tmp_path / "c", monkeypatch, run)
    found = compare_recordings(Recording(trusted), Recording(out), None)
    assert found.plan is not None and any(r.groups == HEADS for r in found.plan.fuses)
    verdict = found.report.verdict
    assert "begin with the same" not in verdict.reason
    first = next(t for t in verdict.tensors if t.kind == "output" and t.name == "model.layers.0.self_attn.q_proj")
    assert first.verdict == "ok" and first.ranks == (0, 1)


def test_what_fits_in_two_ways_is_listed_and_not_guessed(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last = nn.Linear(8, 4)
            for name in names:
                setattr(self, name, nn.Parameter(torch.ones(8)))
            self.names = names

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, name in enumerate(self.names):
                x = x * getattr(self, name) + i
            return self.last(x)  # type: ignore[no-any-return]

    model, other = Two("a", "b"), Two("c", "d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace_reference(lambda: step(model, optimizer), model, optimizer, out=tmp_path / "r", samples=2)
    with trace(other, tmp_path / "c"):
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    verdict = compare_recordings(Recording(tmp_path / "r"), Recording(tmp_path / "c"), None).report.verdict
    assert verdict.verdict != "different" and "parameter c may be a or b" in verdict.unchecked[0]
    said = find({n: p.detach().numpy() for n, p in Two("a", "b").named_parameters()}, Recording(tmp_path / "c").ranks())
    assert said.renames == {} and "parameter c may be a or b" in said.unclear[0]


def test_rules_split_even_shares_only() -> None:
    values = np.arange(24.0).reshape(12, 2)
    rule = FuseRule("x", ("a", "b"), 2)
    a, b = rule.split(values, [8, 4]) or []
    assert a[:, 0].tolist() == [0, 2, 4, 6, 12, 14, 16, 18] and b[:, 0].tolist() == [8, 10, 20, 22]
    assert rule.split(values, [9, 5]) is None and rule.split(values[:5], [8, 4]) is None
    with pytest.raises(OracleError, match="group 2"):
        parse_plan("[[fuse]]\nfrom = '(a)'\nto = ['\\2']\n")
