"""What Proctor keeps of large models: 70 billion parameters on the meta device, and how its memory grows with parameters that are there.

    python benchmarks/large_model.py [--steps 12] [--sizes 4 16 64 256] [--only meta|real] [-- OPTION OF WATCH…]

*meta*: a decoder of the sizes of Llama 2 70B (80 layers of width 8,192, 723 parameters), forward, backward and SGD with shapes alone; *real*: square
linear layers of so many MiB in float32, with Adam. Each program runs bare and under `proctor watch --budget none`, in processes of its own. Printed are the memory that
the process has to itself at its end (MiB; peak of the whole beside it), and CPU milliseconds a step behind the fourth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, resource, sys, time
import torch
from torch import nn
import torch.nn.functional as F
sys.path.append({folder!r})
from own_memory import own_mib

out, kind, steps, mib = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


class Decoder(nn.Module):
    def __init__(self, d=8192, kv=1024, hidden=28672):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(a, b, bias=False) for a, b in ((d, d), (d, kv), (d, kv), (d, d)))
        self.gate, self.up, self.down = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False), nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y)))
        k, v = (t.repeat_interleave(8, 1) for t in (k, v))
        x = x + self.o((q @ k.transpose(-1, -2)).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(32000, 8192), nn.ModuleList(Decoder() for _ in range(80))
        self.norm, self.head = nn.RMSNorm(8192), nn.Linear(8192, 32000, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
if kind == "meta":
    with torch.device("meta"):
        model, x = Llama(), torch.zeros(1, 32, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = lambda: F.cross_entropy(model(x).flatten(0, 1), x.flatten())
else:
    model, x = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(mib // 4))), torch.randn(8, 1024)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    loss_of = lambda: model(x).square().mean()
begin, at = 0.0, 0
for step in range(steps):
    if step == 4:
        begin = time.process_time()
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()
cpu = (time.process_time() - begin) / max(steps - 4, 1)
own = own_mib()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open(out, "w") as file:
    json.dump({"parameters": sum(p.numel() for p in model.parameters()), "mib": own, "peak": peak / 1024, "ms": 1e3 * cpu}, file)
"""


def measured(work: Path, kind: str, steps: int, mib: int, options: list[str] | None) -> dict[str, float]:
    """Of one process; with options, under `proctor watch`."""
    program, out = work / "program.py", work / "out.json"
    program.write_text(PROGRAM.replace("{folder!r}", repr(str(Path(__file__).resolve().parent))))
    out.unlink(missing_ok=True)
    command = [sys.executable, str(program), str(out), kind, str(steps), str(mib)]
    if options is not None:
        watch = ["watch", "--budget", "none", "--fail-on", "never", "--overwrite", "-o", str(work / "run"), *options]
        command = [sys.executable, "-m", "proctor.cli", *watch, "--", *command]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if not out.exists():
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, float] = json.loads(out.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 16, 64, 256], help="MiB of parameters")
    parser.add_argument("--only", choices=["meta", "real"])
    parser.add_argument("options", nargs="*", help="of watch, after --")
    args = parser.parse_args()
    jobs = [("meta", 0)] * (args.only != "real") + [("real", mib) for mib in args.sizes] * (args.only != "meta")
    print(f"{'':6} {'parameters':>15} {'bare MiB':>9} {'watched':>9} {'more':>7} {'peak':>15} {'ms a step':>17}")
    with tempfile.TemporaryDirectory(prefix="proctor-large-") as work:
        for kind, mib in jobs:
            bare, ours = (measured(Path(work), kind, args.steps, mib, options) for options in (None, args.options))
            print(
                f"{kind:6} {bare['parameters']:15,.0f} {bare['mib']:9.0f} {ours['mib']:9.0f} {ours['mib'] - bare['mib']:7.0f} "
                f"{bare['peak']:7.0f}{ours['peak']:8.0f} {bare['ms']:8.1f}{ours['ms']:9.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
