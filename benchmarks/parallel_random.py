"""Random operators on shards: are they the single device's, bit by bit, and is the next draw? (veScale, table 4.)

    python benchmarks/parallel_random.py [--dtensor] [--cost] [--json FILE]
    python benchmarks/parallel_random.py --rules     # all operations that torch tags as random, with what becomes of each

Generated cases: operations x 1-D … 5-D x even and uneven shapes x every placement and double placement on 2, 3, 4 and 8 ranks x
both streams. A case draws the tensor on one device (plain torch for the stock stream), then every rank's shard, and compares
all elements; for the stock stream the next draws of every rank's generator, too. --dtensor: the same operations by torch's
DTensor on gloo processes of 2 and 4 ranks, as it is. --cost: nanoseconds an element on one thread, beside torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from proctor.oracle.parallel.box import Box, placements
from proctor.oracle.parallel.draws import FIXED, registry
from proctor.oracle.parallel.intercept import placed, random_kernels
from proctor.oracle.parallel.streams import KINDS, Ident, stream
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

SEED = 7
Shape = tuple[int, ...]
# From the shape that is drawn and the shape of the whole, which a fan-in is counted from.
Operation = Callable[[Shape, Shape], torch.Tensor]


def kaiming(shape: Shape, whole: Shape) -> torch.Tensor:
    fan = max(1, int(np.prod(whole[1:])))
    bound = (6.0 / ((1 + 5) * fan)) ** 0.5
    return torch.empty(shape).uniform_(-bound, bound)


OPERATIONS: dict[str, Operation] = {
    "nn.init.normal_": lambda s, w: torch.nn.init.normal_(torch.empty(s), 0.5, 2.0),
    "nn.init.uniform_": lambda s, w: torch.nn.init.uniform_(torch.empty(s), -1.0, 3.0),
    "nn.init.kaiming_uniform_": kaiming,
    "rand_like": lambda s, w: torch.rand_like(torch.empty(s)),
    "randn_like": lambda s, w: torch.randn_like(torch.empty(s)),
    "randint_like": lambda s, w: torch.randint_like(torch.empty(s), 3, 77),
    "nn.Dropout": lambda s, w: torch.nn.functional.dropout(torch.ones(s), 0.3),
    "bernoulli_": lambda s, w: torch.empty(s).bernoulli_(0.3),
    "exponential_": lambda s, w: torch.empty(s).exponential_(2.0),
}
SHAPES: tuple[tuple[Shape, ...], ...] = tuple(
    (tuple([24, 8, 8, 8, 8][:n]), tuple([7, 5, 3, 9, 2][:n]), tuple([37, 13, 1, 6, 5][:n])) for n in range(1, 6)
)
MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2)), Mesh(("a",), (8,)), Mesh(("a", "b"), (2, 4)))


def cases() -> Iterator[tuple[str, Shape, Mesh, Layout]]:
    """Operation, shape of the whole, mesh, and how it is cut."""
    for mesh in MESHES:
        for shapes in SHAPES:
            for shape in shapes:
                for layout in placements(len(shape), mesh.axes):
                    for name in OPERATIONS:
                        yield name, shape, mesh, layout
        for rows in (8, 13):
            for layout in (Layout(), Layout((Cut("a"),)), Layout(tuple(Cut(axis) for axis in mesh.axes))):
                yield "multinomial", (rows, 6), mesh, layout
                yield "multinomial, with replacement", (rows, 6), mesh, layout
                yield "randperm", (rows * 5,), mesh, layout


def operation_of(name: str) -> Operation:
    if name == "randperm":
        return lambda s, w: torch.ops.aten.randperm.generator_out(w[0], generator=None, out=torch.empty(s, dtype=torch.int64))
    if name.startswith("multinomial"):
        return lambda s, w: torch.multinomial(_weights(s), 4, name.endswith("replacement"))
    return OPERATIONS[name]


def _weights(shape: Shape) -> torch.Tensor:
    return torch.arange(1.0, shape[1] + 1).expand(shape).contiguous()


def differs(name: str, shape: Shape, mesh: Mesh, layout: Layout, kind: str) -> str:
    """"" where all ranks have the single device's bits; "empty" where torch draws nothing on a rank without elements."""
    operation = operation_of(name)
    if kind == "stock":
        torch.manual_seed(SEED)
        whole, after = operation(shape, shape), torch.rand(3)
    else:
        whole, after = _drawn(kind, operation, Box.whole(shape))[0], None
    for rank in range(mesh.world):
        box = Box.of(shape, layout, mesh, mesh.coords(rank))
        # F.dropout gives an empty tensor back before it draws, so nothing can be taken from the generator there.
        if kind == "stock" and name == "nn.Dropout" and 0 in box.local:
            return "empty"
        found, source = _drawn(kind, operation, box)
        wanted = whole[torch.from_numpy(box.indices[0])] if name.startswith("multinomial") else whole[np.ix_(*box.indices)]
        if not torch.equal(found, wanted):
            return "values"
        if after is not None and not torch.equal(torch.rand(3, generator=source.generator), after):
            return "next draw"
    return ""


