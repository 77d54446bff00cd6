"""Libraries with engines of their own on real ranks: healthy settings agree, what is planted is found, and what is known of them is still so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fuzzing import alone

MODEL = {"layers": ["mlp", "layernorm"], "width": 5}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed (docs/fuzz.md, Libraries)")
def test_deepspeed_agrees_in_every_stage(tmp_path: Path) -> None:
    """Two mistakes are planted: a loss that counts twice shows everywhere, a checkpoint that loses the optimizer's state only where one is loaded."""
    alone(
        f"""
        warm_up(("deepspeed",))
        base = {{"world": 2, "wrapper": "deepspeed", "precision": "float32", "optimizer": "Adam"}}
        looked = [{{**base, "ds_stage": s, "ds_look": True, **more}} for s in (1, 2, 3) for more in ({{}}, {{"accumulate": 2}}, {{"clip": "2"}}, {{"ds_boundary": "coalesced", "accumulate": 2}})]
        plain = [{{**base, **more}} for more in ({{}}, {{"accumulate": 2}}, {{"ds_boundary": "unmanaged", "accumulate": 2}}, {{"scheduler": "ExponentialLR"}}, {{"ds_optimizer": "config"}})]
        saved = [{{**base, **({{"ds_stage": s}} if s else {{}}), "ds_state": "checkpoint"}} for s in (0, 1, 2, 3)]
        others = [{{**base, "ds_stage": 2, "ds_state": "fp32"}}, {{**base, "ds_stage": 3, "ds_state": "16bit"}}, {{**base, "ds_stage": 3, "ds_state": "universal", "before_world": 1}}]
        scenarios = [Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in (*looked, *plain, *others, *saved)]

        def twice():
            import deepspeed
            whole = deepspeed.DeepSpeedEngine.backward
            deepspeed.DeepSpeedEngine.backward = lambda self, loss, *args, **kwargs: whole(self, loss * 2, *args, **kwargs)

        def lost():
            import deepspeed
            whole = deepspeed.DeepSpeedEngine.load_checkpoint
            deepspeed.DeepSpeedEngine.load_checkpoint = lambda self, at, **kwargs: whole(self, at, load_optimizer_states=False, **kwargs)

        # Without a look at gradients Adam would hide a factor of them.
        for plant, some, wanted in ((None, scenarios, ["ok"] * len(scenarios)), (lost, scenarios[-8:], ["ok"] * 3 + ["inconsistent"] * 5), (twice, scenarios[:14], ["inconsistent"] * 14)):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all(some)
            assert [o.verdict for o in found] == wanted, [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (docs/fuzz.md, Libraries)")
def test_megatrons_layers_agree(tmp_path: Path) -> None:
    """A row-wise layer that does not add up is planted: it shows where rows are cut and nowhere else. Label smoothing over a vocabulary that is cut is wrong in the library as it is."""
    alone(
        """
        warm_up(("megatron.core.distributed",))
        base = {"world": 2, "wrapper": "megatron"}
        rows = [{**base, "mg_style": "row"}, {**base, "mg_style": "pairs", "optimizer": "Adam"}, {**base, "mg_style": "pairs", "accumulate": 2}]
        others = [base, {**base, "mg_data": 2}, {**base, "world": 4, "mg_data": 2, "accumulate": 2, "optimizer": "Adam"}, {**base, "world": 4, "mg_data": 2, "mg_ddp": "overlap_grad_reduce=True, bucket_size=8", "accumulate": 2}, {**base, "resume": "plain"}]
        cut = [{**base, "mg_style": "pairs", "mg_sequence": True}, {**base, "mg_style": "pairs", "mg_sequence": True, "optimizer": "Adam", "accumulate": 2}, {**base, "world": 4, "mg_data": 2, "mg_style": "pairs", "mg_sequence": True}]
        words = [Scenario("vocabulary", model, {"batch": 8}, base) for model in ({}, {"logits": True}, {"smoothing": 0.1})]
        plain = [Scenario("vocabulary", {}, {"batch": 8}, s) for s in (*rows, *others)]
        pairs = [Scenario("chain", {"layers": ["mlp", "layernorm"], "width": 5}, {"batch": 8}, s) for s in cut]

        def planted():
            from megatron.core.tensor_parallel import layers
            layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([*plain, *pairs, *words])
            assert [o.verdict for o in found] == ["ok"] * (len(found) - 1) + ["inconsistent"], [(o.verdict, o.why) for o in found]
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {"layers": ["linear", "linear"], "width": 8}, {"batch": 8}, s) for s in (rows[0], base)])
            assert [o.verdict for o in found] == ["inconsistent", "ok"], [(o.verdict, o.why) for o in found]
        """,
        tmp_path,
    )
