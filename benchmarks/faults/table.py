"""The faults. One is an entry: what happens, where, and which verdicts are then true.

`clean` and `violated` are the verdict of a whole recording; `unknown` is right wherever records are missing; `none` where there is nothing to
judge. A fault with `bug=True` has a bug after it, which must be found or be unknown, never called clean; without one nothing may be violated.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.faults import deliveries, detours, rights
from benchmarks.faults import outside as o
from benchmarks.faults.trial import Fault

CLEAN: Final = frozenset({"clean"})
QUIET: Final = frozenset({"clean", "unknown", "none"})  # nothing is wrong with the training, and records may be missing
FOUND: Final = frozenset({"violated"})
DARK: Final = frozenset({"violated", "unknown", "none"})  # there is a bug, and records may be missing

_RUNS_STEPS = "train(at_gate=at_gate)"


def _program(**parts: str) -> Mapping[str, str]:
    return parts


def _in(name: str, what: str, middle: str = "", true: frozenset[str] = CLEAN, **more: Any) -> Fault:
    """Something that the program does to itself, at step 10 where nothing else is said."""
    parts = {k: more.pop(k) for k in ("start", "before", "how", "end") if k in more}
    return Fault(name, what, true, program={**({"middle": middle} if middle else {}), **parts}, **more)


ENDS: Final = [
    _in("sys-exit", "the program ends with code 7", "sys.exit(7)", QUIET),
    _in("os-exit", "it ends by os._exit(3)", "os._exit(3)", QUIET),
    _in("raises", "it raises", "raise ValueError('the user’s own')", QUIET),
    _in("sigkill", "it is killed with -9", "os.kill(os.getpid(), signal.SIGKILL)", QUIET, told="rank 0 was ended by SIGKILL"),
    _in("sigsegv", "a segmentation fault", "import ctypes; ctypes.string_at(0)", QUIET, told="rank 0 was ended by SIGSEGV"),
    _in("sigabrt", "abort()", "os.abort()", QUIET, told="rank 0 was ended by SIGABRT"),
    Fault("sigterm", "SIGTERM from outside, which nobody handles", QUIET, outside=o.signal_job(signal.SIGTERM)),
    Fault("sigint", "Ctrl-C from outside", QUIET, outside=o.signal_job(signal.SIGINT)),
    Fault("sighup", "the terminal goes away", QUIET, outside=o.signal_job(signal.SIGHUP)),
    _in("sigterm-handled", "SIGTERM, which the program handles by an exit with 42", "", QUIET,
        start="signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))", outside=o.signal_job(signal.SIGTERM)),
    Fault("stopped", "SIGSTOP, and SIGCONT after 3 s", outside=o.stop_job(3.0)),
    _in("atexit-raises", "a function of atexit raises", before="import atexit; atexit.register(lambda: 1 / 0)"),
    _in("thread-alive", "a daemon thread still runs at the end", before="threading.Thread(target=lambda: time.sleep(600), daemon=True).start()"),
]  # fmt: skip

PROGRAMS: Final = [
    _in("closes-descriptors", "it closes all descriptors and opens files of its own",
        "os.closerange(3, 4096)\nfiles = [open(f'own-{i}', 'wb') for i in range(40)]\n[f.write(b'x' * 4096) or f.flush() for f in files]\n"
        "[f.close() for f in files]\nout = all(pathlib.Path(f'own-{i}').read_bytes() == b'x' * 4096 for i in range(40))\n"
        "print('say own files', out, flush=True)", QUIET),
    _in("forks", "it forks without exec, and the child ends by itself",
        "pid = os.fork()\nif pid == 0:\n    torch.ones(3).sum(); os._exit(0)\nprint('say child', os.waitpid(pid, 0)[1], flush=True)"),
    _in("child-trains", "a forked child trains, too",
        "pid = os.fork()\nif pid == 0:\n    told = train(8, out=lambda *a, **k: None); os._exit(len(told) - 64)\n"
        "print('say child', os.waitpid(pid, 0)[1], flush=True)"),
    _in("child-stays", "a forked child outlives the program by a second", "if os.fork() == 0:\n    time.sleep(1.5); os._exit(0)"),
    _in("pool", "a pool of forked processes", "import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool:\n    print('say', pool.map(abs, [-1, -2]), flush=True)"),
    _in("threads-train", "two threads train at once", how="found = {}\nthreads = [threading.Thread(target=lambda i=i: found.update({i: train(at_gate=None, "
        "out=lambda *a, **k: None)})) for i in range(2)]\n[t.start() for t in threads]\n[t.join() for t in threads]\nprint('say', sorted(found.items()), flush=True)",
        true=frozenset({"unknown"})),  # a step of two loops at once is nobody's
    _in("trains-again", "a program that it starts trains, too", "import subprocess\nprint('say', subprocess.run([sys.executable, '-c', 'import torch; p = torch.ones(2,"
        " requires_grad=True); o = torch.optim.SGD([p], 0.1); [(o.zero_grad(), p.square().sum().backward(), o.step()) for _ in range(5)]; print(p.sum().item())'],"
        " capture_output=True, text=True).stdout.strip(), flush=True)", QUIET),
    _in("execs", "it becomes itself again by exec", "if 'AGAIN' not in os.environ:\n    os.environ['AGAIN'] = '1'; os.execv(sys.executable, [sys.executable, *sys.argv])", QUIET),
    _in("cwd-gone", "its working directory is deleted", "os.mkdir('away'); os.chdir('away'); os.rmdir('../away')"),
    _in("umask", "umask 0777", start="os.umask(0o777)", true=QUIET),
    _in("profiler", "it has a trace and a profile function", start="sys.setprofile(lambda *_: None); threading.settrace(lambda *_: None)"),
    _in("itimer", "a timer of its own interrupts it every 10 ms", start="beats = []\nsignal.signal(signal.SIGALRM, lambda *_: beats.append(1))\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)"),
    _in("gc-off", "no garbage collection", start="import gc; gc.disable(); gc.freeze()"),
    _in("recursion", "a recursion limit of 140", "sys.setrecursionlimit(140 + len(__import__('inspect').stack()))", QUIET),
    _in("time-raises", "time.time and time.monotonic raise from step 10 on", "def broken(*_):\n    raise RuntimeError('no clock')\ntime.time = broken; time.monotonic = broken", QUIET),
    _in("json-raises", "json.dumps raises from step 10 on", "import json\ndef broken(*_, **__):\n    raise RuntimeError('no json')\njson.dumps = broken; json.dump = broken", QUIET),
    _in("open-raises", "open and os.open raise from step 10 on", "import builtins\ndef broken(*_, **__):\n    raise PermissionError(13, 'no')\nbuiltins.open = broken; os.open = broken", QUIET),
    _in("write-raises", "os.write, os.pwrite raise from step 10 on", "def broken(*_, **__):\n    raise OSError(5, 'no')\nos.write = broken; os.pwrite = broken", QUIET),
    _in("no-threads", "no thread can be started", start="def broken(*_, **__):\n    raise RuntimeError(\"can't start new thread\")\nthreading.Thread.start = broken", true=QUIET),
    _in("environment-gone", "os.environ is empty from step 10 on", "os.environ.clear()"),
    _in("asyncio", "it trains within an event loop", how="import asyncio\nasync def main():\n    await asyncio.to_thread(train, at_gate=None)\nasyncio.run(main())"),
    _in("warnings", "every warning is an error", environment={"PYTHONWARNINGS": "error::DeprecationWarning"}),
    _in("optimised", "python -O -O", environment={"PYTHONOPTIMIZE": "2"}),
    _in("ascii", "a C locale without UTF-8", environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    _in("no-home", "HOME and TMPDIR are not there", environment={"HOME": "/nonexistent", "TMPDIR": "/nonexistent"}),
    _in("own-sitecustomize", "a sitecustomize of its own that raises", environment={"PYTHONPATH": "."},
        files={"sitecustomize.py": "raise RuntimeError('mine')\n"}),
]  # fmt: skip

_COUNTS = "from torch.utils._python_dispatch import TorchDispatchMode\nfrom torch.overrides import TorchFunctionMode\nclass Count({kind}):\n    def {name}(self, f, types, args=(), kwargs=None):\n" \
    "        name = getattr(f, '__name__', str(f))\n        seen[name] = seen.get(name, 0) + 1\n        return f(*args, **(kwargs or {{}}))\nseen = {{}}\nwith Count():\n    train(at_gate=None)\nprint('say', sorted(seen.items()), flush=True)"
_DEEP = "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(3000)])\n" \
    "        self.last = torch.nn.Linear(4, 2)\n    def forward(self, x):\n        for layer in self.body:\n            x = x + 0.001 * layer(x)\n        return self.last(x)\noptions.steps = 14"

HABITS: Final = [
    _in("hook-exits", "os._exit(5) within a forward hook of its own", "torch.nn.modules.module.register_module_forward_hook(lambda *_: os._exit(5))", QUIET),
    _in("call-replaced", "it replaces torch.nn.Module.__call__, and puts it back at step 10", "torch.nn.Module.__call__ = original",
        before="original = torch.nn.Module.__call__\ndef mine(self, *a, **k):\n    return original(self, *a, **k)\ntorch.nn.Module.__call__ = mine"),
    _in("backward-replaced", "it replaces torch.Tensor.backward and SGD.step by functions of its own",
        before="for owner, name in ((torch.Tensor, 'backward'), (torch.optim.SGD, 'step')):\n    def made(f):\n        return lambda self, *a, **k: f(self, *a, **k)\n    setattr(owner, name, made(getattr(owner, name)))", true=QUIET),
    _in("many-modules", "3,000 modules", before=_DEEP),
    _in("settrace", "it has a trace function of its own", start="sys.settrace(lambda *_: None)"),
    _in("warnings-raise", "every warning of any kind is an error, once torch is there", before="import warnings; warnings.simplefilter('error')"),
    _in("faulthandler", "faulthandler is on, and waits for a hang of a minute", start="import faulthandler\nnotes = open(os.devnull, 'w')\nfaulthandler.enable(notes); faulthandler.dump_traceback_later(60, True, file=notes)"),
    _in("development", "python -X dev", environment={"PYTHONDEVMODE": "1"}),
    _in("isolated", "python -I: no PYTHONPATH, no sitecustomize of ours", flags=["-I"], true=frozenset({"none", "unknown"})),
    _in("dispatch-mode", "it counts all operations that torch dispatches", how=_COUNTS.format(kind="TorchDispatchMode", name="__torch_dispatch__")),
    _in("function-mode", "it counts all functions of torch that are called", how=_COUNTS.format(kind="TorchFunctionMode", name="__torch_function__")),
    _in("default-device", "the default device is `meta` while its optimizer steps",
        before="step = torch.optim.SGD.step\ndef mine(self, *a, **k):\n    with torch.device('meta'):\n        return step(self, *a, **k)\ntorch.optim.SGD.step = mine", true=QUIET),
    _in("time-zone", "TZ changes at step 10", "os.environ['TZ'] = 'Pacific/Kiritimati'; time.tzset()"),
    _in("loud", "256 MiB on stdout", "for _ in range(256):\n    sys.stdout.write('x' * (1 << 20) + '\\n')"),
    _in("daemonises", "it forks twice and trains on as a daemon", start="if os.fork():\n    os._exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)", true=QUIET),
    _in("children-ignored", "SIGCHLD is ignored", start="signal.signal(signal.SIGCHLD, signal.SIG_IGN)"),
    _in("stderr-is-a-file", "it closes descriptor 2, and a file of its own gets the number; then json.dumps raises",
        "import json\ndef broken(*_, **__):\n    raise RuntimeError('no json')\njson.dumps = broken", QUIET, start="os.close(2)\nown = open('own', 'wb')\nassert own.fileno() == 2",
        end="print('say own', pathlib.Path('own').read_bytes(), flush=True)"),
    _in("shadows", "a module of its own is called msgspec", files={"msgspec.py": "mine = 1\n"}, true=QUIET),
    _in("pickled", "it pickles the whole model and loads it where Proctor is not", how="import io, subprocess\ntrain(at_gate=None)\nnet = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(torch.ones(1, 4)).sum().backward(); optimizer.step()\nfile = io.BytesIO()\ntorch.save([torch.nn.Sequential(*net.body), optimizer], file)\nprint('say', b'proctor' in file.getvalue(), len(file.getvalue()), flush=True)"),
    _in("odd-path", "it works in a directory whose name is no UTF-8", start="odd = os.fsdecode(b'r\\xff\\xfen'); os.mkdir(odd); os.chdir(odd)"),
]  # fmt: skip

LIMITS: Final = [
    Fault("nofile", "ulimit -n 40", QUIET, prefix=o.ulimit("-n", "40")),
    Fault("fsize", "ulimit -f: no file beyond 16 KiB", QUIET, prefix=o.ulimit("-f", "16")),
    Fault("address-space", "ulimit -v: 5 GiB of addresses", QUIET, prefix=o.ulimit("-v", str(5 << 20))),
    Fault("stack", "ulimit -s 512", QUIET, prefix=o.ulimit("-s", "512")),
    Fault("locked", "ulimit -l 0, -q 0", QUIET, prefix=o.ulimit("-l", "0", "-q", "0")),
    Fault("core", "ulimit -c 0, -i 0", QUIET, prefix=o.ulimit("-c", "0", "-i", "0")),
    Fault("processes-1", "ulimit -u 1: no process and no thread besides its own", QUIET, prefix=rights.few_processes(1), arrange=rights.needs_root),
    Fault("processes-4", "ulimit -u 4", QUIET, prefix=rights.few_processes(4), arrange=rights.needs_root),
    Fault("processes-6", "ulimit -u 6", QUIET, prefix=rights.few_processes(6), arrange=rights.needs_root),
]

DISKS: Final = [
    Fault("disk-full", "a disk of 96 KiB", DARK, bug=True, around=o.small_disk("96k")),
    Fault("disk-tiny", "a disk of 24 KiB", QUIET, around=o.small_disk("24k")),
    Fault("inodes", "a disk with 24 inodes", QUIET, around=o.small_disk("4m,nr_inodes=24")),
    Fault("read-only", "the disk becomes read-only at step 10", DARK, bug=True, around=o.small_disk("32m"), outside=o.make_read_only),
    Fault("disk-away", "the disk is unmounted, lazily, at step 10", DARK, bug=True, around=o.small_disk("32m"), outside=o.take_disk_away),
    Fault("run-deleted", "the run directory is deleted at step 10", DARK, bug=True, outside=o.delete("")),
    Fault("procs-deleted", "the trace is deleted at step 10", DARK, bug=True, outside=o.delete("procs")),
    Fault("verify-deleted", "what the verifier keeps is deleted at step 10", FOUND, bug=True, outside=o.delete("verify")),
    Fault("boot-deleted", "the start-up hook is deleted at step 10", FOUND, bug=True, outside=o.delete("boot")),
    Fault("run-json-bad", "run.json is overwritten with bytes that are none", DARK, bug=True, outside=o.overwrite("run.json")),
    Fault("trace-cut", "the trace of calls is cut to half at step 10", DARK, bug=True, outside=o.cut("procs/*/calls.arrow")),
    Fault("trace-flipped", "a bit of the recorded states is flipped at step 10", DARK, bug=True, outside=o.flip("procs/*/states.arrow")),
    Fault("no-locks", "a disk without locks, hard links and sockets, as an NFS without its lock daemon", DARK, bug=True, arrange=o.no_locks, outside=o.forget_locks),
    Fault("forbidden-run", "the run directory gets mode 000 at step 10, and the job is not above permissions", DARK, bug=True, prefix=rights.ordinary(), arrange=rights.needs_root,
          outside=rights.forbid("", 0), leaves=frozenset({"verify/live/socket"})),
    Fault("forbidden-trace", "the same with the folder of the trace", DARK, bug=True, prefix=rights.ordinary(), arrange=rights.needs_root, outside=rights.forbid("procs", 0)),
    Fault("two-jobs", "a second job is given the same run directory", FOUND, bug=True, outside=o.second_job),
]

VERIFIERS: Final = [
    Fault("verifier-killed", "kill -9 of the verifier at step 10", FOUND, bug=True, outside=o.kill_verifier),
    Fault("verifier-twice", "kill -9 of the verifier, twice", FOUND, bug=True, outside=o.kill_verifier_twice),
    Fault("verifier-stopped", "the verifier is stopped for 4 s", FOUND, bug=True, outside=o.stop_verifier(4.0)),
    Fault("keeper-killed", "verifier and keeper are killed; a socket's file stays", FOUND, bug=True, outside=o.kill_both,
          leaves=frozenset({"verify/live/socket"})),
    Fault("verifier-term", "SIGTERM to the verifier", FOUND, bug=True, outside=o.end_verifier),
    Fault("incidents-bad", "the verifier is killed, and its list of incidents damaged", FOUND, bug=True, outside=o.damage_incidents),
    Fault("token-changed", "the verifier is killed, and the job's token is another one", FOUND, bug=True, outside=o.change_token),
    Fault("socket-gone", "the socket's file is deleted", FOUND, bug=True, outside=o.delete("verify/live")),
]

PAGES: Final = [
    Fault("receiver-down", "the receiver of pages is down", FOUND, bug=True, arrange=deliveries.down_for_good, after=deliveries.said_to_wait),
    Fault("receiver-late", "the receiver is down until 3 s after the job's end", FOUND, bug=True, arrange=deliveries.back_after_the_end(), after=deliveries.taken),
    Fault("receiver-late-hangup", "… and who still delivers gets SIGHUP", FOUND, bug=True, arrange=deliveries.back_after_the_end(deliveries.hang_up), after=deliveries.taken),
    Fault("deliverer-killed", "… and who still delivers is killed with -9: `page flush` delivers", FOUND, bug=True, arrange=deliveries.back_after_the_end(deliveries.kill), after=deliveries.taken_by_hand),
    Fault("receiver-hangs", "the receiver takes a connection and says nothing", FOUND, bug=True, arrange=o.receiver_hangs),
    Fault("receiver-rejects", "the receiver answers 400", FOUND, bug=True, arrange=o.receiver_answers(400)),
    Fault("receiver-busy", "the receiver answers 429, for ever", FOUND, bug=True, arrange=o.receiver_answers(429)),
    Fault("clock-jumps", "the time of day jumps by days", FOUND, bug=True, arrange=o.clock, outside=o.jump_clock),
]

LEFT: Final = QUIET | {"violated"}  # that a rank waits in vain for one that is gone is true, where there is time to see it

RANKS: Final = [
    Fault("rank-killed", "one of two ranks is killed with -9", LEFT, ranks=2, outside=o.kill_rank(1), told="rank 1 was ended by SIGKILL"),
    Fault("rank-segfault", "one of two ranks has a segmentation fault", LEFT, ranks=2, told="rank 1 was ended by SIGSEGV",
          program=_program(middle="import ctypes\nif RANK == 1:\n    ctypes.string_at(0)")),
    Fault("rank-raises", "one of two ranks raises", LEFT, ranks=2, program=_program(middle="if RANK == 1:\n    raise ValueError('one rank')")),
    Fault("elastic", "a rank dies, and torchrun starts the job again", LEFT, ranks=2, torchrun=["--max-restarts", "1"],
          program=_program(middle="if LIFE == 0 and RANK == 1:\n    os._exit(9)")),
    Fault("torchrun-term", "SIGTERM to torchrun", LEFT, ranks=2, outside=o.signal_job(signal.SIGTERM)),
    Fault("network-cut", "the way to the verifier is cut for 2 s, and connections break after 64 KiB", FOUND, bug=True, arrange=o.lossy_verifier),
    Fault("relay-killed", "records go through a relay, which is killed and started again", FOUND, bug=True, arrange=o.relayed, outside=o.restart_relay),
    Fault("relay-lossy", "the relay's way to the verifier is cut for 2 s, and connections break after 64 KiB", FOUND, bug=True, arrange=detours.lossy_relay),
    Fault("nats-lossy", "records go over NATS, on a way that is cut for 2 s, and connections break after 64 KiB", FOUND, bug=True, arrange=detours.lossy_broker),
    Fault("nats-killed", "records go over NATS, and the broker is killed and started again", FOUND, bug=True, arrange=detours.broker, outside=detours.restart_broker),
]  # fmt: skip

FAULTS: Final = [*ENDS, *PROGRAMS, *HABITS, *LIMITS, *DISKS, *VERIFIERS, *PAGES, *RANKS]