def _drawn(kind: str, operation: Operation, box: Box):
    source = stream(kind, SEED)
    with placed(lambda tensor: (source, box, Ident("weight"))):
        return operation(box.local, box.shape), source


def matrix() -> dict[str, dict[str, int]]:
    """Cases, different ones and excluded ones, by operation and stream."""
    table: dict[str, dict[str, int]] = {}
    for name, shape, mesh, layout in cases():
        row = table.setdefault(name, Counter())
        for kind in KINDS:
            found = differs(name, shape, mesh, layout, kind)
            row[f"{kind} cases"] += found != "empty"
            row[f"{kind} different"] += found not in ("", "empty")
            row["excluded"] += found == "empty"
    return table


def dtensor_rank(out: str) -> None:
    """One process: DTensor's own result of every operation, shape and placement against one device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    sizes = (dist.get_world_size(),) if dist.get_world_size() < 4 else (2, 2)
    device = init_device_mesh("cpu", sizes)
    mesh = Mesh(("a", "b")[: len(sizes)], sizes)
    table: dict[str, Counter[str]] = {}
    on_dtensor: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nn.init.normal_": lambda t: torch.nn.init.normal_(t, 0.5, 2.0),
        "nn.init.uniform_": lambda t: torch.nn.init.uniform_(t, -1.0, 3.0),
        "rand_like": torch.rand_like,
        "randn_like": torch.randn_like,
        "randint_like": lambda t: torch.randint_like(t, 3, 77),
        "nn.Dropout": lambda t: torch.nn.functional.dropout(t, 0.3),
        "bernoulli_": lambda t: t.bernoulli_(0.3),
        "exponential_": lambda t: t.exponential_(2.0),
    }
    for shapes in SHAPES:
        for shape in shapes[:2]:
            for layout in placements(len(shape), mesh.axes):
                said = {cut.axis: cut.dim for cut in layout.cuts}
                where = [Shard(said[a]) if a in said else Replicate() for a in mesh.axes]
                box = Box.of(shape, layout, mesh, mesh.coords(dist.get_rank()))
                for name, operation in on_dtensor.items():
                    torch.manual_seed(SEED)
                    whole = operation(torch.ones(shape))
                    spread = distribute_tensor(torch.ones(shape), device, where)
                    torch.manual_seed(SEED)
                    try:
                        same = torch.equal(operation(spread).to_local(), whole[np.ix_(*box.indices)])
                    except (RuntimeError, NotImplementedError, AssertionError):
                        table.setdefault(name, Counter())["refused"] += 1
                        continue
                    every = torch.tensor([int(same)])
                    dist.all_reduce(every, dist.ReduceOp.MIN)
                    kind = "cut" if layout.cuts else "replicated"
                    row = table.setdefault(name, Counter())
                    row[f"{kind} cases"] += 1
                    row[f"{kind} different"] += 1 - int(every)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def dtensor(world: int) -> dict[str, dict[str, int]]:
    """DTensor as it is, on so many processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, "--rank-of-dtensor", f"{folder}/out.json"]
        ranks = [subprocess.Popen(command, env={**os.environ, **own, "RANK": str(r)}) for r in range(world)]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a DTensor rank failed")
        return json.loads(Path(f"{folder}/out.json").read_text())


