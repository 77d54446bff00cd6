"""Each operator on syntax trees: where it applies, what it changes, and that the mutant still trains."""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.mutants.registry import Operator, load

OPERATORS = {n: o for n, o in load("syntax").items() if o.kind == "syntax"}

PROGRAM = """
import copy
import types
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, x):
        x = self.embed(x)
        x = self.layer(x)
        x = F.dropout(x, 0.5, training=self.training)
        return self.head(x)

class Sampler:

    def set_epoch(self, epoch):
        self.epoch = epoch

def loss_function(scores, target):
    fit = F.cross_entropy(scores, target)
    spread = F.mse_loss(scores, scores.detach(), reduction='sum')
    return fit + 0.1 * scores.pow(2).mean() + spread

def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        return sum(loss_function(model(x), y).item() for x, y in data)

def train(model, teacher, optimizer, scheduler, train_loader, sampler, memory):
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = loss_function(model(x), y) / 2
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            memory.append(loss.item())
            if (i + 1) % 2 == 0:
                optimizer.step()
        for group in optimizer.param_groups:
            group['lr'] = 0.01
        scheduler.step()
        teacher.load_state_dict(model.state_dict())
        evaluate(model, train_loader)
    return {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}

def epochs(model, optimizer, scheduler, scaler, data):
    for epoch in range(2):
        for x, y in data:
            loss = loss_function(model(x), y)
            loss.backward()
            scaler.unscale_(optimizer)
            optimizer.step()
        scheduler.step()

class Scaler:

    def unscale_(self, optimizer):
        pass

torch.manual_seed(0)
model = Net()
teacher = copy.deepcopy(model)
teacher.requires_grad_(False)
wrapped = DDP(model, None)
groups = [{'params': [model.layer.weight], 'weight_decay': 0.1}, {'params': [model.layer.bias], 'weight_decay': 0.0}]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
dataset = [(torch.tensor(i % 5), torch.tensor((i * i) % 5)) for i in range(8)]
train_loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
memory = []
train(model, teacher, optimizer, scheduler, train_loader, Sampler(), memory)
epochs(wrapped, optimizer, scheduler, Scaler(), train_loader)
wrapped(torch.tensor([1]))
other = torch.optim.AdamW(groups)
torch.nn.Linear(4, 4).load_state_dict(model.layer.state_dict())

class dist:
    ReduceOp = types.SimpleNamespace(SUM=0, MAX=1)

    @staticmethod
    def all_reduce(tensor, op=0):
        pass

    @staticmethod
    def broadcast(tensor, src):
        pass

def partition(data, rank):
    return data[rank::2]

def by_hand(model, data, rank):
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= 2
    return partition(data, rank)
by_hand(model, dataset, 1)
"""

# A stand-in for the wrapper: data parallel training needs ranks, and operators look at names only.
WRAPPER = """
class DDP(__import__('torch').nn.Module):

    def __init__(self, module, ids):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)
"""

# A fragment that each operator leaves out (-) or puts in (+) somewhere.
CHANGES = {
    "accumulation_ignored": "+if True:",
    "backward_left_out": "-loss.backward()",
    "backward_twice": "+loss.backward(retain_graph=True)",
    "batch_repeated": "+[next(iter(train_loader))] * len(train_loader)",
    "broadcast_left_out": "-dist.broadcast(p.data, 0)",
    "checkpoint_without_a_part": "-'model': model.state_dict(),",
    "clip_after_step": "",
    "clip_before_backward": "",
    "clip_left_out": "-torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "copy_left_out": "-teacher.load_state_dict(model.state_dict())",
    "decay_on_norms": "+[model.layer.bias], 'weight_decay': 0.1",
    "detach_added": "+self.embed(x).detach()",
    "detach_left_out": "-scores.detach()",
    "division_left_out": "-loss_function(model(x), y) / 2",
    "dropout_always": "+training=True",
    "eval_for_train": "-model.train()",
    "eval_left_out": "-model.eval()",
    "first_slice_on_every_rank": "+partition(data, 0)",
    "frozen": "+next(iter(model.parameters())).requires_grad_(False)",
    "labels_shifted": "+target.roll(1, 0)",
    "load_left_out": "-load_state_dict(model.layer.state_dict())",
    "loss_averaged": "+reduction='mean'",
    "loss_divided": "+(loss / 8).backward()",
    "loss_summed": "+F.cross_entropy(scores, target, reduction='sum')",
    "loss_term_zero": "+0 * spread",
    "memory_never_written": "-memory.append(loss.item())",
    "no_grad_left_out": "-with torch.no_grad():",
    "optimizer_of_a_copy": "+deepcopy(model).parameters()",
    "parameters_left_out": "+list(model.parameters())[:-1]",
    "precision_lost": "+self.layer(x).bfloat16().float()",
    "rate_not_set": "-group['lr'] = 0.01",
    "reduction_left_out": "-dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)",
    "reduction_not_divided": "-p.grad /= 2",
    "reduction_of_another_kind": "+op=dist.ReduceOp.MAX",
    "scheduler_each_batch": "",
    "scheduler_left_out": "-scheduler.step()",
    "scheduler_twice": "+scheduler.step()\n        scheduler.step()",
    "scores_twice_normalised": "+scores.softmax(-1)",
    "set_epoch_left_out": "-sampler.set_epoch(epoch)",
    "shuffle_left_out": "+shuffle=False",
    "state_forgotten": "+optimizer.state.clear()",
    "step_before_backward": "",
    "step_left_out": "",
    "step_twice": "+optimizer.step()\n            optimizer.step()",
    "train_left_out": "-model.train()",
    "unfrozen": "-teacher.requires_grad_(False)",
    "unscale_left_out": "-scaler.unscale_(optimizer)",
    "untied": "-self.embed.weight = self.head.weight",
    "wrapper_bypassed": "+wrapped.module(",
    "zero_grad_before_step": "",
    "zero_grad_left_out": "-optimizer.zero_grad()",
}


