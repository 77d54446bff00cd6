"""What the recordings of a run's ranks say by themselves of how its model is cut: a framework's plan, the mesh of its DTensors.

`judging/check.py` asks where no plan was given.
"""

from __future__ import annotations

from collections.abc import Mapping

from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import RankRecord


def read_off(ranks: Mapping[int, RankRecord]) -> Plan | None:
    """What a framework said in every rank about how its model is cut, put together."""
    said = [record.info.plan for record in ranks.values()]
    if len(ranks) < 2 or not all(said):
        return None
    plans = [Plan.from_json(text) for text in dict.fromkeys(said)]
    whole = Plan(plans[0].mesh)
    for plan in plans:
        for rules, known in ((plan.params, whole.params), (plan.activations, whole.activations), (plan.renames, whole.renames)):
            for rule in (r for r in rules if r not in known):
                whole.add(rule)
    return whole if whole.mesh.world == len(ranks) else None


def mesh_of_dtensors(ranks: Mapping[int, RankRecord]) -> Mesh | None:
    """The mesh that DTensors of the whole world name, so that axes can be called by it."""
    for record in ranks.values():
        for entry in record.entries:
            if entry.placement is not None:
                mesh = Mesh(entry.placement.axes, entry.placement.sizes)
                if mesh.world == len(ranks) and not any(a.startswith("mesh") for a in mesh.axes):
                    return mesh
    return None
