"""A finding as one stand-alone script: the library alone, no file besides it, exit code 1 while the bug is there and 0 once it is gone.

Reference and candidate are one program; lines in which they differ stand under `if world`, found by comparing both texts line by line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

from proctor.oracle.fuzz.keras import script as keras_script
from proctor.oracle.fuzz.program import contexts_of, first_of, program, reference_of
from proctor.oracle.fuzz.running.judge import OWN
from proctor.oracle.fuzz.search.findings import Finding, library_of
from proctor.oracle.fuzz.sessions.confirm import DIFFERS
from proctor.oracle.fuzz.sessions.heading import head
from proctor.oracle.fuzz.spec import Scenario

MAX_LINES: Final = 58
WIDTHS: Final = (165, 220, 280)  # of joined lines
TIMEOUT_S: Final = 60  # of a collective, and of the whole
READS: Final = "train(0, 0) is the reference; what stands under `if world` is done by the ranks alone."


def script_of(finding: Finding, version: str) -> str:
    """Write it.

    Args:
        finding: with its smallest scenario.
        version: of the library, for the heading.
    """
    if library_of(finding) == "keras":
        return _under_its_head(finding, version, keras_script.READS, keras_script.lines_of(finding, merged))
    scenario = finding.scenario
    first = finding.outcome.first
    evaluated = first.kind == "evaluation" if first is not None else _raised_evaluated(finding)
    candidate = program(scenario, evaluated=evaluated)
    reference = program(reference_of(scenario), contexts=contexts_of(scenario), evaluated=evaluated)
    imports, saving, before = _first_life(scenario)
    lines = [
        *_imports([*candidate.imports, *reference.imports, *imports]),
        *candidate.net,
        *candidate.make,
        *candidate.batch,
        *merged(reference.build, candidate.build),
        *merged(reference.train, candidate.train),
        *saving,
        *(_crash(scenario.world, before) if first is None else _compare(finding, scenario.world, before)),
    ]
    return _under_its_head(finding, f"torch {version}", READS, lines)


def _under_its_head(finding: Finding, versions: str, reads: str, lines: Sequence[str]) -> str:
    for brief in (False, True):
        text = _short([*head(finding, versions, reads=reads, brief=brief), *lines])
        if len(text) <= MAX_LINES:
            break
    return "\n".join(text) + "\n"


def _first_life(scenario: Scenario) -> tuple[tuple[str, ...], list[str], int]:
    """Imports and functions of the program that saves, and its ranks; 0 where there is none."""
    one = first_of(scenario)
    if one is None:
        return (), [], 0
    saves = program(one, life=1)
    build = [f"def build1{saves.build[0].removeprefix('def build')}", *saves.build[1:]]
    train = ["def train1(rank, world):", *(line.replace("build(rank, world)", "build1(rank, world)") for line in saves.train[1:])]
    return saves.imports, [*build, *train], one.world


def _raised_evaluated(finding: Finding) -> bool:
    """Whether an exception came from the evaluation, or may have: its traceback has the line of the training loop."""
    lines = re.findall(r'File "<scenario>", line (\d+), in train', finding.outcome.trace)
    whole = program(finding.scenario)
    text = [line.strip() for line in (*whole.build, *whole.train)]
    return not lines or "net.eval()" in text[: int(lines[-1])]


def merged(reference: Sequence[str], candidate: Sequence[str]) -> list[str]:
    """Two texts of one function as one: lines that differ stand under `if world`."""
    found: list[str] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, reference, candidate, autojunk=False).get_opcodes():
        if tag == "equal":
            found += candidate[c:d]
        else:
            found += _branches(list(reference[a:b]), list(candidate[c:d]))
    return found


def _branches(reference: list[str], candidate: list[str]) -> list[str]:
    line = (candidate or reference)[0]
    indent = line[: len(line) - len(line.lstrip())]
    if len(reference) == len(candidate) == 1 and (one := _expression(indent, reference[0].strip(), candidate[0].strip())):
        return [one]
    heads = [next((i for i, part in enumerate(text) if part.lstrip().startswith("with ")), -1) for text in (reference, candidate)]
    if min(heads) >= 0:
        # The head of a block: an expression chooses, so that what is inside stays where it is.
        a, b = heads
        before, after = (reference[:a], candidate[:b]), (reference[a + 1 :], candidate[b + 1 :])
        return [*merged(*before), _chosen(reference[a], candidate[b]), *merged(*after)]
    found = []
    if candidate:
        found += [f"{indent}if world:", *(f"    {part}" for part in candidate)]
        found += [f"{indent}else:", *(f"    {part}" for part in reference)] if reference else []
    else:
        found += [f"{indent}if not world:", *(f"    {part}" for part in reference)]
    return found


def _expression(indent: str, reference: str, candidate: str) -> str:
    """One line that chooses between two of the form `name = …` or between two calls; "" if they are neither."""
    head, name, there = "", candidate.partition(" = ")[0], candidate
    here = reference
    if name.isidentifier() and reference.startswith(f"{name} = "):
        head, there, here = f"{name} = ", candidate[len(name) + 3 :], reference[len(name) + 3 :]
    elif not (candidate.endswith(".backward()") and reference.endswith(".backward()")):
        return ""
    return f"{indent}{head}({there}) if world else ({here})"


def _chosen(reference: str, candidate: str) -> str:
    indent = candidate[: len(candidate) - len(candidate.lstrip())]
    if reference == candidate:
        return candidate
    keyword, there = candidate.strip().rstrip(":").split(" ", 1)
    here = reference.strip().rstrip(":").split(" ", 1)[1]
    return f"{indent}{keyword} ({there}) if world else {here}:"


def _imports(lines: Sequence[str]) -> list[str]:
    """Each line once, plain imports on one."""
    unique = list(dict.fromkeys(lines))
    plain = [line.removeprefix("import ") for line in unique if line.startswith("import ")]
    return [f"import {', '.join(dict.fromkeys(['datetime', 'os', 'sys', 'tempfile', *plain]))}", *(line for line in unique if not line.startswith("import "))]


def _run(world: int, before: int, body: Sequence[str], *, compares: bool = False) -> list[str]:
    if before:
        body = ["if file.endswith('1'):", "    for _ in train1(rank, world): pass", "    return", *body]
    start = f"torch.multiprocessing.start_processes(main, ({world}, os.path.join(folder, 'store')), {world}, start_method='fork')"
    first = f"torch.multiprocessing.start_processes(main, ({before}, os.path.join(folder, 'store1')), {before}, start_method='fork')"
    return [
        "def main(rank, world, file):",
        "    torch.set_num_threads(1)",
        f"    dist.init_process_group('gloo', init_method='file://' + file, rank=rank, world_size=world, timeout=datetime.timedelta(seconds={TIMEOUT_S}))",
        *(f"    {line}" for line in body),
        "if __name__ == '__main__':",
        "    for _ in train(0, 0): pass  # the reference, in one process: it runs",
        "    with tempfile.TemporaryDirectory() as folder:",
        *([f"        {first}  # saves, and ends"] if before else []),
        *([f"        try: {start}", f"        except torch.multiprocessing.ProcessExitedException as e: sys.exit(f'{DIFFERS}: {{e}}')"] if compares else [f"        {start}"]),
    ]


def _crash(world: int, before: int) -> list[str]:
    return _run(world, before, ["for _ in train(rank, world): pass"])


def _compare(finding: Finding, world: int, before: int) -> list[str]:
    """Look at the tensor that differs first, in both."""
    first = finding.outcome.first
    assert first is not None
    moment = {"output": "backward", "gradient": "backward", "clipped": "clipped", "evaluation": "evaluation"}.get(first.kind, "update")
    if first.kind in ("output", "gradient", "clipped") and finding.scenario.setting.get("optimizer") == "LBFGS":
        moment = "update"
    flat = finding.scenario.setting.get("wrapper") == "fsdp1" and first.kind not in ("output", "evaluation", "buffer")
    lines = [
        *(_PIECE if flat else ()),
        "def look(rank, world):",
        "    for moment, step, net, opt, seen in train(rank, world):",
        f"        if (moment, step) == ({moment!r}, {first.step}):",
        *(f"            {line}" for line in _looked(finding, first.kind, first.name)),
    ]
    body = ["(got, rows), want = look(rank, world), look(0, 0)[0]"]
    if first.kind in ("output", "evaluation"):
        body.append("want = want[rows]")
    if flat:
        body.append("want = None if want is None else want.flatten()[rows]")
    if _of_table(finding, first.kind):
        body.append("want = torch.cat([torch.zeros(0), *(want[place].flatten() for place in rows)])")
    if first.candidate:
        body += _comparing(max(first.allowed, OWN * first.noise))
    else:  # one of the two has none, or of another shape
        body += ["print(f'rank {rank}: expected', want, 'seen', got)", "sys.exit(int(getattr(got, 'shape', None) != getattr(want, 'shape', None)))"]
    return [*lines, *_run(world, before, body, compares=True)]


def _comparing(allowed: float) -> list[str]:
    """Lines of a rank that has `got` and `want`: it says where they are furthest apart, and ends with 1 where that is more than is allowed."""
    return [
        "off = (got - want).abs().flatten()",
        "at, error = (off.argmax(), off.max().item()) if off.numel() else (0, 0.0)",
        "print(f'rank {rank}: expected {want.flatten()[at:at + 1].tolist()}, seen {got.flatten()[at:at + 1].tolist()}, off by {error:.3g}')",
        f"sys.exit(int(not error <= {allowed:.3g}))",
    ]


def _looked(finding: Finding, kind: str, name: str) -> list[str]:
    """Lines that return the tensor of a kind and a name, and its rows, as the wrapper holds it."""
    setting = finding.scenario.setting
    if setting.get("wrapper") == "fsdp1" and kind not in ("output", "evaluation", "buffer"):
        return _piece_taken(kind, name)
    if _of_table(finding, kind):
        return _table_taken(name)
    if setting.get("wrapper") == "deepspeed" and kind in ("gradient", "state", "parameter"):
        return _engine_taken(kind, name, cut=bool(setting.get("ds_stage")), saved=setting.get("ds_state") in ("fp32", "16bit"))
    return _taken(kind, name, staged=setting.get("wrapper") == "pipeline")


def _of_table(finding: Finding, kind: str) -> bool:
    """Whether a parameter is what only the state dict shows as what it is (TorchRec's tables)."""
    return kind == "parameter" and finding.scenario.setting.get("wrapper") == "dmp"


def _table_taken(name: str) -> list[str]:
    place = "tuple(slice(o, o + n) for o, n in zip(s.metadata.shard_offsets, s.metadata.shard_sizes))"
    return [
        f"t = net.state_dict().get({name!r})  # None: all of it is on other ranks",
        "if not world: return t.detach(), None",
        f"parts = [(s.tensor, {place}) for s in t.local_shards()] if hasattr(t, 'local_shards') else [] if t is None else [(t, ...)]",
        "return torch.cat([torch.zeros(0), *(part.detach().flatten() for part, _ in parts)]), [place for _, place in parts]",
    ]


def _engine_taken(kind: str, name: str, *, cut: bool, saved: bool) -> list[str]:
    plain, _, key = name.partition(":")
    lines = [f"p = dict(getattr(net, 'module', net).named_parameters())[{plain!r}]"]
    if kind == "parameter" and saved:  # without the file, parameters agree
        return [*lines, f"return net.saved.get({plain!r}) if world else p.detach(), None"]
    if kind == "parameter":
        return [*lines, "with zero.GatheredParameters([p]): return p.detach().clone(), None"]
    here = "p.grad" if kind == "gradient" else f"opt.state[p].get({key!r})"
    there = f"net.shown.get({name!r})" if cut else here.replace("opt.", "opt.optimizer.")
    return [*lines, f"return ({there}) if world else {here}, None"]


def _taken(kind: str, name: str, *, staged: bool = False) -> list[str]:
    if kind in ("output", "evaluation"):
        return ["return torch.cat([out for _, out in seen]), torch.cat([part for part, _ in seen])"]
    name, _, key = name.partition(":")
    lines = [f"p = {{n.replace('_orig_mod.', ''): p for n, p in getattr(net, 'module', net).{'named_buffers' if kind == 'buffer' else 'named_parameters'}()}}{f'.get({name!r})' if staged else f'[{name!r}]'}"]
    if staged:
        lines.append("if p is None: sys.exit(0)  # of another rank's stage")
    value = {"gradient": "p.grad", "clipped": "p.grad", "state": f"getattr(opt, 'optim', opt).state[p].get({key!r})"}.get(kind, "p.detach()")
    lines.append(f"t = {value}")
    return [*lines, "return t.full_tensor() if hasattr(t, 'full_tensor') else t, None"]


# Of a program under FSDP1: what its optimizer holds of a parameter, where that lies in it, and which elements of the parameter it is.
_PIECE: Final = (
    "def piece(net, name):",
    "    for path, m in net.named_modules():",
    "        flat = m._handle.flat_param if isinstance(m, FSDP) and m._handle else None",
    "        for i, fqn in enumerate(() if flat is None else flat._fqns):",
    "            if f'{path}.{fqn}'.replace('_fsdp_wrapped_module.', '').strip('.') == name:",
    "                s, begin = flat._shard_param_infos[i] if m._handle.uses_sharded_strategy else None, sum(flat._numels[:i])",
    "                if s and not s.in_shard: return None, None, None",
    "                rows = slice(s.intra_param_start_idx, s.intra_param_end_idx + 1) if s else slice(None)",
    "                part = slice(s.offset_in_shard, s.offset_in_shard + s.numel_in_shard) if s else slice(begin, begin + flat._numels[i])",
    "                return (flat._params[i], slice(None), rows) if flat._params else (flat, part, rows)",
)


def _piece_taken(kind: str, name: str) -> list[str]:
    name, _, key = name.partition(":")
    value = {"gradient": "p.grad", "clipped": "p.grad", "state": f"opt.state[p].get({key!r})"}.get(kind, "p.detach()")
    return [
        f"p, part, rows = piece(net, {name!r}) if world else (dict(net.named_parameters())[{name!r}], slice(None), None)",
        "if p is None: return torch.zeros(0), slice(0)  # other ranks have all of it",
        f"t = {value}",
        "return t.flatten()[part] if world and t is not None and t.ndim else t, rows",
    ]


def _short(lines: Sequence[str]) -> list[str]:
    """Long scripts with their shortest statements joined, and blocks of one statement on one line, as few as are needed; the rest as it is."""
    found = list(lines)
    for width in WIDTHS:
        if len(found) > MAX_LINES:
            found = _joined(found, width)
        if len(found) > MAX_LINES:
            found = _joined(_blocks(found, width), width)
    return found


def _joined(lines: Sequence[str], width: int) -> list[str]:
    """Statements of one block side by side."""
    joined: list[str] = []
    for line in lines:
        indent = _indent(line)
        last = joined[-1] if joined else ""
        same = last and _indent(last) == indent and (indent or (_imported(line) and _imported(last)))
        ends = line.lstrip().startswith(("return", "yield"))  # they may end a line, not begin one that goes on
        if same and _plain(last) and (ends or _plain(line)) and len(last) + len(line.strip()) < width:
            joined[-1] = f"{last}; {line.strip()}"
        else:
            joined.append(line)
    return joined


def _blocks(lines: Sequence[str], width: int) -> list[str]:
    """Blocks of one statement on the line of their head."""
    found: list[str] = []
    left = list(lines)
    while left:
        line = left.pop(0)
        if line.lstrip().startswith(("for ", "if ", "with ", "else:")) and line.endswith(":") and left and _indent(left[0]) > _indent(line):
            alone = len(left) == 1 or _indent(left[1]) <= _indent(line)
            if alone and (_plain(left[0]) or left[0].lstrip().startswith("return")) and len(line) + len(left[0].strip()) < width:
                line = f"{line} {left.pop(0).strip()}"
        found.append(line)
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(line: str) -> bool:
    return not line.lstrip().startswith(("def ", "class ", "if ", "for ", "with ", "else", "return", "yield", "@", "try:", "except ")) and "#" not in line


def _imported(line: str) -> bool:
    return line.startswith("from ")
