"""A table as LaTeX with booktabs: a float per block, ready to be \\input."""

from __future__ import annotations

from itertools import groupby

from fedbench.report.cells import Table
from fedbench.report.picture import Block, blocks, facts_line, page_depth, without_repeats

SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "§": r"\S{}",
    "*": r"$^*$",
}


def to_latex(table: Table) -> str:
    """One float per block; the notes stand under the last. Needs booktabs and graphicx."""
    parts = blocks(table, page_depth(table))
    title = f"{table.title} ({facts_line(table)})" if table.facts else table.title
    floats = [_float(title, block) for block in parts[:-1]]
    floats.append(_float(title, parts[-1], table.notes))
    return "\n\n".join(["% needs \\usepackage{booktabs,graphicx}", *floats])


def escape(text: str) -> str:
    """Text that LaTeX prints as it is; two hyphens would become a dash, and a minus needs its own sign."""
    if text[:1] in "+-" and text[1:2].isdigit():
        return f"${text[0]}$" + escape(text[1:])
    return "".join(SPECIAL.get(character, character) for character in text).replace("--", "-{}-")


def _float(title: str, block: Block, notes: tuple[str, ...] = ()) -> str:
    caption = f"{title}: {block.heading}" if block.heading else title
    lines = [
        r"\begin{table}",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{escape(caption)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",  # only if it is too wide
        rf"\begin{{tabular}}{{{'l' * len(block.names)}{'r' * len(block.columns)}}}",
        r"\toprule",
        *_header(block),
        r"\midrule",
        *_body(block),
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {escape(note)}}}" for note in notes),
        r"\end{table}",
    ]
    return "\n".join(lines)


def _header(block: Block) -> list[str]:
    """A line per level; a header that spans columns has a rule under it."""
    stub, levels = len(block.names), len(block.columns[0])
    lines = []
    for level in range(levels):
        last = level == levels - 1
        cells = [escape(name) if last else "" for name in block.names]
        rules = []
        position = stub
        spans = groupby(block.columns, key=lambda column: column[: level + 1])
        for outer, members in [(key, list(group)) for key, group in spans]:
            width = len(members)
            if last:
                cells += [escape(outer[-1])] * width
            else:
                cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(outer[-1])}}}")
                rules.append(rf"\cmidrule(lr){{{position + 1}-{position + width}}}")
            position += width
        lines.append(" & ".join(cells) + r" \\")
        if rules:
            lines.append("".join(rules))
    return lines


def _body(block: Block) -> list[str]:
    """Rows of several lines are set apart by a little space."""
    lines = []
    tall = any(not line.opens for line in block.lines)
    for index, line in enumerate(without_repeats(block.lines)):
        if tall and line.opens and index:
            lines.append(r"\addlinespace")
        lines.append(" & ".join(escape(text) for text in (*line.header, *line.cells)) + r" \\")
    return lines
