"""Megatron-core 0.16 on CPU and gloo: what it asks of CUDA is answered by the CPU.

`install()` patches torch, imports Megatron-core and mends the two places where it needs more. Call it before anything else
imports Megatron. Nothing of Megatron's arithmetic, communication or bookkeeping is replaced.

What differs from a GPU: streams and events do nothing, so communication that would overlap does not; the CPU generator and the
"CUDA" generator are one, so dropout masks differ from a GPU's; kernels of Apex, Triton and TransformerEngine are absent.
"""
import contextlib
import functools
import logging
import os
import warnings

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)


class Stream:
    """A stream or an event: everything has already happened."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def nothing(self, *args, **kwargs):
        return None

    wait_stream = wait_event = record = wait = synchronize = nothing

    def record_event(self, event=None):
        return event or Stream()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


ONLY_STREAM = Stream()


def is_cuda(device):
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


def answer_devices():
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "set_stream"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: ONLY_STREAM
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.Tensor.record_stream = lambda self, stream: None


def answer_random():
    # The generator itself: torch.manual_seed calls torch.cuda.manual_seed_all, and would call back.
    generator = torch.default_generator

    def seed(value):
        generator.manual_seed(int(value))

    def get_state(device="cuda"):
        return generator.get_state()

    def set_state(state, device="cuda"):
        generator.set_state(state)

    for place in (torch.cuda, torch.cuda.random):
        place.manual_seed, place.get_rng_state, place.set_rng_state = seed, get_state, set_state
    torch._C._cuda_setRNGState = set_state


def answer_tensors():
    def on_cpu(factory):
        @functools.wraps(factory)
        def make(*args, **kwargs):
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return make

    # Names in the namespace, not a TorchFunctionMode: a mode is off inside the backward of a checkpoint.
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    own_type = torch.Tensor.type

    def type_(self, dtype=None, *args, **kwargs):  # the optimizers ask for "torch.cuda.FloatTensor"
        if dtype is not None:
            return own_type(self, dtype, *args, **kwargs)
        return own_type(self).replace("torch.", "torch.cuda.", 1)

    own_to = torch.Tensor.to

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], str | torch.device) and is_cuda(args[0]):
            args = (CPU, *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return own_to(self, *args, **kwargs)

    torch.Tensor.type = type_
    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def answer_collectives():
    exchange, gather, scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def plain(sizes):
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        return exchange(output, input, plain(output_split_sizes), plain(input_split_sizes), **kwargs)

    def longest(tensors):
        return max(len(tensor) for tensor in tensors)

    def padded(tensor, length):
        return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])

    def all_gather(outputs, tensor, **kwargs):
        length = longest(outputs)
        if all(len(output) == length for output in outputs):
            return gather(outputs, tensor, **kwargs)
        wide = [output.new_empty(length, *output.shape[1:]) for output in outputs]
        gather(wide, padded(tensor, length), **kwargs)
        for output, found in zip(outputs, wide):
            output.copy_(found[: len(output)])

    def reduce_scatter(output, tensors, **kwargs):
        length = longest(tensors)
        if all(len(tensor) == length for tensor in tensors):
            return scatter(output, tensors, **kwargs)
        wide = output.new_empty(length, *output.shape[1:])
        scatter(wide, [padded(tensor, length) for tensor in tensors], **kwargs)
        output.copy_(wide[: len(output)])

    dist.all_to_all_single = all_to_all_single  # a GPU takes the sizes from pinned memory, as tensors
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter  # gloo wants parts of one size, experts get what they get


def install():
    """Patch torch, import Megatron-core, mend what it bound at its import."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # wanted by sequence parallelism before Blackwell
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")          # small fused functions are slower to compile than to run
    answer_devices()
    answer_random()
    answer_tensors()
    answer_collectives()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        import megatron.core.models.gpt  # noqa: F401  (the warnings come here)
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.cuda.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.cuda.set_rng_state(state)
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None  # 0.16.1 asks for the name without TransformerEngine
    # "CPU RNG state changed within GPU RNG context": there is but one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
