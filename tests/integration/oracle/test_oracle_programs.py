"""The oracle's example programs compute what their references do, and their injected mistakes do not."""

from __future__ import annotations

import json
import math
import os
import subprocess
from typing import Any

import pytest
from helpers.warm import python

from tests.helpers.oracle.oracle_programs import CONFIGURATIONS, Configuration, run_all
from tests.helpers.ranks import run_ranks

pytest.importorskip("torch")

GPT = Configuration("parallel_gpt", (), ("--tied", "--recompute", "--microbatches", "2"))
MESH = Configuration("parallel_gpt", ("--mesh", "dp=2,tp=2", "--fsdp", "--sp"), GPT.shared)
WITH_MISTAKE = Configuration("parallel_gpt", (*MESH.own, "--bug", "norm_grads_not_reduced"), GPT.shared)
PIPELINE = Configuration("pipeline_gpt", ("--nprocs", "2", "--schedule", "interleaved"), ("--tied",))


def equal(run: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Losses and gradient norms of all steps agree to 1e-6; float32, measured worst of all configurations 2e-7."""
    return all(
        math.isclose(a, b, rel_tol=1e-6)
        for key in ("losses", "grad_norms")
        for a, b in zip(run[key], reference[key], strict=True)
    )


def test_parallel_runs_agree_with_their_references_and_a_mistake_does_not() -> None:
    asked = (GPT, MESH, WITH_MISTAKE, PIPELINE.reference, PIPELINE)
    results = [result for result in run_all(asked, interpreter=python()) if result is not None]
    assert len(results) == len(asked)
    gpt, mesh, mistake, pipeline_reference, pipeline = results
    assert equal(mesh, gpt)
    assert not equal(mistake, gpt)
    assert equal(pipeline, pipeline_reference)


def test_a_program_starts_its_own_ranks() -> None:
    command = Configuration("switch_moe", ("--nprocs", "2")).command("--steps", "1", interpreter=python())
    done = run_ranks(command, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=800)
    assert done.returncode == 0, done.stderr
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(json.loads(result[0].removeprefix("RESULT "))["losses"]) == 1


def test_every_parallel_configuration_has_mistakes_and_the_reference_has_none() -> None:
    for configuration in CONFIGURATIONS:
        if configuration.program == "llama_tp":
            continue  # importing transformers is slow
        assert len(configuration.mistakes()) >= 8
        assert configuration.reference.mistakes() == []


def test_a_mistake_without_a_place_in_the_configuration_is_refused() -> None:
    command = Configuration("parallel_gpt", ()).command("--bug", "norm_grads_not_reduced", interpreter=python())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "--bug norm_grads_not_reduced needs sp"
