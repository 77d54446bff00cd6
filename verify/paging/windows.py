"""Maintenance: times at which incidents are recorded but nobody is told, until they are over."""

from __future__ import annotations

import re
import zoneinfo
from datetime import UTC, datetime
from typing import Final

import msgspec

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAILY: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*([01]\d|2[0-3]|24):([0-5]\d)")
_WEEKLY: Final = re.compile(rf"({'|'.join(_DAYS)})\w*\s+(\S+)\s*-\s*({'|'.join(_DAYS)})\w*\s+(\S+)", re.IGNORECASE)
_DAY: Final = 24 * 60  # minutes
_WEEK: Final = 7 * _DAY


class Maintenance(msgspec.Struct, frozen=True, kw_only=True):
    """`[[maintenance]]`: once, every day or every week.

    Args:
        start: of a single window; a date-time with its offset, or without one in `timezone`.
        end: of a single window.
        daily: `"02:00-03:30"`; over midnight when the end is earlier.
        weekly: `"sat 22:00 - sun 06:00"`.
        timezone: name of the time zone, `Europe/Berlin`.
        reason: shown with what was not sent.
        sinks: only these; all when empty.
    """

    start: datetime | None = None
    end: datetime | None = None
    daily: str = ""
    weekly: str = ""
    timezone: str = "UTC"
    reason: str = ""
    sinks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = [bool(self.start or self.end), bool(self.daily), bool(self.weekly)]
        if sum(kinds) != 1:
            raise ValueError("give one of `start` with `end`, `daily` and `weekly`")
        zone = self._zone()
        if kinds[0]:
            if self.start is None or self.end is None:
                raise ValueError("`start` and `end` belong together")
            if _placed(self.start, zone) >= _placed(self.end, zone):
                raise ValueError("`end` is not after `start`")
        else:
            self._minutes()

    def holds(self, sink: str, now: float) -> bool:
        """Whether it is going on for this sink at these epoch seconds."""
        if self.sinks and sink not in self.sinks:
            return False
        zone = self._zone()
        if self.start is not None and self.end is not None:
            return _placed(self.start, zone) <= now < _placed(self.end, zone)
        local = datetime.fromtimestamp(now, zone)
        minute = local.hour * 60 + local.minute + (local.weekday() * _DAY if self.weekly else 0)
        begin, end = self._minutes()
        return begin <= minute < end if begin < end else minute >= begin or minute < end

    def say(self) -> str:
        """`maintenance daily 02:00-03:30 Europe/Berlin: backups`."""
        when = f"daily {self.daily}" if self.daily else f"weekly {self.weekly}" if self.weekly else f"until {self.end}"
        zone = "" if self.start is not None and self.start.tzinfo else f" {self.timezone}"
        return f"maintenance {when}{zone}" + (f": {self.reason}" if self.reason else "")

    def _zone(self) -> zoneinfo.ZoneInfo:
        try:
            return zoneinfo.ZoneInfo(self.timezone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("`timezone` is unknown: write a name such as Europe/Berlin") from None

    def _minutes(self) -> tuple[int, int]:
        """Beginning and end in minutes of the day or of the week."""
        if self.daily:
            match = _DAILY.fullmatch(self.daily.strip())
            if not match:
                raise ValueError('`daily` must look like "02:00-03:30"')
            hour, minute, hour_end, minute_end = (int(g) for g in match.groups())
            begin, end = hour * 60 + minute, hour_end * 60 + minute_end
            if begin == end or end > _DAY:
                raise ValueError("`daily` is no span of time")
            return begin, end
        match = _WEEKLY.fullmatch(self.weekly.strip())
        clock = _DAILY.fullmatch(f"{match.group(2)}-{match.group(4)}") if match else None
        if match is None or clock is None:
            raise ValueError('`weekly` must look like "sat 22:00 - sun 06:00"')
        hour, minute, hour_end, minute_end = (int(g) for g in clock.groups())
        begin = _DAYS.index(match.group(1).lower()) * _DAY + hour * 60 + minute
        end = _DAYS.index(match.group(3).lower()) * _DAY + hour_end * 60 + minute_end
        if begin == end or end > _WEEK:
            raise ValueError("`weekly` is no span of time")
        return begin, end


def _placed(when: datetime, zone: zoneinfo.ZoneInfo) -> float:
    return (when if when.tzinfo else when.replace(tzinfo=zone)).astimezone(UTC).timestamp()
