"""DeepSpeed: an engine of `deepspeed.initialize` with every stage of ZeRO, its switches, accumulation, clipping, precision and checkpoints.

Switches of ZeRO are read off `DeepSpeedZeroConfig` where the library is installed: its source is parsed, since importing it takes seconds that a campaign of
another library would pay, too. Its extension for shared memory (`deepspeed_shm_comm`, minutes of a compiler at the first `initialize`) serves inference alone: programs switch it off.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("deepspeed",)}
_CUT: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("deepspeed",), "ds_stage": (1, 2, 3)}
_ZEROS: Final = "parameters that were not used have gradients of zeros, which these optimizers count"
_COUNTED: Final[tuple[tuple[dict[str, tuple[Value, ...]], dict[str, tuple[Value, ...]]], ...]] = (
    (_OURS, {"optimizer": ("SGD",)}), ({**_OURS, "optimizer": ("SGD",)}, {"option": ("",)}),
)  # fmt: skip
_STATEFUL: Final = ("Adafactor", "LBFGS", "Muon", "SparseAdam")  # optimizers that look at more of a parameter than one element, or at its layout
# Numbers that are meant for large models, as small as these models are.
_NUMBERS: Final = {
    "reduce_bucket_size": "16", "allgather_bucket_size": "16", "sub_group_size": "16", "prefetch_bucket_size": "8", "param_persistence_threshold": "0",
    "model_persistence_threshold": "12", "max_live_parameters": "0", "max_reuse_distance": "0", "module_granularity_threshold": "1000", "zero_hpz_partition_size": "2",
}  # fmt: skip
_SIZES: Final = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}  # by default each rank takes 2 GB for a bucket
_PLACES: Final = {"offload_param": "{'device': 'cpu'}", "offload_optimizer": "{'device': 'cpu'}"}
# Deprecated, or of checkpoints, files and messages, or of what only an accelerator has (quantised collectives).
_LEFT_OUT: Final = (
    "legacy_stage1", "elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint", "log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory",
    "gather_16bit_weights_on_model_save", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
)  # fmt: skip
_LAST: Final = ("param_persistence_threshold", "offload_param", "zero_hpz_partition_size")  # of parameters that are cut, though their names do not begin with "stage3"
_CONFIG: Final = ("'prescale_gradients': True", "'gradient_predivide_factor': 2.0", "'data_types': {'grad_accum_dtype': 'fp32'}", "'communication_data_type': 'fp32'", "'disable_allgather': True")
_AT: Final = "folder + '/saved'"
_MORE: Final = {"no frozen": ", exclude_frozen_parameters=True"}
_STRICT: Final = {"no frozen": ", load_module_strict=False", "universal": ", tag='universal'"}
_CONVERSION: Final = "num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True"
_FILES: Final = {
    "fp32": (f"net.save_checkpoint({_AT})", f"net.saved = get_fp32_state_dict_from_zero_checkpoint({_AT})"),
    "16bit": (f"net.save_16bit_model({_AT})", "dist.barrier()", f"net.saved = torch.load({_AT} + '/pytorch_model.bin')"),
}
_NO_SCATTER: Final = "'reduce_scatter': False"
_IMPORTS: Final = (
    "import os", "os.environ['DS_ACCELERATOR'] = 'cpu'", "from deepspeed import initialize, ops, utils, zero",
    "ops.__compatible_ops__['deepspeed_shm_comm'] = False  # for inference alone, and compiled at the first use",
)  # fmt: skip


@cache
def fields() -> dict[str, tuple[str, bool]]:
    """Fields of `DeepSpeedZeroConfig` that are not deprecated → source text of their default, and whether they are of stage 3; none without the library."""
    found = importlib.util.find_spec("deepspeed")
    file = next((Path(p, "runtime", "zero", "config.py") for p in (found.submodule_search_locations or ()) if found), None) if found else None
    if file is None or not file.is_file():
        return {}
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedZeroConfig"]
    fields = [node for one in classes for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None]
    texts = {node.target.id: ast.unparse(node.value) for node in fields if isinstance(node.target, ast.Name) and node.value is not None}
    return {name: (text.removeprefix("Field("), "stage3_" in text or name in _LAST) for name, text in texts.items() if "deprecated" not in text}


def switches() -> tuple[str, ...]:
    """`'name': value` of every switch of ZeRO that can be changed."""
    found = []
    for name, (default, _) in fields().items():
        if name in _LEFT_OUT:
            continue
        if name == "overlap_comm":  # None: of the stage
            found += [f"'{name}': True", f"'{name}': False"]
        elif default.startswith(("True", "False")):
            found.append(f"'{name}': {default.startswith('False')}")
        elif name in _NUMBERS or name in _PLACES:
            found.append(f"'{name}': {_NUMBERS.get(name) or _PLACES[name]}")
    return tuple(found)


def _name(switch: Value) -> str:
    return str(switch).partition(":")[0].strip("'")


@register_wrapper
class DeepSpeed(Wrapper):
    """An engine: it averages gradients, clips, steps and schedules by itself."""

    name: ClassVar[str] = "deepspeed"
    library: ClassVar[str] = "deepspeed"
    asks: ClassVar[tuple[Point, ...]] = tuple({"precision": name} for name in (*["float32"] * 5, "autocast"))
    usual: ClassVar[Point] = {"ds_look": True}
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "its clipping knows one norm", when=_OURS, unless={"clip": ("no", "2")}),
        Rule("invalid", "its clipping has no such argument", when=_OURS, unless={"clip_foreach": ("",)}),
        Rule("invalid", "ZeRO's norm is of the parameters that the optimizer has", when={**_CUT, "clip": ("2",), "groups": ("matrices", "bags")}),
        Rule("invalid", "its optimizer has no closure", when={**_OURS, "optimizer": ("LBFGS",)}),
        Rule("invalid", "ZeRO gives the optimizer flat parts of parameters: these look at the whole", when={**_CUT, "optimizer": _STATEFUL}),
        Rule("invalid", "the engine clears gradients itself", when=_OURS, unless={"zero_grad": ("none",)}),
        Rule("invalid", "`ds_state` has its own checkpoints", when=_OURS, unless={"resume": ("no",)}),
        Rule("invalid", "`ds_state` has its own checkpoints", when=_OURS, unless={"disk": ("no",)}),
        Rule("invalid", "it compiles models by a method of its own", when=_OURS, unless={"compile": ("no",)}),
        Rule("invalid", "it says that this asks for reduce_scatter=False", when={**_OURS, "ds_stage": (2, 3), "ds_config": _CONFIG[:2]},
             unless={"ds_zero": (_NO_SCATTER,), "ds_zero_also": (_NO_SCATTER,)}),
        Rule("invalid", "it says that bfloat16 and this type go together in stage 1 alone", when={**_OURS, "ds_precision": ("bf16",), "ds_config": _CONFIG[2:3]}, unless={"ds_stage": (1, 2, 3)}),
        Rule("invalid", "it documents leaf modules for stage 3 where ranks call different ones", when={**_OURS, "ds_stage": (3,)}, traits=frozenset({"sometimes unused"})),
        Rule("invalid", "its optimizer takes no names", when={**_OURS, "groups": ("named",)}),
        *(
            Rule("different", _ZEROS, when=when, unless=unless, traits=frozenset({trait}))
            for trait in ("unused", "sometimes unused")
            for when, unless in _COUNTED
        ),
        Rule("invalid", "its regimes are single precision, float16 and bfloat16", when={**_OURS, "precision": ("float64",)}),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        for line in _IMPORTS:
            draft.add_import(line)
        draft.rows = "torch.arange(n).tensor_split(world)[rank]"
        draft.finish.append(lambda: self._finish(draft, setting))

    def _finish(self, draft: Draft, setting: Point) -> None:
        """When all axes have written: optimizer, schedule and clipping go into the engine."""
        boundary = str(setting["ds_boundary"])
        counted = draft.accumulate if boundary in _COUNTING else 1
        draft.scale = f" * (world*{counted})"  # it divides by the number of microbatches, and gradients by that of ranks
        switches = {_name(setting[name]): str(setting[name]) for name in ("ds_zero", "ds_zero_also") if setting[name]}
        sizes = [f"'{name}': {size}" for name, size in _SIZES.items() if name not in switches and setting["ds_stage"]]
        zero = [f"'stage': {setting['ds_stage']}", *sizes, *switches.values()]
        if setting["ds_state"] == "16bit" and setting["ds_stage"] == 3:
            zero.append("'gather_16bit_weights_on_model_save': True")
        config = [
            "'train_micro_batch_size_per_gpu': 1", f"'gradient_accumulation_steps': {counted}", f"'gradient_clipping': {0.0 if setting['clip'] == 'no' else 0.5}",
            "'zero_allow_untested_optimizer': True", f"'zero_optimization': {{{', '.join(zero)}}}",
        ]  # fmt: skip
        config += [str(setting["ds_config"])] if setting["ds_config"] else []
        if "offload" in str(zero):
            config.append("'zero_force_ds_cpu_optimizer': False")
        if setting["precision"] == "autocast":
            config.append("'torch_autocast': {'enabled': True, 'dtype': 'bfloat16'}")
            draft.contexts = [c for c in draft.contexts if "autocast" not in c]
        if setting["ds_precision"]:
            config.append(f"'{setting['ds_precision']}': {{'enabled': True}}")
            draft.forward = draft.forward.replace("t[part]", "(t[part].bfloat16() if t.is_floating_point() else t[part])")
        if setting["ds_state"] == "universal":
            config.append("'checkpoint': {'load_universal': True}")
        if boundary == "unmanaged":
            config.append("'managed_gradient_accumulation': False")
        made = _optimizer(draft, str(setting["ds_optimizer"]), config)
        schedule = f", lr_scheduler=lambda opt: {draft.scheduler}" if draft.scheduler else ""
        draft.wrap += ["os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))", f"config = {{{', '.join(config)}}}"]
        if setting["ds_init"]:
            draft.wrap.append("zero.Init(module=net, config_dict_or_path=config)")
        draft.opt = f"initialize(model=net, {made}{schedule}, config=config)[0]"
        draft.after_build.append("net = opt")
        draft.scheduler, draft.zero_grad, draft.after_backward = "", "", []
        draft.backward = "net.backward({loss})"
        _BOUNDARIES[boundary](draft)
        if setting["ds_look"]:
            named = "for name, p in net.module.named_parameters() if p.requires_grad"
            draft.after_part.append(f"if last: net.shown = {{name: utils.safe_get_full_grad(p) {named}}}")
            draft.after_update += [
                "keys = sorted({k for s in net.optimizer.optimizer.state.values() for k, t in s.items() if torch.is_tensor(t) and t.ndim})",
                f"net.shown = {{f'{{name}}:{{k}}': utils.safe_get_full_optimizer_state(p, k) {named} for k in keys}}",
            ]


def _optimizer(draft: Draft, by: str, config: list[str]) -> str:
    """Arguments of `initialize` that give the optimizer; its part of the configuration is added."""
    options = "".join(f", {k}={v}" for k, v in draft.options.items())
    if by == "callable":
        return f"optimizer=lambda given: {draft.optimizer}(given{options}), model_parameters={draft.net_args}"
    if by == "given":
        return f"optimizer={draft.optimizer}({draft.net_args}{options})"
    name = draft.optimizer.rpartition(".")[2]
    given = [f"'{k}': {v}" for k, v in draft.options.items()]
    given += ["'torch_adam': True"] if name in ("Adam", "AdamW") else []
    given += ["'adam_w_mode': False"] if name == "Adam" else []
    config.append(f"'optimizer': {{'type': '{name}', 'params': {{{', '.join(given)}}}}}")
    return f"model_parameters={draft.net_args}"


def _counted(draft: Draft) -> None:
    if draft.accumulate > 1:
        draft.after_part.append("if not last: opt.step()  # it counts: nothing is updated yet")


def _told(draft: Draft) -> None:
    draft.before_part.append("net.set_gradient_accumulation_boundary(last)")


def _unmanaged(draft: Draft) -> None:
    """`step` alone says it."""


def _no_sync(draft: Draft) -> None:
    draft.add_import("from contextlib import nullcontext")
    draft.contexts.append("nullcontext() if last else net.no_sync()")


def _coalesced(draft: Draft) -> None:
    draft.zero_grad = "whole = net.coalesce_grad_reduction(); whole.__enter__()"
    draft.after_part.append("if last: whole.__exit__(None, None, None)")


_OVERLAPPED: Final[tuple[dict[str, tuple[Value, ...]], ...]] = tuple(
    {"ds_boundary": ("unmanaged",), axis: ("'overlap_comm': True",)} for axis in ("ds_zero", "ds_zero_also")
)
_BOUNDARIES: Final = {"counted": _counted, "told": _told, "unmanaged": _unmanaged, "no_sync": _no_sync, "coalesced": _coalesced}
_COUNTING: Final = ("counted", "told", "unmanaged")  # losses are divided by the number of microbatches in the configuration


class _Option(OfWrapper):
    library = "deepspeed"
    of = ("deepspeed",)
    absent = "there is no engine"


@register
class Stage(_Option):
    """What ZeRO cuts: nothing, the optimizer's state, gradients, too, or parameters, too."""

    choice = Choice("ds_stage", (0, 1, 2, 3))


