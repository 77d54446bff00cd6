"""Mistakes that the programs of this folder can make on request (`--bug NAME`), each a patch of a running `Job`.

A mistake is made after the model is built and before it is cut or wrapped; forwards are replaced on the module itself,
so hooks, wrappers and checkpointing stay as they are. `fits` says where one has an effect: `needs` are features of the
configuration that must all be there, `unless` those that must not. Some are too small for bfloat16 to show end to end.

`blamed` are regular expressions, one of which the name (module or parameter) that a good checker gives should match.
{k} is the layer that is patched: the middle one.
"""
# More than 400 lines: a list of mistakes, one function each, over one job.
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GPTS = frozenset({"parallel_gpt", "pipeline_gpt", "switch_moe"})
ANY = GPTS | {"llama_tp"}


@dataclass(frozen=True)
class Mistake:
    name: str
    summary: str
    inject: Callable
    programs: frozenset
    needs: frozenset
    unless: frozenset
    blamed: tuple[str, ...]
    float32_only: bool


MISTAKES: dict[str, Mistake] = {}


def mistake(*blamed, programs=GPTS, needs="", unless="", float32_only=False):
    def register(inject):
        name, words = inject.__name__, lambda text: frozenset(text.split())
        MISTAKES[name] = Mistake(
            name, inject.__doc__, inject, frozenset(programs), words(needs), words(unless), blamed, float32_only
        )
        return inject

    return register


def program(args):
    """The program that a set of arguments belongs to."""
    for option, name in (("mesh", "parallel_gpt"), ("schedule", "pipeline_gpt"), ("experts", "switch_moe")):
        if hasattr(args, option):
            return name
    return "llama_tp"


def features(args):
    """Words for what a configuration does, of which `needs` and `unless` are made."""
    found = {word for word in ("sp", "fsdp", "zero", "tied", "recompute", "dropout") if getattr(args, word, False)}
    if args.microbatches > 1:
        found.add("accumulation")
    if hasattr(args, "mesh"):
        dp, tp = args.mesh["dp"], args.mesh["tp"]
        found |= {axis for axis, size in args.mesh.items() if size > 1}
        if dp > 1 and not args.fsdp:
            found.add("ddp" if tp == 1 else "replicate")
        parallel = dp * tp > 1
    else:
        parallel = args.nprocs > 1
        if parallel:
            found.add({"pipeline_gpt": "pp", "switch_moe": "ep", "llama_tp": "tp"}[program(args)])
    return found | ({"parallel"} if parallel else set())


def fits(name, args):
    """Whether the mistake changes what a run with these arguments computes."""
    bug, found = MISTAKES[name], features(args)
    return (
        "parallel" in found and program(args) in bug.programs and bug.needs <= found and not (bug.unless & found)
    )


