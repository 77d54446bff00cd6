"""Megatron-core: linear layers and embeddings cut by its parallel layers, its cross entropy over a cut vocabulary, and its `DistributedDataParallel`, on processors.

It asks CUDA for a device where it makes buffers; one line of each program answers with the processor. Switches of its wrapper and of its configuration are read off their
sources, as those of DeepSpeed are. Layers are in the program's precision, which may be double.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.tensor_parallel import plan
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("megatron",)}
_WHOLE: Final = ("Adafactor", "LBFGS", "Muon")  # optimizers that look at more of a parameter than one element
# Switches that change where numbers lie and when they are sent, not what they are; others are of its optimizer, of checkpoints, or of an accelerator.
_WRAPPER_SWITCHES: Final = ("grad_reduce_in_fp32", "overlap_grad_reduce", "average_in_collective", "check_for_nan_in_grad", "check_for_large_grads", "pad_buckets_for_high_nccl_busbw", "gradient_reduce_div_fusion")
_MODEL_SWITCHES: Final = ("deterministic_mode", "async_tensor_model_parallel_allreduce")
_IMPORTS: Final = (
    "from megatron.core import ModelParallelConfig, parallel_state as ps, tensor_parallel as tp",
    "torch.cuda.current_device = lambda: torch.device('cpu')  # it asks for it where it makes buffers",
)

# Puts a layer in the place of another one, with its part of the numbers; `call` makes one tensor of what a linear layer gives.
_TAKE: Final = (
    "def take(name, make, dim, call=None, **more):",
    "    m = net.get_submodule(name)",
    "    part = make(*m.weight.shape[::-1], bias=m.bias is not None, **given, **more) if call else make(*m.weight.shape, **given)",
    "    for k, p in part.named_parameters():",
    "        q = getattr(m, k)",
    "        p.data.copy_(q.data if q.shape == p.shape else q.data.chunk(size, dim)[at])",
    "        p.requires_grad_(q.requires_grad)",
    "    part.forward = call(part.forward) if call else part.forward",
    "    net.set_submodule(name, part)",
)


@cache
def fields(file: str, name: str) -> dict[str, str]:
    """Fields of a dataclass of the library → source text of their default; none without the library.

    Args:
        file: below `megatron/core`.
        name: of the class.
    """
    found = importlib.util.find_spec("megatron")
    places = [Path(p, "core", *file.split("/")) for p in (found.submodule_search_locations or ())] if found else []
    source = next((p for p in places if p.is_file()), None)
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name] if source else []
    lines = [node for one in classes for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None]
    return {node.target.id: ast.unparse(node.value) for node in lines if isinstance(node.target, ast.Name) and node.value is not None}


def _changed(file: str, name: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    given = fields(file, name)
    return tuple(f"{switch}={given[switch] == 'False'}" for switch in wanted if given.get(switch) in ("True", "False"))


@register_wrapper
class Megatron(Wrapper):
    """Layers cut over groups of ranks; between the groups its `DistributedDataParallel` averages gradients."""

    name: ClassVar[str] = "megatron"
    library: ClassVar[str] = "megatron"
    asks: ClassVar[tuple[Point, ...]] = ({}, {}, {"precision": "float32"})
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "its clipping is a part of its optimizer", when=_OURS, unless={"clip": ("no", "value")}),
        Rule("invalid", "optimizers see a rank's part of a parameter: these look at the whole", when={**_OURS, "optimizer": _WHOLE}),
        Rule("invalid", "its checkpoints are a library of their own", when=_OURS, unless={"resume": ("no", "plain")}),
        Rule("invalid", "its checkpoints are a library of their own", when=_OURS, unless={"disk": ("no",)}),
        Rule("invalid", "what is compiled is no module that could be cut", when=_OURS, unless={"compile": ("no",)}),
        Rule("invalid", "a vocabulary that is cut goes with layers that take all rows", when={**_OURS, "mg_sequence": (True,)}, traits=frozenset({"vocabulary"})),
        Rule("invalid", "its layers know the autocast of CUDA alone", when={**_OURS, "precision": ("autocast",)}),
        Rule("invalid", "layers that are tied are cut together, which is its models' own work", when=_OURS, traits=frozenset({"tied"})),
        Rule("invalid", "its wrapper documents that each parameter has a gradient in each step", when={**_OURS, "mg_data": (2, 4)}, traits=frozenset({"unused"})),
        Rule("invalid", "its wrapper documents that each parameter has a gradient in each step", when={**_OURS, "mg_data": (2, 4)}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "its buffers are cleared, and gradients are none until they are full", when={**_OURS, "mg_data": (2, 4)}, unless={"zero_grad": ("none",)}),
        Rule("invalid", "its buffers hold dense gradients", when={**_OURS, "mg_data": (2, 4)}, traits=frozenset({"sparse"})),
        Rule("approximate", "its cross entropy computes in single precision", when=_OURS, traits=frozenset({"vocabulary"}), tolerance=1e-6),
    )

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """As `Wrapper.invalid`."""
        world, data = int(str(setting["world"])), int(str(setting["mg_data"]))
        if world % data:
            return "ranks are no such square"
        if setting["mg_sequence"] and world == data:
            return "rows are cut over the ranks of a group"
        side = {"column": "columns", "row": "rows", "pairs": "inner" if setting["mg_sequence"] else "pairs"}[str(setting["mg_style"])]
        if world // data > 1 and f"cut {side} by {world // data}" not in traits:
            return "it says that the ranks must divide what is cut"
        return "" if world > 1 else "there is nothing to cut"

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        data = int(str(setting["mg_data"]))
        for line in _IMPORTS:
            draft.add_import(line)
        precision, groups = _precision(setting), f"world // {data}" if data > 1 else "world"
        more = "".join(f", {one}" for one in ("sequence_parallel=True" if setting["mg_sequence"] else "", str(setting["mg_config"])) if one)
        draft.wrap += [
            "ps.destroy_model_parallel()",
            f"ps.initialize_model_parallel(tensor_model_parallel_size={groups})",
            "size, at = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()",
            f"given = dict(config=ModelParallelConfig(tensor_model_parallel_size=size, {precision}{more}), init_method=nn.init.zeros_)",
        ]
        self._cut(draft, setting)
        if "vocabulary" in draft.code.traits:
            draft.wrap.append("net.loss = tp.vocab_parallel_cross_entropy")
        if "logits" in draft.code.traits:
            draft.wrap.append("net.total = tp.reduce_from_tensor_model_parallel_region")
        if data > 1:
            draft.rows = f"torch.arange(n).tensor_split({data})[rank // ({groups})]"
        if data > 1:
            self._wrap(draft, setting, data)
        if setting["mg_sequence"]:  # as its `finalize_model_grads` does, once gradients are averaged
            whole = "[p for p in net.parameters() if getattr(p, 'sequence_parallel', False) and p.grad is not None]"
            draft.after_part.append(f"for p in {whole} if last else (): dist.all_reduce(p.grad, group=ps.get_tensor_model_parallel_group())")

    def _cut(self, draft: Draft, setting: Point) -> None:
        """Put the library's layers in the place of torch's, each with its part of the numbers."""
        paired = {name: i for pair in draft.code.pairs for i, name in enumerate(pair)} if setting["mg_style"] == "pairs" else {}
        draft.wrap += [*_TAKE, "first = lambda f: lambda x: f(x)[0]"]
        bias = ", skip_bias_add=True" if setting["mg_bias"] else ""
        for name in plan(draft, str(setting["mg_style"])):
            call = _adapter(setting, paired.get(name))
            if setting["mg_sequence"] and name not in paired:
                continue  # all of its layers take rows that are cut
            if draft.code.tensor_parallel[name] == "embedding":
                draft.wrap.append(f"take('{name}', tp.VocabParallelEmbedding, 0)")
            elif name in draft.code.cut_outputs:
                draft.wrap.append(f"take('{name}', tp.ColumnParallelLinear, 0, first)")
            elif paired.get(name) == 1 or (setting["mg_style"] == "row" and name not in paired):
                draft.wrap.append(f"take('{name}', tp.RowParallelLinear, 1, {call}, input_is_parallel={name in paired}{bias or ', skip_bias_add=False'})")
            else:
                draft.wrap.append(f"take('{name}', tp.ColumnParallelLinear, 0, {call}{', gather_output=True' if name not in paired else ''}{bias})")

    def _wrap(self, draft: Draft, setting: Point, data: int) -> None:
        switch = str(setting["mg_ddp"])
        draft.add_import("from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig")
        draft.add_import("from megatron.core.transformer import TransformerConfig")
        draft.wrap.append(f"net = DistributedDataParallel(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, {_precision(setting)}), DistributedDataParallelConfig({switch}), net)")
        draft.scale = f" * {data}"
        draft.zero_grad = "net.zero_grad(), net.zero_grad_buffer()"
        draft.after_part += ["if last: net.finish_grad_sync()", "for p in net.parameters() if last else (): p.grad = p.main_grad.to(p.dtype) if p.requires_grad else None"]
        if "overlap" in switch:
            draft.add_import("from contextlib import nullcontext")
            draft.contexts.append("nullcontext() if last else net.no_sync()")


def _precision(setting: Point) -> str:
    return f"params_dtype=torch.{setting['precision']}, use_cpu_initialization=True"


def _adapter(setting: Point, place: int | None) -> str:
    """The expression of a forward pass that gives one tensor, as the layer whose place it takes did: the library's give a bias beside it."""
    call = "sum(t for t in f(x) if t is not None)" if setting["mg_bias"] else "f(x)[0]"
    if setting["mg_sequence"] and place == 0:
        call = call.replace("f(x)", "f(tp.scatter_to_sequence_parallel_region(x))")
    if setting["mg_sequence"] and place == 1:
        call = f"tp.gather_from_sequence_parallel_region({call}, tensor_parallel_output_grad=False)"
    return "first" if call == "f(x)[0]" else f"lambda f: lambda x: {call}"


