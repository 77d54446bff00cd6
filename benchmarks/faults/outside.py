"""What is done to a job, its verifier, its disk and its receivers from outside while it waits at step 10."""

# More than 400 lines: a list of what is done, one function each, over one waiting job.
from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.faults.trial import PROCTOR, Outside, Stage, UnavailableError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from helpers.live.receivers import ROUTING_KEY, Webhook
from helpers.system.clock import CC, Clock

LAST: Final[dict[str, object]] = {}  # what `arrange` made for the trial that goes on


def ulimit(*limits: str) -> Sequence[str]:
    """Words that set limits and become the command."""
    pairs = " ".join(f"ulimit {name} {value};" for name, value in zip(limits[::2], limits[1::2], strict=True))
    return ["bash", "-c", f'{pairs} exec "$@"', "bash"]


# -- the job -----------------------------------------------------------------------------------------------------------


def signal_job(number: int) -> Outside:
    """To the command itself, as a scheduler sends it."""

    def send(stage: Stage) -> None:
        stage.job.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            stage.job.wait(2.0)

    return send


def stop_job(seconds: float) -> Outside:
    def stop(stage: Stage) -> None:
        stage.job.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        stage.job.send_signal(signal.SIGCONT)

    return stop


def kill_rank(rank: int) -> Outside:
    return lambda stage: os.kill(stage.pids[rank], signal.SIGKILL)


# -- the disk ----------------------------------------------------------------------------------------------------------


def small_disk(options: str) -> Callable[[Path], contextlib.AbstractContextManager[Path]]:
    """A disk of its own for the run directory; options of tmpfs."""

    @contextlib.contextmanager
    def mounted(place: Path) -> Iterator[Path]:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={options}", "tmpfs", str(place)]
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            raise UnavailableError("a disk of its own needs root")
        try:
            yield place
        finally:
            while place.is_mount() and not subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True).returncode:
                pass  # a fault may have put another mount above

    return mounted


def make_read_only(stage: Stage) -> None:
    if stage.run is not None:
        place = str(stage.run.parent)
        if subprocess.run(["mount", "-o", "remount,ro", place], check=False, capture_output=True).returncode:
            # Files that are open for writing forbid it: a bind mount above hides them, as a storage that was remounted does.
            subprocess.run(["mount", "--bind", place, place], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)


def take_disk_away(stage: Stage) -> None:
    if stage.run is not None:
        subprocess.run(["umount", "-l", str(stage.run.parent)], check=True)


def delete(part: str) -> Outside:
    return lambda stage: shutil.rmtree(stage.run / part, ignore_errors=True) if stage.run is not None else None


def overwrite(part: str) -> Outside:
    def write(stage: Stage) -> None:
        if stage.run is not None:
            (stage.run / part).write_bytes(b'{"schema": \xff\xfe')

    return write


def _written(stage: Stage, pattern: str) -> list[Path]:
    """Files of the run, once there is something in them: a trace is flushed once a second, and a fast job is here before."""
    if stage.run is None:
        return []
    end = time.monotonic() + 10.0
    while True:
        found = sorted(stage.run.glob(pattern))
        if all(path.stat().st_size for path in found) or time.monotonic() > end:
            return [path for path in found if path.stat().st_size]
        time.sleep(0.1)


def cut(pattern: str) -> Outside:
    def halve(stage: Stage) -> None:
        for path in _written(stage, pattern):
            os.truncate(path, path.stat().st_size // 2)

    return halve


def flip(pattern: str) -> Outside:
    def turn(stage: Stage) -> None:
        for path in _written(stage, pattern):
            with path.open("r+b") as file:
                at = path.stat().st_size * 3 // 4
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))

    return turn


