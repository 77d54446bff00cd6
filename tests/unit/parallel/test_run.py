"""A model run by a plan computes what one device computes, with its random numbers."""

import pytest
import torch
from helpers.oracle.parallel_gpt import batches, gpt, make, on_threads, one, plan, train

from proctor.errors import OracleError
from proctor.oracle.parallel import deferred, parallelize, run_threads
from proctor.oracle.plans.mesh import Mesh

DP_TP = Mesh(("dp", "tp"), (2, 2))


def mesh(dp, tp):
    return Mesh(("dp", "tp"), (dp, tp))


def close(found, wanted, tolerance=1e-5):
    return all(abs(a - b) <= tolerance for f, w in zip(found, wanted) for a, b in zip(f, w))


@pytest.mark.parametrize("name", ["gpt.toml", "gpt_sp.toml"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_losses_and_norms_are_those_of_plain_torch(name, sizes):
    wanted, _ = train(None)
    for found, _ in on_threads(mesh(*sizes), name=name):
        assert close(found, wanted)


@pytest.mark.parametrize("name", ["gpt.toml", "gpt_sp.toml"])
@pytest.mark.parametrize("rng", ["keyed", "stock"])
def test_dropout_is_that_of_one_device(name, rng):
    wanted = train(None, dropout=0.2)[0] if rng == "stock" else one(dropout=0.2, name=name)[0]
    without = one()[0]
    assert not close(wanted, without, 1e-3), "dropout does something"
    for found, _ in on_threads(DP_TP, name=name, rng=rng, dropout=0.2):
        assert close(found, wanted)


@pytest.mark.parametrize("rng", ["keyed", "stock"])
def test_deferred_values_are_those_of_one_device_to_the_bit(rng):
    if rng == "stock":
        torch.manual_seed(0)
        wanted = make().state_dict()
    else:
        wanted = one(steps=0, defer=True)[1].state_dict()

    def states(rank):
        return parallelize(deferred(make), plan().on(mesh(2, 4)), rng=rng, seed=0).state_dict()

    for state in run_threads(states, 8):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_deferred_keeps_values_that_come_from_elsewhere():
    import numpy as np

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("waves", torch.from_numpy(np.sin(np.arange(8.0))).float())
            self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            self.mixed = torch.nn.Parameter(torch.ones(8) + self.waves)
            self.copied = torch.nn.Parameter(torch.empty(8))
            with torch.no_grad():
                self.copied.normal_().copy_(self.waves)

    from proctor.oracle import Plan

    rules = Plan("tp=2").shard("waves|mixed|scale|copied", tp=0)
    wanted = Table().state_dict()
    for state in run_threads(lambda rank: parallelize(deferred(Table), rules, seed=0).state_dict(), 2):
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_deferred_refuses_to_draw_into_a_tensor_from_elsewhere():
    import numpy as np

    with pytest.raises(OracleError, match="draws into a tensor that the constructor did not make"):
        deferred(lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.from_numpy(np.zeros(4)).normal_())]))


def test_a_rank_holds_its_part_only():
    def local(rank):
        model = parallelize(deferred(make), plan().on(mesh(1, 4)), seed=0)
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    shapes = run_threads(local, 4)[1]
    assert shapes["layers.0.attention.qkv.weight"] == (24, 32)
    assert shapes["layers.0.mlp.fc2.weight"] == (32, 32)
    assert shapes["embedding.word.weight"] == (16, 32)
    assert shapes["norm.weight"] == (32,)


def test_gradients_of_microbatches_are_reduced_once():
    wanted = train(None, microbatches=2)[0]
    for found, _ in on_threads(DP_TP, microbatches=2):
        assert close(found, wanted)


def test_a_backward_that_raised_leaves_no_gradient_unreduced():
    def step(rank):
        model = parallelize(deferred(make, 0.2), plan().on(DP_TP), seed=0)
        tokens = batches(1)[0]
        out = model(tokens[:, :-1])
        hook = out.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.head.weight.sum().mul(out.sum()).backward()
        hook.remove()
        model.zero_grad()
        model(tokens[:, :-1]).square().mean().backward()
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    assert len({round(norm, 5) for norm in run_threads(step, 4)}) == 1


def test_recomputed_modules_draw_what_they_drew_first():
    wanted = one(dropout=0.2)[0]
    assert close(one(dropout=0.2, recompute=True)[0], wanted)
    for found, _ in on_threads(DP_TP, dropout=0.2, recompute=True):
        assert close(found, wanted)


def test_recomputation_with_the_stock_stream_of_threads_stops():
    with pytest.raises(OracleError, match="restores torch's default generator only"):
        on_threads(DP_TP, dropout=0.2, recompute=True, rng="stock")


def test_recomputation_with_the_stock_stream_of_a_process():
    wanted = train(None, dropout=0.2, recompute=True)[0]
    torch.manual_seed(0)
    model = parallelize(make(0.2, recompute=True), plan().on(mesh(1, 1)), rng="stock")
    torch.manual_seed(0)
    loss = gpt().next_token_loss(model(batches(1)[0][:, :-1]), batches(1)[0][:, 1:])
    loss.backward()
    assert close([(loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())], wanted[:1])


