"""Callbacks of training libraries, on the real libraries: they record, count as the trainer does, and change nothing.

One process a library imports it once and runs the same small job in each of these ways:

    bare       nothing of ours
    callback   our callback starts recording
    record     attached as `proctor record` attaches
    both       attached so, and with the callback
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import textwrap
from collections import defaultdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers.warm import python

pytest.importorskip("torch")
import proctor
from proctor.cli import main
from proctor.invariants.pack import Pack, read_pack
from proctor.invariants.relations import registry
from proctor.verify.checker import check

RUNNER = """
import json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from job import train
from proctor.instrument import attach
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run

for out, how in json.loads(sys.argv[1]):
    if how in ("record", "both"):
        create_run(Path(out), sys.argv, overwrite=False)
        attach.install(RecordConfig(run=out))
    model = train(out + "-files", out if how in ("callback", "both") else None)
    Path(out + ".json").write_text(json.dumps([p.double().abs().sum().item().hex() for p in model.parameters()]))
    attach.detach()
"""

JOBS = {
    "transformers": """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator
        class Numbers(torch.utils.data.Dataset):
            def __init__(self, seed):
                g = torch.Generator().manual_seed(seed)
                self.x = (torch.randint(0, 64, (36, 1), generator=g) + torch.arange(16)) % 64
            def __len__(self): return len(self.x)
            def __getitem__(self, i): return {"input_ids": self.x[i], "labels": self.x[i]}
        def compute_metrics(prediction):
            return {"count": float(len(prediction.label_ids))}
        def train(files, out):
            callbacks = []
            if out:
                from proctor.instrument.callbacks.transformers import ProctorCallback
                callbacks = [ProctorCallback(out)]
            torch.manual_seed(0)
            model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
            arguments = TrainingArguments(
                output_dir=files, num_train_epochs=2, per_device_train_batch_size=4, save_steps=3, report_to=[], use_cpu=True,
                seed=0, gradient_accumulation_steps=2, disable_tqdm=True, eval_strategy="steps", eval_steps=4,
            )
            Trainer(model=model, args=arguments, train_dataset=Numbers(0), eval_dataset=Numbers(1),
                    data_collator=default_data_collator, callbacks=callbacks, compute_metrics=compute_metrics).train()
            return model
    """,
    "lightning": """
        import logging, warnings
        import torch, lightning as L
        from torch.utils.data import DataLoader, TensorDataset
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        class Regressor(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
            def training_step(self, batch, index):
                return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            def validation_step(self, batch, index):
                self.log("loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))
            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        def train(files, out):
            callbacks = []
            if out:
                from proctor.instrument.callbacks.lightning import ProctorCallback
                callbacks = [ProctorCallback(out)]
            L.seed_everything(0, verbose=False)
            x = torch.randn(72, 8)
            data = TensorDataset(x, x.sum(1, keepdim=True))
            trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, callbacks=callbacks,
                                enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
                                accumulate_grad_batches=2, default_root_dir=files)
            model = Regressor()
            with open(files + ".callbacks", "w") as file:
                file.write(" ".join(type(c).__module__ for c in trainer.callbacks))
            trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 24))
            return model
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        from accelerate.utils import set_seed
        from torch.utils.data import DataLoader, TensorDataset
        def train(files, out):
            trackers = []
            if out:
                from proctor.instrument.callbacks.accelerate import ProctorTracker
                trackers = [ProctorTracker(out)]
            set_seed(0)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=trackers)
            x = torch.randn(72, 8)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            data = TensorDataset(x, x.sum(1, keepdim=True))
            model, optimizer, loader, scheduler = accelerator.prepare(
                model, optimizer, DataLoader(data, 8, shuffle=True), scheduler)
            accelerator.init_trackers("job", config={"token": "secret"})
            step = 0
            for epoch in range(2):
                for inputs, target in loader:
                    with accelerator.accumulate(model):
                        loss = torch.nn.functional.mse_loss(model(inputs), target)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        step += 1
                        accelerator.log({"loss": loss.item()}, step=step)
            accelerator.end_training()
            return model
    """,
}
OURS = "proctor.instrument.callbacks.lightning"
UPDATES = 10  # of every job: two epochs of nine or ten microbatches, the last of an epoch alone in its update


def run_job(library: str, folder: Path, variants: list[str]) -> None:
    (folder / "job.py").write_text(textwrap.dedent(JOBS[library]))
    plan = [(str(folder / how), how) for how in variants]
    run_program(folder, RUNNER, json.dumps(plan))


def run_program(folder: Path, text: str, *arguments: str, **environment: str) -> str:
    """Run a program in a process that nothing of the test's own environment activates; returns what it prints."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR", "TITAN"))}
    done = subprocess.run(
        [python(), str(folder / "program.py"), *arguments], capture_output=True, text=True, timeout=250,
        check=False, cwd=folder, env={**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def needs_entry_point(group: str) -> None:
    if not has_entry_point(group):
        pytest.skip(f"proctor is installed without its entry point in {group}")


def has_entry_point(group: str) -> bool:
    return any(e.value.startswith("proctor.") for e in entry_points(group=group))


def facts(run: Path) -> pl.DataFrame:
    """step of ours, phase, and the trainer's facts, of every context of a run."""
    contexts = proctor.open_run(str(run)).context
    meta = [json.loads(text) for text in contexts["meta"]]
    keys = sorted({k for m in meta for k in m})
    return contexts.select("step", "phase").with_columns(pl.Series(k, [m.get(k) for m in meta]) for k in keys)


def facts_of_updates(run: Any) -> list[dict[str, Any]]:
    """The trainer's facts at each call of `Optimizer.step`, and our own step."""
    updates = run.calls.filter(pl.col("fn") == "torch.optim.Optimizer.step").select("step", "meta")
    return [defaultdict(lambda: None, json.loads(meta), step=step) for step, meta in updates.iter_rows()]


@pytest.mark.parametrize("library", sorted(JOBS))
def test_callback_records_counts_as_the_trainer_and_changes_nothing(library: str, tmp_path: Path) -> None:
    needs(library)
    run_job(library, tmp_path, ["bare", "callback", "both", "record"])

    bare = json.loads((tmp_path / "bare.json").read_text())
    for how in ("callback", "both", "record"):
        assert json.loads((tmp_path / f"{how}.json").read_text()) == bare, f"{how} changed the training"

    if library == "lightning":  # the Trainer finds the callback by itself where recording was asked for, and only there
        found = {how: (tmp_path / f"{how}-files.callbacks").read_text().split() for how in ("bare", "record")}
        assert OURS not in found["bare"]
        assert (OURS in found["record"]) == has_entry_point("lightning.pytorch.callbacks_factory")

    opened = {name: proctor.open_run(str(tmp_path / name)) for name in ("callback", "both", "record")}
    for name, run in opened.items():
        assert [p.notes for p in run.processes] == [[]], name
        updates = run.calls.filter(pl.col("fn") == "torch.optim.Optimizer.step")
        assert updates["step"].to_list() == list(range(UPDATES)), name
    table = calls_of(opened["record"])
    assert calls_of(opened["both"]) == table, "with the callback other calls were recorded"

    for name in ("callback", "both"):
        updates = facts_of_updates(opened[name])
        assert [u["trainer.step"] or 0 for u in updates] == list(range(UPDATES)), f"{name}: not at the trainer's own step"
        assert {u["trainer.accumulation"] for u in updates} == {2}
        if library != "accelerate":  # which has no notion of the others
            assert [u["trainer.epoch"] for u in updates] == [0] * 5 + [1] * 5
            assert [u["trainer.micro"] for u in updates] == [1, 1, 1, 1, 0] * 2
    assert "secret" not in str(facts(tmp_path / "both").to_dicts())

    with_callback, without = (learn(tmp_path, how) for how in ("both", "record"))
    for name, packs in (("both", [without]), ("record", [with_callback]), ("callback", [without, with_callback])):
        result = check(opened[name].trace, packs)
        assert result.checked > 20
        assert result.violations == [], f"{name}: {result.violations[0]}"


def calls_of(run: Any) -> dict[str, int]:
    """How often each function was called."""
    return dict(run.calls.group_by("fn").len().iter_rows())


def learn(folder: Path, how: str) -> Pack:
    """A pack of the run that was recorded in this way."""
    target = folder / f"{how}-pack.json"
    assert main(["infer", str(folder / how), "-o", str(target), "--jobs", "1", "-q"]) == 0
    return read_pack(target, list(registry()))


FABRIC = """
    import os, sys
    import torch
    from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", devices=1)
    assert not fabric._callbacks and "proctor.instrument.attach" not in sys.modules, fabric._callbacks
    def train(fabric):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            fabric.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.double().sum().item().hex()
    bare = train(fabric)
    os.environ["PROCTOR_RUN"] = "run"
    fabric = Fabric(accelerator="cpu", devices=1)
    assert [type(c).__name__ for c in fabric._callbacks] == ["FabricCallback"]
    assert train(fabric) == bare
"""


@pytest.mark.slow
def test_fabric_finds_the_callback_when_a_run_is_asked_for_and_only_then(tmp_path: Path) -> None:
    needs("lightning")
    needs_entry_point("lightning.fabric.callbacks_factory")
    run_program(tmp_path, FABRIC)
    told = facts(tmp_path / "run")
    assert told["trainer.step"].max() == 3
    assert set(told["trainer"].drop_nulls()) == {"lightning.Fabric"}


TITAN = """
    import torch
    from torchtitan.observability import structured_logger as sl
    sl.init_structured_logger(source="training", output_dir="out")
    sl.log_trace_instant("structured_logger_started")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(101, 105):
        sl.set_step(step, relative_step=step - 100)
        with sl.log_trace_span("step"):
            optimizer.zero_grad()
            for _ in range(2):
                with sl.log_trace_span("fwd_bwd"):
                    model(torch.randn(8, 4)).square().mean().backward()
            with sl.log_trace_span("optim"):
                optimizer.step()
            if step == 102:
                with sl.log_trace_span("eval"), torch.no_grad():
                    model.eval()(torch.randn(8, 4))
                    model.train()
"""


def test_torchtitan_handler_tells_its_step_and_stage(tmp_path: Path) -> None:
    needs("torchtitan")
    run = tmp_path / "run"
    handler = "proctor.instrument.callbacks.torchtitan.factory"
    run_program(tmp_path, TITAN, PROCTOR_RUN=str(run), TITAN_STRUCT_LOGGER_HANDLERS=handler)
    opened = proctor.open_run(str(run))
    updates = facts_of_updates(opened)
    assert [(u["step"], u["trainer.step"], u["trainer.stage"]) for u in updates] == [(n, 101 + n, "train") for n in range(4)]
    assert opened.processes[0].notes == []
    stages = facts(run).filter(pl.col("phase") == "eval")
    assert (102, "eval") in set(zip(stages["trainer.step"], stages["trainer.stage"]))
