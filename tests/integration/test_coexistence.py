"""Torch's own machinery works on a recorded program as on a bare one: TorchScript, tracing, export, compile, fx, pickle."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = """
import copy, io, pickle, torch, torch.nn.functional as F
from torch import fx, nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.act = nn.Linear(4, 4), F.relu
    def forward(self, x):
        y = torch.cat([self.l(x), torch.relu(x)], 1)
        return F.softmax(torch.matmul(y, y.t()), -1)
class Plain(M):
    def __init__(self):
        super().__init__()
        del self.act
torch.manual_seed(0)
m, plain, x = M(), Plain(), torch.ones(2, 4)
optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
"""

PARTS = {
    "script": "b = io.BytesIO(); torch.jit.save(torch.jit.script(plain), b); b.seek(0); print(torch.jit.load(b)(x).shape)",
    "trace": "b = io.BytesIO(); torch.jit.save(torch.jit.trace(plain, x), b); print(b.tell() > 0)",
    "pickle": "b = io.BytesIO(); torch.save(m, b); b.seek(0); n = torch.load(b, weights_only=False); print(n.act is m.act)",
    "pickle_builtin": "print(pickle.loads(pickle.dumps([F.relu, torch.cat, torch.Tensor.add_]))[0](x).shape)",
    "pickle_all": textwrap.dedent("""
        kept = []
        for home in (torch, F, nn.init, torch.Tensor, torch.linalg, torch.optim.SGD, nn.Linear, nn.utils):
            for name in dir(home):
                value = getattr(home, name)
                if callable(value) and not name.startswith('_'):
                    try:
                        same = pickle.loads(pickle.dumps(value)) == value
                    except Exception as e:
                        same = type(e).__name__
                    kept.append((home.__name__, name, same))
        print(len(kept), [k for k in kept if k[2] is not True])
    """),
    "default_arguments": "e = nn.TransformerEncoderLayer(4, 2); b = io.BytesIO(); torch.save(nn.Transformer(4, 2, 1, 1, 8), b);"
    " print(e.activation is F.relu, e.activation_relu_or_gelu, b.tell() > 0)",
    "deepcopy": "print(copy.deepcopy(m)(x).shape)",
    "export": "print(len(list(torch.export.export(plain, (x,)).graph.nodes)))",
    "compile": "print(torch.compile(m, backend='eager', fullgraph=True)(x).sum().backward(), optimizer.step())",
    "graph_breaks": "print(torch._dynamo.explain(m)(x).graph_break_count)",
    "torchscript_inside_torch": "from torch.distributed.optim import ZeroRedundancyOptimizer; print(ZeroRedundancyOptimizer.__name__)",
    "fx": "print(len(list(fx.symbolic_trace(plain).graph.nodes)))",
    "func": "print(torch.func.vmap(F.relu)(x).shape, torch.func.grad(lambda v: F.relu(v).sum())(x).sum())",
    "override": "print(torch.overrides.is_tensor_method_or_property(torch.Tensor.add_), torch.overrides.resolve_name(torch.cat))",
    "mode": textwrap.dedent("""
        from torch.overrides import TorchFunctionMode
        class Count(TorchFunctionMode):
            n = 0
            def __torch_function__(self, func, types, args=(), kwargs=None):
                Count.n += 1
                return func(*args, **(kwargs or {}))
        with Count():
            m(x)
        print(Count.n)
    """),
    "dispatch_mode": textwrap.dedent("""
        from torch.utils._python_dispatch import TorchDispatchMode
        class Dispatched(TorchDispatchMode):
            seen = {}
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen[str(func)] = self.seen.get(str(func), 0) + 1
                return func(*args, **(kwargs or {}))
        trained = nn.Linear(4, 2)
        sgd = torch.optim.SGD(trained.parameters(), lr=0.1)
        with Dispatched():
            for _ in range(3):
                sgd.zero_grad()
                trained(torch.ones(2, 4)).square().mean().backward()
                sgd.step()
        print(sorted(Dispatched.seen.items()))
    """),
}


def outputs(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("PART ")]


def test_everything_torch_does_to_a_model_still_works(tmp_path: Path) -> None:
    body = [PROGRAM, "import warnings; warnings.simplefilter('ignore')"]
    for name, code in PARTS.items():
        body.append(f"print('PART {name}', end=' ')\n{code}")
    path = tmp_path / "program.py"
    path.write_text("\n".join(body))
    bare = outputs([sys.executable, str(path)])
    watched = outputs([sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--", sys.executable, str(path)])
    assert len(bare) == len(PARTS)
    assert watched == bare
    assert "PART graph_breaks 0" in watched
