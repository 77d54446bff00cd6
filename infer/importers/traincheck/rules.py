"""TrainCheck's invariants become a pack: relation, descriptors and precondition, nothing left out.

A file has one JSON object a line (or one list). A rule that cannot be understood is left out and named, because one
line must not cost the others; a file without a single rule is an error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from proctor.errors import PackError
from proctor.infer.importers.traincheck.strict import decode
from proctor.invariants.condition import ALWAYS, Condition, Kind, Precondition
from proctor.invariants.files import read_file
from proctor.invariants.invariant import Hypothesis, Invariant, Param, Support, invariant_id
from proctor.invariants.pack import MAX_PACK_BYTES, Pack, Provenance
from proctor.invariants.relations import registry
from proctor.invariants.relations.traincheck.rule import WHEN, TrainCheckRule, stored
from proctor.invariants.relations.traincheck.tables import CONTEXT_MANAGERS
from proctor.invariants.relations.traincheck.values import text_of

_MAX_CLAUSES: Final = 4096  # of one precondition, after values of a set were told apart
_SINGLE: Final = frozenset({"parent_func_call_pre", "func_cover", "func_lead", "pre_event"})  # groups of one record

Params = Mapping[str, Param]


class _Unknown(Exception):
    """A rule that is not understood; says why."""


@dataclass
class ImportedRules:
    """A pack, and what was left out."""

    pack: Pack
    read: int = 0
    twice: int = 0  # rules that the files hold more than once
    skipped: list[str] = field(default_factory=list)


def import_rules(paths: Sequence[Path]) -> ImportedRules:
    """Read files of TrainCheck's invariants.

    Raises:
        PackError: a file cannot be read, or holds no rule that is understood.
    """
    rules: dict[str, Invariant] = {}
    skipped: list[str] = []
    read = 0
    for path in paths:
        before = len(skipped)
        found = 0
        for place, tree in _objects(path):
            found += 1
            try:
                rule = convert(tree)
            except _Unknown as why:
                skipped.append(f"{path.name}, rule {place}: {why}")
                continue
            read += 1
            rules.setdefault(rule.id, rule)
        if found == len(skipped) - before:
            first = f": {skipped[before]}" if found else ""
            raise PackError(f"{path}: no TrainCheck invariant in it{first}", hint="name the file that traincheck-infer wrote")
    programs = sorted(p.name for p in paths)
    pack = Pack(list(rules.values()), Provenance(tool="traincheck", programs=programs))
    return ImportedRules(pack, read=read, twice=read - len(rules), skipped=skipped)


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Objects of a file, counted from 1."""
    try:
        text = read_file(path, MAX_PACK_BYTES).decode(errors="replace")
    except OSError as error:
        raise PackError(f"{path}: {error.strerror or error}") from None
    whole = _decode(text)
    if isinstance(whole, (list, dict)):
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
        return
    lines = (line for line in text.splitlines() if line.strip())
    for place, line in enumerate(lines, start=1):
        yield place, _decode(line)


def _decode(text: str) -> Any:
    try:
        return decode(text)
    except (ValueError, RecursionError):
        return None


def convert(tree: Any) -> Invariant:
    """One rule of ours that says what this one of TrainCheck's says."""
    if not isinstance(tree, dict) or not isinstance(tree.get("relation"), str):
        raise _Unknown("not an invariant of TrainCheck")
    maker = _MAKERS.get(tree["relation"])
    if maker is None:
        raise _Unknown(f"relation {tree['relation'][:60]!r} is not known")
    listed = tree.get("params")
    if not isinstance(listed, list) or not all(isinstance(p, dict) for p in listed):
        raise _Unknown("no parameters")
    name, params = maker(listed)
    relation = registry()[name]
    assert isinstance(relation, TrainCheckRule)
    precondition, rest = _precondition(tree.get("precondition"), relation.group)
    given: dict[str, Param] = {k: v for k, v in params.items() if v is not None}
    if precondition != ALWAYS:
        given[WHEN] = stored(precondition)
    if rest:
        given["also"] = _json(rest)
    hypothesis = Hypothesis.of(name, **given)
    return Invariant(
        id=invariant_id(hypothesis, precondition),
        hypothesis=hypothesis,
        precondition=precondition,
        support=Support(_count(tree.get("num_positive_examples")), _count(tree.get("num_negative_examples")), 0, 0),
        text=relation.say(hypothesis),
        severity=relation.severity,
    )