def test_tied_weights_stay_tied():
    wanted = train(None, tied=True)[0]
    for found, model in on_threads(DP_TP, tied=True):
        assert close(found, wanted)
        assert model.head.weight is model.embedding.word.weight


def test_state_dict_goes_in_and_out_whole():
    torch.manual_seed(3)
    saved = {name: value.clone() for name, value in make().state_dict().items()}

    def load(rank):
        model = parallelize(deferred(make), plan().on(DP_TP), seed=0)
        model.load_state_dict(saved)
        return model.state_dict()

    for state in run_threads(load, 4):
        assert all(torch.equal(state[name], saved[name]) for name in saved)


def test_evaluation_draws_nothing_and_needs_no_gradients():
    def evaluate(rank):
        model = parallelize(deferred(make, 0.3), plan().on(DP_TP), seed=0).eval()
        with torch.no_grad():
            return model(batches(1)[0][:, :-1])

    wanted = one(steps=0, defer=True)[1].eval()
    for found in run_threads(evaluate, 4):
        assert torch.allclose(found, wanted(batches(1)[0][:, :-1]), atol=1e-5)


def test_a_draw_that_no_rule_is_about_stops_with_the_users_line():
    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.rand_like(x))

    from proctor.oracle import Plan

    rules = Plan("dp=2").style("batch", "", "dp")
    with pytest.raises(OracleError, match=r"random numbers are drawn \(.*test_run.py:\d+ in forward\) and the plan does not say"):
        run_threads(lambda rank: parallelize(Noisy(4, 4), rules)(torch.ones(4, 4)), 2)


def test_a_pending_gradient_that_is_forgotten_is_named_before_the_first_update():
    from proctor.oracle.plans.plan_toml import format_plan, parse_plan

    forgotten = parse_plan(format_plan(plan("gpt_sp.toml")).replace(r"(layers\.\d+\.)?norm\d?\.(weight|bias)", "norm.weight", 2))

    def step(rank):
        model = parallelize(deferred(make), forgotten.on(DP_TP), seed=0)
        model(batches(1)[0][:, :-1]).sum().backward()

    with pytest.raises(OracleError, match=r"gradients of layers\.0\.norm1\.weight.* differ between the ranks along tp"):
        run_threads(step, 4)


def test_a_batch_that_is_another_on_each_rank_is_refused_where_the_plan_cuts_it():
    from proctor.oracle import Plan

    rules = Plan("dp=2").style("batch", "", "dp")

    def step(rank, apart):
        parallelize(torch.nn.Linear(4, 4), rules)(torch.ones(4, 4) + (rank if apart else 0))

    run_threads(lambda rank: step(rank, apart=False), 2)
    with pytest.raises(OracleError, match=r"input of the model comes whole, says the plan, .* along dp; ranks were given different data"):
        run_threads(lambda rank: step(rank, apart=True), 2)


def test_edges_that_disagree_are_named_in_the_first_forward():
    wrong = plan().on(mesh(1, 2)).redistribute(r"layers\.\d+\.norm2", at="output", dst={"tp": 1})

    def step(rank):
        parallelize(deferred(make), wrong, seed=0)(batches(1)[0][:, :-1])

    with pytest.raises(OracleError, match=r"input of layers\.0\.mlp\.fc1 comes as \(replicated\), says the plan, and output of layers\.0\.norm2 leaves it as \(tp:1\)"):
        run_threads(step, 2)


def test_a_batch_that_cannot_be_divided_is_one_line():
    with pytest.raises(OracleError, match=r"input of the model: dp:0: dimension 0 of a tensor \[3, 4\] is not divisible by 2"):
        run_threads(lambda rank: parallelize(deferred(make), plan().on(mesh(2, 1)), seed=0)(torch.zeros(3, 4, dtype=torch.int64)), 2)


def test_optimizers_of_whole_matrices_are_refused():
    def step(rank):
        model = parallelize(deferred(make), plan().on(mesh(1, 2)), seed=0)
        model(batches(1)[0][:, :-1]).sum().backward()
        torch.optim.Adafactor(model.parameters()).step()

    with pytest.raises(OracleError, match="Adafactor looks at whole parameters"):
        run_threads(step, 2)


def test_a_mesh_of_another_size_than_the_job_is_refused():
    with pytest.raises(OracleError, match="has 4 ranks and this program is one"):
        parallelize(make(), plan())
    with pytest.raises(OracleError, match="has 4 ranks, the job has 2"):
        run_threads(lambda rank: parallelize(make(), plan()), 2)


def test_a_failure_on_one_rank_ends_all():
    def fail(rank):
        model = parallelize(deferred(make), plan().on(DP_TP), seed=0)
        if rank == 2:
            raise KeyError("mine")
        return model(batches(1)[0][:, :-1])

    with pytest.raises(KeyError, match="mine"):
        run_threads(fail, 4)
