"""How programs use libraries: one wrong line is told by its mode, and a right program by none. Stand-ins of the libraries are on the path; the real ones are tried by `tests/integration/test_libraries.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.libraries import DEEPSPEED, DIFFUSERS, PEFT, write
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry
from proctor.invariants.relations.usage import MODES
from proctor.invariants.trace import Trace

PROGRAMS = {
    "peft": """
        from peft.mapping_func import get_peft_model
        from peft.utils import save_and_load  # by its module, whose functions are tapped anew for each of the programs
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm, self.head = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.head(self.norm(torch.relu(self.body(x))))
        base = Net()
        early = torch.optim.SGD(base.parameters(), 0.1)
        model = get_peft_model(base)
        if BUG == "base":
            model.requires_grad_(True)
        if BUG in ("saved", "saved elsewhere", "frozen", "enabled", "merged"):
            base.norm.requires_grad_(True)
        if BUG == "frozen":
            for layer in model.layers():
                layer.lora_A.requires_grad_(False), layer.lora_B.requires_grad_(False)
        optimizer = early if BUG == "held" else torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        if BUG == "held":
            base.norm.requires_grad_(True)
        for step in range(10):
            x = torch.randn(16, 6)
            with torch.no_grad():
                for layer in model.layers():
                    layer.disable_adapters = True
                model(x)
                for layer in model.layers():
                    layer.disable_adapters = BUG == "enabled"
                    layer.merged = BUG == "merged"
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(OUT)
        if BUG == "saved elsewhere":
            torch.save(base.norm.state_dict(), OUT + "/norm.pt")
        state = {k: v.clone() for k, v in save_and_load.get_peft_model_state_dict(model).items()}
        if BUG == "loaded":
            state = {"module." + k: v for k, v in state.items()}
        if BUG == "loaded in part":
            state.pop(next(k for k in state if "lora_B" in k))
        save_and_load.set_peft_model_state_dict(model, state)
        F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    """,
    "diffusers": """
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
        from diffusers.training_utils import EMAModel
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.times, self.first, self.last = nn.Linear(1, WIDTH), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)
            def forward(self, sample, timestep, states):
                return self.last(torch.relu(self.first(sample) + self.times(timestep.float()[:, None] / 100) + states))
        net, coder, text = Net(), AutoencoderKL(12), nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.2))
        coder.requires_grad_(BUG == "carries")
        text.requires_grad_(False).train(BUG == "conditions")
        kind = "v_prediction" if BUG in ("velocity", "target of velocity") else "epsilon"
        scheduler, average = DDPMScheduler(kind), EMAModel(net.parameters())
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        once = torch.randint(0, 100, (16,))
        for step in range(12):
            for micro in range(2):
                latents = coder.encode(torch.randn(16, 12)).sample()
                latents = latents if BUG == "scaled" else latents * coder.config.scaling_factor
                noise = torch.rand_like(latents) if BUG == "gaussian" else torch.randn_like(latents)
                timesteps = once if BUG == "drawn" else torch.randint(0, 100, (16,))
                noisy = scheduler.add_noise(latents, noise, timesteps)
                told = {"timestep": timesteps.flip(0), "one timestep": timesteps[:1].expand(16), "scaled timestep": timesteps / 100.0}.get(BUG, timesteps)
                with torch.no_grad():
                    states = text(torch.randn(16, 4))
                target = noise
                if BUG == "target":
                    target = latents
                if BUG == "velocity":
                    target = scheduler.get_velocity(latents, noise, timesteps)
                (F.mse_loss(net(noisy, told, states), target) / 2).backward()
                if BUG == "once":
                    average.step(net.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if BUG not in ("averaged", "once"):
                average.step(net.parameters())
            if step % 4 == 3:
                average.store(net.parameters())
                average.copy_to(net.parameters())
                if BUG != "restored":
                    average.restore(net.parameters())
    """,
    "deepspeed": """
        import deepspeed
        from deepspeed.runtime.lr_schedules import WarmupLR
        net = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        scheduler = WarmupLR(optimizer)
        engine = deepspeed.initialize(module=net, optimizer=optimizer, lr_scheduler=scheduler, batches=2, takes="clip" in BUG)
        for batch in range(24):
            if BUG == "clears":
                optimizer.zero_grad()
            x = torch.randn(16, 6)
            engine.backward(F.cross_entropy(engine(x), x[:, :3].argmax(1)))
            if BUG == "clipped":
                torch.nn.utils.clip_grad_norm_(list(net.parameters()), 1.0)
            if BUG == "counts" and batch % 2 == 0:
                continue
            engine.step()
            if BUG == "fed":
                engine.step()
            if BUG == "updates" and batch % 2:
                optimizer.step()
            if BUG == "scheduled" and batch % 2:
                scheduler.step()
    """,
}
# One wrong line: the mode that tells it, and a word of what was seen.
FAULTS = {
    "peft": {
        "merged": ("merged", "all adapters of PeftModel are merged"), "enabled": ("enabled", "switched off"), "held": ("held", "in no optimizer"), "frozen": ("frozen", "are frozen, and other parameters"),
        "base": ("base", "under an adapter are trained"), "saved": ("saved", "leaves out base_model.norm.weight"), "loaded": ("loaded", "belong to nothing"), "loaded in part": ("loaded", "has nothing for"),
    },
    "diffusers": {
        "gaussian": ("gaussian", "nowhere below 0"), "carries": ("carries", "carries gradients"), "drawn": ("drawn", "of the 2 steps before"), "scaled": ("scaled", "without its scaling factor"),
        "timestep": ("timestep", "other timesteps"), "one timestep": ("timestep", "one timestep"), "target": ("target", "against the sample"), "target of velocity": ("target", "against the noise"),
        "conditions": ("conditions", "drops out"), "averaged": ("averaged", "never stepped"), "restored": ("restored", "nothing has restored"), "once": ("once", "several times"),
    },
    "deepspeed": {
        "fed": ("fed", "no backward pass"), "counts": ("counts", "behind each 2"), "clears": ("clears", "cleared between the batches"), "updates": ("updates", "stepped by the program"),
        "scheduled": ("scheduled", "stepped by the program, too"), "clipped": ("clipped", "taken out"),
    },
}  # fmt: skip
RIGHT = {"peft": ("", "saved elsewhere"), "diffusers": ("", "velocity", "scaled timestep"), "deepspeed": ("",)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("usage")
    write(folder / "libraries", PEFT, DIFFUSERS, DEEPSPEED)
    before = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder / "libraries"), before))))
        for library, text in PROGRAMS.items():
            record(folder, {library: text}, [(library, name or "right", 0, 16, name) for name in (*RIGHT[library], *FAULTS[library])])
    return folder


def seen(runs: Path, library: str, name: str) -> list[dict[str, Any]]:
    relation, trace = registry()["usage"], Trace.load([runs / f"{library}-{name or 'right'}"])
    rules = [Hypothesis.of("usage", mode=mode, what=library) for mode in MODES[library]]
    frame = relation.examples(trace, rules).frame
    return [row | {"mode": rules[row["hyp"]]["mode"], "detail": relation.detail(trace, rules[row["hyp"]], row)} for row in frame.to_dicts()]


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in RIGHT.items() for name in names])
def test_a_right_program_is_told_nothing(runs: Path, library: str, name: str) -> None:
    rows = seen(runs, library, name)
    assert rows
    assert [(row["mode"], row["_seen"]) for row in rows if not row["passed"]] == []


@pytest.mark.parametrize(("library", "bug"), [(library, bug) for library, bugs in FAULTS.items() for bug in bugs])
def test_one_wrong_line_is_told(runs: Path, library: str, bug: str) -> None:
    mode, words = FAULTS[library][bug]
    failed = [row for row in seen(runs, library, bug) if not row["passed"]]
    assert mode in {row["mode"] for row in failed}
    detail = next(row["detail"] for row in failed if row["mode"] == mode)
    assert words in detail.seen
    assert detail.expected
    assert detail.advice


@pytest.mark.parametrize("library", PROGRAMS)
def test_each_mode_that_a_right_program_shows_is_learned_from_it(runs: Path, library: str) -> None:
    relation = registry()["usage"]
    learned = {rule["mode"] for rule in relation.propose(Trace.load([runs / f"{library}-right"]))}
    assert learned >= {mode for mode, _ in FAULTS[library].values()} - {"clipped"}
    for mode in MODES[library]:
        rule = Hypothesis.of("usage", mode=mode, what=library)
        assert relation.standing_of(rule) is Standing.CHOICE  # a warning, wherever it ships
        assert relation.needs(rule).functions
        assert relation.say(rule).startswith(f"{library}: ")


def test_a_program_that_uses_no_library_says_nothing(tmp_path: Path) -> None:
    text = """
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    record(tmp_path, {"plain": text}, [("plain", "right", 0, 4, "")])
    assert registry()["usage"].propose(Trace.load([tmp_path / "plain-right"])) == []
