"""Forms of a training step, and gradients of collectives, on real ranks: what torch does right agrees, and what it does otherwise is told."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fuzzing import alone

MODEL = {"layers": ["mlp", "layernorm", "linear"], "width": 8}


def test_forms_agree_where_the_wrapper_takes_them(tmp_path: Path) -> None:
    """Of each form one wrapper that is right and, where there is one, one that is not; a wrong one is told as it is wrong, and where it is."""
    alone(
        f"""
        from proctor.oracle.fuzz.axes.form import _FORMS
        base = {{"world": 2}}
        wrong = {{
            "backward twice": ("ddp", "gradient"), "two forwards": ("ddp", "gradient"), "two forwards, last first": ("zero", "gradient"), "slopes": ("tp", "gradient"),
            "assigned": ("fsdp2", "parameter"), "clear the model between": ("fsdp2", "gradient"), "gradient hooks": ("fsdp2", "gradient"),
            "rows": ("fsdp2", "parameter"),
        }}
        right = [{{**base, "wrapper": "tp" if wrong.get(form, ("",))[0] in ("ddp", "zero") else "ddp", "form": form}} for form in _FORMS if form != "turns"]
        right += [{{**base, "wrapper": "fsdp2", "form": form}} for form in ("turns", "two forwards", "in place", "copied", "clear the optimizer between")]
        right += [{{**base, "wrapper": "fsdp2", "form": form, "accumulate": 2}} for form in ("two forwards", "evaluate", "clear the optimizer between")]
        right += [{{**base, "wrapper": "fsdp2", "init": "constant_"}}, {{**base, "wrapper": "ddp", "init": "eye_"}}]
        broken = [{{**base, "wrapper": wrapper, "form": form}} for form, (wrapper, _) in wrong.items()]
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 8}}, s) for s in right + broken])
        assert [o.verdict for o in found[: len(right)]] == ["ok"] * len(right), [(s, o.verdict, o.why) for s, o in zip(right, found) if o.verdict != "ok"]
        assert [(o.verdict, o.first and o.first.kind) for o in found[len(right) :]] == [("inconsistent", kind) for _, kind in wrong.values()], found[len(right) :]
        """,
        tmp_path,
    )


def test_gradients_of_collectives_agree_for_sums(tmp_path: Path) -> None:
    """Every call is right for sums in one process's order; a factor is planted into one backward pass, and shows there alone. What torch itself gets wrong is told."""
    alone(
        """
        from proctor.oracle.fuzz.axes.exchange import _CALLS
        from proctor.oracle.fuzz.space import compact
        from proctor.oracle.fuzz.axes import axis_of
        choice = axis_of("exchange_call").choice
        def of(call, world=2, **model):
            return Scenario("exchange", model, {"steps": 1}, {"world": world, "wrapper": "exchange", **compact([choice], {choice.name: call})})
        sums = [of(call, world) for call in _CALLS if call != "funcol.broadcast" for world in (2, 3)]
        others = [of("nn.all_gather", reduction="MAX"), of("DTensor, reduced", reduction="AVG"), of("nn.all_to_all", use="transposed"), of("funcol.all_gather_tensor", use="expanded")]
        told = [of("nn.all_reduce", reduction="MAX"), of("nn.reduce_scatter", reduction="AVG"), of("nn.all_gather", use="transposed"), of("DTensor, Partial", reduction="AVG"), of("funcol.broadcast")]
        said = [of("funcol.all_reduce", reduction="MAX")]

        def planted():
            from torch.distributed.nn import functional
            whole = functional._AlltoAllSingle.backward
            functional._AlltoAllSingle.backward = staticmethod(lambda ctx, grad: whole(ctx, grad * 2))

        with Worlds(timeout_s=200) as worlds:
            found = [o.verdict for o in Runner(worlds).run_all([*sums, *others, *told, *said])]
        assert found == ["ok"] * len(sums + others) + ["inconsistent"] * len(told) + ["refused"], found
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all(sums)
        off = {s.setting.get("exchange_call") for s, o in zip(sums, found) if o.verdict != "ok"}
        assert off == {"nn.all_to_all_single", "nn.all_to_all_single, uneven"}, off
        """,
        tmp_path,
    )


def test_a_step_that_overflows_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    """Scaled gradients agree under each wrapper; a rank that updates all the same is planted, and shows where there is an overflow alone. FSDP1's scaler does not go with fused optimizers."""
    alone(
        f"""
        base = {{"world": 2, "optimizer": "Adam"}}
        values = ("scales", "unscales", "overflows")
        right = [{{**base, "wrapper": wrapper, "scaler": value}} for wrapper in ("ddp", "fsdp2", "fsdp1") for value in values]
        right += [{{**base, "wrapper": wrapper, "scaler": "overflows", **more}} for wrapper, more in (
            ("zero", {{}}), ("hsdp", {{"world": 4}}), ("fsdp2", {{"world": 3, "implementation": "fused=True"}}), ("fsdp2", {{"clip": "2", "accumulate": 2}}),
            ("fsdp2", {{"form": "two forwards"}}), ("fsdp2", {{"resume": "full"}}), ("fsdp1", {{"fsdp1_orig": True}}),
        )]
        fused = {{**base, "wrapper": "fsdp1", "fsdp1_orig": True, "implementation": "fused=True"}}
        def of(s):
            return Scenario("chain", {MODEL!r}, {{"batch": 8, "steps": 3}}, s)

        def planted():
            import torch.distributed as dist
            whole = torch.amp.GradScaler.step
            def step(self, opt):
                if dist.is_initialized() and dist.get_rank() == 1:
                    self.unscale_(opt)
                    return opt.step()
                return whole(self, opt)
            torch.amp.GradScaler.step = step

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([of(s) for s in (*right, {{**fused, "scaler": "overflows"}}, {{**fused, "scaler": "unscales"}})])
        assert [o.verdict for o in found] == ["ok"] * len(right) + ["inconsistent", "crash"], [(o.verdict, o.why) for o in found]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = [o.verdict for o in Runner(worlds).run_all([of({{**base, "wrapper": "ddp", "scaler": value}}) for value in ("scales", "overflows")])]
        assert found == ["ok", "inconsistent"], found
        """,
        tmp_path,
    )