# -- descriptors ----------------------------------------------------------------------------------------


def _contain(params: Sequence[Any]) -> tuple[str, Params]:
    parent, child = _some(params, 2)
    if child.get("param_type") == "APIParam":
        arguments = child.get("arguments")
        given = arguments.get("args") if isinstance(arguments, dict) else None
        return "tc_contain", {
            "parent": _api(parent),
            "child": _api(child),
            "arguments": _json(given) if isinstance(given, dict) else None,
            "exception": None if child.get("exception") is None else str(child["exception"]),
        }
    values = {ours: _json(child[theirs]) if theirs in child else None for ours, theirs in (("pre", "pre_value"), ("post", "post_value"))}
    named = {"variable": _text(child, "var_name")} if "var_name" in child else {}
    return "tc_contain", {"parent": _api(parent), "type": _text(child, "var_type"), "attr": _text(child, "attr_name"), **named, **values}


def _order(name: str) -> Callable[[Sequence[Any]], tuple[str, Params]]:
    def make(params: Sequence[Any]) -> tuple[str, Params]:
        if len(params) < 2:
            raise _Unknown("fewer than two functions")
        return name, {"functions": _json([_api(p) for p in params])}

    return make


def _distinct(params: Sequence[Any]) -> tuple[str, Params]:
    (function,) = _some(params, 1)
    return "tc_distinct", {"function": _api(function)}


def _consistent(params: Sequence[Any]) -> tuple[str, Params]:
    a, b = _some(params, 2)
    return "tc_consistent", {
        "type": _text(a, "var_type"),
        "attr": _text(a, "attr_name"),
        "other_type": _text(b, "var_type"),
        "other_attr": _text(b, "attr_name"),
    }


def _output(params: Sequence[Any]) -> tuple[str, Params]:
    function, tensor = _some(params, 2)
    if "const_value" not in tensor:
        raise _Unknown("no const_value")
    return "tc_output", {
        "function": _api(function),
        "attr": _text(tensor, "attr_name"),
        "value": _json(tensor["const_value"]),
    }


def _input_output(params: Sequence[Any]) -> tuple[str, Params]:
    taken, function, returned = _some(params, 3)
    if taken.get("is_input") is not True or returned.get("is_input") is not False:
        raise _Unknown("expected an input and an output")
    return "tc_input_output", {"function": _api(function), "input": _tensor(taken), "output": _tensor(returned)}


def _threshold(params: Sequence[Any]) -> tuple[str, Params]:
    """The first value is the larger one; one of the two is an argument, the other an attribute of a result."""
    larger, function, smaller = _some(params, 3)
    if larger.get("is_input") is smaller.get("is_input"):
        raise _Unknown("expected an input and an output")
    least = smaller.get("is_input") is True
    argument, returned = (smaller, larger) if least else (larger, smaller)
    return "tc_threshold", {
        "function": _api(function),
        "argument": _text(argument, "name"),
        "output": _tensor(returned),
        "least": least,
    }


_MAKERS: Final[Mapping[str, Callable[[Sequence[Any]], tuple[str, Params]]]] = {
    "APIContainRelation": _contain,
    "FunctionCoverRelation": _order("tc_cover"),
    "FunctionLeadRelation": _order("tc_lead"),
    "DistinctArgumentRelation": _distinct,
    "ConsistencyRelation": _consistent,
    "ConsistentOutputRelation": _output,
    "ConsistentInputOutputRelation": _input_output,
    "ThresholdRelation": _threshold,
}