def cost() -> dict[str, dict[str, float]]:
    """Nanoseconds of CPU time an element of 4 million; the least of five, torch and ours in turn."""
    size = 4_000_000
    operations = {name: OPERATIONS[name] for name in ("nn.init.uniform_", "nn.init.normal_", "bernoulli_")}
    found: dict[str, dict[str, float]] = {}
    quarter = Box.of((2000, 2000), Layout((Cut("a", "chunk", 1),)), Mesh(("a",), (4,)), {"a": 1})
    for name, operation in operations.items():
        row = dict.fromkeys(("torch", "keyed", "keyed, Shard(1)/4, an own element", "stock, Shard(1)/4, a global element"), float("inf"))
        for _ in range(5):
            row["torch"] = min(row["torch"], _ns(lambda op=operation: op((2000, 2000), (2000, 2000)), size))
            row["keyed"] = min(row["keyed"], _ns(lambda op=operation: _drawn("keyed", op, Box.whole((2000, 2000))), size))
            row["keyed, Shard(1)/4, an own element"] = min(row["keyed, Shard(1)/4, an own element"], _ns(lambda op=operation: _drawn("keyed", op, quarter), size // 4))
            row["stock, Shard(1)/4, a global element"] = min(row["stock, Shard(1)/4, a global element"], _ns(lambda op=operation: _drawn("stock", op, quarter), size))
        found[name] = row
    return found


def _ns(call: Callable[[], object], elements: int) -> float:
    before = time.process_time_ns()
    call()
    return (time.process_time_ns() - before) / elements


def show(title: str, table: dict) -> None:
    columns = list(dict.fromkeys(key for row in table.values() for key in row))
    print(f"\n{title}\n| operation | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in table.items():
        cells = [f"{row.get(c, 0):.1f}" if isinstance(row.get(c, 0), float) else str(row.get(c, 0)) for c in columns]
        print(f"| {name} | {' | '.join(cells)} |")


def rules() -> None:
    """Kernels for the CPU that torch tags `nondeterministic_seeded`: drawn by a rule, drawing nothing, or stopped with the user's line."""
    known = registry()
    for name in random_kernels():
        print(f"| {name} | {'rule' if name in known else 'stops'} |")
    for name, why in FIXED.items():
        print(f"| {name} | {why} |")
    print(f"{sum(name in known for name in random_kernels())} with a rule, {sum(name not in known for name in random_kernels())} stop, {len(FIXED)} draw nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtensor", action="store_true", help="DTensor as it is, beside it")
    parser.add_argument("--cost", action="store_true", help="nanoseconds an element")
    parser.add_argument("--rules", action="store_true", help="which operations have a rule")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank-of-dtensor", metavar="OUT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rules:
        rules()
        return
    torch.set_num_threads(1)
    if args.rank_of_dtensor:
        dtensor_rank(args.rank_of_dtensor)
        return
    found = {"matrix": matrix()}
    show("both streams against one device", found["matrix"])
    total = {key: sum(row.get(key, 0) for row in found["matrix"].values()) for key in ("keyed cases", "stock cases", "keyed different", "stock different", "excluded")}
    print(f"\n{total['keyed cases'] + total['stock cases']} cases, {total['keyed different'] + total['stock different']} different, {total['excluded']} left out: dropout of an empty shard, stock")
    if args.dtensor:
        for world in (2, 4):
            found[f"dtensor {world}"] = dtensor(world)
            show(f"DTensor as it is, {world} processes", found[f"dtensor {world}"])
    if args.cost:
        found["cost"] = cost()
        show("ns an element (CPU time of one thread)", found["cost"])
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
