"""What watching costs on a GPU: `make gpu`, on a machine with a CUDA device.

    python benchmarks/gpu.py [--megabytes 256] [--steps 60] [--layers 12] [--width 768]

Three tables: that fingerprints on the device are those of the CPU, for all dtypes and for strided tensors; their speed beside a copy of the same
memory; and the step of a GPT (about 100 M parameters, bf16 autocast, AdamW fused), eager and compiled, watched and bare by turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURN = 10  # steps
GPT = """
import json, sys, time, torch
from torch import nn
import torch.nn.functional as F
layers, width, steps, turn, compiled = (int(word) for word in sys.argv[1:])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, -1, 64).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(16384, width), nn.ModuleList(Block() for _ in range(layers)), nn.Linear(width, 16384)
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
model = Gpt().cuda()
run = torch.compile(model) if compiled else model
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
from proctor.instrument import attach
observer, times = attach._observer, []
for step in range(steps * turn):
    if step % turn == 0:
        on = (step // turn) % 2 == 0
        observer.pause(not on)
    x = torch.randint(16384, (8, 512), device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(run(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append((on, time.perf_counter() - begin))
observer.pause(False)
print("TIMES " + json.dumps([sum(p.numel() for p in model.parameters()), times]))
"""


def equal() -> int:
    """Fingerprints of the device that are not those of the CPU."""
    import torch

    from proctor.instrument.observe.content import formats
    from proctor.instrument.observe.fingerprint import fingerprint

    wrong = 0
    for dtype in formats():
        raw = torch.randint(0, 256, (50_003 * dtype.itemsize,), dtype=torch.uint8)
        tensor = (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)
        views = [tensor, tensor[::3], tensor[:50_000].view(200, 250).t()] if dtype.is_floating_point and dtype.itemsize > 1 else [tensor]
        for view in views:
            here, there = fingerprint(view), fingerprint(view.cuda())
            same = (here.fp, here.flags) == (there.fp, there.flags)
            wrong += not same
            print(f"{dtype!s:24} {tuple(view.stride())!s:12} {'equal' if same else f'DIFFERENT {here} {there}'}")
    return wrong


def speed(megabytes: int) -> None:
    """GB/s of a fingerprint, and its share of a copy's."""
    import torch

    from proctor.instrument.observe.on_device import on_device

    for dtype in (torch.float32, torch.bfloat16):
        for several in (1, 256):
            size = (megabytes << 20) // several // dtype.itemsize
            tensors = [torch.randn(size, device="cuda").to(dtype) for _ in range(several)]
            others = [torch.empty_like(t) for t in tensors]

            def took(work: object) -> float:
                times = []
                for _ in range(12):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    work()  # type: ignore[operator]
                    end.record()
                    torch.cuda.synchronize()
                    times.append(begin.elapsed_time(end) / 1e3)
                return statistics.median(times[2:])

            copy = took(lambda a=tensors, b=others: [y.copy_(x) for x, y in zip(a, b, strict=True)])
            own = took(lambda a=tensors: [on_device(t, [(t.numel(), 1)], 0) for t in a])
            total = megabytes / 1024
            print(f"{dtype!s:16} {several:4} × {megabytes / several:6.1f} MiB: fingerprint {total / own:7.0f} GiB/s, read by a copy {total / copy:7.0f}")


def cost(args: argparse.Namespace, compiled: bool, budget: str) -> None:
    """Step times of the GPT, watched ÷ bare."""
    with tempfile.TemporaryDirectory(prefix="proctor-gpu-") as folder:
        script = Path(folder) / "gpt.py"
        script.write_text(GPT)
        program = [sys.executable, str(script), *map(str, (args.layers, args.width, args.steps, TURN, int(compiled)))]
        watch = [sys.executable, "-m", "proctor.cli", "watch", "--budget", budget, "--warmup", "200", "--fail-on", "never", "-o", f"{folder}/run", "--"]
        done = subprocess.run([*watch, *program], capture_output=True, text=True, env=dict(os.environ), check=False)
        line = next((text for text in done.stdout.splitlines() if text.startswith("TIMES ")), None)
    if line is None:
        raise SystemExit(done.stderr[-2000:])
    number, times = json.loads(line.removeprefix("TIMES "))
    half = times[len(times) // 3 :]  # behind compiling, and most of the steps that are looked at in any case
    bare, on = (statistics.mean(t for watched, t in half if watched is wanted) for wanted in (False, True))
    print(f"GPT of {number / 1e6:.0f} M, {'compiled' if compiled else 'eager'}, budget {budget}: {1e3 * bare:.1f} ms a step bare, × {on / bare:.3f} watched")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=120, help=f"turns of {TURN} steps")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    wrong = equal()
    speed(args.megabytes)
    for compiled in (False, True):
        for budget in ("none", "1%"):
            cost(args, compiled, budget)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
