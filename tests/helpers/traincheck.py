"""Small traces and invariants in TrainCheck's format.

    log = Log(); log.call("torch.f", args={"0": {"float": 0.1}}); write(tmp_path / "t", log)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNCONDITIONAL: Mapping[str, Any] = {"inverted": False, "preconditions": [{"clauses": "Unconditional"}]}


class Log:
    """Records of one process, in order; times count up by 10."""

    def __init__(self, pid: int = 100, thread: int = 7, start: int = 1000, **meta_vars: Any) -> None:
        self.pid, self.thread, self.time = pid, thread, start
        self.meta_vars: dict[str, Any] = {"step": 0, **meta_vars}
        self.records: list[dict[str, Any]] = []

    def _add(self, **fields: Any) -> dict[str, Any]:
        self.time += 10
        record = {"process_id": self.pid, "thread_id": self.thread, "meta_vars": dict(self.meta_vars), **fields, "time": self.time}
        self.records.append(record)
        return record

    @contextmanager
    def inside(
        self,
        function: str,
        args: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        returns: Any = None,
        raises: str = "",
        obj: int | None = None,
    ) -> Iterator[None]:
        """A call; what is added in the block happens during it."""
        call = f"{self.pid}_{self.time}"
        shared = {"func_call_id": call, "function": function, "is_bound_method": obj is not None, "obj_id": obj}
        given = {"args": args or {}, "kwargs": kwargs or {}}
        self._add(type="function_call (pre)", **shared, **given)
        yield
        if raises:
            self._add(type="function_call (post) (exception)", exception=raises, **shared)
        else:
            self._add(type="function_call (post)", return_values={"NoneType": None} if returns is None else returns, **shared)

    def call(self, function: str, **details: Any) -> None:
        with self.inside(function, **details):
            pass

    def state(self, name: str, kind: str = "torch.nn.Parameter", **attributes: Any) -> None:
        self._add(type="state_change", var_name=name, var_type=kind, attributes=attributes)


def write(folder: Path, *logs: Log) -> Path:
    """A trace folder with one file a process."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in logs:
        lines = "".join(json.dumps(r) + "\n" for r in log.records)
        (folder / f"trace_API_{log.pid}_{log.thread}.log").write_text(lines)
    return folder


def tensor(dtype: str = "torch.float32", shape: Sequence[int] = (4, 2), **attributes: Any) -> dict[str, Any]:
    """A typed value."""
    return {"torch.FloatTensor": {"dtype": dtype, "shape": list(shape), "ndim": len(shape), **attributes}}


def api(name: str, **details: Any) -> dict[str, Any]:
    return {"param_type": "APIParam", "api_full_name": name, **details}


def var(attr: str, kind: str = "torch.nn.Parameter", **details: Any) -> dict[str, Any]:
    return {"param_type": "VarTypeParam", "var_type": kind, "attr_name": attr, **details}


def value(path: Sequence[Any], *, taken: bool, index: int = 0, name: str = "tensors") -> dict[str, Any]:
    """A value of the tensors that a call takes or returns."""
    return {
        "param_type": "InputOutputParam",
        "name": name,
        "index": index,
        "type": "torch.Tensor",
        "additional_path": list(path),
        "api_name": None,
        "is_input": taken,
    }


def clause(kind: str, field: str, *values: Any, path: Sequence[str] | str = "None") -> dict[str, Any]:
    out: dict[str, Any] = {"type": kind, "prop_name": field, "additional_path": path, "prop_dtype": "str"}
    return {**out, "values": list(values)} if kind == "constant" else out


def when(*clauses: Mapping[str, Any], inverted: bool = False) -> dict[str, Any]:
    """A precondition of one conjunction."""
    return {"inverted": inverted, "preconditions": [{"clauses": list(clauses)}]}


_GROUPS = {
    "APIContainRelation": "parent_func_call_pre",
    "FunctionCoverRelation": "func_cover",
    "FunctionLeadRelation": "func_lead",
    "DistinctArgumentRelation": "distinct_arg",
    "ConsistencyRelation": "var",
}


def invariant(relation: str, *params: Mapping[str, Any], precondition: Mapping[str, Any] = UNCONDITIONAL) -> dict[str, Any]:
    """One line of a file of invariants."""
    return {
        "text_description": "",
        "relation": relation,
        "params": list(params),
        "precondition": {_GROUPS.get(relation, "pre_event"): precondition},
        "num_positive_examples": 3,
        "num_negative_examples": None,
    }
