"""Campaigns on real ranks: worlds, verdicts, faults of a rank, findings and their scripts, resume, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fuzzing import TIMEOUT_S, alone, leftovers
from helpers.warm import python

from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions.journal import Journal
from proctor.oracle.fuzz.spec import Scenario

PROCTOR = [sys.executable, "-m", "proctor.cli"]
MODEL = {"layers": ["mlp", "layernorm"], "width": 5}


def test_healthy_settings_agree_and_a_rank_that_fails_costs_its_timeout(tmp_path: Path) -> None:
    said = alone(
        f"""
        from proctor.errors import OracleError
        from proctor.oracle.fuzz.running.worlds import Answer
        settings = [
            {{"world": 2, "wrapper": "ddp"}},
            {{"world": 3, "wrapper": "fsdp2", "optimizer": "Adam", "fsdp_units": "each"}},
            {{"world": 2, "wrapper": "zero", "optimizer": "Adam"}},
            {{"world": 2, "wrapper": "tp"}},
            {{"world": 3, "wrapper": "ddp", "split": "one empty", "accumulate": 2, "sync": "last"}},
            {{"world": 2, "wrapper": "fsdp2", "optimizer": "AdamW", "clip": "2", "resume": "full"}},
        ]
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in settings])
            assert [o.verdict for o in found] == ["ok"] * len(found), found
            none = Runner(worlds).run(Scenario("chain", {{"layers": ["relu"]}}))
            assert none.verdict == "no program" and "empty parameter list" in none.why, none
            local = Runner(worlds).run(Scenario("chain", {{"layers": ["linear", "batchnorm", "linear"]}}, {{"batch": 6}}, {{"world": 2, "wrapper": "ddp"}}))
            assert local.verdict == "different" and "rows" in local.why, local
        with Worlds(timeout_s=200) as worlds:
            text = "def train(rank, world):\\n    {{}}\\n    yield 'update', 0, None, None, ()\\n"
            from safetensors.numpy import save_file
            save_file({{}}, worlds.folder / "empty", metadata={{"noise": "{{}}"}})
            one = {{"reference": str(worlds.folder / "empty"), "floor": 0, "tolerance": 0, "steady": True}}
            for what, wanted in (
                ("import os\\n    if rank: os.abort()\\n    dist.barrier()", "SIGABRT"),
                ("import os\\n    if rank: os._exit(9)\\n    dist.barrier()", "exit code 9"),
                ("if rank: raise ValueError('mine')\\n    dist.barrier()", "mine"),
                ("import mmap\\n    held = [mmap.mmap(-1, 1 << 30) for _ in range(99)]", "Cannot allocate memory"),
            ):
                begun = time.monotonic()
                answer = worlds.run(2, {{**one, "codes": [compiled("import torch.distributed as dist\\n" + text.format(what))]}})
                took = time.monotonic() - begun
                assert wanted in answer.ended + str(answer.raised()), (wanted, answer)
                assert took < 150, took  # far from the timeout: a death is seen when it happens
            pids = [p for w in worlds._worlds.values() for p in w.pids]
        for pid in pids:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                continue
            raise AssertionError(f"rank {{pid}} is left")
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no zombie")
        assert not worlds.folder.exists()
        with Worlds(timeout_s=5) as worlds:
            save_file({{}}, worlds.folder / "empty", metadata={{"noise": "{{}}"}})
            hang = "import time, torch.distributed as dist\\n" + text.format("time.sleep(9999) if rank else dist.barrier()")
            answer = worlds.run(2, {{**one, "reference": str(worlds.folder / "empty"), "codes": [compiled(hang)]}})
            assert answer.ended == "timeout" and 5 <= answer.seconds, answer
            # What ranks start goes with them: of a rank that dies, and of one that hangs.
            seconds = str(4000000 + os.getpid())  # another copy of this test may run on this machine
            for then in ("os._exit(9) if rank else dist.barrier()", "time.sleep(9999)"):
                children = "import os, subprocess, time, torch.distributed as dist\\n" + text.format(f"subprocess.Popen(['sleep', '{{seconds}}'])\\n    " + then)
                assert worlds.run(2, {{**one, "reference": str(worlds.folder / "empty"), "codes": [compiled(children)]}}).ended
        def sleeps(p):
            try:
                return seconds.encode() in (p / "cmdline").read_bytes() and b"State:\\tZ" not in (p / "status").read_bytes()
            except OSError:  # it ended while it was read, like any process of this machine
                return False
        left = [p for p in Path("/proc").glob("[0-9]*") if sleeps(p)]
        assert not left, left
        # A disk that is full is said, and is no finding.
        full = Answer(({{"raised": {{"type": "OSError", "message": "[Errno 28] No space left on device", "where": "", "traceback": ""}}}},))
        with Worlds() as worlds:
            runner = Runner(worlds)
            scenario = Scenario("chain", {MODEL!r}, {{"batch": 6}}, settings[0])
            assert runner.run(scenario).verdict == "ok"
            worlds.run_all = lambda tasks: iter([(0, full)] if list(tasks) else [])
            try:
                runner.run(scenario)
            except OracleError as e:
                assert "the disk is full" in str(e), e
            else:
                raise AssertionError("nothing was said")
        """,
        tmp_path,
    )
    assert "no zombie" in said


def test_ranks_that_wait_for_one_that_raised_meet_again_without_a_fork(tmp_path: Path) -> None:
    """What a world says after it met anew is that of a fresh one; a new exception of some ranks is asked of a fresh world, one that it told before is believed."""
    alone(
        f"""
        from safetensors.numpy import save_file
        train = "import torch, torch.distributed as dist\\ndef train(rank, world):\\n    {{}}\\n    yield 'update', 0, None, None, ()\\n"
        fails = "dist.new_group([0, 1])\\n    if rank == 0: raise ValueError('{{}}')\\n    dist.all_reduce(torch.ones(3))"
        settings = [
            {{"world": 3, "wrapper": "fsdp2", "optimizer": "Adam", "clip": "2"}}, {{"world": 3, "wrapper": "tp"}}, {{"world": 3, "wrapper": "ddp"}},
        ]
        with Worlds(timeout_s=200) as worlds:
            save_file({{}}, worlds.folder / "empty", metadata={{"noise": "{{}}"}})
            one = {{"reference": str(worlds.folder / "empty"), "floor": 0, "tolerance": 0, "steady": True}}

            def raised(what):
                return [r["message"] for r in worlds.run(3, {{**one, "codes": [compiled(train.format(fails.format(what)))]}}).raised()]

            assert raised("mine") == ["mine"]
            world = worlds._worlds[3]
            for _ in range(2):
                found = Runner(worlds).run_all([Scenario("chain", {MODEL!r}, {{"batch": 6}}, s) for s in settings])
                assert [o.verdict for o in found] == ["ok"] * 3, found
                assert raised("mine") == ["mine"]
            assert worlds._worlds[3] is world and world.revived == 3
            assert raised("another") == ["another"] and worlds._worlds[3] is not world
        """,
        tmp_path,
    )


def test_operators_and_collectives_by_themselves(tmp_path: Path) -> None:
    """DTensor's numbers that leave a sharded tensor are those of the rank's own part: a mistake of the library as it is. The collective's is planted."""
    alone(
        """
        cut = [Scenario("operator", {"expression": e}, {}, {"world": 2, "wrapper": "dtensor", "dt_a": "S0"}) for e in ("a @ b.mT", "(a > 0.1).any(0)", "a * a.norm().item()")]
        shape = {"shape": "2, 3", "dtype": "complex64"}
        hand = [Scenario("collective", shape, {}, {"world": 3, "wrapper": "by_hand", **s}) for s in
                ({"hand_call": "all_reduce"}, {"hand_call": "all_reduce", "hand_layout": "transposed"}, {"hand_call": "all_gather", "hand_async": True})]
        none = Scenario("collective", {}, {}, {"world": 2, "wrapper": "by_hand", "hand_layout": "conjugate"})

        def planted():
            import torch.distributed as dist
            plain = dist.all_reduce
            dist.all_reduce = lambda t, *args, **kwargs: plain(t if t.is_contiguous() else t.contiguous(), *args, **kwargs)

        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([*cut, *hand, none])
            assert [o.verdict for o in found] == ["ok", "ok", "inconsistent", "ok", "ok", "ok", "no program"], found
        with Worlds(timeout_s=200, prepare=planted) as worlds:
            assert [o.verdict for o in Runner(worlds).run_all(hand)] == ["ok", "inconsistent", "ok"]
        """,
        tmp_path,
    )


