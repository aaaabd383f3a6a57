"""Grids that ship with fedbench; `fedbench run --grid NAME` finds them here."""

if __name__ != "fedbench.grids":
    raise ImportError("import fedbench.grids: the folder is packaged inside fedbench")
