"""One expression of tensors: what the rules of a distributed tensor must give as plain tensors do, forward and backward.

`a` and `b` are matrices of one shape, `v` a vector as long as their rows, `m` a mask of their shape, `i` numbers of rows. An expression gives one tensor (or a
number) of any shape; the model multiplies it with its input, so that every element has a gradient of its own. Statements may stand before it, each with a semicolon.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, register
from proctor.oracle.fuzz.space import Choice, Point

EXPRESSIONS: Final = (
    # products
    "a @ b.mT", "a.mT @ b", "a @ v", "F.linear(a, b, b[:, 0])", "torch.addmm(b @ b.mT, a, b.mT)", "torch.einsum('ij,kj->ik', a, b)", "torch.einsum('ij,ij->j', a, b)",
    "torch.outer(a[:, 0], b[0])", "torch.bmm(a[None], b.mT[None])", "torch.dot(a.flatten(), b.flatten())", "torch.vdot(a[0], b[0])", "torch.kron(a, b[:2])",
    # sums and other reductions
    "a.sum()", "a.sum(0)", "a.sum(1, keepdim=True)", "a.mean(0)", "a.mean()", "a.var(0)", "a.std()", "a.var(1, correction=0)", "a.prod(0)", "a.prod()", "a.amax(0)", "a.amin(1)",
    "a.max()", "a.max(0).values", "a.min(1).values", "a.median()", "a.median(0).values", "a.aminmax(dim=0).max", "a.logsumexp(0)", "a.norm()", "a.norm(1)", "a.norm(float('inf'))",
    "a.norm(dim=0)", "a.norm(3, dim=1)", "torch.linalg.vector_norm(a, 0.5)", "torch.linalg.matrix_norm(a)", "torch.linalg.vector_norm(a, float('-inf'))", "a.nansum(0)", "a.count_nonzero()",
    "(a > 0.1).sum(0)", "(a > 0.1).any(0)", "(a > -9).all()", "a.argmax()", "a.argmax(0)", "a.argmin(1)", "a.trace()", "torch.dist(a, b)", "a.sum(0).relu()", "(a @ b.mT).sum(0).exp()",
    # results that are parts of sums (of maxima, of means) on the ranks, and what is done with them
    "a.sum(1) + 1.0", "1 - a.sum(1)", "a.sum(1) * b.sum(1)", "a.sum(1).abs()", "torch.where(i > 0, a.sum(1), 0.5)", "a.sum(1).masked_fill(i > 0, 0.5)", "a.sum(1).clone().add_(1)", "a.sum(1).fill_(1)",
    "a.sum(1).sub_(1)", "a.sum(1).zero_() + 1", "a.sum(1).norm()", "a.sum(1).max()", "a.sum(1)[i]", "a.amax(1) * -1", "2 * a.amax(1) - a.amin(1)", "a.mean(1) + 1", "a.norm(dim=1) ** 2", "a.sum(1) @ b", "a.sum(1) ** 2",
    # numbers that leave a tensor
    "a * a.norm().item()", "a * a.sum().item()", "a * float(a.amax())", "a * a.mean().item()", "a * (a > 0).sum().item()", "a * float(torch.linalg.vector_norm(a))", "a * len(a)", "a * a.numel()",
    # along a dimension
    "a.cumsum(0)", "a.cumsum(1)", "a.cumprod(0)", "a.logcumsumexp(0)", "a.cummax(0).values", "a.softmax(0)", "a.softmax(1)", "a.log_softmax(0)", "F.normalize(a, dim=0)", "F.normalize(a, dim=1)",
    "F.cosine_similarity(a, b, 0)", "F.layer_norm(a, a.shape[1:], v)", "F.layer_norm(a, a.shape)", "F.rms_norm(a, a.shape[1:], v)", "F.group_norm(a[None], 1)", "F.glu(a, 0)", "F.glu(a, 1)",
    "a.sort(0).values", "a.sort(1, descending=True).values", "a.argsort(0)", "a.topk(2, 0).values", "a.topk(2, 1).values", "a.kthvalue(2, 0).values", "a.diff(dim=0)", "a.flip(0)", "a.flip(1)", "a.roll(1, 0)",
    "a.roll(1, 1)", "a.roll(1)", "a.renorm(2, 0, 0.5)", "torch.trapezoid(a, dim=0)",
    # shapes
    "a.mT * 2", "a.flatten()", "a.reshape(-1, 2)", "a.view(2, -1)", "a.view(-1, 1, a.shape[1])", "a.unflatten(1, (2, -1)).transpose(0, 1)", "a.expand(3, *a.shape) * 2", "a.repeat(2, 1)", "a.repeat(1, 2)",
    "a.repeat_interleave(2, 0)", "a.tile(2, 2)", "a[1:]", "a[:, 1:]", "a[::2]", "a[:, ::2]", "a[-1]", "a[:, -1]", "a[None, :, None]", "a.narrow(0, 1, 2)", "a.select(0, 1)", "a.chunk(2, 0)[1]", "a.split(2, 1)[-1]",
    "a.tensor_split(3, 0)[1]", "a.unbind(0)[-1]", "torch.cat([a, b])", "torch.cat([a, b], 1)", "torch.cat([a, b[:1]])", "torch.stack([a, b])", "torch.stack([a, b], 2)", "torch.hstack([a, b])", "a.unfold(0, 2, 1)",
    "a.squeeze(0)", "a.movedim(0, 1) + 0", "a.diagonal()", "torch.diag(a[0])", "torch.block_diag(a, b)", "a.tril()", "a.triu(1)", "torch.rot90(a)", "F.pad(a, (1, 0))", "F.pad(a, (0, 0, 1, 0))", "F.pad(a[None], (1, 1), 'circular')",
    # picking and putting
    "a[i]", "a[:, i[:2]]", "a.index_select(0, i)", "a.gather(0, i[:, None].expand(-1, a.shape[1]))", "a.take(i)", "torch.take_along_dim(a, a.argsort(1), 1)", "F.embedding(i, a)", "a.masked_fill(m, 0.5)", "torch.where(m, a, b)",
    "torch.where(a > 0, a, b)", "a.scatter(0, i[:1, None].expand(1, a.shape[1]), 0.5)", "a.scatter_add(0, i[:, None].expand(-1, a.shape[1]), b)", "a.index_add(0, i, b)", "a.index_copy(0, i, b)", "a.index_fill(0, i[:1], 0.5)", "a.masked_select(m)",
    "F.one_hot(i, 16)", "a.index_put((i,), b)", "a.slice_scatter(b[:1], 0, 1, 2)", "a.select_scatter(b[0], 0, 1)", "F.cross_entropy(a, i % a.shape[1])", "F.cross_entropy(a, i % a.shape[1], reduction='sum')", "F.cross_entropy(a, i % a.shape[1], label_smoothing=0.1)",
    "F.nll_loss(a.log_softmax(1), i % a.shape[1], reduction='none')", "torch.bucketize(a, v.sort().values)", "torch.isin(i, i[:1])", "torch.bincount(i, minlength=16)", "torch.unique(i)",
    # element by element
    "a + v", "a * b[:1]", "a - b[:, :1]", "a / (b.abs() + 1)", "a.clamp(max=v)", "torch.lerp(a, b, 0.3)", "torch.addcmul(a, a, b)", "torch.addcdiv(a, a, b.abs() + 1)", "torch.hypot(a, b)", "torch.atan2(a, b)", "a.abs().pow(v)", "2 ** a",
    "torch.maximum(a, b)", "a.round(decimals=1)", "a.fmod(0.3)", "a.detach().floor_divide(0.3)", "torch.copysign(a, b)", "a.logit(0.1)", "F.gelu(a)", "F.softplus(a)", "F.prelu(a, v)", "F.hardtanh(a)", "a.nan_to_num()", "a.float().double()",
    "a.bfloat16().double()", "a.to(torch.complex128).abs()", "torch.polar(a.abs(), b).real", "a.sigmoid() + v.sum()", "(a + 1).sqrt().nan_to_num()", "F.dropout(a, 0.5, False)", "(a > b).double()", "a.logical_and(b)", "torch.zeros_like(a) + b", "torch.full_like(a, 2) * b",
    "a.new_ones(a.shape) * b", "a.clone().add_(b)", "a.clone().mul_(v)", "a.clone().copy_(b)", "a.clone().fill_(0.5) + b", "a.clone().clamp_(0)", "a.clone().zero_() + b", "a.clone().add_(b.sum(0))",
    # layers and losses
    "F.mse_loss(a, b)", "F.mse_loss(a, b, reduction='sum')", "F.mse_loss(a.sum(1), b[:, 0])", "F.cross_entropy(a, i % a.shape[1], ignore_index=0)", "F.cross_entropy(a, i % a.shape[1], weight=v.detach().abs())", "F.cross_entropy(a, b.softmax(1))",
    "F.cross_entropy(a[None].mT, i[None] % a.shape[1])", "F.cross_entropy(a[None, :, None].repeat(1, 1, 2, 1).movedim(3, 1), torch.stack([i, i + 1], 1)[None] % a.shape[1])",
    "F.cross_entropy(a, i % a.shape[1] - 1, ignore_index=-1, weight=v.detach().abs())", "-(a.softmax(1) * a.log_softmax(1)).sum(1)",
    "F.nll_loss(a.log_softmax(1), i % a.shape[1], ignore_index=1)", "F.binary_cross_entropy(a.sigmoid(), b.sigmoid())", "F.gaussian_nll_loss(a, b, b.abs() + 1)", "F.multi_margin_loss(a, i % a.shape[1])", "F.l1_loss(a, b)", "F.smooth_l1_loss(a, b)", "F.huber_loss(a, b)", "F.kl_div(a.log_softmax(1), b.softmax(1), reduction='batchmean')", "F.binary_cross_entropy_with_logits(a, b.sigmoid())",
    "F.conv1d(a[None], b[:, :1, None].expand(-1, a.shape[0], 1))", "F.conv1d(a[:, None], v[None, None, :3], padding=1)", "F.conv2d(a[None, None], b[None, None, :2, :2])", "F.max_pool1d(a[None], 2)", "F.avg_pool1d(a[None], 2)", "F.adaptive_avg_pool1d(a[None], 2)", "F.interpolate(a[None], scale_factor=2)",
    "F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])", "F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None], is_causal=True)", "torch.cdist(a, b)", "F.pdist(a)",
    "F.triplet_margin_loss(a, b, a + 1)", "F.cosine_embedding_loss(a, b, i.sign())", "F.batch_norm(a, None, None, training=True)",
    # linear algebra
    "torch.linalg.svdvals(a)", "torch.linalg.qr(a).R", "torch.linalg.inv(a @ a.mT + torch.diag(a[:, 0].abs() + 3))", "torch.linalg.det(a @ a.mT)", "torch.linalg.cholesky(a @ a.mT + torch.diag(a[:, 0].abs() + 3))", "torch.linalg.solve(a @ a.mT + torch.diag(a[:, 0].abs() + 3), b)",
    # what is written through a view of a tensor must be in the tensor
    "c = a.clone(); c[0].add_(1); c", "c = a.clone(); c[:, 0].zero_(); c", "c = a.clone(); c[1:].mul_(2); c", "c = a.clone(); c[:, 1:].mul_(2); c", "c = a.clone(); c[1:] = b[1:]; c", "c = a.clone(); c[:, 0] = 0.5; c",
    "c = a.clone(); c.mT.mul_(2); c", "c = a.clone(); c.view(-1).mul_(2); c", "c = a.clone(); c.diagonal().mul_(2); c", "c = a.clone(); c.unbind(0)[0].mul_(2); c", "c = a.clone(); c.reshape(-1, 2).mul_(2); c", "c = a.clone(); c.chunk(2)[0].copy_(b.chunk(2)[0]); c",
    # in place, and into another tensor
    "a.clone().lerp_(b, 0.3)", "a.clone().masked_fill_(m, 0.5)", "a.clone().t_()", "a.clone().index_add_(0, i, b)", "a.clone().index_copy_(0, i, b)", "a.clone().index_fill_(0, i[:1], 0.5)", "a.clone().index_put_((i[:1],), b[:1])", "a.clone().tril_()", "a.clone().cumsum_(0)",
    "a.clone().copy_(v)", "a.clone().copy_(a.mean(0))", "a.clone().addmm_(a @ a.mT, b)", "a.clone().mul_(a.sum(1, keepdim=True))", "torch.add(a.detach(), b.detach(), out=torch.empty_like(a.detach()))", "torch.cumsum(a.detach(), 0, out=torch.empty_like(a.detach()))",
    "b[:, 0].detach().clone().copy_(a.detach().sum(1))", "b[:, 0].detach().clone().add_(a.detach().amax(1))",
    # more of results that are parts on the ranks
    "a.norm(dim=1).sum()", "a / (a.norm() + 1e-6)", "(a - a.mean(0)) / (a.std(0) + 1)", "torch.cat([a.sum(1), b.sum(1)])", "a.sum(1).cumsum(0)", "a.amax(1).sum()", "a.mean(1) - b.mean(1)", "torch.ones_like(a.sum(1))", "torch.empty_like(a.sum(1)).fill_(2)", "a.sum(1).std()",
    "a.sum(1).detach().fill_(2)", "a.sum(1).detach().div_(2)", "a * a.max().item()", "a * float(a.sum(1)[-1])", "a * float(torch.dist(a, b))", "a * float(a.prod())", "a * float(torch.allclose(a, b))", "a * float(a[-1, -1])", "a * len((a > 0).nonzero())",
    # several tensors in one call
    "torch.stack(torch._foreach_norm([a, b]))", "torch._foreach_add([a, b], [b, a])[0]", "torch._foreach_mul([a, b], 2.0)[1]", "torch._foreach_lerp([a], [b], 0.3)[0]", "nn.utils.get_total_norm([a, b])", "nn.utils.get_total_norm([a, b], float('inf'))", "nn.utils.parameters_to_vector([a, b])",
)


# Tensors that an expression may name: two matrices, a vector, numbers of rows, a mask.
MADE: Final = {
    "a": "self.a = nn.Parameter(torch.empty({rows}, {columns}))",
    "b": "self.b = nn.Parameter(torch.empty({rows}, {columns}))",
    "v": "self.v = nn.Parameter(torch.empty({columns}))",
    "i": "self.register_buffer('i', torch.arange({rows}).flip(0))",
    "m": "self.register_buffer('m', torch.arange({rows} * {columns}).view({rows}, {columns}) % 3 == 1)",
}

_SAID: Final = {"classes": re.compile(r"F\.cross_entropy|log_softmax\(1\)"), "smoothing": re.compile("label_smoothing")}  # the second dimension is that of classes


@register
class Operator(Template):
    """An expression."""

    name: ClassVar[str] = "operator"
    apart: ClassVar[bool] = True
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("expression", EXPRESSIONS, kept=True),
        Choice("rows", (4, 8, 6, 5, 3, 1)),
        Choice("columns", (4, 6, 5, 3)),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        rows, columns, expression = point["rows"], point["columns"], str(point["expression"])
        *before, given = expression.split("; ")
        used = [name for name in MADE if re.search(rf"\b{name}\b", expression)]  # the others would be noise in a finding's script
        net = (
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.bias = nn.Parameter(torch.empty(1))",
            *(f"        {MADE[name].format(rows=rows, columns=columns)}" for name in used),
            "    def forward(self, x):",
            f"        {', '.join(used)} = {', '.join(f'self.{name}' for name in used)}",
            *(f"        {statement}" for statement in before),
            f"        t, bias = torch.as_tensor({given}), self.bias",
            "        t, bias = (p.full_tensor() if hasattr(p, 'full_tensor') else p for p in (t, bias))",
            "        return x * (t.to(x.dtype).flatten() + bias)",
        )
        return ModelCode(net=net, x="(torch.randn(n, 1, generator=g),)", y=(1,), traits=frozenset({"operator", expression, *(f"tensor {name}" for name in used), *(trait for trait, said in _SAID.items() if said.search(expression))}), subject=expression)
