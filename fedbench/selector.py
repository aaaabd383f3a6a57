"""The one small grammar for a name with settings: `fedprox[mu=0.01]`, in grids and on the command line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from fedbench.errors import FedbenchError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; everyone else reads a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

_SELECTOR = re.compile(r"^\s*(?P<name>[^\[\]=,\s]+)\s*(?:\[(?P<settings>[^\[\]]*)\])?\s*$")


def read_yaml(text: str) -> Any:
    """The content of YAML text; raises yaml.YAMLError, also where PyYAML lets a ValueError through (a 13th month)."""
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:
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
    match = _SELECTOR.match(text)
    if match is None:
        raise FedbenchError(f"{text!r} is not of the form name or name[key=value,...].")
    settings = match["settings"]
    pairs = [parse_assignment(part) for part in settings.split(",")] if settings else []
    if len({key for key, _ in pairs}) < len(pairs):
        raise FedbenchError(f"{text!r} names a setting twice.")
    return match["name"], dict(pairs)


def split_list(text: str) -> list[str]:
    """`a[x=1,y=2],b` as ["a[x=1,y=2]", "b"]: a comma inside brackets does not separate."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
