"""The live view over real sockets: what it shows, to whom, and what a reader gets who comes back."""

from __future__ import annotations

import json
import re
import threading

import pytest
from helpers.processes import BACK, STEP, ZERO, process
from helpers.runs import write_run

from proctor.cli import main
from proctor.verify.view.events import EventLog, IncidentEvent, NoticeEvent, StepEvent

NASTY = "</script><img src=x onerror=alert(1)>\"'\u202e\x1b[31m javascript:alert(1)"


@pytest.fixture
def run(tmp_path):
    states = [{"var": {"name": NASTY, "module": NASTY, "model": NASTY}, "step": s, "fp": s, "norm": 1.0} for s in range(3)]
    return write_run(tmp_path / "run", [process(states=states)], program=NASTY, command=["python", NASTY])


def incident(key="k", **more):
    return IncidentEvent(key=key, title=f"title of {key}", state="firing", **more)


def test_the_page_runs_no_script_but_ours_and_escapes_everything(serve, run):
    EventLog(run).append(incident(NASTY, details={NASTY: NASTY}, ranks=NASTY))
    site = serve(run)
    status, headers, text = site.get()
    assert status == 200
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert text.count("<script") == text.count(f'<script nonce="{nonce}">') == 1
    assert text.count("<style") == text.count(f'<style nonce="{nonce}">') == 1
    assert "<img" not in text
    assert "\u202e" not in text
    assert " style=" not in text
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    other = site.get()[1]["content-security-policy"]
    assert nonce not in other
    with site.events() as take:
        data = take(2)[1][2]
    assert "\u202e" not in data
    assert "\x1b" not in data
    assert json.loads(data)["title"].startswith("title of </script>")
    status, headers, part = site.get("/report")
    assert (status, headers["content-security-policy"]) == (200, "default-src 'none'; frame-ancestors 'none'")
    assert "<img" not in part
    assert "<script" not in part


def test_a_reader_who_comes_back_gets_what_followed_and_nothing_twice(serve, run):
    log = EventLog(run)
    for i in range(3):
        log.append(incident(f"k{i}"))
    site = serve(run)
    with site.events() as take:
        first = take(4)
        assert [e for _, e, _ in first] == ["reset", "incident", "incident", "incident"]
        log.append(incident("k3"))
        first += take(1)
    last = first[-1][0]
    for i in range(4, 7):
        log.append(incident(f"k{i}"))
    with site.events(Last_Event_ID=last) as take:
        second = take(3)
    assert [i for i, _, _ in second] == ["5", "6", "7"]
    with site.events(f"/events?after={second[-1][0]}") as take:
        log.append(NoticeEvent(action="trigger", key="k6"))
        assert [i for i, _, _ in take(1)] == ["8"]
    for odd in ("x", "-1", "9" * 30, "999999"):
        with site.events(Last_Event_ID=odd) as take:
            assert take(1)[0][1] == "reset"


def test_many_readers_get_the_same_events(serve, run):
    log = EventLog(run)
    log.append(StepEvent(step=0))
    site = serve(run)
    results, ready = [], threading.Barrier(13)

    def read():
        with site.events() as take:
            got = take(2)
            ready.wait(20)
            results.append(got + take(40))

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    ready.wait(20)
    for i in range(40):
        log.append(incident(f"k{i}"))
    for thread in threads:
        thread.join(20)
    assert len(results) == 12
    for got in results:
        assert [i for i, _, _ in got] == ["", *map(str, range(1, 42))]


def test_other_names_and_other_methods_are_refused(serve, run):
    site = serve(run)
    assert site.get(Host="evil.example")[0] == 421
    assert site.get(Host="127.0.0.1.evil.example:80")[0] == 421
    assert site.get("/events", Host="10.0.0.7")[0] == 421
    assert site.get(Host="localhost:1")[0] == 200
    assert site.get(Host="[::1]:80")[0] == 200
    assert site.get(method="POST")[0] == 405
    assert site.get("/../run.json")[0] == 404
    assert site.get("/assets/live.js")[0] == 404


def test_a_token_is_needed_and_becomes_a_cookie(serve, run):
    token = "a-token-of-twenty-chars"
    site = serve(run, token=token, hosts=["train.example"])
    assert site.get()[0] == 403
    assert site.get("/events")[0] == 403
    assert site.get("/?token=wrong")[0] == 403
    assert site.get("/?token=" + "x" * 9000)[0] == 403
    status, headers, _ = site.get(f"/?token={token}", Host="10.0.0.7:8080")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert token not in cookie
    given = cookie.partition(";")[0]
    assert site.get(Cookie=given)[0] == 200
    assert site.get(Cookie=f"other=1; {given}", Host="train.example")[0] == 200
    assert site.get(Cookie=given, Host="evil.example")[0] == 421
    assert site.get(Cookie=given[:-1])[0] == 403
    assert site.get(f"//evil.example/?token={token}")[1]["location"] == "/"


def test_an_error_of_ours_is_a_sentence(serve, run, monkeypatch):
    from proctor.verify.view.pages import Pages

    def broken(self, frame):
        raise RuntimeError("secret")

    monkeypatch.setattr(Pages, "page", broken)
    status, _, text = serve(run).get()
    assert status == 500
    assert text == "The view could not answer this; it goes on.\n"


def test_a_run_that_is_being_written_is_shown_and_shown_anew(serve, tmp_path, monkeypatch):
    from proctor.verify.view import pages

    monkeypatch.setattr(pages, "LEAST_S", 0.0)
    monkeypatch.setattr(pages, "SHARE", 0.0)
    run = tmp_path / "run"
    (run / "procs").mkdir(parents=True)
    site = serve(run)
    assert "the run cannot be read" in site.get()[2]
    with site.events() as take:
        assert take(1)[0][1] == "reset"
        (run / "procs").rmdir()
        run.rmdir()
        write_run(run, [{"calls": [{"fn": fn, "step": s} for s in range(4) for fn in (ZERO, BACK, STEP)]}])
        assert take(1)[0][1] == "report"
    assert "12 calls" in site.get("/report")[2]


def test_damaged_files_are_no_error(serve, run):
    (run / "check.json").write_text("{")
    (run / "verify").mkdir()
    (run / "verify" / "incidents.json").write_text('{"incidents": [1, {"title": 3, "began": 1e300, "rules": 7}, {}]}')
    for table in run.glob("procs/*/calls.arrow"):
        table.write_bytes(table.read_bytes()[:100])
    assert serve(run).get()[0] == 200


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "there is no token"),
        (["--host", "192.168.7.7"], "there is no token"),
        (["--port", "70000"], "expected 0 to 65535"),
        (["--token-file", "absent"], "No such file"),
        (["--host", "name.invalid", "--token-file", "{token}"], "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_one_line(run, capsys, tmp_path, arguments, said):
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    assert main(["view", str(run), *(a.format(token=token) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_token_file_is_the_owners_own_and_long_enough(run, capsys, tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o644)
    assert main(["view", str(run), "--token-file", str(token)]) == 2
    assert "can be read by others" in capsys.readouterr().err
    token.chmod(0o600)
    token.write_text("short")
    assert main(["view", str(run), "--token-file", str(token)]) == 2
    assert "at least 16" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(run, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "starlette" else real(name, *a))
    assert main(["view", str(run)]) == 2
    assert "pip install 'proctor[view]'" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["view", str(tmp_path / "absent")]) == 2
    assert "no such directory" in capsys.readouterr().err
