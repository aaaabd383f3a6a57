"""What a sweep shows while it runs: live bars on a terminal, plain lines elsewhere."""

from io import StringIO

import pytest
from rich.console import Console

from fedbench.workers.display import Display
from fedbench.workers.process import Claimed, Ended, RoundDone
from fedbench.workers.slots import Slot

CPU = Slot("cpu", "cpu", 1)
PID = 4711


class Screen:
    """A display of two jobs with ten rounds each, and what it has printed."""

    def __init__(self, *, terminal):
        self._text = StringIO()
        console = Console(file=self._text, force_terminal=terminal, width=200, markup=False, highlight=False)
        self.display = Display(console, jobs=2, rounds=20)

    def show(self, *events):
        with self.display:
            for event in events:
                self.display.show(PID, CPU, event)
                self.display.refresh()
        return self

    @property
    def text(self):
        return self._text.getvalue()


@pytest.fixture
def file():
    return Screen(terminal=False)


@pytest.fixture
def terminal():
    return Screen(terminal=True)


def claimed(key="k1", label="fedavg digits small seed 0"):
    return Claimed(key, label, 10)


# --- not a terminal ---


def test_a_job_that_ends_is_one_plain_line(file):
    file.show(claimed(), RoundDone("k1", 10, {"gm": 0.5}), Ended("k1", "done", 12.34))

    assert file.text == "[1/2]  done  fedavg digits small seed 0  GM 50.00  12.3 s\n"


def test_rounds_are_not_printed_one_by_one(file):
    file.show(claimed(), RoundDone("k1", 1, {"gm": 0.5}), RoundDone("k1", 2, {}))

    assert file.text == ""


def test_the_newest_accuracy_of_every_view_is_shown(file):
    file.show(
        claimed(), RoundDone("k1", 2, {"gm": 0.5, "pm": 0.6}), RoundDone("k1", 4, {"pm": 0.75}), Ended("k1", "done", 1)
    )

    assert "PM 75.00  GM 50.00" in file.text


def test_a_failure_is_shown_with_the_first_line_of_its_reason(file):
    file.show(claimed(), Ended("k1", "failed", 0.5, "ValueError: no luck\nmore that nobody asked for"))

    assert file.text == "[1/2]  failed  fedavg digits small seed 0  0.5 s  ValueError: no luck\n"


def test_jobs_are_counted_as_they_end(file):
    file.show(claimed("k1"), Ended("k1", "done", 1), claimed("k2"), Ended("k2", "diverged", 1))

    assert [line.split()[:2] for line in file.text.splitlines()] == [["[1/2]", "done"], ["[2/2]", "diverged"]]


@pytest.mark.parametrize("outcome", ["interrupted", "lost"])
def test_a_job_that_will_be_tried_again_is_not_counted(file, outcome):
    file.show(claimed("k1"), Ended("k1", outcome, 1), claimed("k2"), Ended("k2", "done", 1))

    assert [line.split()[:2] for line in file.text.splitlines()] == [["[0/2]", outcome], ["[1/2]", "done"]]


def test_waiting_for_another_process_is_said_once(file):
    file.display.waiting(2)
    file.display.waiting(1)

    assert file.text == "waiting for 2 job(s) that another fedbench is running ...\n"


@pytest.mark.parametrize(("exitcode", "how"), [(-9, "signal 9"), (1, "exit code 1")])
def test_the_death_of_a_worker_says_how_it_died(file, exitcode, how):
    file.display.died(CPU, exitcode)

    assert f"a worker on cpu died ({how})" in file.text


def test_stopping_says_how_to_stop_at_once(file):
    file.display.stopping()

    assert "Ctrl-C again" in file.text


def test_a_file_gets_no_control_characters(file):
    file.show(claimed(), RoundDone("k1", 1, {"gm": 0.5}), Ended("k1", "failed", 1, "no luck"))

    assert "\x1b" not in file.text


# --- a terminal ---


def test_a_terminal_shows_a_line_per_worker_and_one_for_all(terminal):
    terminal.show(claimed(), RoundDone("k1", 1, {"gm": 0.5}))

    assert "all 2 jobs" in terminal.text
    assert "cpu  fedavg digits small seed 0" in terminal.text
    assert "1/10" in terminal.text
    assert "1/20" in terminal.text
    assert "GM 50.00" in terminal.text


def test_the_overall_bar_counts_the_rounds_of_all_jobs(terminal):
    terminal.show(claimed("k1"), *(RoundDone("k1", n, {}) for n in (1, 2, 3)), claimed("k2"), RoundDone("k2", 1, {}))

    assert "4/20" in terminal.text


def test_a_terminal_shows_the_settings_in_brackets(terminal):
    terminal.show(claimed(label="fedprox[mu=0.01] digits small seed 0"), RoundDone("k1", 1, {}))

    assert "fedprox[mu=0.01] digits" in terminal.text


def test_a_terminal_shows_failures_as_they_happen(terminal):
    terminal.show(claimed(), Ended("k1", "failed", 0.5, "ValueError: no luck"))

    assert "[1/2]  failed  fedavg digits small seed 0  0.5 s  ValueError: no luck" in terminal.text


def test_a_worker_takes_the_next_job_on_its_line(terminal):
    terminal.show(claimed("k1"), Ended("k1", "done", 1), claimed("k2", "local digits small seed 0"))

    assert "cpu  local digits small seed 0" in terminal.text


def test_a_new_job_without_the_end_of_the_old_one_replaces_its_line(terminal):
    terminal.show(claimed("k1"), claimed("k2", "local digits small seed 0"), RoundDone("k2", 1, {}))

    last_frame = terminal.text.rpartition("all 2 jobs")[2]
    assert "local digits" in last_frame
    assert "fedavg digits" not in last_frame


def test_events_of_an_unknown_worker_do_not_break_the_display(terminal):
    terminal.show(RoundDone("k9", 1, {"gm": 0.5}), Ended("k9", "done", 1))

    assert "[1/2]  done  k9" in terminal.text