def _some(params: Sequence[Any], n: int) -> list[dict[str, Any]]:
    if len(params) != n:
        raise _Unknown(f"{len(params)} parameters, expected {n}")
    return list(params)


def _api(param: Mapping[str, Any]) -> str:
    return _text(param, "api_full_name")


def _text(param: Mapping[str, Any], key: str) -> str:
    value = param.get(key)
    if not isinstance(value, str) or not value:
        raise _Unknown(f"a parameter has no {key}")
    return value


def _tensor(param: Mapping[str, Any]) -> str:
    """Which tensor, and the way to the value in it."""
    index, path = param.get("index"), param.get("additional_path")
    if not isinstance(index, int) or not isinstance(path, list) or not path:
        raise _Unknown("a parameter has no index or path")
    return _json([index, *path])


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


# -- preconditions --------------------------------------------------------------------------------------


def _precondition(groups: Any, wanted: str) -> tuple[Precondition, dict[str, Any]]:
    """The precondition on the records that a relation looks at, and any others that the rule has.

    The others speak of variables that a call did not change. TrainCheck looks at them only where its instrumentation
    kept which variables an object had touched, and else at the call alone, as is done here.
    """
    if not isinstance(groups, dict) or not groups:
        raise _Unknown("no precondition")
    name = wanted if wanted in groups else next(iter(groups))
    if name != wanted and len(groups) > 1:
        raise _Unknown(f"no precondition for {wanted}")
    rest = {k: v for k, v in groups.items() if k != name}
    group = groups[name]
    listed = group.get("preconditions") if isinstance(group, dict) else None
    if not isinstance(listed, list):
        raise _Unknown("a precondition without clauses")
    single = wanted in _SINGLE
    clauses = [clause for one in listed for clause in _clauses(one, single=single)]
    if len(clauses) > _MAX_CLAUSES:
        raise _Unknown("too many clauses")
    return Precondition(any_of=tuple(clauses), inverted=group.get("inverted") is True), rest


def _clauses(one: Any, *, single: bool) -> Iterator[tuple[Condition, ...]]:
    """A conjunction; one for each combination where a field may have several values."""
    listed = one.get("clauses") if isinstance(one, dict) else None
    if listed == "Unconditional":
        yield ()
        return
    if not isinstance(listed, list) or not all(isinstance(c, dict) for c in listed):
        raise _Unknown("a precondition without clauses")
    options = [_conditions(c, single=single) for c in listed]
    size = 1
    for o in options:
        size *= len(o)
        if size > _MAX_CLAUSES:
            raise _Unknown("too many clauses")
    for combination in itertools.product(*options):
        yield tuple(combination)


def _conditions(clause: Mapping[str, Any], *, single: bool) -> list[Condition]:
    """One condition, or one for each value that a field may have."""
    try:
        kind = Kind(str(clause.get("type")))
    except ValueError:
        raise _Unknown(f"a clause of type {str(clause.get('type'))[:40]!r}") from None
    field_name = _field(clause)
    if kind is Kind.CONSTANT:
        values = clause.get("values")
        if not isinstance(values, list) or not values:
            raise _Unknown("a constant clause without values")
        texts = [text_of(v) for v in values]
        return [Condition(field_name, kind, t) for t in dict.fromkeys(texts) if t is not None] or [Condition(field_name, kind, "")]
    if single:  # one record agrees with itself, and differs from all others of which there are none
        kind = Kind.EXIST
    return [Condition(field_name, kind)]


def _field(clause: Mapping[str, Any]) -> str:
    """The name of a field; the way into it is part of the name."""
    name, path = clause.get("prop_name"), clause.get("additional_path")
    if not isinstance(name, str) or not name:
        raise _Unknown("a clause without a field")
    steps = [str(p) for p in path] if isinstance(path, list) else []
    if name.startswith(CONTEXT_MANAGERS) and len(steps) == 1 and name.endswith(f".{steps[0]}"):
        return name
    return ".".join([name, *steps])
