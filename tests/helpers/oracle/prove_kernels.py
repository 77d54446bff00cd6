"""A program of a few operators, recorded with its backward, beside the numbers that torch's kernels gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.machine import Machine
from proctor.oracle.prove.recording.recorder import Recorder
from proctor.oracle.prove.tape import Tape


def recorded_on(program: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Tape, list[torch.Tensor]]:
    """The tape of a program with its backward, and what torch says: the result and each input's gradient."""
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(False)
    recorder = Recorder(0, 1, lambda: ("", "forward"), lambda: "sum", real=True)
    try:
        with recorder:
            recorder.on = True
            found = program(*inputs)
            grads = torch.autograd.grad((found * torch.arange(found.numel()).view(found.shape)).sum(), inputs, allow_unused=True)
            results = [found, *(g for g in grads if g is not None)]
            for k, tensor in enumerate(results):
                recorder.mark(str(k), tensor)
            recorder.on = False
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(True)
    return recorder.tape, results


def same_numbers(program: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], name: str = "") -> Machine:
    """Run a program's tape in doubles, and compare each result with the kernel's."""
    tape, results = recorded_on(program, inputs)
    assert any(max(node.values, default=0) < 0 or -1 in node.values for node in tape.nodes)
    machine = Machine([tape], F64(), {})
    machine.run()
    assert not machine.opaque, machine.opaque
    for k, tensor in enumerate(results):
        np.testing.assert_allclose(machine.marks[0][str(k)], tensor.detach().numpy(), rtol=1e-9, atol=1e-11, err_msg=f"{name}, result {k}")
    return machine


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Doubles that a gradient goes to."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