@register
class ZeroSwitch(_Option):
    """A switch of ZeRO."""

    choice = Choice("ds_zero", ("", *switches()))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        stage, (_, last) = setting["ds_stage"], fields()[_name(value)]
        needs = "stage 3" if last and stage != 3 else "a stage" if not stage else ""
        if _name(value) == "compute_grad_norm" and (stage == 3 or setting["clip"] != "no"):
            return "it documents stages 1 and 2 without clipping"
        if _name(value) == "zero_hpz_partition_size" and setting["world"] not in (2, 4):
            return "ranks are divided into groups of two"
        return super().invalid(value, setting, traits) or (f"the switch is of {needs}" if needs else "")


@register
class ZeroAlso(ZeroSwitch):
    """A second switch of ZeRO, so that two that do not go together meet."""

    choice = Choice("ds_zero_also", ("", *switches()))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return super().invalid(value, setting, traits) or ("the same switch twice" if _name(setting["ds_zero"]) >= _name(value) else "")


@register
class Config(_Option):
    """One more key of the configuration, which changes how gradients are averaged and not what they are."""

    choice = Choice("ds_config", ("", *_CONFIG))


@register
class Boundary(_Option):
    """Who says which microbatch is the last one, and when gradients are reduced: its own counter, a call before each, only `step`, or a context."""

    choice = Choice("ds_boundary", tuple(_BOUNDARIES))
    rules = (
        Rule("invalid", "it documents no_sync for stages 0 and 1", when={"ds_boundary": ("no_sync",), "ds_stage": (2, 3)}),
        Rule("invalid", "it documents coalesce_grad_reduction for stages 1 to 3", when={"ds_boundary": ("coalesced",), "ds_stage": (0,)}),
        *(Rule("invalid", "it documents overlapped communication for stage 2 where `step` alone says it", when=when, unless={"ds_stage": (2,)}) for when in _OVERLAPPED),
    )


