"""Methods, one file each; imported as `fedbench.algorithms.<name>`."""

if __name__ != "fedbench.algorithms":
    raise ImportError("import fedbench.algorithms: the folder is packaged inside fedbench")
