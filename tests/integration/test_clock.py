"""The clock on training loops as people write them: Proctor counts the steps that the user counts, and nothing healthy is a violation.

One process runs all programs, each recorded as `proctor record` records it. What follows an update
(clearing, evaluation, scheduler, saving) is in the step of that update. The same programs run bare
first: losses are the same bit for bit.
"""

# More than 400 lines: its programs stand in it as text, and one process runs them all.
from __future__ import annotations

import json
import os
import subprocess
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from helpers.warm import python

pytest.importorskip("torch")
import proctor
from proctor.invariants.pack import Pack, read_pack
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

RUNNER = """
import json, os, sys, warnings
import torch
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
from pathlib import Path
from proctor.instrument import attach
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run

folder = Path(sys.argv[1])
os.chdir(folder)
sums = {}
for how in ("bare", "recorded"):
    for path in sorted(folder.glob("*.py")):
        if how == "recorded":
            create_run(folder / path.stem, [path.name], overwrite=False)
            attach.install(RecordConfig(run=str(folder / path.stem)))
        torch.manual_seed(0)
        space = {"__name__": "__main__", "__file__": str(path)}
        exec(compile(path.read_text(), str(path), "exec"), space)
        attach.detach()
        models = [m for v in space.values() for m in (v if isinstance(v, list) else [v]) if isinstance(m, torch.nn.Module)]
        trained = [p for m in models for p in m.parameters()] + [v for v in space.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        sums.setdefault(path.stem, []).append([p.double().abs().sum().item().hex() for p in trained])
Path("sums.json").write_text(json.dumps(sums))
"""

HEAD = """
import copy, os, tempfile
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def mlp(inputs=8, outputs=1, hidden=16):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))

def data(n=64, size=16):
    x = torch.randn(n, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), size, shuffle=True)

def evaluate(model):
    model.eval()
    with torch.no_grad():
        loss = model(torch.randn(4, 8)).mean().item()
    model.train()
    return loss
"""


@dataclass(frozen=True)
class Program:
    """steps: that the user counts. evaluated, scheduled, saved: the steps that these rows must be in; None: not looked at."""

    text: str
    steps: int
    evaluated: tuple[int, ...] | None = None
    scheduled: tuple[int, ...] | None = None
    saved: tuple[int, ...] | None = None
    micro: int = 0
    checked: int = 11  # rules, at least
    says: tuple[str, ...] = ()  # what shipped rules say of it, once