def test_a_checkpoint_by_hand_comes_back_in_every_layout(tmp_path: Path) -> None:
    """`dcp.save` takes every layout; `async_save` loses the sign of a negative view."""
    alone(
        """
        settings = [{"world": 2, "wrapper": "by_hand", "hand_call": call, **({"hand_layout": layout} if layout else {})}
                    for call in ("dcp.save", "dcp.async_save") for layout in ("", "transposed", "strided", "offset", "negative")]
        with Worlds(timeout_s=200) as worlds:
            found = [o.verdict for o in Runner(worlds).run_all([Scenario("collective", {"shape": "2, 3"}, {"steps": 1}, s) for s in settings])]
        assert found == ["ok"] * 9 + ["inconsistent"], found
        """,
        tmp_path,
    )


@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs torchrec (docs/fuzz.md, Libraries)")
def test_embeddings_of_sequences_agree_however_tables_are_cut(tmp_path: Path) -> None:
    """Words that come back in another order are planted: they show. Tables that are not cut raise in the library as it is, and a type that it has not is refused in words."""
    alone(
        """
        warm_up(("torchrec.distributed",))
        base = {"precision": "float32", "world": 2, "wrapper": "dmp"}
        kinds = ["table_wise", "row_wise", "column_wise", "mixed"]
        def of(kind, **more):
            return Scenario("sequences", {"tables": 3, "width": 8}, {"batch": 6}, {**base, **({"rec_sharding": kind} if kind != "table_wise" else {}), **more})

        def planted():
            from torchrec.sparse.jagged_tensor import JaggedTensor
            JaggedTensor.values = lambda self: self._values.flip(0)

        for plant, wanted in ((None, "ok"), (planted, "inconsistent")):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all([of(kind) for kind in kinds] + ([of(kind, split="uneven") for kind in kinds] if plant is None else []))
            assert {o.verdict for o in found} == {wanted}, found
        with Worlds(timeout_s=200) as worlds:
            found = [o.verdict for o in Runner(worlds).run_all([of("data_parallel"), of("table_row_wise")])]
        assert found == ["crash", "refused"], found
        """,
        tmp_path,
    )


def test_an_average_of_the_weights_is_that_of_one_process(tmp_path: Path) -> None:
    """Each way to keep one agrees under each wrapper that takes it; one that misses the last update of a rank is planted, and shows. FSDP1 cannot be copied, and does not say so."""
    alone(
        f"""
        from proctor.oracle.fuzz.axes import axis_of
        values = axis_of("average").choice.values[1:]
        own = [value for value in values if not value.startswith("AveragedModel")]
        right = [{{"world": 2, "wrapper": wrapper, "average": value}} for wrapper in ("ddp", "zero") for value in values]
        right += [{{"world": world, "wrapper": wrapper, "average": value}} for wrapper, world in (("fsdp2", 3), ("hsdp", 4), ("fsdp1", 2)) for value in own]
        right += [{{"world": 2, "wrapper": "tp", "average": value}} for value in ("AveragedModel, mean", "list", "state")]
        right += [{{"world": 2, "wrapper": "fsdp2", "average": "list", "form": "two forwards", "clip": "2"}}, {{"world": 2, "wrapper": "fsdp2", "average": "state", "optimizer": "Adam", "resume": "full"}}]
        broken = [{{"world": 2, "wrapper": "fsdp1", "average": "AveragedModel"}}]
        of = [Scenario("chain", {MODEL!r}, {{"batch": 8}}, s) for s in right + broken]
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all(of)
        assert [o.verdict for o in found] == ["ok"] * len(right) + ["crash"], [(s, o.verdict, o.why) for s, o in zip(right, found) if o.verdict != "ok"]

        def planted():
            import torch.distributed as dist
            from torch.optim.swa_utils import AveragedModel
            whole = AveragedModel.update_parameters
            AveragedModel.update_parameters = lambda self, net: None if dist.is_initialized() and dist.get_world_size() > 1 and self.n_averaged > 0 else whole(self, net)

        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([s for s in of if s.setting["wrapper"] == "ddp"])
        off = {{s.setting["average"] for s, o in zip(of, found) if o.verdict != "ok"}}
        assert off == set(values) - set(own), (off, found)
        """,
        tmp_path,
    )