def second_job(stage: Stage) -> None:
    if stage.run is not None:
        for more in ((), ("--overwrite",)):
            words = [*PROCTOR, "watch", *more, "-o", str(stage.run), "--", sys.executable, "-c", "print('ran')"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
            if done.returncode != 2 or "ran" in done.stdout or len(done.stderr.strip().splitlines()) != 1:
                raise AssertionError(f"a second job was taken: {done.returncode} {done.stdout} {done.stderr}")


# -- the verifier ------------------------------------------------------------------------------------------------------


def kill_verifier(stage: Stage) -> None:
    stage.hit_verifier(signal.SIGKILL)


def kill_verifier_twice(stage: Stage) -> None:
    for _ in range(2 if stage.run is not None else 0):
        stage.hit_verifier(signal.SIGKILL)
        time.sleep(2.0)


def stop_verifier(seconds: float) -> Outside:
    def stop(stage: Stage) -> None:
        stage.hit_verifier(signal.SIGSTOP)
        (stage.folder / "go").write_text("")  # the job goes on meanwhile
        time.sleep(seconds if stage.run is not None else 0.0)
        stage.hit_verifier(signal.SIGCONT)

    return stop


def kill_both(stage: Stage) -> None:
    stage.hit_verifier(signal.SIGKILL, keeper=True)
    stage.hit_verifier(signal.SIGKILL)


def end_verifier(stage: Stage) -> None:
    stage.hit_verifier(signal.SIGTERM)


def damage_incidents(stage: Stage) -> None:
    if stage.run is not None:
        stage.hit_verifier(signal.SIGSTOP)
        (stage.run / "verify" / "incidents.json").write_bytes(b"\x00" * 100)
        stage.hit_verifier(signal.SIGKILL)


def change_token(stage: Stage) -> None:
    if stage.run is not None:
        (stage.run / "boot" / "token").write_text("f" * 64)
        stage.hit_verifier(signal.SIGKILL)


# -- receivers ---------------------------------------------------------------------------------------------------------


def page(folder: Path, port: int, *, deliver_s: int = 3) -> Sequence[str]:
    here = folder / "arranged"
    here.mkdir(exist_ok=True)
    (here / "key").write_text(ROUTING_KEY)
    (here / "key").chmod(0o600)
    sink = f'[sinks.oncall]\ntype = "pagerduty"\ntier = "all"\nurl = "http://127.0.0.1:{port}"\nrouting_key_file = "key"\ntimeout_s = 2\n'
    (here / "page.toml").write_text(f"[job]\ndeliver_s = {deliver_s}\n{sink}")
    return ["--page", str(here / "page.toml")]


def receiver_hangs(folder: Path) -> Sequence[str]:
    server = socket.create_server(("127.0.0.1", 0))
    LAST["hangs"] = server
    return page(folder, server.getsockname()[1])


def receiver_answers(status: int) -> Callable[[Path], Sequence[str]]:
    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(f"HTTP/1.1 {status} No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno".encode())

    def arranged(folder: Path) -> Sequence[str]:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        LAST["answers"] = server
        return page(folder, int(server.server_address[1]))

    return arranged


# -- the clock ---------------------------------------------------------------------------------------------------------


def clock(folder: Path) -> Sequence[str]:
    if CC is None:
        raise UnavailableError("needs a C compiler")
    here = folder / "arranged"
    here.mkdir(exist_ok=True)
    made = Clock(here)
    LAST["clock"] = made
    os.environ.update(made.environment)  # of what is started next; `jump_clock` takes it out again
    return ()


def jump_clock(stage: Stage) -> None:
    if stage.run is None:
        return
    for name in ("LD_PRELOAD", "JUMP"):
        os.environ.pop(name, None)
    made = LAST["clock"]
    assert isinstance(made, Clock)
    for ahead in (86_400, -2 * 86_400, 90 * 86_400, -3_600):
        made.jump(ahead)
        time.sleep(0.5)


_NO_LOCKS: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/socket.h>
static int locks(int command) { return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; }
#define FCNTL(name) int name(int fd, int command, ...) { \
    va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list); \
    if (locks(command)) { errno = ENOLCK; return -1; } \
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, #name); \
    return real(fd, command, argument); }
