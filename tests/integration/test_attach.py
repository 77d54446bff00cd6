"""Which processes are recorded, and that nothing of ours is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")
import proctor
from proctor.invariants.trace import Trace

MODEL = """
import os, sys, torch
from torch import nn
def train(steps, loader=None):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader or [(torch.randn(8, 4),) for _ in range(steps)]
    for (x,) in batches:
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""


def record(folder: Path, body: str, *launcher: str, env: dict[str, str] | None = None) -> tuple[subprocess.CompletedProcess[str], Path]:
    path, out = folder / "train.py", folder / "run"
    path.write_text(MODEL + textwrap.dedent(body))
    command = [*launcher, str(path)] if launcher else [sys.executable, str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--", *command],
        capture_output=True, text=True, timeout=400, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done, out


SPAWN = """
    import torch.multiprocessing as mp, torch.distributed as dist, tempfile
    def rank_main(rank, store):
        dist.init_process_group('gloo', init_method='file://' + store, rank=rank, world_size=2)
        train(3)
        dist.destroy_process_group()
    if __name__ == '__main__':
        mp.spawn(rank_main, (tempfile.mktemp(),), nprocs=2)
"""


@pytest.mark.slow
def test_mp_spawn_records_the_ranks_and_not_the_launcher(tmp_path: Path) -> None:
    _, out = record(tmp_path, SPAWN)
    processes = Trace.load([out]).processes
    assert sorted((p.rank, p.world) for p in processes) == [(0, 2), (1, 2)]
    assert all(p.finished for p in processes)


def test_without_the_extension_a_program_runs_and_is_recorded(tmp_path: Path) -> None:
    """As from a wheel without one. torch imports its compiler when the first optimizer is made, and meets our taps there."""
    _, run = record(tmp_path, "train(3)", env={"PROCTOR_NATIVE": "0"})
    assert Trace.load([run]).steps == 3


def test_torchrun_records_exactly_the_ranks(tmp_path: Path) -> None:
    body = """
        import torch.distributed as dist
        dist.init_process_group('gloo')
        train(3)
        dist.destroy_process_group()
    """
    _, out = record(tmp_path, body, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    assert sorted(p.rank for p in Trace.load([out]).processes) == [0, 1]


@pytest.mark.slow
def test_shell_script_is_followed(tmp_path: Path) -> None:
    shell = tmp_path / "go.sh"
    shell.write_text(f'#!/bin/sh\ncd /\nexec {sys.executable} "$1"\n')
    _, out = record(tmp_path, "train(2)", "sh", str(shell))
    assert Trace.load([out]).steps == 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_are_inert(tmp_path: Path, method: str) -> None:
    body = f"""
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == '__main__':
            data = TensorDataset(torch.randn(32, 4))
            train(0, DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context={method!r}))
    """
    _, out = record(tmp_path, body, python())
    trace = Trace.load([out])
    assert len(trace.processes) == 1 and trace.steps == 4


def test_a_process_that_never_trains_records_nothing(tmp_path: Path) -> None:
    done, out = record(tmp_path, """
        model = nn.Linear(2, 2)
        for _ in range(3):  # which inputs matter: gradients, and no update
            x = torch.ones(1, 2, requires_grad=True)
            model(x).sum().backward()
            print(x.grad)
    """)
    trace = Trace.load([out])
    assert trace.processes == []
    assert [line for line in done.stderr.splitlines() if "proctor" in line] == [
        "proctor: nothing was recorded: no optimizer of torch was made, and no parameter was seen to change after a backward"
    ]
    assert any("nothing was recorded" in note for note in trace.notes)


@pytest.mark.slow
def test_the_user_s_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import sys; sys.flag_of_mine = 'ran'\n")
    done, out = record(tmp_path, "print(sys.flag_of_mine); train(1)", env={"PYTHONPATH": str(tmp_path / "mine")})
    assert done.stdout.strip() == "ran"
    assert Trace.load([out]).steps == 1


@pytest.mark.slow
def test_what_happens_before_training_is_recorded(tmp_path: Path) -> None:
    _, out = record(tmp_path, "torch.manual_seed(3); train(1)")
    calls = proctor.open_run(str(out)).calls
    early = calls.filter(calls["phase"] == "init")["fn"].to_list()
    assert "torch.manual_seed" in early and "torch.nn.init.kaiming_uniform_" in early


def test_the_user_s_functions_and_lines_are_recorded(tmp_path: Path) -> None:
    body = """
        class Trainer:
            scale = 1
            def step(self, model, optimizer):
                optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
        def main():
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = Trainer()
            for _ in range(3):
                trainer.step(model, optimizer)
        main()
    """
    _, out = record(tmp_path, body, python())
    calls = proctor.open_run(str(out)).calls
    mine = calls.filter(calls["fn"] == "__main__.Trainer.step")
    assert mine.height == 3
    lines = (tmp_path / "train.py").read_text().splitlines()
    site = mine["site"][0]
    path, _, line = site.rpartition(":")
    assert Path(path).name == "train.py" and "trainer.step(model" in lines[int(line) - 1]


@pytest.mark.slow
def test_meta_and_watch_from_code(tmp_path: Path) -> None:
    body = f"""
        import proctor
        proctor.watch(out={str(tmp_path / 'mine')!r})
        proctor.meta(stage='warmup')
        train(2)
        proctor.meta(stage=None)
    """
    (tmp_path / "train.py").write_text(MODEL + textwrap.dedent(body))
    subprocess.run([sys.executable, str(tmp_path / "train.py")], check=True, timeout=400)
    opened = proctor.open_run(str(tmp_path / "mine"))
    assert opened.trace.steps == 2
    assert opened.calls.filter(opened.calls["meta"] == '{"stage": "warmup"}').height > 0


def test_two_threads_that_train_at_once_end_as_without_proctor_and_nothing_is_judged(tmp_path: Path) -> None:
    done, out = record(tmp_path, """
        import threading
        both = threading.Barrier(2)
        class Meet(torch.autograd.Function):
            forward = staticmethod(lambda ctx, x: x.clone())
            @staticmethod
            def backward(ctx, grad):
                both.wait(60)
                return grad
        def train(seed):
            noise = torch.Generator().manual_seed(seed)
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            for _ in range(150):
                optimizer.zero_grad()
                Meet.apply(model(torch.randn(16, 8, generator=noise))).pow(2).mean().backward()
                optimizer.step()
        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        [t.start() for t in threads], [t.join() for t in threads]
        print("ended")
    """, python())
    assert "ended" in done.stdout and done.stderr.count("two threads of this process train at once") == 1
    trace = Trace.load([out])
    assert [what for what, _ in trace.processes[0].blind] == ["all"]
    assert trace.calls.height and trace.values["seq"].max() < trace.calls["seq"].max() - 500, "calls go on, and no value is read any more"


def test_a_write_between_many_calls_of_a_model_is_seen_at_the_backward_at_the_latest(tmp_path: Path) -> None:
    """Before each of the first calls parameters are looked at; a solver's hundreds of calls are not slowed down for it."""
    _, out = record(tmp_path, """
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = 0
            for i in range(40):
                if (step, i) in ((1, 3), (2, 30)):
                    with torch.no_grad():
                        model.weight.mul_(0.5)
                loss = loss + model(torch.randn(8, 4)).sum()
            loss.backward()
            optimizer.step()
    """, python())
    run = proctor.open_run(str(out))
    names = dict(run.calls.select("seq", "fn").iter_rows())
    seen = run.states.filter((run.states["edge"] == 0) & (run.states["step"] > 0) & (run.states["attr"] == "data"))
    assert [(step, names[call]) for step, call in seen.select("step", "call").iter_rows()] == [(1, "torch.nn.Linear.forward"), (2, "torch.Tensor.backward")]


@pytest.mark.slow
def test_recording_every_second_step(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(MODEL + "train(12)")
    subprocess.run(
        [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--every", "4", "--warmup", "2", "--", sys.executable, str(path)],
        check=True, timeout=400, capture_output=True,
    )
    opened = proctor.open_run(str(out))
    updates = opened.calls.filter(opened.calls["fn"] == "torch.optim.Optimizer.step")
    assert updates["step"].to_list() == [0, 1, 4, 8]


def test_everything_is_put_back(tmp_path: Path) -> None:
    """Every function that a full recording replaced is the original object again after detaching.

    Left out: `step`, which torch itself wraps on the first construction of a class, and `torch.manual_seed`, which
    Dynamo replaces when it is imported (`TorchPatcher`); what others put over ours is theirs.
    """
    body = f"""
        import torch, torch.distributed as dist, torch.nn.functional as F
        from torch import nn
        from proctor.instrument import attach
        from proctor.instrument.patch import catalog
        from proctor.instrument.config import RecordConfig
        from proctor.native import is_tap
        places = [(p.owner, p.attribute) for p in catalog.points()]
        places += [(nn.Module, '__call__'), (torch.optim.SGD, 'step'), (torch.optim.Optimizer, 'zero_grad'),
                   (torch.optim.Optimizer, '__init__')]
        homes = type(torch._C._VariableFunctions), torch._C._nn, torch._VF, torch.functional, torch, F
        places += [(home, name) for home in homes for name in vars(home)]
        names = [set(vars(home)) for home in homes[:4]]
        before = [vars(o).get(a) for o, a in places]
        import pathlib; pathlib.Path({str(tmp_path / 'r')!r}).mkdir()
        observer = attach.install(RecordConfig(run={str(tmp_path / 'r')!r}))
        train(2)
        patched = sum(vars(o).get(a) is not b for (o, a), b in zip(places, before))
        attach.detach()
        after = [vars(o).get(a) for o, a in places]
        step = vars(torch.optim.SGD)['step']
        wrong = [(o, a) for (o, a), x, y in zip(places, before, after) if x is not y and a not in ('step', 'manual_seed')]
        print(patched > 250, wrong, is_tap(step), names == [set(vars(home)) for home in homes[:4]])
    """
    path = tmp_path / "train.py"
    path.write_text(MODEL + textwrap.dedent(body))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True [] False True"


@pytest.mark.slow
def test_identity_of_the_user_s_functions_is_kept(tmp_path: Path) -> None:
    """A tap equals its function but is another object, so a function that is held elsewhere is left alone."""
    body = """
        class Trainer:
            def step(self): return 1
            def other(self): return 2
            @staticmethod
            def helper(): return 3
            @classmethod
            def make(cls): return cls()
        def loss_a(x): return x.sum()
        def loss_b(x): return x.mean()
        LOSSES = {'a': loss_a}
        def main():
            trainer = Trainer()
            callback = trainer.step
            train(2)
            print(LOSSES['a'] is loss_a, callback.__func__ is Trainer.step, loss_b(torch.ones(2)).item())
            for _ in range(2):
                train(1), loss_a(torch.ones(1)), loss_b(torch.ones(1)), trainer.other(), Trainer.helper(), Trainer.make()
        main()
    """
    done, out = record(tmp_path, body)
    assert done.stdout.strip() == "True True 1.0"
    functions = set(proctor.open_run(str(out)).calls["fn"])
    assert {f"__main__.{n}" for n in ("loss_b", "Trainer.other", "Trainer.helper", "Trainer.make")} <= functions
    assert not functions & {"__main__.main", "__main__.train", "__main__.loss_a", "__main__.Trainer.step"}  # running, or held