class _Option(OfWrapper):
    library = "megatron"
    of = ("megatron",)
    absent = "nothing of Megatron is there"


@register
class Style(_Option):
    """Which dimension of a layer is cut."""

    choice = Choice("mg_style", ("column", "row", "pairs"))


@register
class Data(_Option):
    """Into how many groups the ranks are divided, each with all of the model."""

    choice = Choice("mg_data", (1, 2, 4))


@register
class Ddp(_Option):
    """A switch of its `DistributedDataParallel`."""

    choice = Choice("mg_ddp", ("", *_changed("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig", _WRAPPER_SWITCHES), "overlap_grad_reduce=True, bucket_size=8"))
    rules = (
        Rule("invalid", "there is one group", when={"mg_data": (1,)}, unless={"mg_ddp": ("",)}),
        Rule("approximate", "gradients are summed in single precision", when={"mg_ddp": ("grad_reduce_in_fp32=True",)}, tolerance=1e-6),
        Rule("invalid", "it says that both scale gradients", when={"mg_ddp": ("average_in_collective=True",), "mg_data": (1,)}),
    )


@register
class Config(_Option):
    """A switch of `ModelParallelConfig`."""

    choice = Choice("mg_config", ("", *_changed("model_parallel_config.py", "ModelParallelConfig", _MODEL_SWITCHES)))


@register
class Bias(_Option):
    """`skip_bias_add`: the layer gives its bias back, and the caller adds it."""

    choice = Choice("mg_bias", (False, True))


@register
class Sequence(_Option):
    """Between the layers of a pair rows are cut over the ranks, too (`sequence_parallel`)."""

    choice = Choice("mg_sequence", (False, True))
    rules = (Rule("invalid", "only what lies between the layers of a pair is cut along its rows", when={"mg_sequence": (True,)}, unless={"mg_style": ("pairs",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return super().invalid(value, setting, traits) or ("" if "pairs" in traits else "the model has no pair of layers, or others beside it")