@register
class Maker(_Option):
    """Who makes the optimizer: the program, a function that the engine calls, or the configuration."""

    choice = Choice("ds_optimizer", ("given", "callable", "config"))
    rules = (
        Rule("invalid", "the configuration has numbers, no tensors", when={"ds_optimizer": ("config",), "implementation": ("lr=tensor",)}),
        Rule("invalid", "the library has one of its own under this name", when={"ds_optimizer": ("config",), "optimizer": ("Muon",)}),
    )


@register
class Init(_Option):
    """`zero.Init` of the model before the engine is made."""

    choice = Choice("ds_init", (False, True), rare=0.3)
    rules = (
        Rule("invalid", "it is of stage 3", when={"ds_init": (True,)}, unless={"ds_stage": (3,)}),
        Rule("invalid", "parameters that are cut have no dimensions by which they could be sorted", when={"ds_init": (True,)}, unless={"groups": ("one",)}),
    )


@register
class Look(_Option):
    """Whether gradients and state are looked at by the functions that the library documents for that, between its calls."""

    choice = Choice("ds_look", (False, True))
    rules = (
        Rule("invalid", "nothing is cut", when={"ds_look": (True,), "ds_stage": (0,)}),
        Rule("invalid", "gradients are averaged within `step`", when={"ds_look": (True,), "ds_boundary": ("unmanaged",)}),
        Rule("invalid", "it asks for parameters that the optimizer has", when={"ds_look": (True,)}, unless={"groups": ("one", "two")}),
    )


