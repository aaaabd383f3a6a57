"""Finds methods and data sets by file: one file is one plugin, and the engine names none of them.

A plugin is looked for in the package (`fedbench.algorithms`, `fedbench.datasets`), in the folders that
`FEDBENCH_PLUGINS` names, and behind the entry points of the same names. A module is imported on first use only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
from pathlib import Path
from typing import Generic, TypeVar

from fedbench.errors import FedbenchError, did_you_mean

T = TypeVar("T")
_PACKAGES = ("fedbench.algorithms", "fedbench.datasets")


class Registry(Generic[T]):
    """The plugins of one kind: subclasses of `base`, found in `package`."""

    def __init__(self, package: str, kind: str, base: type[T]) -> None:
        self._package = package
        self._kind = kind
        self._base = base

    def names(self) -> list[str]:
        """Every plugin's name, sorted. Built-in files are not imported for this."""
        return sorted({*self._builtin(), *self._from_folders(), *self._entry_points()})

    def get(self, name: str) -> type[T]:
        """The class of the plugin `name`; raises FedbenchError when there is none."""
        if name in self._builtin():
            return self._plugin_class(f"{self._package}.{name}")
        if name in (folder := self._from_folders()):
            return folder[name]
        if name in (points := self._entry_points()):
            try:
                loaded = points[name].load()
            except Exception as error:
                raise FedbenchError(
                    f"the entry point {name!r} does not load: {type(error).__name__}: {error}"
                ) from error
            if not (inspect.isclass(loaded) and issubclass(loaded, self._base)):
                raise FedbenchError(f"the entry point {name!r} is not a {self._kind}")
            return loaded
        raise FedbenchError(f"unknown {self._kind} {name!r}.", did_you_mean(name, self.names()))

    def _builtin(self) -> set[str]:
        path = importlib.import_module(self._package).__path__
        own = [folder for folder in path if Path(folder) not in _plugin_folders()]
        return {module.name for module in pkgutil.iter_modules(own) if not module.name.startswith("_")}

    def _from_folders(self) -> dict[str, type[T]]:
        """Plugins of the user's folders. These are imported, because a file may hold either kind."""
        found: dict[str, type[T]] = {}
        package = importlib.import_module(self._package)
        for folder in _plugin_folders():
            if str(folder) not in package.__path__:
                # As part of the package, so that `from .fedavg import FedAvg` works in a user's file too.
                package.__path__.append(str(folder))
            for module in pkgutil.iter_modules([str(folder)]):
                if module.name.startswith("_"):
                    continue
                if module.name in self._builtin():
                    raise FedbenchError(
                        f"{folder / module.name}.py has the name of a built-in {self._kind}.",
                        "Rename the file.",
                    )
                try:
                    found[module.name] = self._plugin_class(f"{self._package}.{module.name}")
                except _NoPluginError:
                    continue
        return found

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {point.name: point for point in importlib.metadata.entry_points(group=self._package)}

    def _plugin_class(self, module_name: str) -> type[T]:
        try:
            module = importlib.import_module(module_name)
        except FedbenchError:
            raise
        except ModuleNotFoundError as error:
            # A relative import of the other kind's plugins: the file is no plugin of this kind.
            package, _, leaf = (error.name or "").rpartition(".")
            others = [name for name in _PACKAGES if name != self._package]
            if package == self._package and any(importlib.util.find_spec(f"{other}.{leaf}") for other in others):
                raise _NoPluginError(f"{module_name} belongs to another kind") from error
            raise self._does_not_load(module_name, error) from error
        except Exception as error:
            raise self._does_not_load(module_name, error) from error
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, self._base)
            and value.__module__ == module_name
            and not value.__name__.startswith("_")
        ]
        if not classes:
            raise _NoPluginError(f"{module_name} defines no {self._kind}")
        if len(classes) > 1:
            names = ", ".join(cls.__name__ for cls in classes)
            raise FedbenchError(f"{module_name} defines several {self._kind}s ({names}); one file is one plugin")
        return classes[0]

    def _does_not_load(self, module_name: str, error: Exception) -> FedbenchError:
        file = f"{module_name.rpartition('.')[2]}.py"
        return FedbenchError(f"the {self._kind} file {file} does not load: {type(error).__name__}: {error}")


class _NoPluginError(FedbenchError):
    """The module holds no plugin of the kind that was asked for."""


def _plugin_folders() -> list[Path]:
    folders = [Path(part) for part in os.environ.get("FEDBENCH_PLUGINS", "").split(os.pathsep) if part]
    for folder in folders:
        if not folder.is_dir():
            raise FedbenchError(f"FEDBENCH_PLUGINS names {folder}, which is not a folder.")
    return folders
