"""Real Megatron-core on CPU: every parallelism computes what one process computes, once shards are put together."""

# More than 400 lines: its jobs take minutes, so they run once for all of these tests.
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from helpers.ranks import TEARDOWN
from helpers.shards import joined
from helpers.warm import python
from safetensors.numpy import load_file

from proctor.oracle.merging.merge import Conflict, Held, Shard, join
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import read_plan

EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron"

# Every job in one process group: importing Megatron takes longer than all the training.
RUNNER = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import train
import torch, torch.distributed as dist
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from proctor.oracle.frameworks import megatron, megatron_activations

out = Path(sys.argv[2])
rank, world = int(sys.argv[4]), int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[6]}", rank=rank, world_size=world)
args = tensors = counts = None

def plain(tensor):
    return tensor.detach().float().clone().contiguous()

class Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key):
        ctx.key = key
        if key not in tensors:  # recomputation comes later
            tensors[key] = plain(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        tensors["grad_" + ctx.key] = plain(grad)
        return grad, None

def tapped(side, name, values, drop):
    again = torch._C._current_graph_task_id() != -1
    call = counts[side, name, again] = counts.get((side, name, again), -1) + 1
    if megatron.reference_call(call) >= 2 or "saved" in counts:
        return values
    found, spec = pytree.tree_flatten_with_path(values)
    leaves = []
    for path, x in found:
        slot = re.sub("[^0-9a-z_]+", ".", pytree.keystr(path[drop:])).strip(".")
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x = Tap.apply(x, f"{side}/{name}/{slot}/{megatron.reference_call(call)}")
        leaves.append(x)
    return pytree.tree_unflatten(leaves, spec)

def watch(chunk):
    names, out = megatron.canonical_names(chunk), megatron_activations.left_out(chunk)
    inner = megatron.unwrapped(chunk)
    for path, module in chunk.named_modules():
        if module is not inner and not any(m is module for m in inner.modules()):
            continue
        name = names[path]
        if "input" not in out.get(name, ()):
            module.register_forward_pre_hook(lambda m, a, k, name=name: tapped("input", name, (a, k), 1), with_kwargs=True)
        if "output" not in out.get(name, ()):
            module.register_forward_hook(lambda m, a, y, name=name: tapped("output", name, y, 0))

def save(step, chunks, optimizer):
    kind = ["main_grad", "state"][step]
    owners = {id(p): (p, m) for c in chunks for m in c.modules() for p in m.parameters(recurse=False)}
    names = megatron.parameter_names(chunks)
    local = {names[key]: p for key, (p, m) in owners.items()}
    for part in [megatron.main_grads, megatron.optimizer_state][step](optimizer, chunks):
        key = f"{kind}/{part.slot}/{part.name}"
        tensors[key] = plain(part.tensor)
        said["parts"].append([key, part.name, part.start, part.stop, list(local[part.name].shape), part.whole])
    if step == 0:
        layouts = {names[key]: megatron.layout_of(p, m) for key, (p, m) in owners.items()}
        mesh = megatron.mesh()
        said.update(
            axes=mesh.axes, sizes=mesh.sizes, coords=megatron.coords(), present=megatron.present(),
            layouts={name: [[c.axis, c.strategy, c.dim, list(c.options)] for c in layout.cuts] for name, layout in layouts.items()},
            modules=sorted({n for c in chunks for n in megatron.canonical_names(c).values()}),
            steps=sorted({kind.__name__ for kind in megatron.optimizer_classes()}),
            scale=megatron_activations.gradient_scale(chunks[0]),
            plan=megatron_activations.plan_of(chunks).to_json().decode(),
            reference_calls=[megatron.reference_call(k) for k in range(2)],
        )
        tensors.update({f"param//{name}": plain(parameter) for name, parameter in local.items()})
        counts["saved"] = True

build, finalize = train.build, train.finalize_model_grads

def unreduced(chunks, *args, **kwargs):  # as if somebody forgot the gradients that sequence parallelism splits up
    for chunk in chunks:
        chunk.finish_grad_sync()

def built(args):
    chunks, optimizer = build(args)
    for chunk in chunks:
        watch(chunk)
    return chunks, optimizer

train.build = built
for job, words in json.loads(sys.argv[3]).items():
    train.finalize_model_grads = unreduced if "unreduced" in job else finalize
    args, tensors, counts, said = train.make_parser().parse_args(words), {}, {}, {"parts": []}
    said["result"] = train.train(args, save)
    save_file(tensors, out / f"{job}-{rank}.safetensors")
    (out / f"{job}-{rank}.json").write_text(json.dumps(said))
dist.destroy_process_group()
"""

DENSE = {
    "tp2": "--tp 2",
    "tp2_sp": "--tp 2 --sequence-parallel",
    "pp2": "--pp 2",
    "pp2_vpp2": "--pp 2 --vpp 2",
    "cp2": "--cp 2",
    "dp2": "",
    "dp2_distopt": "--distributed-optimizer",
    "dp2_distopt_overlap": "--distributed-optimizer --overlap",
    "tp2_sp_recompute": "--tp 2 --sequence-parallel --recompute",
}
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {  # what is computed → how it is run
    "dense": ("", DENSE),
    "moe": (
        "--layers 2 --experts 4 --swiglu",
        {"ep2": "--ep 2", "ep2_distopt": "--ep 2 --distributed-optimizer", "moe_tp2_sp": "--tp 2 --sequence-parallel"},
    ),
    "tied": ("--layers 2 --tied", {"tied_pp2": "--pp 2"}),
    "llama": ("--layers 2 --norm RMSNorm --swiglu --groups 2", {"llama_tp2_sp": "--tp 2 --sequence-parallel"}),
    "bf16": ("--layers 2 --dtype bf16", {"bf16_tp2_sp": "--tp 2 --sequence-parallel", "bf16_distopt": "--distributed-optimizer"}),
}
FOUR = {
    "dense": ("", {"tp2_dp2_sp_distopt": "--tp 2 --sequence-parallel --distributed-optimizer", "pp2_tp2": "--pp 2 --tp 2"}),
    "moe": (
        "--experts 4 --swiglu",
        {
            "ep2_tp2_dp2": "--ep 2 --tp 2 --sequence-parallel --distributed-optimizer",
            "ep4": "--ep 4",
            "ep2_dp4": "--ep 2",
            "ep2_cp2": "--ep 2 --cp 2",
            "tp2_etp1_ep2": "--tp 2 --etp 1 --ep 2 --sequence-parallel",
            "tp4_etp2_ep2": "--tp 4 --etp 2 --ep 2 --sequence-parallel",
        },
    ),
}


class Job(NamedTuple):
    """What the ranks of one job said and saved."""

    said: list[dict[str, Any]]
    tensors: list[dict[str, np.ndarray]]

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple(self.said[0]["axes"]), tuple(self.said[0]["sizes"]))

    def merged(self) -> dict[str, np.ndarray]:
        """Every gradient, optimizer state and parameter of the whole model, put together from the shards of all ranks."""
        assert self.conflicts() == []
        return {key: full for key, (full, _) in self._merged().items()}

    def conflicts(self) -> list[tuple[str, str]]:
        """Replicas that differ: the tensor, the axes along which they do."""
        return [(key, conflict.axis) for key, (_, found) in self._merged().items() for conflict in found]

    def _merged(self) -> dict[str, tuple[np.ndarray, list[Conflict]]]:
        held: dict[str, dict[tuple[int, ...], list[Any]]] = {}
        names: dict[str, str] = {}
        shards: dict[str, list[Shard]] = {}
        for rank, (said, tensors) in enumerate(zip(self.said, self.tensors)):
            for key, name, start, stop, shape, complete in said["parts"]:
                names[key] = name
                if complete:
                    shards.setdefault(key, []).append(Shard(rank, said["coords"], tensors[key].reshape(shape)))
                else:
                    held.setdefault(key, {}).setdefault(tuple(shape), []).append((rank, start, stop))
            for key, value in tensors.items():
                if key.startswith("param/"):
                    names[key] = key.removeprefix("param//")
                    shards.setdefault(key, []).append(Shard(rank, said["coords"], value))
        for key, kinds in held.items():
            for shape, parts in kinds.items():
                shards.setdefault(key, []).extend(self._joined(key, shape, parts))
        return {key: self._whole(found, self._layout(names[key])) for key, found in shards.items()}

    def activations(self) -> tuple[dict[str, np.ndarray], set[str]]:
        """What crossed the edges of modules, put together; and the modules of which no layout is known."""
        shards: dict[str, list[Shard]] = {}
        for rank, (said, tensors) in enumerate(zip(self.said, self.tensors)):
            for key, value in tensors.items():
                if key.startswith(("input/", "output/", "grad_input/", "grad_output/")):
                    shards.setdefault(key, []).append(Shard(rank, said["coords"], value))
        plans = [Plan.from_json(said["plan"]) for said in self.said]
        whole, unknown = {}, set()
        for key, found in shards.items():
            which, name, slot, _ = key.split("/")
            layout = plans[found[0].rank].activation_layout(name, which, slot)
            if layout is None:
                unknown.add(name)
                continue
            order = plans[found[0].rank].activation_order(name, which, slot)
            full, conflicts = self._whole(found, layout)
            # Sums of replicas in another order differ in the last bits.
            assert all(conflict.rel < 1e-2 for conflict in conflicts), (key, conflicts)
            scale = self.said[0]["scale"] if which.startswith("grad_") else 1.0
            whole[key] = (full if order is None else full.transpose(order)) / scale
        return whole, unknown

    def _joined(self, key: str, shape: tuple[int, ...], parts: list[tuple[int, int, int]]) -> Iterator[Shard]:
        """Flat ranges of the ranks that differ only along dp and cp, put together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, _, _ in parts:
            here = self.said[rank]["coords"]
            groups.setdefault(tuple(here[axis] for axis in self.mesh.axes if axis not in ("dp", "cp")), []).append(rank)
        for ranks in groups.values():
            held = [Held(Shard(r, self.said[r]["coords"], self.tensors[r][key]), (np.arange(a, b),)) for r, a, b in parts if r in ranks]
            full, _ = join(held, (int(np.prod(shape)),))
            assert full is not None, key
            yield Shard(ranks[0], self.said[ranks[0]]["coords"], full.reshape(shape))

    def _whole(self, shards: Sequence[Shard], layout: Layout) -> tuple[np.ndarray, list[Conflict]]:
        shape = list(shards[0].array.shape)
        for dim, cuts in layout.on(self.mesh).by_dim(len(shape)).items():
            extents = {tuple(self.mesh.index(c.axis, s.coords) for c in cuts): s.array.shape[dim] for s in shards}
            shape[dim] = sum(extents.values())
        full, conflicts = joined(shards, layout, self.mesh, shape)
        assert full is not None, (str(layout), shape)
        return full, conflicts

    def _layout(self, name: str) -> Layout:
        cuts = next(said["layouts"][name] for said in self.said if name in said["layouts"])
        return Layout(tuple(Cut(axis, strategy, dim, tuple(options)) for axis, strategy, dim, options in cuts))


class Launch:
    """Ranks that train one job after another.

    Args:
        world: number of ranks.
        jobs: arguments of the example, by name.
        folder: where they meet and save.
    """

    def __init__(self, world: int, jobs: dict[str, str], folder: Path) -> None:
        self.world, self.jobs, self.folder = world, jobs, folder
        runner = folder / "runner.py"
        runner.write_text(RUNNER)
        words = json.dumps({name: [*text.split(), "--iters", "2"] for name, text in jobs.items()})
        command = [python(), str(runner), str(EXAMPLE), str(folder), words]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(folder / f"meet-{world}")],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"errors-{world}-{rank}").open("wb"),
            )
            for rank in range(world)
        ]

    def done(self) -> dict[str, Job]:
        try:
            codes = [rank.wait(timeout=280) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
        errors = [self.folder / f"errors-{self.world}-{rank}" for rank in range(self.world)]
        # gloo's teardown may end a rank that has saved everything (helpers/ranks.py).
        said = [path.read_text()[-3000:] for path, code in zip(errors, codes) if code and TEARDOWN not in path.read_text()]
        assert not said, said[0]
        return {
            name: Job(
                [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(self.world)],
                [load_file(self.folder / f"{name}-{rank}.safetensors") for rank in range(self.world)],
            )
            for name in self.jobs
        }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("megatron")
    one = Launch(1, {family: what for family, (what, _) in FAMILIES.items()}, folder)
    ways = {name: f"{what} {how}" for what, ways in FAMILIES.values() for name, how in ways.items()}
    two = Launch(2, ways | {"tp2_sp_unreduced": DENSE["tp2_sp"]}, folder)
    return one.done() | two.done()


CASES = [(family, name) for family, (_, ways) in FAMILIES.items() for name in ways]


def worst(reference: dict[str, np.ndarray], candidate: dict[str, np.ndarray], kind: str) -> tuple[float, str]:
    """Largest relative error of any tensor of a kind, as TTrace measures it: ‖c − r‖ / ‖r‖."""
    errors = [
        (float(np.linalg.norm(candidate[key] - full) / np.linalg.norm(full)), key)
        for key, full in reference.items()
        if key.startswith(f"{kind}/") and not key.startswith("state/step")
    ]
    return max(errors)


def agrees(reference: Job, candidate: Job, *, bf16: bool = False) -> None:
    expected, found = reference.merged(), candidate.merged()
    assert set(expected) == set(found)
    assert worst(expected, found, "param")[0] == 0.0
    for kind in ("main_grad", "state"):
        error, where = worst(expected, found, kind)
        assert error < (6e-2 if bf16 else 1e-5), where
    for key in ("losses", "grad_norms", "param_sum"):
        assert np.allclose(candidate.said[0]["result"][key], reference.said[0]["result"][key], rtol=2e-3 if bf16 else 1e-6), key


def edges_agree(reference: Job, candidate: Job, *, bf16: bool = False) -> None:
    expected, unknown = reference.activations()
    found, _ = candidate.activations()
    gone = {key for key in expected if key not in found}
    assert all("core_attention." in key for key in gone), sorted(gone)  # the example's own attention has no parts
    assert all(".experts" in name for name in unknown), unknown
    both = expected.keys() & found.keys()
    for key in both:
        error, size = float(np.linalg.norm(found[key] - expected[key])), float(np.linalg.norm(expected[key]))
        assert error <= (0.1 if bf16 else 1e-5) * size + 1e-9, (key, error / size)
    assert len(both) >= 150


@pytest.mark.parametrize(("family", "name"), CASES, ids=[name for _, name in CASES])
def test_a_parallel_job_computes_what_one_process_computes(jobs: dict[str, Job], family: str, name: str) -> None:
    agrees(jobs[family], jobs[name], bf16=family == "bf16")


@pytest.mark.parametrize(("family", "name"), CASES, ids=[name for _, name in CASES])
def test_what_crosses_the_edges_of_modules_is_put_together_by_the_rules(jobs: dict[str, Job], family: str, name: str) -> None:
    edges_agree(jobs[family], jobs[name], bf16=family == "bf16")


def test_a_plan_written_by_hand_says_what_is_read_off(jobs: dict[str, Job]) -> None:
    job = jobs["tp2_sp"]
    written, said = read_plan(EXAMPLE / "plan.toml").on(job.mesh), Plan.from_json(job.said[0]["plan"])
    for name in job.said[0]["layouts"]:
        assert str(written.param_layout(name)) == str(said.param_layout(name)), name
    for key in job.tensors[0]:
        which, *place = key.split("/")
        if which.removeprefix("grad_") in ("input", "output"):
            assert str(written.activation_layout(place[0], which, place[1])) == str(said.activation_layout(place[0], which, place[1])), key


def test_a_missing_reduction_shows_between_replicas(jobs: dict[str, Job]) -> None:
    found = [conflict for conflict in jobs["tp2_sp_unreduced"].conflicts() if conflict[0].startswith("main_grad/")]
    assert {key.rpartition(".")[0].rpartition("/")[2].rpartition(".")[2] for key, _ in found} == {
        "input_layernorm", "pre_mlp_layernorm", "final_layernorm", "linear_proj", "linear_fc2",
    }  # fmt: skip
    assert {axes for _, axes in found} == {"tp"}


def test_every_module_of_a_stage_is_one_of_the_reference(jobs: dict[str, Job]) -> None:
    for family, name in CASES:
        found = {module for said in jobs[name].said for module in said["modules"]}
        expected = {module for module in jobs[family].said[0]["modules"] if name != "cp2" or "core_attention." not in module}
        assert found == expected, name


def test_the_distributed_optimizer_owns_every_element_once(jobs: dict[str, Job]) -> None:
    for name in ("dp2_distopt", "ep2_distopt", "bf16_distopt"):
        owned: dict[str, int] = {}
        for said in jobs[name].said:
            for key, _, start, stop, _, _ in said["parts"]:
                owned[key] = owned.get(key, 0) + stop - start
        whole = {key: int(np.prod(shape)) for said in jobs[name].said for key, _, _, _, shape, _ in said["parts"]}
        assert {k: n for k, n in owned.items() if k.startswith("main_grad")} == {k: n for k, n in whole.items() if k.startswith("main_grad")}
        assert any(not complete for said in jobs[name].said for *_, complete in said["parts"])


def test_ranks_say_where_they_are(jobs: dict[str, Job]) -> None:
    for _, name in CASES:
        for rank, said in enumerate(jobs[name].said):
            assert said["present"]
            assert jobs[name].mesh.rank(said["coords"]) == rank
    assert jobs["pp2"].said[1]["coords"] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}


def test_the_optimizers_that_step_are_known(jobs: dict[str, Job]) -> None:
    assert {"ChainedOptimizer", "FP32Optimizer", "MixedPrecisionOptimizer"} <= set(jobs["dense"].said[0]["steps"])


def test_data_parallel_ranks_take_turns_with_micro_batches(jobs: dict[str, Job]) -> None:
    assert [said["reference_calls"] for said in jobs["dp2"].said] == [[0, 2], [1, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("family", FOUR)
def test_four_ranks_compute_what_one_process_computes(tmp_path: Path, family: str) -> None:
    what, ways = FOUR[family]
    one = Launch(1, {family: what}, tmp_path).done()
    for name, job in Launch(4, {name: f"{what} {how}" for name, how in ways.items()}, tmp_path).done().items():
        agrees(one[family], job)
        edges_agree(one[family], job)
        assert all(job.mesh.rank(said["coords"]) == rank for rank, said in enumerate(job.said)), name