@register
class LowPrecision(_Option):
    """Parameters, gradients and what is sent in bfloat16, with masters in single precision."""

    choice = Choice("ds_precision", ("", "bf16"), rare=0.3)
    rules = (
        Rule("invalid", "the engine casts parameters of single precision", unless={"ds_precision": ("",), "precision": ("float32",)}),
        Rule("approximate", "parameters, activations and gradients are rounded to bfloat16", unless={"ds_precision": ("",)}, tolerance=0.15),
        Rule("invalid", "the engine clears gradients of the optimizer's parameters alone", when={"ds_precision": ("bf16",)}, unless={"groups": ("one", "two")}),
    )


@register
class State(_Option):
    """Checkpoints: `save_checkpoint` after the first step, and `load_checkpoint` into an engine that begins anew, also by way of a universal checkpoint; or the
    parameters of its two ways to one file of the whole model."""

    order = 70
    choice = Choice("ds_state", ("no", "checkpoint", "no frozen", "universal", *_FILES), rare=0.6)
    rules = (Rule("invalid", "universal checkpoints are of ZeRO", when={"ds_state": ("universal", "fp32"), "ds_stage": (0,)}),)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        if value in _FILES:
            draft.after_update += ["net.saved = {}", "if step == 0:", *(f"    {line}" for line in _FILES[str(value)])]
            draft.add_import("from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint")
            return
        saving, loading = [f"net.save_checkpoint({_AT}{_MORE.get(str(value), '')})"], [f"net.load_checkpoint({_AT}{_STRICT.get(str(value), '')})"]
        if value == "universal":
            draft.add_import("from argparse import Namespace")
            draft.add_import("from deepspeed.checkpoint import ds_to_universal")
            saving += [f"if rank == 0: ds_to_universal.main(Namespace(input_folder={_AT} + '/global_step1', output_folder={_AT} + '/universal', {_CONVERSION}))", "dist.barrier()"]
        if draft.life == 2:
            draft.first = 1
            draft.before_loop += loading
            return
        again = ["net, opt = build(rank, world)", *loading] if not draft.life else []
        draft.after_step += ["if step == 0:", *(f"    {line}" for line in (*saving, *again))]
