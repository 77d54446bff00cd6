"""Codes of notices that are about the monitoring itself, PR2xx: no rule of a pack stands behind them."""

from __future__ import annotations

from typing import Final, NamedTuple

from proctor.verify.lifecycle.monitor import KILLED_RANK, LOST_COVERAGE, SILENT_RANK, VERIFIER_AWAY
from proctor.verify.paging.gate import DIGEST_CODE

TEST: Final = "PR299"


class Own(NamedTuple):
    """What one code says.

    severity: as it is told; "" where it is that of what it contains.
    text: what it means, when it is over, and what to do.
    """

    name: str
    severity: str
    text: str


OWN: Final = {
    LOST_COVERAGE: Own(
        "lost coverage",
        "warning",
        """Records of the job did not reach the verifier, or peers were turned away. Rules that would need these records are
unknown there, not violated: the job may be healthy, it is watched with gaps.

The reasons are counted in the incident:
  gap        flushes that were dropped or lost on the way, and are not in the run's files either: the verifier was away or
             slow for longer than the rank's ring holds, the network was cut, or the files are on another host
  bad_peer   somebody connected who does not know the job's token, or sent what is not a trace
  refused    records that do not have the columns of a trace

It is over when nothing has been lost for `coverage_clear_s` (300 s), or the job ends.
Look at: load and memory of the verifier's host; the disk of RUN; for bad_peer, who can reach the port of --listen.
`proctor check RUN` judges afterwards what is in the files.""",
    ),
    SILENT_RANK: Own(
        "silent rank",
        "error",
        """A rank that was heard before, or that the job says it has, has sent nothing for `silent_after_s` (60 s), while the
verifier itself was there to listen.

Its process is stopped, or its host or the network is gone; nothing is checked there meanwhile. A rank that merely records
nothing (it compiles, loads, or evaluates unseen) still gives signs of life and is not silent; one that hangs in a collective
is told as PR110, with the call.

It is over when every rank is heard again, or the job ends in good order.""",
    ),
    KILLED_RANK: Own(
        "killed rank",
        "error",
        """A signal ended a rank: a crash in native code (SIGSEGV, SIGBUS, SIGILL, SIGFPE), native code that gave up (SIGABRT), or SIGKILL, by the
kernel when memory ran out, by a scheduler or by hand. Such a process writes no traceback. The first one is named, since a launcher then
ends the others; the incident lists all.

It is known of ranks on the verifier's host, while they are not reaped or on Linux 6.15 and newer; of others PR202 says that they are silent. SIGTERM,
SIGINT and SIGHUP, by which a process is asked to end, are not told.

It is over when the job is started again. Look at: the job's own output, `dmesg` for the out-of-memory killer, core files
(`coredumpctl`), and `python -X faulthandler` for the Python line of a crash.""",
    ),
    VERIFIER_AWAY: Own(
        "verifier away",
        "warning",
        """The verifier of this job ended and was started again. It carries on with the incidents it had, and with pages that were
not delivered. Ranks send again what their rings still hold, and the rest is read from the run's files; steps in between
may not have been judged, and what is missing counts as lost coverage (PR201).

It is over when the verifier has been there for `coverage_clear_s` (300 s), or the job ends.
Look at: RUN/verify/verifier.log, and whether the host's memory ran out.""",
    ),
    DIGEST_CODE: Own(
        "digest",
        "",
        """More incidents than `pages_per_hour` or `tickets_per_hour` of page.toml allow: what is more is told in this one notice, one
of the page tier and one of the ticket tier, which lists them, is told again as it grows, and is over with its last incident.

Look at the worst of them first; `proctor page status --run RUN` and `proctor view RUN` show all.""",
    ),
    TEST: Own(
        "test",
        "info",
        """Somebody ran `proctor page test --config page.toml` to see that notices arrive. Nothing is wrong. It is triggered,
acknowledged where the receiver knows that, and resolved within seconds, under a key that is used once.""",
    ),
}
"""By code."""


def show(code: str) -> str:
    """The explanation of one code of ours."""
    name, severity, text = OWN[code]
    return f"{code} {name}{f' ({severity})' if severity else ''}\n\n{text}"
