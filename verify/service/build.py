"""A verifier is put together: incidents, pager, metrics, writers and the oracle, as the settings of its job say.

`serve` calls it once. What cannot be used is said here, before the first record is judged; a port that is taken and a list of
incidents that is damaged do not keep a watched job from being judged.
"""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

from proctor.errors import ProctorError, TraceError
from proctor.invariants.fit import load_packs
from proctor.invariants.relations import registry
from proctor.invariants.suppression import read_suppressions
from proctor.verify.lifecycle import IncidentBook, Policy
from proctor.verify.metrics import metrics
from proctor.verify.service.confirm import Confirming, Reference
from proctor.verify.service.processes import Going, say
from proctor.verify.service.settings import Settings
from proctor.verify.service.teller import Tells
from proctor.verify.service.verifier import Verifier
from proctor.verify.transport.inbox import Inbox
from proctor.verify.transport.server import Server
from proctor.verify.view.events import EventLog
from proctor.verify.writers import parse
from proctor.verify.writers._background import Background


def build(settings: Settings, inbox: Inbox, server: Server, freeze: Callable[[str, int], None], stopped: Callable[[], bool]) -> Verifier:
    """A verifier of this job, with everybody whom it tells.

    Args:
        settings: of the job.
        inbox: what its processes send.
        server: which takes it.
        freeze: asks all ranks to keep their last steps: capsule key and step.
        stopped: whether somebody asked the verifier to stop.

    Raises:
        ProctorError: a pack, the paging configuration, a suppression or the list of incidents cannot be read.
    """
    packs, _ = load_packs([Path(p) for p in settings.packs])
    folder = settings.folder
    config = pager = None
    if settings.page:
        # What talks to the network takes a tenth of a verifier's imports.
        from proctor.verify.paging import Pager, read_config

        config = read_config(settings.page)
        pager = Pager(config, folder / "outbox.db", say=say, job=settings.job)
        pager.start()
    codes = {relation.code for relation in registry().values()}
    counts = metrics(settings.job, codes, wanted=bool(settings.metrics))
    if settings.metrics:
        host, _, port = settings.metrics.rpartition(":")
        try:
            counts.serve(host, int(port))
        except ProctorError as e:
            say(f"{e}; watching goes on without")
    book = _book(settings, platform.node(), config.incidents if config is not None else None)
    tells: Tells | None = pager
    if pager is not None and config is not None and config.incidents.confirm_with:
        policy = config.incidents
        ask = Reference(Path(settings.run), policy.confirm_with, policy.confirm_plan)
        tells = Confirming(pager, folder, ask, policy.confirm_within_s, partial(_note, book))
    return Verifier(
        run=Path(settings.run),
        packs=packs,
        pack_names=settings.packs,
        inbox=inbox,
        book=book,
        log=EventLog(Path(settings.run)),
        going=Going(settings.pid, settings.started) if settings.pid else None,
        refused=lambda: server.stats().refused,
        heard_at=server.heard_at,
        freeze=freeze,
        stopped=stopped,
        paged=(lambda: pager.status().outcomes) if pager is not None else dict,
        fitting=settings.fitting,
        pager=tells,
        metrics=counts,
        writers=[Background(parse(text), settings.job, say) for text in settings.export],
        hang_after_s=math.inf if settings.hang_after is None else settings.hang_after,
        suppressions=[s for path in settings.suppressions for s in read_suppressions(Path(path))],
        say=say,
    )


def _note(book: IncidentBook, key: str, text: str) -> None:
    book.attach_fact(key, "reference", text)


def _book(settings: Settings, host: str, policy: Policy | None) -> IncidentBook:
    """The incidents of the job; a damaged list of a watched run is put aside, since nobody is there who could."""
    path = settings.folder / "incidents.json"

    def opened() -> IncidentBook:
        return IncidentBook(settings.job, host, policy, state_path=path, run=settings.run)

    try:
        return opened()
    except TraceError as e:
        if not settings.pid:
            raise
        say(f"{e}; it is now incidents.json.damaged")
        with contextlib.suppress(OSError):
            path.replace(path.with_name("incidents.json.damaged"))
        return opened()