def planted(operator: Operator, source: str) -> list[str]:
    """The program with the bug, once for each place."""
    assert operator.sites is not None
    mutants = []
    for i in range(len(list(operator.sites(ast.parse(source))))):
        tree = ast.parse(source)
        list(operator.sites(tree))[i].apply()
        mutants.append(ast.unparse(ast.fix_missing_locations(tree)))
    return mutants


def test_every_operator_is_in_the_table() -> None:
    assert sorted(OPERATORS) == sorted(CHANGES)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_an_operator_changes_what_it_says(name: str) -> None:
    source = ast.unparse(ast.parse(PROGRAM))
    mutants = planted(OPERATORS[name], source)
    assert mutants and all(m != source for m in mutants)
    sign, fragment = CHANGES[name][:1], CHANGES[name][1:]
    before = source.count(fragment)
    if sign == "+":
        assert any(m.count(fragment) > before for m in mutants)
    elif sign == "-":
        assert before and any(m.count(fragment) < before for m in mutants)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_an_operator_does_not_apply_where_nothing_trains(name: str) -> None:
    assert OPERATORS[name].applies(PROGRAM)
    assert not OPERATORS[name].applies("import json\n\ndef main(path):\n    return json.load(open(path))\n\nmain('a.json')\n")


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_mutant_is_still_a_program_that_trains(name: str) -> None:
    source = ast.unparse(ast.parse(WRAPPER + PROGRAM))
    mutant = planted(OPERATORS[name], source)[0]
    code = compile(mutant, "mutant", "exec")
    # torch itself refuses some places: the bug is then not silent, and the mutant does not count.
    with contextlib.suppress(RuntimeError):
        exec(code, {"__name__": "mutant"})


def test_a_place_is_named_by_line_function_and_words() -> None:
    sites = OPERATORS["clip_left_out"].sites
    assert sites is not None
    source = ast.unparse(ast.parse(PROGRAM))
    (place,) = sites(ast.parse(source))
    assert source.splitlines()[place.line - 1].strip().startswith("torch.nn.utils.clip_grad_norm_")
    assert place.function == "train"
    assert {"clip_grad_norm_", "model"} <= set(place.words)


def test_order_is_changed_as_said() -> None:
    source = ast.unparse(ast.parse(PROGRAM))

    def order(name: str, *calls: str) -> list[int]:
        text = planted(OPERATORS[name], source)[0].split("def train", 1)[1].split("def epochs", 1)[0]
        return [text.index(call) for call in calls]

    assert order("clip_after_step", "optimizer.step()", "clip_grad_norm_") == sorted(order("clip_after_step", "optimizer.step()", "clip_grad_norm_"))
    assert (lambda p: p == sorted(p))(order("clip_before_backward", "clip_grad_norm_", "loss.backward()"))
    assert (lambda p: p == sorted(p))(order("step_before_backward", "optimizer.step()", "loss.backward()"))
    assert (lambda p: p == sorted(p))(order("zero_grad_before_step", "loss.backward()", "zero_grad", "optimizer.step()"))