PROGRAMS = {
    "clears_last": Program(
        """
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for i in range(6):
            x = torch.randn(16, 8)
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            if i % 3 == 2:
                evaluate(model)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        steps=6, evaluated=(2, 5), scheduled=(-1, 0, 1, 2, 3, 4, 5), saved=(2, 5),
    ),
    "clears_first": Program(
        """
        model, loader = mlp(), data()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        evaluate(model)
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            evaluate(model)
            scheduler.step()
            torch.save(model.state_dict(), "first.pt")
        """,
        steps=8, evaluated=(-1, 3, 7), scheduled=(-1, 3, 7), saved=(3, 7),
    ),
    "closure": Program(
        """
        x = torch.randn(32, 8); y = x.sum(1, keepdim=True)
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for i in range(5):
            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
            evaluate(model)
        """,
        steps=5, evaluated=(0, 1, 2, 3, 4),
    ),
    "accumulates": Program(
        """
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 3))
        optimizer.zero_grad()
        for i in range(14):  # the last two are half a step
            x = torch.randn(16, 8)
            (F.mse_loss(model(x), x.sum(1, keepdim=True)) / 4).backward()
            if (i + 1) % 4 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        """,
        steps=3, scheduled=(-1, 0, 1, 2), micro=3,
    ),
    "scaler_skips": Program(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for i in range(6):
            x = torch.randn(16, 8) * (float("inf") if i in (2, 4) else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            evaluate(model)
            optimizer.zero_grad()
        """,
        steps=6, evaluated=(0, 1, 2, 3, 4, 5),
    ),
    "adversaries": Program(
        """
        netG, netD = mlp(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
        optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
        optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
        criterion, loader = nn.BCELoss(), data()
        for epoch in range(2):
            for real, _ in loader:
                netD.zero_grad()
                criterion(netD(real), torch.ones(16, 1)).backward()
                fake = netG(torch.randn(16, 4))
                criterion(netD(fake.detach()), torch.zeros(16, 1)).backward()
                optimizerD.step()
                netG.zero_grad()
                criterion(netD(fake), torch.ones(16, 1)).backward()
                optimizerG.step()
            torch.save(netG.state_dict(), "g.pt")
        """,
        steps=8, saved=(3, 7), micro=1,
    ),
    "trains_with_norms_kept": Program(
        """
        generator, critic = mlp(4, 8).eval(), mlp(8).eval()  # norms of what was trained before
        of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
        of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
        for i in range(6):
            made, real = generator(torch.randn(16, 4)), torch.randn(16, 8)
            of_critic.zero_grad()
            (critic(made.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(made).mean()).backward()
            of_generator.step()
        """,
        steps=6, evaluated=(-1,), says=("the model is in training mode in the forward before each backward",),
    ),
    "critic_more_often": Program(
        """
        G, D = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        opt_G = torch.optim.RMSprop(G.parameters(), lr=1e-3)
        opt_D = torch.optim.RMSprop(D.parameters(), lr=1e-3)
        for i, (real, _) in enumerate(data(112)):
            opt_D.zero_grad()
            z = torch.randn(16, 4)
            (D(G(z).detach()).mean() - D(real).mean()).backward()
            opt_D.step()
            for p in D.parameters():
                p.data.clamp_(-0.1, 0.1)
            if i % 3 == 0:
                opt_G.zero_grad()
                (-D(G(z)).mean()).backward()
                opt_G.step()
        """,
        steps=7,
    ),
    "two_optimizers": Program(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.fc = nn.Embedding(20, 8), nn.Linear(24, 1)
            def forward(self, x):
                return self.fc(self.emb(x).flatten(1))
        model = Net()
        often, seldom = torch.optim.SGD(model.fc.parameters(), lr=0.1), torch.optim.Adam(model.emb.parameters(), lr=0.01)
        for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randint(0, 20, (128, 3))), 16, shuffle=True)):
            model.zero_grad()
            F.mse_loss(model(x), x.float().mean(1, keepdim=True)).backward()
            often.step()
            if i % 2:
                seldom.step()
        """,
        steps=8,
    ),
    "resumed": Program(
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        def run(folder, resume):
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if resume:  # makes the optimizer's state by a step without gradients
                model_state, optimizer_state = get_state_dict(model, optimizer)
                dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)
                set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
            for i in range(3):
                optimizer.zero_grad()
                x = torch.randn(16, 8)
                F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                optimizer.step()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)
            return model
        with tempfile.TemporaryDirectory() as folder:
            first = run(folder, False)
            second = run(folder, True)
        """,
        steps=6,
    ),
    "schedule_moved_on": Program(
        """
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        for x, y in data():
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        """,
        steps=4, scheduled=(-1, 0, 1, 2, 3),
    ),
    "averaged": Program(
        """
        from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
        model, loader = mlp(), data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        averaged, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.01)
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            averaged.update_parameters(model)
            scheduler.step()
        update_bn(loader, averaged)
        evaluate(averaged)
        """,
        steps=12, scheduled=(-1, 3, 7, 11),
    ),
    "layer_by_layer": Program(
        """
        class Layer(nn.Linear):
            def __init__(self, inputs, outputs):
                super().__init__(inputs, outputs)
                self.opt = torch.optim.Adam(self.parameters(), lr=0.02)
            def forward(self, x):
                return torch.relu(F.linear(x / (x.norm(2, 1, keepdim=True) + 1e-4), self.weight, self.bias))
            def learn(self, good, bad):
                for _ in range(4):
                    loss = torch.log1p(torch.exp(torch.cat([1 - self.forward(good).pow(2).mean(1), self.forward(bad).pow(2).mean(1) - 1]))).mean()
                    self.opt.zero_grad()
                    loss.backward()
                    self.opt.step()
                return self.forward(good).detach(), self.forward(bad).detach()
        layers = [Layer(8, 16), Layer(16, 12)]
        good, bad = torch.randn(16, 8), torch.randn(16, 8)
        for layer in layers:
            good, bad = layer.learn(good, bad)
        """,
        steps=8,
    ),
    "inner_loops": Program(
        """
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        meta = torch.optim.Adam(model.parameters(), lr=1e-2)
        for i in range(3):
            meta.zero_grad()
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.05)
            for _ in range(2):
                x = torch.randn(8, 4)
                loss = F.mse_loss(learner(x), x.sum(1, keepdim=True))
                inner.zero_grad()
                loss.backward()
                inner.step()
            x = torch.randn(8, 4)
            grads = torch.autograd.grad(F.mse_loss(learner(x), x.sum(1, keepdim=True)), learner.parameters())
            for p, g in zip(model.parameters(), grads):
                p.grad = g
            meta.step()
        """,
        steps=9,  # the inner updates are updates, too
    ),
    "rollouts": Program(
        """
        class Agent(nn.Module):
            def __init__(self):
                super().__init__()
                self.critic, self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(8, 2)
            def act(self, x, action=None):
                probs = torch.distributions.Categorical(logits=self.actor(x))
                action = probs.sample() if action is None else action
                return action, probs.log_prob(action), self.critic(x)
        agent = Agent()
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
        for rollout in range(2):
            obs, ret = torch.randn(32, 8), torch.randn(32)
            with torch.no_grad():
                act, logp, val = agent.act(obs)
            for epoch in range(2):
                for mb in torch.randperm(32).split(16):
                    _, new, v = agent.act(obs[mb], act[mb])
                    loss = -((new - logp[mb]).exp() * (ret[mb] - val[mb].squeeze(1))).mean() + (v.view(-1) - ret[mb]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
        """,
        steps=8,
    ),
    "tasks": Program(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
            def forward(self, x):
                return self.head(self.body(x))
        model, teacher = Net(), None
        for task in range(3):  # a head drawn anew and a new optimizer a task; the model of the task before is its frozen teacher
            model.head.reset_parameters()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for x, y in data():
                out = model(x)
                loss = F.mse_loss(out, y)
                if teacher is not None:
                    with torch.no_grad():
                        old = teacher(x)
                    loss = loss + F.mse_loss(out, old)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            evaluate(model)
            teacher = copy.deepcopy(model).eval()
            for p in teacher.parameters():
                p.requires_grad = False
        """,
        steps=12,
    ),
    "attacked": Program(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in range(5):
            x, y = torch.randn(16, 8).requires_grad_(), torch.randint(0, 3, (16,))
            F.cross_entropy(model(x), y).backward()
            optimizer.zero_grad()
            F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
            optimizer.step()
        """,
        steps=5, micro=1,
    ),
    "sharpness_aware": Program(
        """
        class SAM(torch.optim.Optimizer):
            def __init__(self, params, base, **kw):
                super().__init__(params, kw)
                self.base = base(self.param_groups, **kw)
            @torch.no_grad()
            def climb(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        self.state[p]["old"] = p.clone()
                        p.add_(0.01 * p.grad)
                self.zero_grad()
            @torch.no_grad()
            def descend(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.copy_(self.state[p]["old"])
                self.base.step()
                self.zero_grad()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05)
        for i in range(5):
            x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
            F.cross_entropy(model(x), y).backward()
            optimizer.climb()
            F.cross_entropy(model(x), y).backward()
            optimizer.descend()
        """,
        steps=5, micro=1,
    ),
    "is_interrupted": Program(
        """
        class Stops(torch.optim.SGD):
            left = 4
            def zero_grad(self, set_to_none=True):
                Stops.left -= 1
                if Stops.left < 0:
                    raise KeyboardInterrupt
                super().zero_grad(set_to_none)
        def stop(*_):
            raise KeyboardInterrupt
        for kind in (Stops, torch.optim.SGD):
            model = mlp()
            optimizer = kind(model.parameters(), lr=1e-2)
            try:
                for i in range(6):
                    optimizer.zero_grad()
                    F.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 1)).backward()
                    if i == 4:
                        optimizer.register_step_pre_hook(stop)
                    optimizer.step()
            except KeyboardInterrupt:
                pass
        """,
        steps=9,
    ),
    "updates_data_by_hand": Program(
        """
        model = mlp()
        for i in range(5):
            model.zero_grad()
            x = torch.randn(16, 8)
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            for p in model.parameters():
                p.data.add_(p.grad.data, alpha=-0.05)  # moves no version counter
            if i % 2:
                evaluate(model)
        """,
        steps=5, evaluated=(1, 3), checked=1,
    ),
    "updates_by_hand_beside_an_optimizer": Program(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        unused = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in data(96):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.05)
        """,
        steps=6, checked=9,
    ),
    "updates_by_hand_after_two_microbatches": Program(
        """
        class Adaptive:  # an optimizer of the user's own
            def __init__(self, params):
                self.params, self.squares = list(params), None
            @torch.no_grad()
            def step(self):
                self.squares = self.squares or [torch.zeros_like(p) for p in self.params]
                for p, square in zip(self.params, self.squares):
                    square.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                    p -= 0.01 * p.grad / (square.sqrt() + 1e-8)
                    p.grad = None
        model = mlp()
        optimizer = Adaptive(model.parameters())
        for i in range(4):
            for _ in range(2):
                x = torch.randn(16, 8)
                F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        """,
        steps=4, micro=1, checked=1,
    ),
    "updates_tensors_by_hand": Program(
        """
        w, b = torch.randn(8, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
        for i in range(5):
            x = torch.randn(16, 8)
            F.mse_loss(x @ w + b, x.sum(1, keepdim=True)).backward()
            with torch.no_grad():
                w -= 0.05 * w.grad
                b -= 0.05 * b.grad
                w.grad.zero_()
                b.grad.zero_()
        """,
        steps=5, checked=0,
    ),
    "updates_a_copy_beside_its_original_by_hand": Program(
        """
        one = [nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 1))]
        other = [nn.Parameter(p.detach() * 1.001) for p in one]  # as after a sum over ranks: equal but for rounding
        for i in range(5):
            x = torch.randn(16, 8)
            for a, b in (one, other):
                F.mse_loss(torch.relu(x @ a) @ b, x.sum(1, keepdim=True)).backward()
            with torch.no_grad():
                for p in (*one, *other):
                    p -= 0.01 * p.grad
                    p.grad.zero_()
        """,
        steps=5, checked=0,
    ),
    "asks_for_gradients": Program(
        """
        model = mlp()
        for i in range(5):
            x = torch.randn(16, 8)
            grads = torch.autograd.grad(F.mse_loss(model(x), x.sum(1, keepdim=True)), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p -= 0.05 * g
            if i % 2:
                evaluate(model)
        """,
        steps=5, evaluated=(1, 3), checked=0,
    ),
    "asks_for_gradients_beside_an_optimizer": Program(
        """
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for i in range(5):
            x = torch.randn(16, 8, requires_grad=True)
            out = model(x)
            penalty = torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().mean()
            optimizer.zero_grad()
            (F.mse_loss(out, x.detach().sum(1, keepdim=True)) + 0.1 * penalty).backward()
            optimizer.step()
        """,
        steps=5,
    ),
    "makes_new_tensors": Program(
        """
        params = [(torch.randn(8, 16) * 0.1).requires_grad_(), torch.zeros(16, requires_grad=True), torch.randn(16, 1, requires_grad=True)]
        for i in range(6):
            x = torch.randn(16, 8)
            loss = F.mse_loss((x @ params[0] + params[1]).relu() @ params[2], x.sum(1, keepdim=True))
            grads = torch.autograd.grad(loss, params)
            params = [(p - 0.01 * g).detach().requires_grad_() for p, g in zip(params, grads)]
        w, b, v = params
        """,
        steps=6, checked=0,
    ),
    "makes_new_tensors_for_backward": Program(
        """
        w, b = torch.randn(8, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
        for i in range(6):
            x = torch.randn(16, 8)
            F.mse_loss(x @ w + b, x.sum(1, keepdim=True)).backward()
            w, b = (w - 0.05 * w.grad).detach().requires_grad_(), (b - 0.05 * b.grad).detach().requires_grad_()
        """,
        steps=6, checked=0,
    ),
    "keeps_the_graph_of_all_steps": Program(
        """
        first = torch.randn(8, 1, requires_grad=True)
        w = first
        for i in range(6):
            x = torch.randn(16, 8)
            grads = torch.autograd.grad(F.mse_loss(x @ w, x.sum(1, keepdim=True)), [w], create_graph=True)
            w = w - 0.05 * grads[0]
        """,
        steps=6, checked=0,
    ),
    "transforms_a_function": Program(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        params = {name: p.detach() for name, p in model.named_parameters()}
        def loss_of(params, x):
            return F.mse_loss(torch.func.functional_call(model, params, (x,)), x.sum(1, keepdim=True))
        for i in range(6):
            grads = torch.func.grad(loss_of)(params, torch.randn(16, 8))
            params = {name: p - 0.01 * grads[name] for name, p in params.items()}
        trained = [p.requires_grad_() for p in params.values()]
        w, b, v, c = trained
        """,
        steps=6, micro=1, checked=0,  # that an update has been is known when the next gradient is asked for, behind its forward
    ),
    "samples_at_last": Program(
        """
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for episode in range(4):  # several forwards for one backward; a last forward that nothing follows
            actions = [torch.distributions.Categorical(logits=model(torch.randn(1, 8))) for _ in range(3)]
            loss = -torch.stack([a.log_prob(a.sample()) for a in actions]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        best = model(torch.randn(1, 8)).argmax().item()
        """,
        steps=4,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clock")
    for name, program in PROGRAMS.items():
        (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(program.text))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PROCTOR")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python(), "-c", RUNNER, str(folder)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@cache
def shipped() -> Pack:
    return read_pack(Path(proctor.invariants.__path__[0]) / "packs" / "torch.json")


def steps_of(trace: Trace, function: str, phase: str | None = None) -> tuple[int, ...]:
    """The steps in which a function was called."""
    codes = [code for code, name in enumerate(trace.functions) if name == function or (function == "<model>" and name.endswith(".forward"))]
    calls = trace.calls.filter(pl.col("fn").is_in(codes)).join(trace.contexts, on="ctx")
    if phase is not None:
        calls = calls.filter(pl.col("phase") == phase)
    return tuple(sorted(set(calls["step"].to_list())))


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_are_the_user_s(runs: Path, name: str) -> None:
    program, trace = PROGRAMS[name], Trace.load([runs / name])
    assert trace.steps == program.steps
    assert trace.contexts.filter(pl.col("step") < program.steps)["micro"].max() == program.micro
    assert not [note for p in trace.processes for note in p.notes], "an error of ours"
    if program.evaluated is not None:
        evaluated = set(steps_of(trace, "<model>", "eval")) | ({-1} & set(steps_of(trace, "<model>", "init")))
        assert tuple(sorted(evaluated)) == program.evaluated
    if program.scheduled is not None:
        assert steps_of(trace, "torch.optim.lr_scheduler.LRScheduler.step") == program.scheduled
    if program.saved is not None:
        assert steps_of(trace, "torch.save") == program.saved


def test_tensors_that_no_model_owns_have_the_names_of_the_program(runs: Path) -> None:
    trace = Trace.load([runs / "updates_tensors_by_hand"])
    rows = trace.states.join(trace.contexts, on="ctx").join(trace.variables, on="var").filter(pl.col("attr") == "data")
    assert dict(rows.group_by("name").agg(pl.col("step").n_unique()).iter_rows()) == {"w": 5, "b": 5}


@pytest.mark.parametrize("name", PROGRAMS)
def test_healthy_loops_violate_no_shipped_rule(runs: Path, name: str) -> None:
    result = check(Trace.load([runs / name]), [shipped()])
    assert result.checked >= PROGRAMS[name].checked
    assert tuple(v.text for v in result.violations) == PROGRAMS[name].says, [(v.step, v.seen) for v in result.violations]


def test_training_is_the_same_bit_for_bit(runs: Path) -> None:
    sums = json.loads((runs / "sums.json").read_text())
    assert sums.keys() == PROGRAMS.keys()
    for name, (bare, recorded) in sums.items():
        assert bare and bare == recorded, name
