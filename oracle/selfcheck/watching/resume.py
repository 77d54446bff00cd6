"""k steps, save, load, go on = straight through: what `state_dict` does not tell is lost by a resume.

A fork that is made before the first step waits: it is the fresh process. At the checked update it gets the `state_dict` of the models, the
optimizers and the schedulers, and the batch; it loads them, does the step, and tells what came out. A copy of the running process does the same
step. All are the program's own objects, so nothing is asked of it. What the program's own checkpoint function forgets to save is
not seen here (`--vary` with its own options is for that); nor is the position of its loader.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import os
import select
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn

from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome, Word
from proctor.oracle.selfcheck.watching.fork import can_fork, in_copy, quiet
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.step import Call, Update, seeded, short, written_at
from proctor.oracle.selfcheck.watching.undropped import undropped
from proctor.oracle.selfcheck.watching.values import difference

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.watching.watch import Watch

NAME: Final = "resume"
CLAIM: Final = "k steps, save, load, go on gives what going straight on gives"
TIMEOUT_S: Final = 300.0
RATES: Final = 3  # steps of a scheduler that are compared


class Fresh:
    """The waiting fork. What both hand each other lies in files without a name: nobody else can write what is unpickled there.

    Args:
        send: descriptor; what is written wakes it. Closing it ends it.
        told: descriptor; ends when the fork does, or says that it is done.
        state, result: what it is given, and what it leaves.
        pid: of the fork.
    """

    def __init__(self, send: int, told: int, state: IO[bytes], result: IO[bytes], pid: int) -> None:
        self.send, self.told, self.state, self.result, self.pid = send, told, state, result, pid

    @classmethod
    def wait(cls, watch: Watch) -> Fresh | None:
        """Make it; `None` where no copy of the process can be made."""
        if not can_fork():
            return None
        state, result = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  open as long as the fork waits
        receive, send = os.pipe()
        told, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(receive)
            os.close(tell)
            return cls(send, told, state, result, pid)
        try:
            os.close(send)
            os.close(told)
            quiet()
            if os.read(receive, 1) == b"g":
                _resumed(watch, state, result)
                os.write(tell, b"d")
        finally:
            os._exit(0)

    def go(self, state: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Wake it; what it found, and why there is nothing."""
        try:
            torch.save(state, self.state)
            self.state.flush()
            self.state.seek(0)
            os.write(self.send, b"g")
        except (OSError, RuntimeError, AttributeError, TypeError) as e:
            self.end()
            return {}, short(e)
        why = ""
        if not select.select([self.told], [], [], TIMEOUT_S)[0]:
            why = f"it took longer than {TIMEOUT_S:.0f} s"
        elif os.read(self.told, 1) != b"d":
            why = "the process that waited has ended"
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
        if why:
            return {}, why
        try:
            self.result.seek(0)
            return torch.load(self.result, weights_only=True), ""
        except Exception as e:  # noqa: BLE001 - cut off
            return {}, short(e)

    def end(self) -> None:
        """It is not needed."""
        for descriptor in (self.send, self.told):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.send = self.told = -1
        self.state.close()
        self.result.close()


def judge(watch: Watch, update: Update) -> Outcome:
    """Compare the step after a resume with the step that goes straight on."""

    def outcome(verdict: Word, reason: str) -> Outcome:
        return Outcome(relation=NAME, claim=CLAIM, subject=update.name, verdict=verdict, reason=reason)

    fresh, watch.fresh = watch.fresh, None
    try:
        state = _state(update)
        found, why = fresh.go(state)
        if why or "error" in found:
            return outcome("inconclusive", f"the step could not be done after a resume: {found.get('error') or why}")
        made, why = in_copy(lambda: _bytes(_step(update.calls, update.optimizers, update.schedulers, state)), TIMEOUT_S)
        straight = torch.load(io.BytesIO(made), weights_only=True) if made else {"error": why}
        if "error" in straight:
            return outcome("inconclusive", f"the step could not be done again: {straight['error']}")
        return msgspec.structs.replace(_compare(straight, found, update), claim=CLAIM, subject=update.name)
    except NotApplicable as e:
        return outcome("not-applicable", str(e))
    except Unknown as e:
        return outcome("inconclusive", str(e))
    except Exception as e:  # noqa: BLE001 - the program's own state_dict
        return outcome("inconclusive", f"its state cannot be saved: {short(e)}")
    finally:
        fresh.end()


def _state(update: Update) -> dict[str, Any]:
    calls = [c for c in update.calls if c.gradients]
    if not calls:
        raise NotApplicable("no model with the optimizer's parameters was called as a whole")
    return {
        "models": [(id(m), m.state_dict()) for m in update.models],
        "optimizers": [(id(o), o.state_dict()) for o in update.optimizers],
        "schedulers": [(id(s), s.state_dict()) for s in update.schedulers],
        "calls": [(id(c.module), c.args, c.kwargs, c.random[0], c.training, {p: g for p, g in c.gradients.items()}) for c in calls],
        "optimizer": id(update.optimizer),
    }


