"""A time of day that jumps, for the processes of a test."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

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
