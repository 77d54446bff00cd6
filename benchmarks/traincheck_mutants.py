"""Invariants in TrainCheck's format that nobody inferred: random descriptors and preconditions from a trace.

    python benchmarks/traincheck_mutants.py TRACE_FOLDER [N] > mutants.jsonl

Inferred rules have preconditions that hold; these reach what those do not: inverted and disjoint conditions, clauses of
every kind on fields of every kind, orders that never occur, changes to classes of values. Feed them to
`traincheck_verdicts.py`. The seed is fixed, so equal traces give equal rules.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from proctor.infer.importers.traincheck.files import KINDS, Losses, find, read

_MANAGER = "meta_vars.context_managers.torch.amp.autocast_mode.autocast"
_CLASSES = ("non_none", "non_zero", "above_zero", "below_zero", "non_negative", "non_positive", "anything")
# Functions that TrainCheck 0.2.0 leaves out of rules about order, also of those that name them; its published verdicts
# come from a version that did not, and we do not either.
_UNORDERED = """cuda.is_available torch.get_default_dtype torch._VariableFunctionsClass torch.cuda._is_compiled
torch.is_grad_enabled torch._ops.OpOverload torch.nn.modules.module.Module torch.utils.data._utils torch.nn._reduction
torch.nn.functional torch._tensor.Tensor.backward torch.autograd torch.overrides ._ <locals>
torch.distributed.utils. torch.nn.parallel.scatter_gather._is_namedtuple""".split()
_DTYPES = {bool: "bool", int: "int", float: "float", str: "str"}


class Seen:
    """Names and values that occur in a trace."""

    def __init__(self, folder: Path) -> None:
        calls: Counter[str] = Counter()
        self.fields: dict[str, set[Any]] = {}
        self.state_fields: dict[str, set[Any]] = {}
        self.attributes: dict[str, set[str]] = {}
        self.arguments: dict[str, dict[str, Any]] = {}
        for line in read(find(folder), Losses()):
            fields = {f"meta_vars.{k}": v for k, v in (line.record.get("meta_vars") or {}).items()}
            fields |= {"process_id": line.pid, "thread_id": line.thread}
            if line.kind == KINDS["state_change"]:
                self.attributes.setdefault(line.record["var_type"], set()).update(line.record["attributes"])
                fields |= {f"attributes.{k}": v for k, v in line.record["attributes"].items()}
                fields["var_name"] = line.record["var_name"]
                _collect(self.state_fields, fields)
            else:
                calls[line.record["function"]] += 1
                self.arguments.setdefault(line.record["function"], line.record.get("kwargs") or {})
                _collect(self.fields, fields | {"is_bound_method": line.record.get("is_bound_method")})
        self.functions = [name for name, n in calls.items() if 4 <= n <= 400]
        self.ordered = [name for name in self.functions if not any(skip in name for skip in _UNORDERED)]


def _collect(known: dict[str, set[Any]], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, (bool, int, float, str)) and len(known.setdefault(name, set())) < 8:
            known[name].add(value)


def main(folder: Path, n: int) -> None:
    """Print n rules."""
    rng = random.Random(7)
    seen = Seen(folder)
    makers = [_contain_call, _contain_change, _cover, _lead, _consistent, _distinct, _output, _input_output]
    for i in range(n):
        relation, params, group, several = makers[i % len(makers)](rng, seen)
        print(
            json.dumps(
                {
                    "text_description": f"mutant {i}",
                    "relation": relation,
                    "params": params,
                    "precondition": {group: _group(rng, seen.state_fields if several else seen.fields)},
                    "num_positive_examples": 1,
                    "num_negative_examples": 0,
                }
            )
        )


def _group(rng: random.Random, fields: dict[str, set[Any]]) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"inverted": False, "preconditions": [{"clauses": "Unconditional"}]}
    listed = [{"clauses": [_clause(rng, fields) for _ in range(rng.randint(1, 3))]} for _ in range(rng.randint(1, 2))]
    return {"inverted": rng.random() < 0.3, "preconditions": listed}


def _clause(rng: random.Random, fields: dict[str, set[Any]]) -> dict[str, Any]:
    name = rng.choice(sorted(fields))
    values = sorted(fields[name], key=str)
    kind = rng.choice(["constant", "constant", "constant", "consistent", "unequal", "exist"])
    path: Any = "None"
    if rng.random() < 0.15:
        name, path, values = _MANAGER, ["dtype"], ["torch.bfloat16"]
    if kind == "exist":
        path = "None"
    dtype = _DTYPES[type(values[0])] if values else "None"
    clause = {"type": kind, "prop_name": name, "additional_path": path, "prop_dtype": dtype}
    if kind == "constant":
        clause["values"] = rng.sample(values, rng.randint(1, min(3, len(values)))) if values else [None]
        clause["prop_dtype"] = dtype if values else "None"
    return clause


def _api(name: str) -> dict[str, Any]:
    return {"param_type": "APIParam", "api_full_name": name}


def _contain_call(rng: random.Random, seen: Seen) -> Any:
    child = rng.choice(seen.functions)
    param = _api(child)
    given = seen.arguments.get(child)
    if given and rng.random() < 0.5:
        name = rng.choice(sorted(given))
        param["arguments"] = {"args": {name: given[name]}, "func_name": child}
    return "APIContainRelation", [_api(rng.choice(seen.functions)), param], "parent_func_call_pre", False


def _contain_change(rng: random.Random, seen: Seen) -> Any:
    kind = rng.choice(sorted(seen.attributes))
    attr = rng.choice(["data", "grad", rng.choice(sorted(seen.attributes[kind]))])
    values = {key: rng.choice([None, *_CLASSES]) for key in ("pre_value", "post_value") if rng.random() < 0.6}
    child = {"param_type": "VarTypeParam", "var_type": kind, "attr_name": attr, **values}
    return "APIContainRelation", [_api(rng.choice(seen.functions)), child], "parent_func_call_pre", False


def _cover(rng: random.Random, seen: Seen) -> Any:
    return "FunctionCoverRelation", [_api(f) for f in rng.sample(seen.ordered, rng.choice([2, 2, 3]))], "func_cover", False


def _lead(rng: random.Random, seen: Seen) -> Any:
    return "FunctionLeadRelation", [_api(f) for f in rng.sample(seen.ordered, rng.choice([2, 2, 3]))], "func_lead", False


def _consistent(rng: random.Random, seen: Seen) -> Any:
    kind = rng.choice(sorted(seen.attributes))
    attr = rng.choice(["data", "grad", "shape", rng.choice(sorted(seen.attributes[kind]))])
    param = {"param_type": "VarTypeParam", "var_type": kind, "attr_name": attr}
    return "ConsistencyRelation", [param, dict(param)], "var", True


def _distinct(rng: random.Random, seen: Seen) -> Any:
    return "DistinctArgumentRelation", [_api(rng.choice(seen.functions))], "distinct_arg", False


def _output(rng: random.Random, seen: Seen) -> Any:
    attr, value = rng.choice([("dtype", "torch.float32"), ("requires_grad", False), ("ndim", 2), ("shape", [4, 5]), ("grad", None)])
    tensor = {"param_type": "VarTypeParam", "var_type": "torch.Tensor", "attr_name": attr, "const_value": value}
    return "ConsistentOutputRelation", [_api(rng.choice(seen.functions)), tensor], "pre_event", False


def _input_output(rng: random.Random, seen: Seen) -> Any:
    function = rng.choice(seen.functions)
    paths = [["dtype"], ["shape", 0], ["shape", 1], ["ndim"], ["requires_grad"], ["_TRAINCHECK_data_ID"]]
    sides = [
        {
            "param_type": "InputOutputParam",
            "name": f"{side}_tensors",
            "index": rng.choice([0, 0, 1]),
            "type": "torch.Tensor",
            "additional_path": rng.choice(paths),
            "api_name": function,
            "is_input": side == "input",
        }
        for side in ("input", "output")
    ]
    return "ConsistentInputOutputRelation", [sides[0], _api(function), sides[1]], "pre_event", False


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 800)
