"""A job goes on, bit for bit, while the network to its verifier is cut and while everybody's clock jumps."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from helpers.network import THERE, link, other_host
from helpers.receivers import PagerDuty, free_port, wait_until
from helpers.watching import PROCTOR, bare, config, environment, job, losses, pagerduty_at, verdict

CC = shutil.which("cc")
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {  /* seconds, from the file JUMP */
  static volatile long *shared;
  if (!shared) {
    int file = open(getenv("JUMP"), O_RDONLY);
    shared = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
  }
  return *shared;
}
int clock_gettime(clockid_t clock, struct timespec *out) {
  int failed = syscall(SYS_clock_gettime, clock, out);
  if (!failed && clock == CLOCK_REALTIME) out->tv_sec += ahead();
  return failed;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec, out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return out ? (*out = now.tv_sec) : now.tv_sec;
}
"""
DAY_S = 86400


class Clock:
    """What the time of day is for every process that runs with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._ahead, library = folder / "ahead", folder / "clock.so"
        (folder / "clock.c").write_text(CLOCK)
        subprocess.run([str(CC), "-O1", "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c")], check=True)
        self._ahead.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "JUMP": str(self._ahead)}

    def jump(self, seconds: int) -> None:
        """To this distance from the true time."""
        with self._ahead.open("r+b") as file:
            file.write(struct.pack("<q", seconds))


def steps_in(run: Path) -> bytes:
    events = run / "verify" / "events.jsonl"
    return events.read_bytes() if events.exists() else b""


@pytest.mark.slow
def test_a_job_goes_on_while_its_verifier_cannot_be_reached(tmp_path: Path) -> None:
    arguments = ("--iters", "200", "--part-at", "150", "--pause", "0.03")
    there, token = tmp_path / "there", tmp_path / "token"
    with other_host() as name:
        serve = [*PROCTOR, "verify", str(there), "--listen", f"tcp:{THERE}:7077", "--token-file", str(token)]
        verifier = subprocess.Popen(["ip", "netns", "exec", name, *serve], env=environment(), stderr=subprocess.PIPE, text=True)
        try:
            assert wait_until(token.exists, 30)
            command = [*PROCTOR, "watch", "-o", str(tmp_path / "here"), "--verifier", f"{THERE}:7077", "--token-file", str(token)]
            process = subprocess.Popen([*command, "--", *job(*arguments)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert wait_until(lambda: b'"step"' in steps_in(there), 60), "nothing was judged"
            link(name, up=False)
            time.sleep(3.0)
            assert process.poll() is None
            link(name, up=True)
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-2000:]
            _, said = verifier.communicate(timeout=90)
        finally:
            verifier.kill()
    assert losses(out) == bare(*arguments)
    found = verdict(there)
    assert found["worst"] in ("error", "critical"), said[-2000:]
    assert found["steps"] == 200


@pytest.mark.slow
@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_clocks_that_jump_change_neither_training_nor_pages(tmp_path: Path) -> None:
    arguments = ("--iters", "260", "--part-at", "160", "--pause", "0.03")
    run, port, clock = tmp_path / "run", free_port(), Clock(tmp_path)
    server = PagerDuty(port)
    page = config(tmp_path, pagerduty_at(port))
    command = [*PROCTOR, "watch", "-o", str(run), "--page", str(page), "--", *job(*arguments)]
    process = subprocess.Popen(command, env={**environment(), **clock.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: b'"step"' in steps_in(run), 60), "nothing was judged"
        for ahead in (DAY_S, -2 * DAY_S, 90 * DAY_S, -3600):
            clock.jump(ahead)
            time.sleep(1.0)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-2000:]
        assert verdict(run)["steps"] == 260
        assert wait_until(lambda: any(hit.body["event_action"] == "trigger" for hit in server.hits), 20), err[-2000:]
        time.sleep(1.0)
        triggers = [hit.body["dedup_key"] for hit in server.hits if hit.body["event_action"] == "trigger"]
    finally:
        process.kill()
        server.close()
    assert losses(out) == bare(*arguments)
    assert len(triggers) == 1
    assert "Traceback" not in err