FCNTL(fcntl)
FCNTL(fcntl64)
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
int link(const char *from, const char *to) { errno = EPERM; return -1; }
int bind(int fd, const struct sockaddr *address, socklen_t size) {
    if (address->sa_family == AF_UNIX) { errno = EPERM; return -1; }
    int (*real)(int, const struct sockaddr *, socklen_t) = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
    return real(fd, address, size);
}
"""


def no_locks(folder: Path) -> Sequence[str]:
    """Files without locks, hard links and sockets, as an NFS without its lock daemon has them; for all processes under watch."""
    if CC is None:
        raise UnavailableError("needs a C compiler")
    here = folder / "arranged"
    here.mkdir(exist_ok=True)
    (here / "locks.c").write_text(_NO_LOCKS)
    subprocess.run([CC, "-O1", "-shared", "-fPIC", "-o", str(here / "locks.so"), str(here / "locks.c"), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(here / "locks.so")
    return ()


def forget_locks(stage: Stage) -> None:
    """What is started from here on is as ever."""
    if stage.run is not None:
        os.environ.pop("LD_PRELOAD", None)


# -- the network -------------------------------------------------------------------------------------------------------


class Lossy:
    """A way to an address that cuts each connection after some bytes, and all of them while it is down."""

    def __init__(self, to: tuple[str, int], after: int) -> None:
        self.to, self.after, self.up, self.cuts = to, after, True, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            if not self.up:
                near.close()
                continue
            try:
                far = socket.create_connection(self.to, 5)
            except OSError:
                near.close()
                continue
            budget = [self.after]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other, budget), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, budget: list[int]) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(8192)) and self.up and budget[0] > 0:
                budget[0] -= len(data)
                other.sendall(data)
            self.cuts += budget[0] <= 0
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def interrupted(port: int) -> Lossy:
    """A way to a port that cuts each connection after 64 KiB, and six seconds from now is away for two."""
    way = Lossy(("127.0.0.1", port), 64 * 1024)

    def interrupt() -> None:
        time.sleep(6.0)
        way.up = False
        time.sleep(2.0)
        way.up = True

    threading.Thread(target=interrupt, daemon=True).start()
    return way


def verifier_elsewhere(folder: Path, run: Path) -> tuple[int, Path]:
    """A verifier that listens on TCP, for a run that it writes nothing of; its port and the job's token."""
    token = folder / "arranged" / "token"
    token.parent.mkdir(mode=0o700, exist_ok=True)  # sockets lie in it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = (folder / "arranged" / "verifier.log").open("wb")
    command = [*PROCTOR, "verify", str(run), "--listen", f"tcp:127.0.0.1:{port}", "--token-file", str(token)]
    LAST["verifier"] = subprocess.Popen(command, stdout=log, stderr=log)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return port, token
        time.sleep(0.1)
    raise AssertionError("the verifier does not listen")


def lossy_verifier(folder: Path) -> Sequence[str]:
    port, token = verifier_elsewhere(folder, folder.parent / "elsewhere")
    way = interrupted(port)
    return ["--verifier", f"127.0.0.1:{way.port}", "--token-file", str(token)]


def relayed(folder: Path) -> Sequence[str]:
    port, token = verifier_elsewhere(folder, folder.parent / "elsewhere")
    address = f"unix:{folder / 'arranged' / 'relay'}"
    start = functools.partial(
        subprocess.Popen, [*PROCTOR, "verify", "--relay", f"tcp:127.0.0.1:{port}", "--listen", address, "--token-file", str(token)]
    )
    LAST["relay"], LAST["start relay"] = start(), start
    return ["--verifier", address, "--token-file", str(token)]


def restart_relay(stage: Stage) -> None:
    if stage.run is None:
        return
    relay, start = LAST["relay"], LAST["start relay"]
    assert isinstance(relay, subprocess.Popen) and callable(start)
    assert relay.poll() is None, "the relay is not there"
    relay.kill()
    relay.wait()
    LAST["relay"] = start()


def tidy_up() -> None:
    """End what was arranged for a trial."""
    for one in LAST.values():
        if isinstance(one, subprocess.Popen) and one.poll() is None:
            one.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(20)
            if one.poll() is None:
                one.kill()
                one.wait()
        elif isinstance(one, socket.socket):
            one.close()
        elif isinstance(one, socketserver.BaseServer):
            one.shutdown()
            one.server_close()
        elif isinstance(one, list):  # halves of a detour
            for half in one:
                half.close()
        elif isinstance(one, Webhook):
            one.close()
    LAST.clear()
    for name in ("LD_PRELOAD", "JUMP"):
        os.environ.pop(name, None)
