"""What `fedbench run` makes of its options."""

import pytest

from fedbench.errors import FedbenchError
from fedbench.sweep import seconds_in


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d", 86400),
        (" 2H ", 7200),
    ],
)
def test_a_length_of_time_is_written_with_its_unit(text, seconds):
    assert seconds_in(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-5", "0", "0h", "1.2.3h", "30m2h", "h", "2 weeks", "nan", "inf"])
def test_anything_else_is_a_clear_error(text):
    with pytest.raises(FedbenchError, match="is not a length of time"):
        seconds_in(text)