def test_an_interrupt_while_ranks_are_forked_is_not_lost(tmp_path: Path) -> None:
    said = alone(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        here = os.getpid()
        os.register_at_fork(after_in_parent=lambda: os.getpid() == here and os.kill(here, signal.SIGINT))
        pids = []
        with Worlds() as worlds:
            try:
                worlds.run(0, {})
            except KeyboardInterrupt:
                pids = [p for w in worlds._worlds.values() for p in w.pids]
        try:
            os.kill(pids[0], 0)
        except ProcessLookupError:
            print("interrupted, and no rank left")
        """,
        tmp_path,
    )
    assert said == "interrupted, and no rank left\n"


def test_a_campaign_finds_a_mutation_and_its_script_runs_alone(tmp_path: Path) -> None:
    """The hook that DDP calls sums where it should average: planted in the rank, and again in the script's process."""
    said = alone(
        f"""
        from proctor.oracle.fuzz.search.campaign import Campaign
        from proctor.oracle.fuzz.search.findings import Finding
        from proctor.oracle.fuzz.sessions.script import script_of

        with Worlds(timeout_s=200, prepare=ddp_sums) as worlds:
            campaign = Campaign(Runner(worlds), 0, [])
            scenario = Scenario("chain", {MODEL!r}, {{"batch": 8}}, {{"world": 3, "wrapper": "ddp", "optimizer": "Adam", "clip": "value", "accumulate": 2}})
            outcome = campaign.runner.run(scenario)
            assert outcome.verdict == "inconsistent", outcome
            found = [f for f in campaign.explain(scenario, outcome) if isinstance(f, Finding)]
            assert len(found) == 1 and set(found[0].triggers) == {{"world", "wrapper"}}, found
            assert found[0].scenario.world == 2 and found[0].outcome.first.kind == "gradient", found[0]
            assert "scale 2" in found[0].outcome.why, found[0].outcome.why
            assert found[0].scenario.template == "chain" and found[0].scenario.input.get("steps", 2) == 1, found[0].scenario
            again = campaign.runner.run(scenario)
            assert list(campaign.explain(scenario, again)) == [found[0].id] and found[0].count == 2
            Path({str(tmp_path)!r}, "script.py").write_text(script_of(found[0], torch.__version__))
        """,
        tmp_path,
    )
    assert not said
    script = tmp_path / "script.py"
    text = script.read_text()
    assert len(text.splitlines()) <= 60 and "proctor" not in text
    healthy = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert healthy.returncode == 0, healthy.stderr  # torch as it is has no such bug
    broken = text.replace("net = DDP(net)", "net = DDP(net); [p.register_hook(lambda g: g * world) for p in net.parameters()]")
    assert broken != text
    script.write_text(broken)
    wrong = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert wrong.returncode == 1 and "off by" in wrong.stdout, (wrong.stdout, wrong.stderr)


@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs torchrec (docs/fuzz.md, Libraries)")
def test_torchrec_agrees_and_three_of_d3s_bugs_are_found(tmp_path: Path) -> None:
    """Bug 1, switched on: sums for means of the tables' gradients, of tables that are cut."""
    alone(
        """
        warm_up(("torchrec.distributed",))
        settings = [{"precision": "float32", "world": 2, "wrapper": "dmp", **more} for more in ({}, {"rec_sharding": "row_wise"}, {"rec_sharding": "column_wise"})]
        scenarios = [Scenario("torchrec", {"tables": 2}, {"batch": 8}, s) for s in settings]

        def sums():
            from torchrec.distributed.comm_ops import set_gradient_division
            set_gradient_division(False)

        for plant, wanted in ((None, "ok"), (sums, "inconsistent")):
            with Worlds(timeout_s=200, prepare=plant) as worlds:
                found = Runner(worlds).run_all(scenarios)
            assert [o.verdict for o in found] == [wanted] * 3, found
            assert plant is None or all(o.first.kind == "parameter" and o.first.name.startswith("bags.") for o in found), found
        # Bugs 18 and 21 are still in the library: nothing is planted.
        single, quantised = {"precision": "float32", "world": 2, "wrapper": "dmp", "rec_sharder": "bag"}, {"precision": "float32", "rec_quant": "qint8 qint8"}
        with Worlds(timeout_s=200) as worlds:
            found = Runner(worlds).run_all([Scenario("torchrec", {"tables": 2}, {"batch": 8}, s) for s in (single, quantised, {**quantised, "rec_read": "to_dict"})])
        assert [o.verdict for o in found] == ["crash", "ok", "crash"], found
        assert "table-wise" in found[0].why and "split_sizes" in found[2].why, found
        """,
        tmp_path,
    )


@pytest.mark.skipif(find_spec("accelerate") is None or find_spec("transformers") is None, reason="of these libraries")
def test_accelerate_and_transformers_agree(tmp_path: Path) -> None:
    alone(
        """
        warm_up(("accelerate", "transformers.modeling_utils"))
        ours = {"world": 2, "wrapper": "accelerate"}
        settings = [{**ours, "accumulate": 2, "acc_rows": "loader"}, {**ours, "acc_plugin": "fsdp2", "optimizer": "Adam", "acc_state": True}, {**ours, "clip": "2", "acc_clip": True}]
        cut = {**ours, "acc_plugin": "fsdp2", "acc_units": "auto_wrap_policy='size_based_wrap', min_num_params=1", "acc_fsdp": "activation_checkpointing=True"}
        settings += [{**ours, "acc_gather": "gather_for_metrics"}, cut, {**ours, "accumulate": 2, "acc_sync": "sync_each_batch=True"}]
        settings += [{**ours, "compile": "wrapped"}]  # behind one with FSDP2, of which the library leaves a word in the environment
        found = [Scenario("chain", {"layers": ["mlp", "layernorm"]}, {"batch": 8}, s) for s in settings]
        found += [Scenario("causal", {"family": "gpt2"}, {}, s) for s in ({"world": 2, "wrapper": "ddp"}, {"hf_attention": "eager"}, {"hf_checkpointing": "use_reentrant=False"})]

        def twice():
            import accelerate
            plain = accelerate.Accelerator.backward
            accelerate.Accelerator.backward = lambda self, loss: plain(self, loss * self.gradient_accumulation_steps)
            gather = accelerate.Accelerator.gather_for_metrics
            accelerate.Accelerator.gather_for_metrics = lambda self, given: [given[0] if i == 0 else t.flip(0) for i, t in enumerate(gather(self, given))]

        skipped = [Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}, {**ours, "acc_rows": rows, "acc_skip": True}) for rows in ("loader", "split batches", "dispatch parts")]
        with Worlds(timeout_s=200) as worlds:
            assert [o.verdict for o in Runner(worlds).run_all([*found, *skipped])] == ["ok"] * 12 + ["inconsistent"]  # the library's own
        with Worlds(timeout_s=200, prepare=twice) as worlds:
            assert [o.verdict for o in Runner(worlds).run_all(found[:6])] == ["inconsistent", "ok", "ok", "inconsistent", "ok", "inconsistent"]
        """,
        tmp_path,
    )


def test_a_campaign_leaves_a_directory_that_can_be_resumed(tmp_path: Path) -> None:
    out, session = tmp_path / "campaign", uuid.uuid4().hex
    environment = {**os.environ, "FUZZ_SESSION": session}
    job = subprocess.Popen(
        [*PROCTOR, "oracle", "fuzz", "--budget", "2h", "--rows", "2", "--seed", "3", "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    )
    end = time.monotonic() + TIMEOUT_S
    journal = out / "journal-0.jsonl"
    while time.monotonic() < end and job.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 1):
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to all ranks, too
    _, complaint = job.communicate(timeout=TIMEOUT_S)
    # A shell calls both 130: Python ends itself by the signal where it came while a text was executed (`exec`), though it was caught.
    assert job.returncode in (130, -signal.SIGINT), f"exit code {job.returncode}: {complaint}"
    assert f"--resume {out}" in complaint
    assert leftovers(session) == []
    first = [json.loads(line)["number"] for line in journal.read_text().splitlines()]
    crash = Outcome("crash", Symptom("crash", "RuntimeError", "cannot", "torch/x.py:f"), "it fails")
    interrupted = Finding("cafe0123", Scenario("chain"), crash, {"wrapper": "ddp"}, (), Scenario("chain"))  # while its script ran
    Journal(out).put(interrupted, "", "")
    with journal.open("a") as file:
        file.write('{"number": 99, "torn')  # as a kill leaves it
    report = json.loads((out / "report.json").read_text())
    assert report["pairs"] == len(first) and "<html" in (out / "report.html").read_text()
    again = subprocess.run(
        [python(), *PROCTOR[1:], "oracle", "fuzz", "--resume", str(out), "--pairs", str(len(first) + 1)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert again.returncode in (0, 1, 3), again.stderr
    (seen,) = [f for f in Journal(out).findings() if f.id == interrupted.id]
    assert seen.confirmed == "its script ends with exit code 0", seen
    # Another campaign there is refused as long as one runs.
    with Journal(out).alone():
        second = subprocess.run([python(), *PROCTOR[1:], "oracle", "fuzz", "--resume", str(out)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert second.returncode == 2 and "a campaign is running here" in second.stderr and "Traceback" not in second.stderr, second.stderr
    numbers = [p["number"] for p in map(json.loads, (line for line in journal.read_text().splitlines() if "torn" not in line))]
    assert numbers == sorted(set(numbers)) and numbers[: len(first)] == first and len(numbers) == len(first) + 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "soon"], "no length of time"),
        (["--library", "tensorflaw"], "unknown"),
        (["replay"], "not understood"),
        (["replay", "nothing.json"], "No such file"),
        (["--resume", "nowhere"], "no campaign"),
        (["--workers", "0"], "at least 1"),
        (["--known", "none.toml"], "No such file"),
        (["--known", "empty.toml"], "triggers.wrapper must list one value or more"),
        (["--axes", "before_world,disc"], "unknown: disc"),
        (["--axes", "world=7"], "world: 1, 2, 3, 4"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "empty.toml").write_text('[[known]]\nid = "x"\nlibrary = "torch"\nreason = "y"\nverdict = "crash"\ntriggers = { wrapper = [] }\nform = 2\n')
    done = subprocess.run([python(), *PROCTOR[1:], "oracle", "fuzz", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / ".proctor-fuzz").exists()
