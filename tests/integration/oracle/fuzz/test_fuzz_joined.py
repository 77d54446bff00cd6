"""Ranks that leave early, averages over ranks, ZeRO's gathered state, calls of FSDP2, transformers' `Trainer`: on real ranks, with planted mistakes and torch's own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fuzzing import alone

MODEL = {"layers": ["mlp", "layernorm", "linear"], "width": 8}


def test_the_others_go_on_without_a_rank_that_has_left(tmp_path: Path) -> None:
    """DDP's own context is right for plain steps. It is told where gradients add up, beside a hook, and with ZeRO; a model that is not brought into line at the end is planted."""
    alone(
        f"""
        base = {{"world": 2, "wrapper": "ddp", "join": "net.join()"}}
        active = "net.join(divide_by_initial_world_size=False)"
        right = [base, {{**base, "world": 3, "optimizer": "Adam"}}, {{**base, "accumulate": 2, "sync": "last"}}, {{**base, "join": active, "accumulate": 2}}, {{**base, "clip": "2"}}]
        told = [{{**base, "accumulate": 2}}, {{**base, "join": active, "ddp_hook": "ALLREDUCE"}}, {{**base, "wrapper": "zero", "join": "Join([net, opt])"}}]

        def planted():
            from torch.nn.parallel import DistributedDataParallel
            DistributedDataParallel._sync_final_model = lambda self, is_last_joiner: None

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 2}}, s) for s in right + told])
        assert [o.verdict for o in found[: len(right)]] == ["ok"] * len(right), [(s, o.verdict, o.why) for s, o in zip(right, found) if o.verdict != "ok"]
        assert [(o.verdict, o.first and o.first.kind) for o in found[len(right) :]] == [("inconsistent", kind) for kind in ("gradient", "gradient", "parameter")], found[len(right) :]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 2}}, s) for s in right])
        assert {{(o.verdict, o.first and o.first.kind) for o in found}} == {{("inconsistent", "evaluation")}}, found
        """,
        tmp_path,
    )


