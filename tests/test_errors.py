"""Mistakes become one line and a status; near names are suggested; several mistakes are told together."""

from __future__ import annotations

import pytest

from library.errors import ErrorCollector, OptionError, RunStopped, did_you_mean, run_script


def raising(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    "error,status,line",
    [
        (OptionError("--x 1: wrong"), 2, "error: --x 1: wrong"),
        (RunStopped("step 3: stopped"), 1, "error: step 3: stopped"),
        (KeyboardInterrupt(), 130, "error: stopped by the keyboard"),
    ],
)
def test_what_a_person_can_act_on_is_a_line_and_a_status(error, status, line, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script(raising(error))
    assert stopped.value.code == status
    printed = capsys.readouterr().err
    assert printed.startswith(line) and len(printed.strip().splitlines()) == 1


def test_a_wrong_filter_is_a_mistake_too(capsys):
    from library.grad_filter import GradFilterError

    with pytest.raises(SystemExit) as stopped:
        run_script(raising(GradFilterError("grad_filter: wrong")))
    assert stopped.value.code == 2 and capsys.readouterr().err == "error: grad_filter: wrong\n"


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ValueError, match="inside"):
        run_script(raising(ValueError("inside")))


def test_several_mistakes_are_collected():
    errors = ErrorCollector()
    for text in ("a", "b"):
        with errors.check():
            raise OptionError(text)
    with pytest.raises(OptionError) as raised:
        errors.raise_if_any()
    assert str(raised.value).splitlines() == ["a", "b"]
    ErrorCollector().raise_if_any()


@pytest.mark.parametrize(
    "name,expected", [("topq", " Did you mean 'topk'?"), ("TOPK", " Did you mean 'topk'?"), ("zzz", "")]
)
def test_the_nearest_name_is_suggested(name, expected):
    assert did_you_mean(name, ["topk", "random"]) == expected
