"""The wild corpus: which public training programs are run, from where, with what. One TOML file a project.

    repository = "https://github.com/owner/name"
    commit = "40 hexadecimal digits"
    licence = "MIT"
    half = "first"                        # or "second": looked at only to publish its figure

    [[programs]]
    paths = ["mnist/main.py"]             # each is a program; fields below hold for all of them
    trains = "a convolutional classifier"
    arguments = ["--epochs", "2"]
    shims = ["limit", "torchvision"]      # files of shims/site-packages, without `wild_`

Read by `__main__.py`. Raises `ManifestError` with one line: file, place, what is wrong.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final, Literal

import msgspec

HERE: Final = Path(__file__).parent
PROJECTS: Final = HERE / "projects"
SHIMS: Final = HERE / "shims" / "site-packages"
MAX_BYTES: Final = 1 << 20
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REPOSITORY: Final = re.compile(r"https://github\.com/([A-Za-z0-9-]+)/([A-Za-z0-9._-]+)")
_LAUNCHER: Final = re.compile(r"python|torchrun [1-9]")


class ManifestError(ValueError):
    """A manifest is wrong; the text is one line for a person."""


class _Programs(msgspec.Struct, forbid_unknown_fields=True):
    """As written: one entry may name several paths that are run alike."""

    paths: list[str]
    trains: str
    arguments: list[str] = []
    shims: list[str] = msgspec.field(default_factory=lambda: ["limit"])
    launcher: str = "python"
    timeout_s: int = 900
    steps: int = 12
    batch: int = 8
    needs: list[str] = []
    links: list[str] = []
    folder: str | None = None
    files: dict[str, str] = {}
    label: str = ""
    bug: str = ""
    skip: str = ""


class _Project(msgspec.Struct, forbid_unknown_fields=True):
    repository: str
    commit: str
    licence: str
    half: Literal["first", "second"]
    programs: list[_Programs]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program and how it is run.

    Args:
        project: `owner+name`, also the folder of its checkout.
        half: of the corpus.
        path: of the script, in the checkout.
        trains: in a few words.
        arguments: of its command line.
        shims: what is given in place of downloads, by name.
        launcher: `python` or `torchrun N`.
        timeout_s: for each run.
        steps: updates after which the shim `limit` ends the program; 0: it ends by itself.
        batch: largest batch; 0: as the program has it.
        needs: packages that must be importable.
        links: folders of the checkout that are seen as installed packages.
        folder: of the checkout, copied to be the working directory; the script's own when not given.
        files: made in the working directory before a run: name to kind (`files.py`).
        label: tells entries of one path apart.
        bug: of the program itself, found by reading it: no rule is learned from it.
        skip: why it is not run here.
    """

    project: str
    half: str
    path: str
    trains: str
    arguments: tuple[str, ...] = ()
    shims: tuple[str, ...] = ()
    launcher: str = "python"
    timeout_s: int = 900
    steps: int = 12
    batch: int = 8
    needs: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    folder: str | None = None
    files: dict[str, str] = {}
    label: str = ""
    bug: str = ""
    skip: str = ""

    @property
    def name(self) -> str:
        """Unique in the corpus and safe as the name of a file."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self.path.removesuffix(".py"))
        return f"{self.project}--{stem}{'--' + self.label if self.label else ''}"

    @property
    def place(self) -> str:
        """Folder of the checkout that is copied."""
        return str(Path(self.path).parent) if self.folder is None else self.folder


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at one commit, and its programs."""

    name: str
    repository: str
    commit: str
    licence: str
    half: str
    programs: tuple[Program, ...]


def read_project(path: Path) -> Project:
    """Raises ManifestError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ManifestError(f"{path.name}: more than {MAX_BYTES} bytes")
        raw = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Project)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ManifestError(f"{path.name}: {' '.join(str(error).split())}") from None
    found = _REPOSITORY.fullmatch(raw.repository)
    if found is None:
        raise ManifestError(f"{path.name}: repository {raw.repository!r} is not https://github.com/OWNER/NAME")
    name = f"{found[1]}+{found[2]}"
    if path.stem != name:
        raise ManifestError(f"{path.name}: the file of {raw.repository} is called {name}.toml")
    if _COMMIT.fullmatch(raw.commit) is None:
        raise ManifestError(f"{path.name}: commit {raw.commit!r} is not 40 hexadecimal digits")
    programs = [p for entry in raw.programs for p in _expand(path, name, raw.half, entry)]
    seen: set[str] = set()
    for program in programs:
        if program.name in seen:
            raise ManifestError(f"{path.name}: {program.path} is there twice; give one of them a label")
        seen.add(program.name)
    return Project(
        name=name, repository=raw.repository, commit=raw.commit, licence=raw.licence, half=raw.half, programs=tuple(programs)
    )


def read_corpus(folder: Path = PROJECTS) -> list[Project]:
    """All projects by name; halves are disjoint since a project has one file and one half.

    Raises:
        ManifestError: one is wrong, or there is none.
    """
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ManifestError(f"{folder}: no manifest (*.toml) in there")
    projects = [read_project(path) for path in files]
    names = [p.name.lower() for p in projects]
    for name in names:
        if names.count(name) > 1:
            raise ManifestError(f"{folder}: project {name} is there twice, so its half is not clear")
    return projects


def _expand(path: Path, project: str, half: str, entry: _Programs) -> list[Program]:
    where = f"{path.name}: {', '.join(entry.paths)[:60] or 'programs'}"
    if not entry.paths:
        raise ManifestError(f"{path.name}: an entry of programs names no path")
    for name in (*entry.paths, *entry.links, *entry.files, entry.folder or "."):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ManifestError(f"{where}: {name!r} leads out of the checkout")
    if _LAUNCHER.fullmatch(entry.launcher) is None:
        raise ManifestError(f"{where}: launcher {entry.launcher!r} is neither 'python' nor 'torchrun N'")
    for shim in entry.shims:
        if not (SHIMS / f"wild_{shim}.py").is_file():
            raise ManifestError(f"{where}: there is no shim {shim!r} in {SHIMS.name}")
    if entry.timeout_s < 1 or entry.steps < 0 or entry.batch < 0:
        raise ManifestError(f"{where}: timeout_s, steps and batch are not negative, and timeout_s is at least 1")
    given = {f: getattr(entry, f) for f in entry.__struct_fields__ if f != "paths"}
    lists = {f: tuple(v) if isinstance(v, list) else v for f, v in given.items()}
    return [Program(project=project, half=half, path=p, **lists) for p in entry.paths]
