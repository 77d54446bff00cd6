"""What of a program is tracked, and what it is called: models, parameters, buffers, optimizers.

`steps` says which optimizers were made and which tensors a backward gave gradients to. Models are then found from those: the
module trees, among all that live, that own these parameters. Nothing is named by the user, nothing is wrapped, and nothing is
kept alive. Out: slots in a fixed order, each with the code of its variable and of what is known of it besides its value.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import msgspec

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import no_torch_function
from proctor.instrument.observe.modules import (
    buffer_of,
    class_name,
    clean_names,
    joined,
    roots_owning,
    unwrap,
)
from proctor.instrument.observe.optimizers import OptimizerStates
from proctor.instrument.observe.plainly import placed, placed_of, trained
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.observe.seen import LastSeen, Places, Seen
from proctor.invariants.codec.variable import Variable, apart
from proctor.invariants.schema import Name
from proctor.native import Slot

_HOLDERS = 4  # optimizers of one parameter that are told
_RESCAN_EVERY = 64  # steps between looks for parameters that were added in place


def _in_order(roots: list[Any], order: dict[int, int]) -> list[Any]:
    """Models in the order of what is asked for, by place. Of two that share a layer, the one that has more of it first: the order of the collector is another in each run."""

    def place(root: Any) -> tuple[int, int, str]:
        own = [order[id(p)] for p in plainly.parameters(root) if id(p) in order]
        return min(own, default=len(order)), -len(own), class_name(root)

    return sorted(roots, key=place)


class Tracked:
    """The tensors of one process that are looked at."""

    def __init__(self, intern: Callable[[int, str], int], watches: Callable[[str], bool]) -> None:
        self.intern = intern
        self.watches = watches
        self.names: dict[int, str] = {}  # id of a tensor or module → canonical name, for signatures
        self.on_names: Callable[[dict[int, str]], None] | None = None
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._params: dict[int, tuple[Any, Slot, Slot, dict[str, Any]]] = {}  # id(p) → ref, data, grad, description
        self._buffers: dict[tuple[int, str], Slot] = {}  # id of the module, name in it
        self._states = OptimizerStates(self._params.__contains__, self._state_slot)
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._labels: dict[int, str] = {}  # id of an optimizer → its label
        self._holder: dict[int, str] = {}  # id of a parameter → label of the optimizer that holds it
        self._holders: dict[int, list[str]] = {}  # labels of all that have held it, the last few
        self._group: dict[int, int] = {}  # id of a parameter → which of the groups of that optimizer it is in
        self._modules: dict[int, weakref.ref[Any]] = {}  # that have a name
        self._models: dict[str, list[weakref.ref[Any]]] = {}  # models by class, in the order in which they were found
        self._frozen: list[int] = []  # parameters that an optimizer holds and that did not train when the step began
        self._zero_lr: dict[str, set[int]] = {}
        self._said: dict[str, list[tuple[int, int, bool, int | None]]] = {}  # of each group of an optimizer, what the last two follow from
        self._rates: dict[str, dict[int, int]] = {}  # decade of the learning rate of each parameter, by optimizer: -3 of 0.002
        self._wrapped: dict[int, str] = {}
        self._scanned_at = 0
        self.layout = 0  # counts what may have changed which parameters and buffers there are, or how they are called
        self._last = LastSeen()
        self._places: Places | None = None  # of the rows in it, until others are tracked
        self._seen: Seen | None = None  # what `seen_last` gave, until something else is seen

    # -- discovery ----------------------------------------------------------------------------------------

    @property
    def tracked(self) -> int:
        return len(self._params)

    def add_optimizer(self, optimizer: Any, label: str) -> None:
        """Track the models whose parameters this optimizer holds, and the parameters that no model owns.

        Args:
            optimizer: a constructed `torch.optim.Optimizer`.
            label: what signatures and metas call it, "#0" for the first of the process.
        """
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._labels[id(optimizer)] = label
        self.refresh_optimizer(optimizer)

    def holds(self, optimizer: Any) -> bool:
        """Whether this optimizer is tracked."""
        known = self._optimizers.get(id(optimizer))
        return known is not None and known() is optimizer

    def refresh_optimizer(self, optimizer: Any) -> None:
        """Read the parameter groups of an optimizer (again)."""
        label = self._labels.get(id(optimizer), "")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._holder.update((id(p), label) for p in params)
        for p in params:
            known = self._holders.setdefault(id(p), [])
            if label not in known:
                known[:] = [*known[-_HOLDERS + 1 :], label]
        self._group.update((id(p), i) for i, group in enumerate(optimizer.param_groups) for p in group["params"])
        missing = {id(p) for p in params} - self._params.keys()
        if missing:
            order = {id(p): i for i, p in enumerate(params)}  # the same on all ranks and in all runs, unlike that of the collector
            for root in _in_order(roots_owning(missing), order):
                self.add_model(root)
        for i, p in enumerate(params):
            if id(p) not in self._params and placed(p):
                self._add_parameter(p, Variable("", f"optimizer{label}.{i}", "", "parameter", kind="master"), {})
        self._describe_again(self._params.values())

    def add_leaves(self, leaves: list[tuple[str, Any]]) -> None:
        """Track what a program without an optimizer trains: the models that own these tensors, and those that no model owns.

        Args:
            leaves: name in the program and tensor, in the order of the graph.
        """
        order = {id(p): i for i, (_, p) in enumerate(leaves)}
        missing = order.keys() - self._params.keys()
        if not missing:
            return
        for root in _in_order(roots_owning(missing), order):
            self.add_model(root)
        for name, p in leaves:
            if id(p) not in self._params:
                self._add_parameter(p, Variable("", name, "", "parameter", kind="leaf"), {})

    def forget(self, keys: Iterable[int]) -> None:
        """Track these parameters no more: others have taken their place, and their names."""
        for key in keys:
            entry = self._params.pop(key, None)
            if entry is not None:
                self._last.drop(entry[1].at, entry[2].at)
                self._changed()

    def note_update(self, optimizer: Any) -> None:
        """An update begins: remember what it leaves alone, since its learning rate is zero, how large that is for the others, and what trains again since the step began."""
        if self._frozen:
            self._describe_again([entry for key in self._frozen if (entry := self._params.get(key)) is not None and (p := entry[0]()) is not None and p.requires_grad])
        label = self._labels.get(id(optimizer), "")
        groups = [(group["params"], group.get("lr")) for group in optimizer.param_groups]
        said = [(len(params), id(params[0]) if params else 0, *(_of_number(lr) if type(lr) is float else (is_zero(lr), decade(lr)))) for params, lr in groups]
        before = self._said.get(label)
        if said == before:
            return
        self._said[label] = said
        if before is None or [one[:2] for one in before] != [one[:2] for one in said]:
            self.let_go(optimizer)
        zero = {id(p) for params, lr in groups if is_zero(lr) for p in params}
        rates = {id(p): at for params, lr in groups if (at := decade(lr)) is not None for p in params}
        if zero != self._zero_lr.get(label, set()) or rates != self._rates.get(label, {}):
            self._zero_lr[label], self._rates[label] = zero, rates
            self._describe_again(self._params.values())

    def let_go(self, optimizer: Any) -> None:
        """What an optimizer held when it was made, and holds no more: somebody put other tensors into its groups, such as flat masters of what they held."""
        label = self._labels.get(id(optimizer), "")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gone = [key for key, holder in self._holder.items() if holder == label and key not in held]
        for key in gone:
            del self._holder[key]
            self._group.pop(key, None)
            self._holders[key] = [other for other in self._holders.get(key, []) if other != label]
        if gone:
            self.refresh_optimizer(optimizer)

    def _describe_again(self, entries: Iterable[tuple[Any, Slot, Slot, dict[str, Any]]]) -> None:
        for ref, data, grad, description in entries:
            p = ref()
            if p is not None:
                data.meta = grad.meta = self._meta(p, description)

    def add_model(self, root: Any) -> None:
        """Track every parameter and buffer of a module tree. Idempotent; new parameters are added."""
        self._changed()
        self._roots[id(root)] = weakref.ref(root)
        inner, wrapper = unwrap(root)
        model = self._numbered(inner)
        owners: dict[str, Any] = dict(plainly.named_modules(root, remove_duplicate=False))
        names = clean_names(owners)
        with_params = [n for n, m in owners.items() if any(p is not None for p in m._parameters.values())]
        order = {names[n]: i for i, n in enumerate(dict.fromkeys(with_params))}
        last = len(order) - 1
        first_name: dict[int, str] = {}
        for name, p in placed_of(plainly.named_parameters(root, remove_duplicate=False)):  # a later scan finds what a lazy one has become
            prefix, _, kind = name.rpartition(".")
            clean = joined(names.get(prefix, prefix), kind)
            owner = owners.get(prefix, inner)
            at = order.get(names.get(prefix, ""), 0)
            position = "last" if at == last else "first" if at == 0 else "middle"
            alias = first_name.setdefault(id(p), clean)
            var = Variable(
                model, clean, "", "parameter", class_name(owner), kind, position, alias if alias != clean else ""
            )
            about = {"wrapper": wrapper or self._wrapped.get(id(p), ""), "model": model}
            self._add_parameter(p, var, about if root is inner else about | {"root": class_name(root)})
        if self.watches("buffer"):
            for name, b in placed_of(plainly.named_buffers(root)):
                prefix, _, kind = name.rpartition(".")
                owner = owners.get(prefix, inner)
                slot = self._buffers.get((id(owner), kind))
                if slot is None or slot.owner() is not b:  # new, or of a module that is gone and whose id is another's
                    clean = joined(names.get(prefix, prefix), kind)
                    var = Variable(model, clean, "data", "buffer", class_name(owner), kind)
                    now = partial(_present_buffer, weakref.ref(owner), kind)
                    if slot is not None:
                        self._last.drop(slot.at)
                    slot = Slot(now, self._var(var), self._meta(b, {}), False, self._last.place())
                    self._buffers[id(owner), kind] = slot
                    self.names[id(b)] = clean
        known = self._modules.get(id(root))
        if known is None or known() is not root or not self.names[id(root)]:  # else it is a part of a model, which has named its modules
            for name, module in owners.items():
                self.names[id(module)] = apart(model, names[name]) if names[name] else ""
                self._modules[id(module)] = weakref.ref(module)
        if self.on_names is not None:
            self.on_names(self.names)

    def _numbered(self, model: Any) -> str:
        """The class of a model; the second that lives of one class is `Net#2`, so that two critics are not one."""
        name = class_name(model)
        known = self._models.setdefault(name, [])
        place = next((i for i, ref in enumerate(known) if ref() is model), None)
        if place is None:
            place = next((i for i, ref in enumerate(known) if ref() is None), len(known))
            known[place : place + 1] = [weakref.ref(model)]
        return f"{name}#{place + 1}" if place else name

    def set_wrapper(self, root: Any, wrapper: str) -> None:
        """Remember that a tree is driven by DDP, FSDP, … (a fact for preconditions)."""
        for p in plainly.parameters(root):
            self._wrapped[id(p)] = wrapper
            if (known := self._params.get(id(p))) is not None:
                known[3]["wrapper"] = wrapper
                known[1].meta = known[2].meta = self._meta(p, known[3])

    def knows(self, root: Any) -> bool:
        return id(root) in self._roots and self._roots[id(root)]() is root

    def rescan(self, step: int) -> None:
        """Look for parameters added, replaced, frozen or unfrozen; cheap ones at every step, all now and then, and where one is gone: another may have its place."""
        due = step < 3 or step - self._scanned_at >= _RESCAN_EVERY
        for root in _alive(self._roots.values()) if due else ():
            self.add_model(root)
        self._scanned_at = step if due else self._scanned_at
        self._frozen, known = [], len(self._params)
        for key, (ref, data, grad, description) in list(self._params.items()):
            p = ref()
            trains = p is not None and trained(p)
            if p is not None and not trains and key in self._holder:
                self._frozen.append(key)
            if p is None:
                del self._params[key]
                self._last.drop(data.at, grad.at)
                self._changed()
            elif trains != description.get("requires_grad"):
                data.meta = grad.meta = self._meta(p, description)
        for root in _alive(self._roots.values()) if len(self._params) < known and not due else ():
            self.add_model(root)

    def _add_parameter(self, p: Any, var: Variable, extra: dict[str, Any]) -> None:
        known = self._params.get(id(p))
        if known is not None and known[0]() is p:
            if var.alias:
                twin = self._var(msgspec.structs.replace(var, attr="data"))
                if twin not in known[1].twins and twin != known[1].var:
                    known[1].twins.append(twin)
            if extra.get("root", known[3].get("root")) != known[3].get("root"):  # it was wrapped since
                known[3]["root"] = extra["root"]
                known[1].meta = known[2].meta = self._meta(p, known[3])
            return
        description = dict(extra)
        meta = self._meta(p, description)
        ref = TensorRef(p)
        data = Slot(ref, self._var(msgspec.structs.replace(var, attr="data")), meta, False, self._last.place())
        grad = Slot(ref, self._var(msgspec.structs.replace(var, attr="grad")), meta, True, self._last.place())
        self._params[id(p)] = (ref, data, grad, description)
        self.names[id(p)] = var.name
        self._changed()

    def _changed(self) -> None:
        self.layout += 1
        self._places = self._seen = None

    def _var(self, var: Variable) -> int:
        return self.intern(Name.VARIABLE, msgspec.json.encode(var).decode())

    def _meta(self, t: Any, description: dict[str, Any]) -> int:
        """Intern what is known about a tensor besides its value."""
        with no_torch_function():
            description["requires_grad"] = bool(t.requires_grad)
            meta: dict[str, Any] = {
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": json.dumps(list(t.shape), separators=(",", ":")),
                "ndim": t.dim(),
                "device": t.device.type,
                "requires_grad": bool(t.requires_grad),
                "in_optimizer": id(t) in self._holder,
                "optimizer": self._holder.get(id(t)),
                "group": self._group.get(id(t)),
                "lr_zero": id(t) in self._zero_lr.get(self._holder.get(id(t), ""), ()),
                "rate": self._rates.get(self._holder.get(id(t), ""), {}).get(id(t)),
                "wrapper": description.get("wrapper") or None,
            }
            if "root" in description:
                meta["root"] = description["root"]
            if len(holders := self._holders.get(id(t), ())) > 1:
                meta["holders"] = ",".join(sorted(holders))
            placements = getattr(t, "placements", None)
            if placements is not None:
                meta["placement"] = ",".join(type(p).__name__ + (str(p.dim) if hasattr(p, "dim") else "") for p in placements)
                meta["mesh"] = ",".join(str(n) for n in (t.device_mesh.mesh_dim_names or ()))
                meta["part"] = ",".join(str(c) for c, p in zip(t.device_mesh.get_coordinate() or (), placements) if p.is_shard())
            for key, value in vars(t).items():
                if isinstance(value, bool | int | str) and not key.startswith("_") and len(str(value)) <= 64:
                    meta[f"attr.{key}"] = value
            return self.intern(Name.META, json.dumps(meta, sort_keys=True))

    # -- what is there --------------------------------------------------------------------------------------

    def has_no_rate(self, key: int) -> bool:
        """Whether the learning rate of this parameter was zero at the last update."""
        return key in self._zero_lr.get(self._holder.get(key, ""), ())

    def parameters(self) -> list[tuple[int, Any]]:
        """Id and tensor of each tracked parameter that is alive, in order of discovery."""
        return [(key, p) for key, entry in self._params.items() if (p := entry[0]()) is not None]

    def roots(self) -> list[Any]:
        """The outermost modules that own parameters and are alive."""
        return [root for ref in self._roots.values() if (root := ref()) is not None]

    def buffers(self) -> list[tuple[tuple[int, str], Any]]:
        """Id of the module and name in it, and tensor, of each tracked buffer that is alive."""
        return [(key, b) for key, slot in self._buffers.items() if (b := slot.owner()) is not None]

    def optimizers(self) -> list[tuple[str, Any]]:
        """Label and object of each tracked optimizer that is alive."""
        found = [(self._labels.get(key, ""), ref()) for key, ref in self._optimizers.items()]
        return [(label, optimizer) for label, optimizer in found if optimizer is not None]

    def _state_slot(self, p: Any, key: Any, value: Any, before: Slot | None) -> Slot:
        """Of a new tensor in the state of an optimizer, which takes the place of another one."""
        var = Variable("", apart(str(self._params[id(p)][3].get("model", "")), self.names.get(id(p), "")), str(key), "optimizer")
        if before is not None:
            self._last.drop(before.at)
        self._places = self._seen = None
        return Slot(TensorRef(value), self._var(var), self._meta(value, {}), False, self._last.place())


def _present_buffer(module: weakref.ref[Any], name: str) -> Any:
    """What a module holds under the name of a buffer now: `self.mean = …` puts another tensor there."""
    owner = module()
    held = None if owner is None else buffer_of(owner, name)
    return held if held is not None and placed(held) else None


def is_zero(lr: Any) -> bool:
    """Zero, or so small (the end of a decay) that rounding may keep a float32 parameter as it is.

    Of a rate in a tensor this is known on the CPU only: to ask a device would wait for it.
    """
    return _known(lr) and abs(float(lr)) < 1e-6


def decade(lr: Any) -> int | None:
    """The power of ten that a learning rate lies above; None where it is zero or not known, as in a tensor on a device."""
    return math.floor(math.log10(abs(float(lr)))) if _known(lr) and math.isfinite(lr) and lr else None


@lru_cache(64)
def _of_number(lr: float) -> tuple[bool, int | None]:
    """Both of the above, of a plain number, which most rates are, step after step."""
    return is_zero(lr), decade(lr)


def _known(lr: Any) -> bool:
    return isinstance(lr, int | float) or (getattr(getattr(lr, "device", None), "type", "") == "cpu" and lr.numel() == 1)


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [root for ref in list(refs) if (root := ref()) is not None]