def _resumed(watch: Watch, given: IO[bytes], left: IO[bytes]) -> None:
    """In the fork that waited: load, do the step, leave the results."""
    try:
        given.seek(0)
        state = torch.load(given, weights_only=False)  # nobody but the process that this one was forked from can have written it; arguments of a model may be anything
        objects = {id(o): o for o in gc.get_objects() if issubclass(type(o), nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)}
        for kind in ("models", "optimizers", "schedulers"):
            for number, values in state[kind]:
                if number not in objects:
                    raise Unknown("a model, optimizer or scheduler was made after the first step")
                objects[number].load_state_dict(values)
        calls = []
        for number, args, kwargs, words, training, gradients in state["calls"]:
            calls.append(Call(objects[number], "", tuple(args), kwargs, [words, None, None, None], training, gradients=gradients))
        result = _step(calls, [objects[n] for n, _ in state["optimizers"]], [objects[n] for n, _ in state["schedulers"]], state)
    except Exception as e:  # noqa: BLE001 - told to the process that asked
        result = {"error": short(e) if not isinstance(e, Unknown) else str(e)}
    torch.save(result, left)
    left.flush()


def _step(calls: Sequence[Call], optimizers: Sequence[Any], schedulers: Sequence[Any], state: dict[str, Any]) -> dict[str, Any]:
    """Results, gradients and updates of the step, and the learning rates after it."""
    out: dict[str, Any] = {"results": {}, "gradients": {}, "updates": {}, "rates": []}
    for number, call in enumerate(c for c in calls if c.gradients):
        call.random = [call.random[0], None, None, None]
        seeded(number)  # generators of numpy and Python: the same on both sides
        call.module.train(call.training)
        with undropped(call.module):
            results, gradients = call.derive()
        out["results"].update({f"{number}.{p}": t for p, t in results.items()})
        out["gradients"].update({f"{number}.{n}": t for n, t in gradients.items()})
    where = {id(p): f"{i}.{n}" for i, m in enumerate(dict.fromkeys(c.module for c in calls)) for n, p in m.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        if state["optimizers"][number][0] != state["optimizer"]:
            continue
        held = [p for g in optimizer.param_groups for p in g["params"]]
        before = [p.detach().clone() for p in held]
        for p in held:  # of what is in no call, only the running process has a gradient
            if id(p) not in where:
                p.grad = None
        optimizer.step()
        out["updates"].update({where.get(id(p), str(i)): p.detach() - b for i, (p, b) in enumerate(zip(held, before, strict=True))})
    for _ in range(RATES):
        for scheduler in schedulers:
            with contextlib.suppress(TypeError):  # one that needs a metric
                scheduler.step()
        out["rates"].append([float(g["lr"]) for o in optimizers for g in o.param_groups if "lr" in g])
    return out


def _compare(straight: dict[str, Any], resumed: dict[str, Any], update: Update) -> Outcome:
    for kind, words in (("results", "result"), ("gradients", "gradient"), ("updates", "update")):
        one, other = straight[kind], resumed[kind]
        name = next((n for n in one if n not in other or difference(one[n], other[n])[0]), None)
        if name is None:
            continue
        worst = gap({name: one[name]}, {name: other[name]}) if name in other else None
        if worst is not None and worst.ratio <= 1.0:
            continue
        culprit = _optimizer(update) if kind == "updates" else _hidden(update, name)
        lost = "the optimizer's state_dict does not hold all of its state" if kind == "updates" else "the model keeps something that is not in its state_dict"
        error = worst.error if worst is not None else float("inf")
        return Outcome(
            relation=NAME, verdict="different", reason=f"after a resume the {words} {name.partition('.')[2] or 'of the model'} is another: {lost}",
            expected="the bits of the run that goes straight on", seen=f"a difference of {error:.2g} of the norm", culprit=culprit, error=error,
            advice="make it a buffer (register_buffer, persistent) or part of get_extra_state / state_dict",
        )  # fmt: skip
    if straight["rates"] != resumed["rates"]:
        kinds = ", ".join(type(s).__name__ for s in update.schedulers)
        return Outcome(
            relation=NAME, verdict="different", reason=f"after a resume the learning rate goes another way: {resumed['rates']} for {straight['rates']}",
            expected=str(straight["rates"]), seen=str(resumed["rates"]), culprit=Culprit("", kinds, _line(update.schedulers[0]) if update.schedulers else ""),
            advice="the scheduler's state_dict does not hold all of its state",
        )  # fmt: skip
    return Outcome(relation=NAME, verdict="equivalent", reason=f"{len(straight['gradients'])} gradients, the update and {RATES} learning rates are the same; the loader's position is not checked")


def _hidden(update: Update, name: str) -> Culprit:
    """The first module with plain state beside its buffers, else the model."""
    call = next(iter(update.calls))
    for path, module in call.module.named_modules():
        plain = [k for k, v in vars(module).items() if isinstance(v, torch.Tensor | float) and not k.startswith("_")]
        loose = [k for k in module._buffers if k in module._non_persistent_buffers_set]
        if plain or loose:
            return Culprit(path or call.name, f"{type(module).__name__}.{(plain + loose)[0]}", written_at(module))
    for path, module in call.module.named_modules():
        counted = [k for k, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool) and not k.startswith("_") and k in ("step", "steps", "calls", "counter", "count", "n", "t", "it")]
        if counted:
            return Culprit(path or call.name, f"{type(module).__name__}.{counted[0]}", written_at(module))
    return call.place(name.partition(".")[2].rpartition(".")[0])


def _optimizer(update: Update) -> Culprit:
    return Culprit("", update.name, _line(update.optimizer))


def _line(item: Any) -> str:
    code = getattr(inspect.unwrap(type(item).step), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and "/torch/" not in code.co_filename else ""


def _bytes(value: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
