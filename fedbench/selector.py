"""The one small grammar for a name with settings: `fedprox[mu=0.01]`, in grids and on the command line.

A value in quotes, as YAML has them, may hold commas and brackets: `csv[path='my data, v2.csv']`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from fedbench.errors import FedbenchError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; everyone else reads a number."""


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    value = int(loader.construct_yaml_int(node))
    str(value)  # a ValueError for thousands of hexadecimal digits, here rather than in a message about them
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

_SELECTOR = re.compile(r"^\s*(?P<name>[^\[\]=,\s]+)\s*(?:\[(?P<settings>[^\[\]]*)\])?\s*$")
_QUOTED = re.compile(r"""(?<==)\s*(?:'(?:[^']|'')*'|"(?:[^"\\]|\\.)*")(?=\s*(?:[,\]]|$))""")
_NEEDS_QUOTES = re.compile(r"[\[\],]|^['\"]")


def read_yaml(text: str) -> Any:
    """The content of YAML text; raises yaml.YAMLError, also where PyYAML lets others through (a 13th month)."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # of `!!bool x`, `!!int ''`, `[[[[...`
        raise yaml.YAMLError(str(error)) from None


def parse_value(text: str) -> Any:
    """A scalar as YAML reads it (`0.01`, `true`, `1e-3`, `block`); raises FedbenchError for anything else."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        value = {}
    if isinstance(value, (dict, list, set)):
        raise FedbenchError(f"{text!r} is not a plain value.")
    return value


def parse_assignment(text: str) -> tuple[str, Any]:
    """`rounds=20` as ("rounds", 20); raises FedbenchError when there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise FedbenchError(f"{text!r} is not of the form key=value.")
    return key.strip(), parse_value(value.strip())


def parse_selector(text: str) -> tuple[str, dict[str, Any]]:
    """`fedprox[mu=0.01]` as ("fedprox", {"mu": 0.01}); raises FedbenchError for anything else."""
    match = _SELECTOR.match(_masked(text))
    if match is None:
        raise FedbenchError(f"{text!r} is not of the form name or name[key=value,...].")
    settings = text[slice(*match.span("settings"))] if match["settings"] else ""
    pairs = [parse_assignment(part) for part in _cut(settings, ",")] if settings else []
    if len({key for key, _ in pairs}) < len(pairs):
        raise FedbenchError(f"{text!r} names a setting twice.")
    return match["name"], dict(pairs)


def write_selector(name: str, settings: Mapping[str, Any]) -> str:
    """The text that `parse_selector` reads so, with sorted settings; raises FedbenchError for what no text can say."""
    written = ",".join(f"{key}={_written(settings[key])}" for key in sorted(settings))
    return f"{name}[{written}]" if written else name


def split_list(text: str) -> list[str]:
    """`a[x=1,y=2],b` as ["a[x=1,y=2]", "b"]: a comma inside brackets does not separate."""
    return [part.strip() for part in _cut(text, r",(?![^\[]*\])") if part.strip()]


def _masked(text: str) -> str:
    """Text of the same length in which nothing that stands in quotes has a meaning."""
    return _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), text)


def _cut(text: str, separator: str) -> list[str]:
    """The parts between the separators that are not in quotes."""
    spans = [match.span() for match in re.finditer(separator, _masked(text))]
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _written(value: Any) -> str:
    """The value as it is, or in quotes where it would be read as something else."""
    text = str(value)
    if not isinstance(value, str) or (not _NEEDS_QUOTES.search(text) and _reads(text, value)):
        return text
    quoted = "'" + text.replace("'", "''") + "'"
    if not _reads(quoted, value):
        raise FedbenchError(f"{text!r} cannot be written in a grid.", "Leave out line breaks and control characters.")
    return quoted


def _reads(text: str, value: str) -> bool:
    try:
        return bool(parse_value(text.strip()) == value)  # as it is read between commas
    except FedbenchError:
        return False
