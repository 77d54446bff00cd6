"""What the program wrote runs as often as without us: its properties, containers, data sets and tensors are not asked for what they compute.

`PROGRAM` trains one small network, with one object in it that notes each time that code of its own runs. Bare and recorded the notes, the losses, the parameters and the
random state are the same, and no probe goes off. Of the same kind are programs whose tensors have no shape or no memory: lazy modules, nested tensors, transforms of functions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

PROGRAM = '''
import hashlib, json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

log = []
torch.manual_seed(0)
F = nn.functional


def noted(name, value=None):
    def get(self):
        log.append(name)
        if value is None:
            raise RuntimeError(name)
        return value(self)
    return property(get)


def samples(n=64):
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (n,), generator=g)
    return [(F.one_hot(k, 6).float() + 0.1 * torch.randn(6, generator=g), k) for k in y]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(self.one(x).relu())


class Noted(nn.Module):
    def forward(self, x):
        log.append("computed")
        return x + 0.001 * torch.randn_like(x)


class Refuses:
    def __bool__(self): log.append("bool"); raise RuntimeError("bool")
    def __eq__(self, other): log.append("eq"); raise RuntimeError("eq")
    def __hash__(self): log.append("hash"); raise RuntimeError("hash")
    def __repr__(self): log.append("repr"); raise RuntimeError("repr")
    def __getattr__(self, name): log.append("asked for " + name); raise RuntimeError(name)


def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def together(make):
    return DataLoader(samples(), batch_size=8, collate_fn=lambda items: make(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])))


class Takes(Net):
    def __init__(self, read): super().__init__(); self.read = read
    def forward(self, batch):
        x, y = self.read(batch)
        return F.cross_entropy(super().forward(x), y)


def computed_weights():
    model = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 3))
    for i in (0, 1, 3, 4):
        nn.utils.parametrize.register_parametrization(model[i], "weight", Noted())
    return model, {"loss_of": lambda m, b: F.cross_entropy(m(b[0].unsqueeze(1)), b[1])}


def properties():
    class Layer(nn.Module):
        def __init__(self): super().__init__(); self.inner = nn.Parameter(torch.randn(3, 6) * 0.1)
        def forward(self, x): return x @ self.inner.t()
    for name in "weight bias dtype device config optimizer data shape p dropout original_name base_layer loss grad_fn requires_grad data_ptr".split():
        setattr(Layer, name, noted(name))
    return nn.Sequential(Layer()), {}


def batch_of_properties():
    class B(Refuses):
        def __init__(self, x, y): self.held = x, y
    for name in "shape dtype device data_ptr requires_grad grad_fn layout numel data keys values items loss logits".split():
        setattr(B, name, noted(name))
    return Takes(lambda b: b.held), {"loader": together(B), "loss_of": lambda m, b: m(b)}


def batch_that_is_a_dict():
    class B(dict):
        def __getitem__(self, key): log.append("item"); return super().__getitem__(key)
        def items(self): log.append("items"); return super().items()
        def values(self): log.append("values"); return super().values()
        def __iter__(self): log.append("iter"); return super().__iter__()
    return Takes(lambda b: (b["x"], b["y"])), {"loader": together(lambda x, y: B(x=x, y=y)), "loss_of": lambda m, b: m(b)}


def batch_that_is_a_list():
    class B(list):
        def __getitem__(self, i): log.append("item"); return super().__getitem__(i)
        def __len__(self): log.append("len"); return super().__len__()
        def __iter__(self): log.append("iter"); return super().__iter__()
    return Takes(lambda b: (b[0], b[1])), {"loader": together(lambda x, y: B([x, y])), "loss_of": lambda m, b: m(b)}


class Counting(Dataset):
    def __init__(self): self.items = samples()
    def __getitem__(self, i): return self.items[i]
    def __len__(self): log.append("len"); return len(self.items)


def data_set_that_counts():
    return Net(), {"loader": DataLoader(Counting(), batch_size=8, shuffle=True)}


def stream_without_a_length():
    class S(IterableDataset):
        def __iter__(self): return iter(samples())
        def __len__(self): log.append("len"); raise RuntimeError("len")
    return Net(), {"loader": DataLoader(S(), batch_size=8)}


def sampler_of_properties():
    class S(Sampler):
        epoch, seed, shuffle, generator = noted("epoch"), noted("seed"), noted("shuffle"), noted("generator")
        def __iter__(self): return iter(torch.randperm(64).tolist())
        def __len__(self): log.append("len"); raise RuntimeError("len")
        def __bool__(self): log.append("bool"); raise RuntimeError("bool")
    return Net(), {"loader": DataLoader(samples(), batch_size=8, sampler=S())}


def batch_sampler_of_its_own():
    class S(Refuses):
        def __iter__(self): return iter([list(range(i, i + 8)) for i in range(0, 64, 8)])
        def __len__(self): log.append("len"); return 8
    return Net(), {"loader": DataLoader(samples(), batch_sampler=S())}


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ != "__get__":  # what a tensor is may be asked for
            log.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def tensors_of_its_own():
    model = Net()
    model.one.weight = nn.Parameter(model.one.weight.detach().as_subclass(Sub))
    model.register_buffer("seen", torch.ones(3).as_subclass(Sub))
    return model, {"loader": together(lambda x, y: (x.as_subclass(Sub), y.as_subclass(Sub)))}


class Wrapped(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map

        log.append(str(function))
        out = function(*tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, args), **(kwargs or {}))
        return tree_map(lambda t: Wrapped(t) if isinstance(t, torch.Tensor) else t, out)


def tensors_that_wrap():
    return Net(), {"loss_of": lambda m, b: F.cross_entropy(m(Wrapped(b[0])), b[1])}


def lazy():
    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm, self.two, self.unused = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3), nn.LazyConv2d(3, 3)
        def forward(self, x): return self.two(self.norm(self.one(x)))
    model = L()
    model(torch.randn(4, 6))
    return model, {"parameters": [p for p in model.parameters() if not isinstance(p, nn.UninitializedParameter)]}


def lazy_until_the_first_step():
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), {}


def nested():
    class N(nn.Module):
        def __init__(self): super().__init__(); self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        def forward(self, x): return self.two(torch.stack([t.mean(0) for t in self.one(x).unbind()]))
    ragged = lambda x: torch.nested.nested_tensor([row.expand(2 + i % 3, 6) for i, row in enumerate(x)])
    return N(), {"loss_of": lambda m, b: F.cross_entropy(m(ragged(b[0])), b[1])}


def sparse():
    class S(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.EmbeddingBag(6, 8, sparse=True), nn.Linear(8, 3)
            self.register_buffer("rows", torch.eye(3).to_sparse_csr())
            self.register_buffer("pairs", torch.eye(3).to_sparse())
        def forward(self, x): return self.two(self.one(x.argmax(1, keepdim=True)))
    return S(), {"optimizer": torch.optim.SGD}


def transforms():
    from torch.func import functional_call, grad, vmap

    def loss_of(model, batch):
        one = lambda p, x, y: F.cross_entropy(functional_call(model, p, (x[None],)), y[None])
        each = vmap(grad(one), in_dims=(None, 0, 0))({k: v.detach() for k, v in model.named_parameters()}, *batch)
        return plain(model, batch) + 0 * sum(g.sum() for g in each.values())
    return Net(), {"loss_of": loss_of}


class Fewer(Net):
    def __init__(self): super().__init__(); self.norm = nn.BatchNorm1d(8)
    def forward(self, x): return self.two(self.norm(self.one(x)).relu())
    def parameters(self): log.append("parameters"); return iter([self.one.weight])
    def named_parameters(self): log.append("named_parameters"); return iter([("one.weight", self.one.weight)])
    def modules(self): log.append("modules"); return iter([self.one])
    def named_modules(self): log.append("named_modules"); return iter([("one", self.one)])
    def buffers(self): log.append("buffers"); return iter([])
    def named_buffers(self): log.append("named_buffers"); return iter([])


def module_that_gives_fewer():
    model = Fewer()
    return model, {"parameters": [*model.one._parameters.values(), *model.two._parameters.values()]}


def module_that_refuses_names():
    import types

    class M(types.ModuleType):
        def __setattr__(self, name, value): log.append("set " + name); raise AttributeError(name)
    code = "def helper(x):\\n    return x\\n"
    made = M("strange")
    vars(made)["__file__"] = __file__
    exec(code, vars(made))
    sys.modules["strange"] = made
    return Net(), {"loss_of": lambda m, b: made.helper(plain(m, b))}


def main():
    model, more = globals()[sys.argv[1]]()
    loss_of, loader = more.get("loss_of", plain), more.get("loader", DataLoader(samples(), batch_size=8, shuffle=True))
    optimizer = more.get("optimizer", torch.optim.AdamW)(more.get("parameters", model.parameters()), lr=0.01)
    losses = []
    while len(losses) < 12:
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            if len(losses) % 4 == 0:
                with torch.no_grad():
                    loss_of(model.eval(), batch)
                model.train()
                torch.save({"model": model.state_dict(), "step": len(losses)}, "checkpoint.pt")
            if len(losses) == 12:
                break
    said = list(log)
    parts = [p.detach().as_subclass(torch.Tensor) for p in model.parameters() if not isinstance(p, nn.UninitializedParameter)]
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts) + torch.get_rng_state().numpy().tobytes()).hexdigest()
    print("SAID " + json.dumps([[loss.hex() for loss in losses], digest, said]))


main()
'''
KINDS = (
    "computed_weights", "properties", "batch_of_properties", "batch_that_is_a_dict", "batch_that_is_a_list", "data_set_that_counts", "stream_without_a_length", "sampler_of_properties", "batch_sampler_of_its_own",
    "tensors_of_its_own", "tensors_that_wrap", "lazy", "lazy_until_the_first_step", "nested", "sparse", "transforms", "module_that_refuses_names", "module_that_gives_fewer",
)  # fmt: skip


def ran(folder: Path, kind: str, before: list[str]) -> tuple[list[object], str]:
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*before, python(), "train.py", kind], cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    said: list[object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("SAID "))[5:])
    return said, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_the_program_runs_as_often_as_without_us(kind: str, tmp_path: Path) -> None:
    bare, _ = ran(tmp_path / "bare", kind, [])
    recorded, told = ran(tmp_path / "recorded", kind, [sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--"])
    assert recorded == bare
    assert " is off after " not in told
    notes = [note for path in (tmp_path / "run" / "procs").glob("*/process.json") for note in json.loads(path.read_text())["notes"]]
    assert not [note for note in notes if " is off after " in note]


@pytest.mark.parametrize("kind", ["batch_of_properties", "batch_that_is_a_list", "tensors_that_wrap", "transforms"])
def test_neither_does_watching_run_it(kind: str, tmp_path: Path) -> None:
    bare, _ = ran(tmp_path / "bare", kind, [])
    watched, told = ran(tmp_path / "watched", kind, [sys.executable, "-m", "proctor.cli", "watch", "-o", str(tmp_path / "run"), "--fail-on", "never", "--"])
    assert watched == bare
    assert " is off after " not in told
