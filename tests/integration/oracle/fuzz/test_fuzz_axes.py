"""Axes on real ranks: healthy settings agree, and what is planted into the library is found where it is planted."""

from __future__ import annotations

from pathlib import Path

from helpers.fuzzing import alone

MODEL = {"layers": ["mlp", "layernorm"], "width": 5}


def test_checkpoints_on_disk_come_back_at_another_number_of_ranks(tmp_path: Path) -> None:
    """What is put together of the shards of others is planted wrong: it shows where the number of ranks changes or one file is made, and only there."""
    alone(
        f"""
        base = {{"wrapper": "fsdp2", "optimizer": "Adam"}}
        here = [{{**base, "world": 2, "disk": form}} for form in ("save", "async", "full", "flat", "from torch")]
        there = [{{**base, "world": 2, "disk": "save", "before_world": 3}}, {{**base, "world": 1, "disk": "save", "before_world": 2}},
                 {{**base, "world": 2, "disk": "save", "before": "tp", "before_world": 3, "scheduler": "OneCycleLR"}}, {{**base, "world": 2, "disk": "to torch"}}]
        less = [{{**base, "world": 3, "disk": "save", "before_world": 1, "before": "none"}}, {{"wrapper": "tp", "world": 2, "disk": "save", "before": "ddp"}}]

        def planted():
            from torch.distributed.checkpoint import DefaultLoadPlanner
            DefaultLoadPlanner.commit_tensor = lambda self, item, tensor: tensor.mul_(1.5 if any(item.dest_offsets) else 1)

        for plant, wrong in ((None, 0), (planted, len(there))):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in here + less + there])
                assert not list(worlds.folder.glob("saved-*"))
            wanted = ["ok"] * (len(here + less + there) - wrong) + ["inconsistent"] * wrong
            assert [o.verdict for o in found] == wanted, found
        """,
        tmp_path,
    )


def test_compiled_models_agree_and_are_compiled(tmp_path: Path) -> None:
    """A function that dynamo's graph gets wrong is planted: it shows where something is compiled, whatever wraps it, and nowhere else."""
    alone(
        f"""
        base = {{"world": 2, "optimizer": "Adam"}}
        settings = [{{**base, "wrapper": w, "compile": c}} for w in ("ddp", "fsdp2") for c in ("model", "units", "wrapped")]
        settings += [{{**base, "wrapper": "tp", "compile": "model"}}, {{**base, "wrapper": "ddp", "compile": "units", "disk": "save"}}, {{"compile": "wrapped"}}]
        plain = [{{**base, "wrapper": w}} for w in ("ddp", "fsdp2", "fsdp1", "tp")]

        def planted():
            from torch._dynamo.backends import registry
            whole = registry.lookup_backend("aot_eager")
            def wrong(graph, inputs, **kwargs):
                compiled = whole(graph, inputs, **kwargs)
                return lambda *args: [out * 1.5 if out.is_floating_point() else out for out in compiled(*args)]
            wrong._tags = ()
            registry._COMPILER_FNS["aot_eager"] = wrong

        warm_up()
        for plant, wanted, compiled in ((None, "ok", settings), (planted, "inconsistent", settings[1::3])):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in compiled + plain])
            verdicts = [o.verdict for o in found]
            assert verdicts == [wanted] * len(compiled) + ["ok"] * len(plain), [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )


def test_pipelines_agree_in_every_schedule(tmp_path: Path) -> None:
    """A stage that sends its neighbour another gradient is planted: the stages before it differ. Evaluation in V shape raises in the library as it is."""
    alone(
        """
        from proctor.oracle.fuzz.axes.pipelined import _SCHEDULES, _SHAPED
        layers = {"layers": ["linear", "mlp", "layernorm", "linear", "gelu"], "width": 5}
        base = {"world": 2, "wrapper": "pipeline", "optimizer": "Adam"}
        settings = [{**base, "pipe_micro": "two a rank", **({"pipe_schedule": s} if s != "ScheduleGPipe" else {}), **({} if s in _SHAPED else {"pipe_eval": True})} for s in _SCHEDULES]
        settings += [{**base, "pipe_scale": True}, {**base, "disk": "flat"}, {**base, "disk": "flat", "before": "ddp"}, {**base, "wrapper": "fsdp2", "disk": "flat", "before": "pipeline"}]
        scenarios = [Scenario("chain", layers, {"batch": 8}, s) for s in settings]
        shaped = Scenario("chain", layers, {"batch": 8}, {**base, "pipe_schedule": "ScheduleZBVZeroBubble", "pipe_eval": True})

        def planted():
            from torch.distributed.pipelining.stage import PipelineStage
            whole = PipelineStage.get_bwd_send_ops
            def wrong(stage, chunk):
                if stage.stage_index == 1 and chunk in stage.bwd_cache:
                    stage.bwd_cache[chunk] = tuple(g if g is None else g * 2 for g in stage.bwd_cache[chunk])
                return whole(stage, chunk)
            PipelineStage.get_bwd_send_ops = wrong

        for plant, wanted in ((None, "ok"), (planted, "inconsistent")):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all(scenarios[:2] if plant else [*scenarios, shaped])
            assert [o.verdict for o in found] == ([wanted] * 2 if plant else ["ok"] * len(scenarios) + ["crash"]), [(o.verdict, o.why) for o in found]
            assert not plant or {(o.first.kind, o.first.rank) for o in found} == {("gradient", 0)}, found
        """,
        tmp_path,
    )


def test_the_state_that_is_asked_for_before_training_changes_it(tmp_path: Path) -> None:
    """`get_state_dict` makes a step of an optimizer without state, so that Adam counts one too many: a mistake of the library as it is. SGD has nothing to count."""
    alone(
        f"""
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 6}}, {{"resume": "asked", **s}}) for s in ({{}}, {{"optimizer": "Adam"}})])
        assert [o.verdict for o in found] == ["ok", "inconsistent"] and found[1].first.name.endswith(":step"), found
        """,
        tmp_path,
    )


def test_flat_parameters_agree_part_by_part(tmp_path: Path) -> None:
    """FSDP1 in all of its strategies; what is planted into one rank's shard is found there. Its whole optimizer state of original parameters is wrong in the library as it is."""
    alone(
        f"""
        base = {{"wrapper": "fsdp1", "optimizer": "Adam"}}
        names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        settings = [{{**base, "world": 4, **({{"fsdp1_strategy": s}} if s != "FULL_SHARD" else {{}}), **({{"fsdp1_orig": True}} if o else {{}})}} for s in names for o in (0, 1)]
        settings += [{{**base, "world": 2, "fsdp1_units": "each", "accumulate": 2, "sync": "last"}}, {{**base, "world": 3, "split": "one empty"}},
                     {{**base, "world": 2, "fsdp1_state": "LOCAL_STATE_DICT"}}, {{**base, "world": 2, "fsdp1_state": "SHARDED_STATE_DICT", "fsdp1_orig": True}},
                     {{**base, "world": 2, "disk": "save", "before": "ddp"}}, {{**base, "world": 3, "precision": "float32", "clip": "2"}}]
        whole = {{**base, "world": 2, "fsdp1_state": "FULL_STATE_DICT"}}
        scenarios = [Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in settings]

        def planted():
            import torch.distributed as dist
            name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
            plain = getattr(dist, name)
            def wrong(out, *args, **kwargs):
                plain(out, *args, **kwargs)
                if dist.get_rank() == 1:
                    out.mul_(2)
            setattr(dist, name, wrong)

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([*scenarios, *(Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in (whole, {{**whole, "fsdp1_orig": True}}))])
            assert [o.verdict for o in found] == ["ok"] * (len(settings) + 1) + ["inconsistent"], [(o.verdict, o.why) for o in found]
            assert found[-1].first.kind == "state" and found[-1].first.module == "Linear", found[-1]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([s for s in scenarios if "fsdp1_strategy" not in s.setting][:2])
            assert {{(o.verdict, o.first.kind, o.first.rank) for o in found}} == {{("inconsistent", "gradient", 1)}}, found
        """,
        tmp_path,
    )