def blamed(name, args):
    """The regular expressions of `Mistake.blamed` for these arguments."""
    return [pattern.replace("{k}", str(args.layers // 2)) for pattern in MISTAKES[name].blamed]


def names(of):
    return sorted(name for name, bug in MISTAKES.items() if of in bug.programs)


def apply(name, job):
    """Make the mistake, or end with a message when the configuration has no place for it."""
    if name is None:
        return
    bug = MISTAKES[name]
    if not fits(name, job.args):
        needs = " ".join(sorted(bug.needs)) or "more than one rank"
        unless = f", not {' or '.join(sorted(bug.unless))}" if bug.unless else ""
        raise SystemExit(f"--bug {name} needs {needs}{unless}")
    bug.inject(job)


# Where things are in the models

def models(job):
    return job.models if hasattr(job, "models") else [job.model]


def middle(job):
    """The middle layer, in a list that is empty on pipeline ranks that do not have it."""
    key = job.args.layers // 2
    if program(job.args) == "llama_tp":
        return [job.model.model.layers[key]]
    return [model.layers[str(key)] for model in models(job) if str(key) in model.layers]


def embeddings(job):
    return [model.embedding for model in models(job) if model.embedding is not None]


def column(block):
    """A projection whose output is cut over tp."""
    return block.attention.qkv if hasattr(block, "attention") else block.self_attn.q_proj


def row(block):
    """A projection whose input is cut over tp."""
    return block.mlp.fc2 if hasattr(block, "attention") else block.mlp.down_proj


def linear_of_rank(layer, x):
    """A linear layer of local tensors only. torch hands its layers DTensors, transformers plain ones."""
    x = x.to_local() if isinstance(x, DTensor) else x
    return F.linear(x, layer.weight.to_local(), None if layer.bias is None else layer.bias.to_local())


def placed_like(x, out, placement):
    """`out` as a DTensor of that placement when `x` is one."""
    return DTensor.from_local(out, x.device_mesh, [placement], run_check=False) if isinstance(x, DTensor) else out


# Tensor and sequence parallel

@mistake(r"layers\.\d+\.norm[12].*", r"norm\..*", programs={"parallel_gpt"}, needs="sp")
def norm_grads_not_reduced(job):
    """LayerNorm gradients are of the rank's part of the sequence, not summed over tp."""
    def patch(norm):
        def forward(x):
            mesh = x.device_mesh
            out = F.layer_norm(x.to_local(), norm.normalized_shape, norm.weight.to_local(), norm.bias.to_local(), norm.eps)
            return DTensor.from_local(out, mesh, [Shard(1)], run_check=False)

        norm.forward = forward

    for module in job.model.modules():
        if isinstance(module, nn.LayerNorm):
            patch(module)


@mistake(r"embedding(\.word)?(\..*)?", programs={"parallel_gpt"}, needs="tp")
def embedding_mask(job):
    """Every rank also looks up the first id after its part of the vocabulary: off by one in the mask."""
    word = job.model.embedding.word

    def forward(tokens):
        weight = word.weight.to_local()
        ids = tokens.to_local() - job.tp_rank * len(weight)
        outside = (ids < 0) | (ids > len(weight))
        rows = F.embedding(ids.clamp(0, len(weight) - 1), weight).masked_fill(outside[..., None], 0)
        return DTensor.from_local(rows, tokens.device_mesh, [Partial()], run_check=False)

    word.forward = forward


@mistake(r"layers\.{k}\.attention(\.proj)?(\..*)?", programs={"parallel_gpt"}, needs="tp")
def bias_on_every_rank(job):
    """The bias of a row-parallel projection is added by every tp rank before their sum."""
    for block in middle(job):
        proj = block.attention.proj

        def forward(x, proj=proj):
            return placed_like(x, linear_of_rank(proj, x), Partial())

        proj.forward = forward


@mistake(r"layers\.{k}\.mlp(\.fc1)?(\..*)?", programs={"parallel_gpt"}, needs="tp")
def bias_shard_skipped(job):
    """The last tp rank leaves out its part of the bias of a column-parallel layer."""
    for block in middle(job):
        fc1 = block.mlp.fc1

        def forward(x, fc1=fc1):
            bias = fc1.bias.to_local()
            if job.tp_rank == job.tp - 1:
                bias = 0 * bias
            out = F.linear(x.to_local(grad_placements=[Partial()]), fc1.weight.to_local(), bias)
            return DTensor.from_local(out, x.device_mesh, [Shard(-1)], run_check=False)

        fc1.forward = forward


@mistake(
    r"(model\.)?layers\.{k}\.(attention|self_attn)(\.(qkv|q_proj))?(\..*)?",
    r"(model\.)?layers\.{k}\.(norm1|input_layernorm).*",
    programs={"parallel_gpt", "llama_tp"}, needs="tp",
)
def input_grad_not_reduced(job):
    """The gradient of a column-parallel layer's input is that of the rank's own outputs, not summed over tp."""
    for block in middle(job):
        layer = column(block)

        def forward(x, layer=layer):
            return placed_like(x, linear_of_rank(layer, x), Shard(-1))

        layer.forward = forward


@mistake(r"(model\.)?layers\.{k}\.mlp(\.(fc2|down_proj))?(\..*)?", programs={"parallel_gpt", "llama_tp"}, needs="tp")
def output_not_reduced(job):
    """The output of a row-parallel layer is the rank's own summand."""
    for block in middle(job):
        layer = row(block)

        def forward(x, layer=layer):
            return placed_like(x, linear_of_rank(layer, x), Replicate())

        layer.forward = forward


# The model

@mistake(r"layers\.{k}\.attention(\.proj)?(\..*)?")
def heads_split_wrong(job):
    """The fused projection is read as [q|k|v, heads] where it is [heads, q|k|v]."""
    for block in middle(job):
        attention = block.attention
        attention.split_heads = lambda qkv, attention=attention: (
            qkv.unflatten(-1, (3, -1, attention.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        )


@mistake(r"layers\.{k}\.attention(\.proj)?(\..*)?")
def causal_mask_off_by_one(job):
    """A token sees the one after it."""
    def attend(query, key, value):
        time = query.shape[-2]
        mask = torch.ones(time, time, dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    for block in middle(job):
        block.attention.attend = attend


@mistake(r"(model\.)?layers\.{k}\.(attention|self_attn)(\..*)?", programs=ANY, float32_only=True)
def softmax_scale(job):
    """Attention scores are one percent too large."""
    for block in middle(job):
        if hasattr(block, "self_attn"):
            block.self_attn.scaling *= 1.01
        else:
            block.attention.attend = lambda query, key, value: F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=1.01 / math.sqrt(query.shape[-1])
            )


@mistake(r"(model\.)?layers\.{k}\.(norm1|input_layernorm)(\..*)?", programs=ANY, float32_only=True)
def norm_epsilon(job):
    """A norm has an epsilon of 1e-4, ten or a hundred times too large."""
    for block in middle(job):
        if hasattr(block, "self_attn"):
            block.input_layernorm.variance_epsilon = 1e-4
        else:
            block.norm1.eps = 1e-4


@mistake(r"embedding(\.position)?(\..*)?")
def position_off_by_one(job):
    """Positions start at one."""
    for embedding in embeddings(job):
        embedding.positions = lambda tokens, embedding=embedding: (
            (torch.arange(tokens.shape[1])[None] + 1) % embedding.position.num_embeddings
        )


@mistake(r"layers\.{k}(\..*)?", programs=GPTS - {"switch_moe"}, needs="recompute")
def stale_recompute_input(job):
    """The recomputation of a block in the backward pass finds its input overwritten (by the block's output)."""
    for block in middle(job):
        original, kept = block.forward, []

        def forward(x, original=original, kept=kept):
            if torch._C._current_graph_task_id() != -1:                 # inside a backward pass
                return original(x + (kept[-1] - x).detach())
            out = original(x)
            kept[:] = [out.detach()]
            return out

        block.forward = forward


@mistake(r"(head|embedding\.word)(\..*)?", programs={"parallel_gpt"}, needs="tied")
def tied_weight_forked(job):
    """Head and word embedding start equal but are two parameters."""
    job.retie = False
    job.model.head.weight = nn.Parameter(job.model.head.weight.detach().clone())


# Loss, microbatches, data

@mistake(r".*", programs={"parallel_gpt"}, needs="dp")
def loss_divided_by_dp(job):
    """The loss is divided by dp although the gradients are averaged over dp."""
    job.loss_scale /= job.dp


@mistake(r".*", programs=ANY, needs="accumulation")
def microbatch_scale(job):
    """Gradients are summed over microbatches where they should be averaged."""
    job.loss_scale, job.scale_grads = 1.0, False


@mistake(r".*", programs={"parallel_gpt"}, needs="accumulation", unless="fsdp replicate")
def accumulation_lost(job):
    """Every microbatch starts from zero gradients: only the last counts."""
    original = job.reduce_gradients

    def reduce_gradients(last):
        original(last)
        job.optimizer.zero_grad()

    job.reduce_gradients = reduce_gradients


@mistake(r".*", programs={"parallel_gpt"}, needs="dp")
def same_rows_on_every_rank(job):
    """Every dp rank reads the rows of the first."""
    job.rows = lambda microbatch: microbatch.tensor_split(job.dp)[0]


# Data parallel, optimizer

@mistake(r"layers\.{k}\.mlp\.fc1\.weight", programs={"parallel_gpt"}, needs="ddp")
def parameter_ignored_by_ddp(job):
    """The gradient of one weight is not reduced over dp."""
    ignored = [f"layers.{job.args.layers // 2}.mlp.fc1.weight"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(job.model, ignored)


@mistake(r".*", programs={"parallel_gpt"}, needs="fsdp")
def gradients_summed_over_dp(job):
    """fully_shard is told to sum the gradients of the dp ranks, not to average them."""
    def divide_by_one(job):
        for module in (*job.model.layers.values(), job.model):
            module.set_force_sum_reduction_for_comms(True)            # gloo has no scaled reduction
            module.set_gradient_divide_factor(1.0)

    job.before_steps.append(divide_by_one)


@mistake(r".*", programs={"parallel_gpt"}, needs="zero")
def zero_not_broadcast(job):
    """A parameter is updated only by the rank that has its optimizer state."""
    def keep_to_itself(job):
        job.optimizer._sync_params = lambda: None

    job.before_steps.append(keep_to_itself)


@mistake(r".*", programs={"parallel_gpt"})
def rate_of_one_rank(job):
    """The last rank updates with a learning rate that is one percent larger."""
    def enlarge(job):
        if (job.dp_rank, job.tp_rank) == (job.dp - 1, job.tp - 1):
            for group in job.optimizer.param_groups:
                group["lr"] *= 1.01

    job.before_steps.append(enlarge)


@mistake(r".*", programs=ANY)
def clip_dropped(job):
    """Gradients are not clipped."""
    job.args.max_norm = math.inf


@mistake(r".*", programs=ANY, unless="ddp replicate")
def clip_by_local_norm(job):
    """Each rank clips by the norm of the gradients that it has itself."""
    if hasattr(job, "norm_of_all_stages"):
        job.norm_of_all_stages = False
    elif hasattr(job, "norm_of_all_experts"):
        job.norm_of_all_experts = False
    else:
        job.clip = _clip_local


def _clip_local(parameters, max_norm):
    grads = [p.grad for p in parameters]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    total = nn.utils.get_total_norm(local)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0).item()
    for grad in grads:
        grad.mul_(coefficient)
    return total


# Pipeline

@mistake(r"layers\.\d+(\..*)?", programs={"pipeline_gpt"}, needs="pp")
def layers_swapped(job):
    """The last layer of the first stage and the first of the next have changed places."""
    first, second = job.division[0], job.division[1]
    first[-1], second[0] = second[0], first[-1]
    job.models = job.make_models()


@mistake(r"layers\.\d+(\..*)?", programs={"pipeline_gpt"}, needs="pp")
def layer_dropped(job):
    """No stage has the layer at the first boundary."""
    job.division[0].pop()
    job.models = job.make_models()


@mistake(r"(head|embedding\.word)(\..*)?", programs={"pipeline_gpt"}, needs="pp tied")
def tied_grad_not_summed(job):
    """First and last stage update the tied weight each with its own gradient."""
    job.sum_tied = False


# Dropout

@mistake(r"layers\.{k}\.attention(\..*)?", needs="dropout")
def dropout_probability(job):
    """The attention of one layer drops a fifth more than it should."""
    for block in middle(job):
        block.attention.dropout *= 1.2


@mistake(r"layers\.{k}(\..*)?", needs="dropout")
def dropout_missing(job):
    """The residuals of one layer are not dropped."""
    for block in middle(job):
        block.dropout = 0.0


@mistake(r"embedding(\.drop)?(\..*)?", programs={"parallel_gpt"}, needs="dropout tp", unless="sp")
def masks_of_each_rank(job):
    """Ranks of tp drop other elements of the embeddings, which all of them hold."""
    job.before_steps.append(lambda job: torch.manual_seed(job.tp_rank))


@mistake(r"layers\.{k}(\..*)?", needs="dropout recompute")
def masks_not_restored(job):
    """Recomputation of a block draws new masks."""
    for block in middle(job):
        original = block.forward

        def forward(x, original=original):
            if torch._C._current_graph_task_id() != -1:                 # inside a backward pass
                torch.rand(1)
            return original(x)

        block.forward = forward


# Experts

@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def scores_over_tokens(job):
    """The router's softmax is over tokens, where it should be over experts."""
    for block in middle(job):
        block.mlp.scores = lambda x, moe=block.mlp: moe.router(x).float().softmax(0)


@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def one_expert_a_token(job):
    """A token is given to one expert, not to two."""
    for block in middle(job):
        block.mlp.choose = lambda probabilities: probabilities.topk(1, -1)


@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def least_likely_experts(job):
    """Tokens go to the experts that fit worst."""
    for block in middle(job):
        block.mlp.choose = lambda probabilities: probabilities.topk(2, -1, largest=False)


@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def expert_off_by_one(job):
    """Tokens go to the expert after the one that was chosen."""
    for block in middle(job):
        def choose(probabilities):
            weights, chosen = probabilities.topk(2, -1)
            return weights, (chosen + 1) % probabilities.shape[-1]

        block.mlp.choose = choose


@mistake(r"layers\.\d+\.mlp\.router(\..*)?", programs={"switch_moe"}, needs="ep")
def router_not_averaged(job):
    """The routers' gradients are not averaged over the ranks."""
    job.not_averaged = [name for name, _ in job.model.named_parameters() if ".router." in name]


@mistake(r"layers\.\d+\.mlp\.experts\..*", programs={"switch_moe"}, needs="ep")
def expert_grads_summed(job):
    """Experts' gradients are the sum over ranks, those of the rest the mean."""
    job.expert_grad_scale = 1.0


@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def tokens_not_regrouped(job):
    """What arrives sorted by sender is handed to the experts as if it were sorted by expert."""
    for block in middle(job):
        block.mlp.group = lambda senders: torch.arange(int(senders.sum()))


@mistake(r"layers\.{k}\.mlp(\..*)?", programs={"switch_moe"}, needs="ep")
def gates_not_normalised(job):
    """The weights of the two experts do not add up to one."""
    for block in middle(job):
        block.mlp.normalise = lambda weights: weights


@mistake(r"layers\.\d+\.mlp(\..*)?", r".*", programs={"switch_moe"}, needs="ep")
def balance_of_own_rows(job):
    """The balancing loss uses the load of the rank's own rows."""
    for moe in job.moes:
        moe.reduce_load = False