def test_the_state_of_zero_comes_back_however_it_is_gathered(tmp_path: Path) -> None:
    """Gathered on either rank, and by way of the optimizer that it belongs to; averages over ranks of equal numbers change nothing. A load that loads nothing is planted, and an average that is a sum."""
    alone(
        f"""
        from proctor.oracle.fuzz.axes import axis_of
        saved = [{{"world": 2, "wrapper": "zero", "optimizer": "Adam", "zero_saved": v}} for v in axis_of("zero_saved").choice.values[1:]]
        saved += [{{**s, "world": 3, "zero_view": True, "groups": "two"}} for s in saved]
        averaged = [{{"world": 4, "wrapper": "ddp", "optimizer": "Adam", "averager": v, "resume": "plain"}} for v in axis_of("averager").choice.values[1:]]
        hooked = [{{"world": 2, "wrapper": "ddp", "local_hook": v}} for v in axis_of("local_hook").choice.values[1:]]

        def planted():
            from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager, utils
            from torch.distributed.optim import ZeroRedundancyOptimizer
            import torch
            ZeroRedundancyOptimizer.load_state_dict = lambda self, state: None
            whole = utils.average_parameters
            def twice(params, group):
                params = list(params)
                whole(iter(params), group)
                for p in params: p.data.mul_(2)
            utils.average_parameters = twice

        def run(**more):
            with Worlds(timeout_s=200, **more) as worlds:
                return Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 3}}, s) for s in saved + averaged + hooked])
        found = run()
        assert {{o.verdict for o in found}} == {{"ok"}}, [(o.verdict, o.why) for o in found]
        found = run(prepare=planted)
        assert [o.verdict for o in found] == ["inconsistent"] * len(saved + averaged) + ["ok"] * len(hooked), [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )


def test_calls_of_fsdp2_change_nothing(tmp_path: Path) -> None:
    """Each call with each wrapper that takes it; a divisor on one rank is told (torch divides twice). A hook that is not called, and a pass that is not given up, are planted."""
    alone(
        f"""
        from proctor.oracle.fuzz.axes import axis_of, why_invalid
        calls = axis_of("fsdp_call").choice.values[1:]
        right = [{{"world": world, "wrapper": wrapper, "fsdp_call": call, "fsdp_units": "each"}} for call in calls for world, wrapper in ((2, "fsdp2"), (4, "hsdp"))]
        right += [{{"world": 2, "wrapper": "fsdp2", "fsdp_units": "pairs", "optimizer": "Adam", "resume": "full"}}, {{"world": 4, "wrapper": "hsdp", "fsdp_units": "pairs"}}]
        right += [{{"world": 4, "wrapper": "hsdp", "accumulate": 2, "sync": sync, "fsdp_units": "each"}} for sync in axis_of("sync").choice.values[1:]]
        told = [{{"wrapper": "fsdp2", "fsdp_call": "divide by 3"}}]
        assert not [s for s in right if why_invalid(s, frozenset())]

        def planted():
            from torch.distributed.fsdp import FSDPModule
            FSDPModule.set_all_reduce_hook = lambda self, hook, *, stream=None: None

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 2}}, s) for s in right + told])
        assert [o.verdict for o in found[:-1]] == ["ok"] * len(right), [(s, o.verdict, o.why) for s, o in zip(right, found) if o.verdict != "ok"]
        assert (found[-1].verdict, found[-1].first.kind, found[-1].first.way) == ("inconsistent", "gradient", "gradient scale 1/3"), found[-1]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 2}}, s) for s in right])
        assert {{s.get("fsdp_call") for s, o in zip(right, found) if o.verdict != "ok"}} == {{"all-reduce hook"}}, found
        """,
        tmp_path,
    )


def test_parameters_on_one_mesh_of_all_ranks_agree(tmp_path: Path) -> None:
    """Every way to name dimensions but one, which torch does not carry out; matrices that are cut, too. A sum in the place of the mean is planted."""
    alone(
        f"""
        from proctor.oracle.fuzz.axes import axis_of
        base = {{"world": 4, "wrapper": "spmd"}}
        *dims, flat = axis_of("spmd_dims").choice.values
        right = [base, *({{**base, "spmd_dims": d}} for d in dims[1:]), *({{**base, "spmd_cut": c, "fsdp_units": "each", "clip": "2", "optimizer": "Adam"}} for c in axis_of("spmd_cut").choice.values)]
        right += [{{**base, "spmd_cut": "columns", "resume": "sharded", "optimizer": "Adam"}}, {{**base, "accumulate": 2, "sync": "last"}}]
        def run(settings, **more):
            with Worlds(timeout_s=200, **more) as worlds:
                return Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 2}}, s) for s in settings])

        def planted():
            from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
            whole = collectives._get_gradient_divide_factors
            collectives._get_gradient_divide_factors = lambda scatter, reduce, dtype, device="", factor=None, force=False: whole(scatter, reduce, dtype, device, 1.0, force)

        found = run([*right, {{**base, "spmd_dims": flat}}])
        assert [o.verdict for o in found] == ["ok"] * len(right) + ["crash"], [(o.verdict, o.why) for o in found]
        found = run(right, prepare=planted)
        assert {{(o.verdict, o.first and o.first.kind) for o in found}} == {{("inconsistent", "gradient")}}, [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("accelerate") is None, reason="of these libraries")
def test_a_trainer_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """Squares and tokens, accumulated, clipped, under a schedule, from a checkpoint. Tokens that are counted on each rank alone are planted; GPT-2's are counted wrongly by transformers itself."""
    alone(
        """
        from proctor.oracle.fuzz.running.warm import warm_up
        warm_up(("accelerate", "transformers.modeling_utils"))
        ours = {"world": 2, "wrapper": "trainer"}
        right = [
            ours, {**ours, "accumulate": 2, "optimizer": "Adam"}, {**ours, "hf_loss": "tokens", "accumulate": 2}, {**ours, "hf_loss": "smoothed"},
            {**ours, "hf_resume": True, "scheduler": "ExponentialLR", "optimizer": "Adam"}, {**ours, "clip": "2", "hf_loss": "tokens"},
        ]
        def of(setting, family="llama"):
            return Scenario("causal", {"family": family}, {"batch": 4, "steps": 2}, setting)

        def planted():
            from accelerate import Accelerator
            Accelerator.gather = lambda self, tensor: tensor

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([*map(of, right), of({"wrapper": "trainer", "hf_loss": "tokens"}, "gpt2")])
        assert [o.verdict for o in found[:-1]] == ["ok"] * len(right), [(o.verdict, o.why) for o in found]
        assert (found[-1].verdict, found[-1].first.kind) == ("inconsistent", "gradient"), found[-1]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([*map(of, right)])
        assert found[0].verdict == found[2].verdict == "inconsistent", [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )
