"""The monitor speaks of itself: lost records, silent ranks."""

from __future__ import annotations

from helpers.verdicts import Book

from proctor.verify.lifecycle import Policy


def coverage(book: Book, lost: dict[str, int], missing: tuple[int, ...] = ()):
    notices = book.book.coverage(lost, missing)
    book.told += notices
    return notices


def test_lost_records_are_an_incident_until_none_were_lost_for_a_while():
    book = Book()
    assert coverage(book, {"ring full": 0}) == []
    [notice] = coverage(book, {"ring full": 1200})
    assert (notice.code, notice.tier, notice.key) == ("PR201", "ticket", "proctor:job:PR201:world")
    assert notice.details["lost"] == "ring full: 1,200"
    assert coverage(book, {"ring full": 1300, "gap": 4}) == []
    assert book.tick(200, heard={}) == []
    assert coverage(book, {"ring full": 1301, "gap": 4}) == []
    assert book.tick(200, heard={}) == []
    assert [n.action for n in book.tick(101, heard={})] == ["resolve"]
    assert coverage(book, {"ring full": 1301, "gap": 4}) == []  # nothing new
    assert "1,305" in book.told[0].title or book.book.incidents[0].title == "monitor lost coverage: 1,305 records missing"


def test_a_counter_that_begins_anew_counts_on():
    book = Book()
    coverage(book, {"ring full": 10})
    coverage(book, {"ring full": 3})
    assert book.book.incidents[0].facts["lost"] == "ring full: 13"


def test_a_silent_rank_is_named_and_over_when_it_speaks():
    book = Book(Policy(silent_after_s=10))
    last = book.time
    for _ in range(9):
        assert book.tick(1, heard={0: book.time, 1: book.time, 2: last}) == []
    book.tick(1, heard={0: book.time, 1: book.time, 2: last})
    notices = book.tick(1, heard={0: book.time, 1: book.time, 2: last})
    assert [n.title for n in notices or book.told] == ["rank 2 of 3 is silent"]
    assert book.told[0].code == "PR202" and book.told[0].severity == "error"
    assert [n.action for n in book.tick(1, heard={0: book.time, 1: book.time, 2: book.time})] == ["resolve"]


def test_a_verifier_that_was_stopped_blames_nobody():
    book = Book(Policy(silent_after_s=10))
    heard = {0: book.time, 1: book.time}
    book.tick(1, heard=heard)
    assert book.tick(3600, heard=heard) == []  # SIGSTOP, SIGCONT
    assert book.tick(1, heard={0: book.time, 1: book.time}) == []


def test_when_nobody_speaks_it_says_so():
    book = Book(Policy(silent_after_s=10))
    heard = {0: book.time, 1: book.time}
    for _ in range(15):
        book.tick(1, heard=heard)
    assert [n.title for n in book.told] == ["no rank is heard any more"]


def test_a_rank_that_never_came_is_silent_after_a_while():
    book = Book(Policy(silent_after_s=10))
    for _ in range(15):
        coverage(book, {}, (3,))
        book.tick(1, heard={0: book.time})
    assert [n.title for n in book.told] == ["rank 3 of 2 is silent"]
    coverage(book, {}, ())
    assert [n.action for n in book.tick(1, heard={0: book.time, 3: book.time})] == ["resolve"]


def test_ranks_that_said_goodbye_are_not_missed():
    book = Book(Policy(silent_after_s=10))
    for _ in range(30):
        book.tick(1, heard={})
    assert book.told == []


def test_at_the_end_nothing_is_left_but_silence_before_a_crash():
    for finished, left in ((True, []), (False, ["PR202"])):
        book = Book(Policy(silent_after_s=10))
        coverage(book, {"gap": 1})
        heard = {0: book.time}
        for _ in range(15):
            book.tick(1, heard=heard)
        book.book.close(finished=finished)
        assert [i.code for i in book.book.incidents if i.open] == left


def test_the_first_rank_that_a_signal_ended_is_named_until_the_job_is_started_again():
    book = Book()
    [notice] = book.book.killed(1, "SIGSEGV", "a crash in native code", 128)
    assert (notice.code, notice.severity, notice.key) == ("PR204", "error", "proctor:job:PR204:world")
    assert notice.title == "rank 1 was ended by SIGSEGV (a crash in native code) in step 128"
    book.book.killed(0, "SIGKILL", "somebody or something ended it", 129)
    [incident] = book.book.incidents
    assert incident.title.startswith("rank 1 was ended by SIGSEGV") and "then 1 more rank" in incident.title
    assert "rank 0 by SIGKILL" in incident.facts["ended"]
    book.book.begin_life()
    assert not incident.open


def test_a_job_that_ends_with_a_killed_rank_leaves_it_open():
    book = Book()
    book.book.killed(0, "SIGKILL", "the kernel ended it because memory ran out", -1)
    book.book.close(finished=False)
    [incident] = book.book.incidents
    assert incident.open and incident.title == "rank 0 was ended by SIGKILL (the kernel ended it because memory ran out)"
