"""Data sets, one file each; imported as `fedbench.datasets.<name>`."""

if __name__ != "fedbench.datasets":
    raise ImportError("import fedbench.datasets: the folder is packaged inside fedbench")