def test_what_is_cut_between_layers_agrees(tmp_path: Path) -> None:
    """Rows of a chain, tokens of a transformer. Norms whose gradients are each rank's own are planted; torch itself lets a norm train that was frozen, which is told."""
    alone(
        """
        layers = {"layers": ["mlp", "layernorm", "gelu", "linear", "rmsnorm"], "width": 5}
        def of(s, template="chain", batch=8, **model):
            return Scenario(template, model or layers, {"batch": batch}, {"wrapper": "tp", "tp_style": "sequence", **s})
        right = [of({"world": 2}), of({"world": 4, "wrapper": "tp_fsdp2"}), of({"world": 2, "accumulate": 2, "optimizer": "Adam", "clip": "2"}), of({"world": 3}, batch=6, layers=["layernorm", "linear"], width=6)]
        right += [of({"world": 4}, "transformer", length=4), of({"world": 2}, "transformer", length=4, norm="rmsnorm", heads=4)]
        thawed = of({"world": 2}, **layers, frozen="alternate")

        def planted():
            from torch.distributed.tensor import DTensor, Replicate
            from torch.distributed.tensor.parallel import SequenceParallel
            SequenceParallel._prepare_input_fn = staticmethod(lambda cut, module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]))

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([*right, thawed])
        assert [o.verdict for o in found] == ["ok"] * len(right) + ["inconsistent"], [(o.verdict, o.why) for o in found]
        assert found[-1].first.kind == "gradient" and "the reference has none" in found[-1].why, found[-1].why
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all(right[:1])
        assert [(o.verdict, o.first and o.first.kind) for o in found] == [("inconsistent", "gradient")], found
        """,
        tmp_path,
    )


def test_a_loss_of_scores_that_stay_cut_is_right_for_one_target_each(tmp_path: Path) -> None:
    """Other losses have a wrong gradient, silently. An exception within the context manager leaves it on; the next program in the same rank has it off."""
    alone(
        """
        def of(expression, **s):
            return Scenario("operator", {"expression": expression}, {"steps": 1}, {"world": 2, "wrapper": "dtensor", "dt_a": "S1", **s})
        ignored = "F.cross_entropy(a, i % a.shape[1] - 1, ignore_index=-1, weight=v.detach().abs())"
        right = ["F.cross_entropy(a, i % a.shape[1])", "F.cross_entropy(a, i % a.shape[1], ignore_index=0)", "F.cross_entropy(a[None].mT, i[None] % a.shape[1])"]
        wrong = ["F.cross_entropy(a, b.softmax(1))", "-(a.softmax(1) * a.log_softmax(1)).sum(1)"]
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([of(e, dt_loss="loss_parallel") for e in (*right, *wrong, ignored)])
            after = Runner(worlds).run_all([of(ignored), *(of(e) for e in wrong)])
        assert [o.verdict for o in found] == ["ok"] * len(right) + ["inconsistent"] * len(wrong) + ["crash"], [(o.verdict, o.why) for o in found]
        assert all(o.first.kind == "gradient" for o in found[len(right) : -1]), found
        assert [o.verdict for o in after] == ["ok"] * 3, [(o.verdict, o.why) for o in after]
        """,
        tmp_path,
    )
