"""How soon people are told, how soon it is over, and how often they are told again: the numbers that a site may set."""

from __future__ import annotations

import shlex
from typing import Annotated

import msgspec

from proctor.invariants.invariant import Tier

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of an incident's life.

    An evaluation is a step at which a rule met its precondition and could be decided.

    Args:
        confirm_k, confirm_n: a rule that may fail by chance (`Relation.confirm`) is believed when k of its last n
            evaluations failed. Each time that an incident came back, one more is asked for.
        clean: evaluations without a failure, of each rule of an incident, after which it is over. Doubled, up to 32
            times, each time that it came back.
        hold_s: seconds since its last failure before which it is not over, either.
        flap_window_s: seconds after its end in which an incident that comes back is the same one.
        max_retriggers_per_hour: times in an hour that people are told of one incident that came back.
        storm: more rules than this that begin to fail at one step are one incident.
        max_open: incidents open at once; what comes on top is added to the earliest.
        silent_after_s: seconds without a word after which a rank is silent.
        coverage_clear_s: seconds without another loss after which lost coverage is over.
        coverage_tier, silent_tier: what lost coverage, and a silent rank, deserve.
        resolve_at_end: call everything over when the job ends, rather than leave open what it ended with.
        confirm_with: command line of a trusted run in one process, which does a step again before people are paged
            (`verify.confirm`); "" pages at once.
        confirm_plan: file that says how the job is cut.
        confirm_within_s: seconds that a page waits for it at most.
    """

    confirm_k: Count = 2
    confirm_n: Count = 3
    clean: Count = 10
    hold_s: Seconds = 10.0
    flap_window_s: Seconds = 900.0
    max_retriggers_per_hour: Annotated[int, msgspec.Meta(ge=0, le=3600)] = 3
    storm: Count = 20
    max_open: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    silent_after_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 60.0
    coverage_clear_s: Seconds = 300.0
    coverage_tier: Tier = Tier.TICKET
    silent_tier: Tier = Tier.TICKET
    resolve_at_end: bool = False
    confirm_with: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    confirm_plan: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    confirm_within_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0

    def __post_init__(self) -> None:
        if self.confirm_k > self.confirm_n:
            raise ValueError(f"confirm_k = {self.confirm_k} is more than confirm_n = {self.confirm_n}")
        try:
            words = shlex.split(self.confirm_with)
        except ValueError as error:
            raise ValueError(f"confirm_with: {error}") from None
        if self.confirm_with and not words:
            raise ValueError("confirm_with names no command")
