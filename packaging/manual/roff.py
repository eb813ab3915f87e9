"""Markdown to man(7), as much of it as the manual's pages and the included documents use.

Headings, paragraphs, lists, tables, fenced code, `code`, **bold**, *emphasis* and links. A table becomes one tagged
paragraph a row: the first cell is the tag, the column "Meaning" (or the last one) the text, the others come before it
with their headings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_GLYPHS = str.maketrans({0x2013: "\\(en", 0x2026: "...", 0xB5: "\\(mc", 0xD7: "\\(mu", 0x2264: "\\(<="})
"""En dash, ellipsis, micro, times, at most: pages are ASCII."""
_ITEM = re.compile(r"^(?:[-*]|(\d+)\.) +")
_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|(?<![\w*])\*([^*\s][^*]*)\*(?!\w)|\[([^\]]+)\]\([^)]*\)")


def escape(text: str) -> str:
    """Text that groff prints as it stands."""
    return text.replace("\\", "\\e").replace("-", "\\-").translate(_GLYPHS)


def _line(text: str) -> str:
    return f"\\&{text}" if text[:1] in (".", "'") else text


def inline(text: str) -> str:
    """One paragraph's text with its markup."""
    made, position = "", 0
    for match in _INLINE.finditer(text):
        made += escape(text[position : match.start()])
        code, bold, emphasis, link = match.groups()
        if code is not None or bold is not None:
            made += f"\\fB{escape(code or bold)}\\fR"
        else:
            made += f"\\fI{escape(emphasis)}\\fR" if emphasis is not None else inline(link)
        position = match.end()
    return _line(made + escape(text[position:]))


def cells(row: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def _table(rows: list[str]) -> Iterator[str]:
    headings = [heading.capitalize() for heading in cells(rows[0])]
    text = headings.index("Meaning") if "Meaning" in headings else len(headings) - 1
    for row in rows[2:]:
        found = cells(row)
        yield from (".TP", inline(found[0] if "`" in found[0] else f"**{found[0]}**"))
        facts = [f"{headings[i]}: {cell}" for i, cell in enumerate(found) if cell and i not in (0, text)]
        if facts:
            yield from (inline("; ".join(facts) + "."), ".br")
        yield inline(found[text])


def _blocks(text: str) -> Iterator[list[str]]:
    """Headings, fences, tables, list items and paragraphs, each as its lines."""
    block: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            block.append(line)
            fenced = not fenced
            if not fenced:
                yield block
                block = []
            elif len(block) > 1:
                yield block[:-1]
                block = [line]
        elif fenced:
            block.append(line)
        elif not line.strip() or line.startswith("#"):
            if block:
                yield block
            block = []
            if line.startswith("#"):
                yield [line]
        elif block and (_ITEM.match(line) or (line.startswith("|") != block[-1].startswith("|"))):
            yield block
            block = [line]
        else:
            block.append(line)
    if block:
        yield block


def body(text: str) -> str:
    """man(7) source of a document without its first-level heading."""
    made: list[str] = []
    after_heading = False
    for lines in _blocks(text):
        first = lines[0]
        was_heading, after_heading = after_heading, first.startswith("#")
        if match := re.match(r"(#+) +(.*)", first):
            title = escape(match[2].replace("`", ""))
            made.append(f'.SH "{title.upper()}"' if len(match[1]) == 2 else f'.SS "{title}"')
        elif first.startswith("```"):
            made += [".PP", ".RS 4", ".nf"][1 if was_heading else 0 :]
            made += [_line(escape(line)) for line in lines[1:-1]] + [".fi", ".RE"]
        elif first.startswith("|"):
            made += _table(lines)
        elif match := _ITEM.match(first):
            rest = " ".join([first[match.end() :], *(line.strip() for line in lines[1:])])
            made += [f".IP {match[1]}. 4" if match[1] else ".IP \\(bu 2", inline(rest)]
        else:
            made += ([] if was_heading else [".PP"]) + [inline(" ".join(line.strip() for line in lines))]
    return "\n".join(made) + "\n"


def demoted(text: str) -> str:
    """An included document: its title goes, its sections become subsections."""
    lines = text.splitlines()
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in lines if not line.startswith("# "))


def section(text: str, heading: str) -> str:
    """What stands below `## heading`. Raises KeyError."""
    for part in re.split(r"(?m)^## +", text)[1:]:
        title, _, rest = part.partition("\n")
        if title.strip() == heading:
            return rest.strip()
    raise KeyError(heading)
