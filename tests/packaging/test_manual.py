"""The manual and the completions say what the programs' own --help says, and what they say is well-formed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syshax.ctl.__main__ import app as ctl
from syshax.vllm.launcher import parser as worker_parser
from syshaxd.__main__ import app as daemon
from syshaxd.config import live_keys
from syshaxd.frontend.__main__ import app as api

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {
    "syshaxctl": "syshaxctl.1",
    "syshaxd": "syshaxd.8",
    "syshax-api": "syshax-api.8",
    "syshax-worker": "syshax-worker.8",
}
MACROS = {".TH", ".nh", ".ad", ".SH", ".SS", ".PP", ".TP", ".IP", ".RS", ".RE", ".nf", ".fi", ".br"}


@pytest.fixture(scope="session")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("manual")
    done = subprocess.run([sys.executable, "packaging/manual", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def help_of(program: str, words: list[str]) -> str:
    if program == "syshax-worker":
        return worker_parser().format_help()
    app = {"syshaxctl": ctl, "syshaxd": daemon, "syshax-api": api}[program]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def commands_of(program: str) -> Iterator[tuple[list[str], str]]:
    """Every command's words with its --help, found by reading the help of the command above it."""
    queue: list[list[str]] = [[]]
    while queue:
        words = queue.pop()
        text = help_of(program, words)
        yield words, text
        listed = text.partition("Commands:")[2]
        queue += [[*words, match] for match in re.findall(r"(?m)^  ([a-z-]+)\b", listed)]


def plain(page: Path) -> str:
    """The page's words without markup."""
    return re.sub(r"\\f[BRI]|\\&", "", page.read_text()).replace("\\-", "-").replace("\\e", "\\")


@pytest.mark.parametrize("program", PAGES)
def test_every_command_and_option_of_help_is_in_page_and_completions(manual: Path, program: str) -> None:
    page = plain(manual / "man" / PAGES[program])
    files = [manual / "completions/bash" / program, manual / "completions/zsh" / f"_{program}"]
    fish = (manual / "completions/fish" / f"{program}.fish").read_text()
    found = list(commands_of(program))
    assert len(found) > 5 if program in ("syshaxd", "syshaxctl") else len(found) == 1 + (program == "syshax-api")
    for words, text in found:
        options = set(re.findall(r"(?m)^ +(?:-h, )?(--[a-z][a-z-]+)", text))
        assert "--help" in options
        for option in options:
            assert option in page, f"{program} {words}"
            assert f"-l {option[2:]} " in fish
            for file in files:
                assert option in file.read_text()
        if words and "Commands:" not in text:
            assert re.search(rf'(?m)^\.SS "{" ".join(words)}[" ]', page)


def test_every_key_is_in_the_configuration_page(manual: Path) -> None:
    page = plain(manual / "man/syshaxd.toml.5")
    for key, _, _ in live_keys():
        section, name = key.rsplit(".", 1)
        assert f'.SS "[{section}]"' in page
        assert f".TP\n{name}\n" in page.partition(f'.SS "[{section}]"')[2].partition(".SS")[0]


def test_pages_hold_known_macros_and_no_markdown(manual: Path) -> None:
    pages = sorted((manual / "man").iterdir())
    assert len(pages) == 5
    for page in pages:
        text = page.read_text()
        assert text.startswith(".TH ")
        assert '\n.SH "NAME"\n' in text
        for line in text.splitlines():
            assert not line.startswith(".") or line.split()[0] in MACROS, line
            assert line.isascii(), line
            assert "`" not in line or "'" in line, line
            assert not line.startswith(("|", "#")) and "{{" not in line, line


def complete(file: Path, words: list[str], folder: Path) -> list[str]:
    """What bash offers after these words, the last of them being typed."""
    function = "_" + words[0].replace("-", "_")
    script = (
        f'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "-", file, *words], capture_output=True, text=True, cwd=folder, check=True
    )
    assert done.stderr == ""
    return sorted(done.stdout.split())


def test_bash_completes_commands_options_and_files(manual: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "--odd").touch()

    def offered(*words: str) -> list[str]:
        return complete(manual / "completions/bash" / words[0], list(words), tmp_path)

    assert offered("syshaxctl", "config", "s") == ["set", "show"]
    assert offered("syshaxctl", "--json", "lo") == ["load"]
    assert offered("syshaxctl", "load", "--f") == ["--format"]
    assert offered("syshaxctl", "load", "ch") == ["checkpoint"]
    assert offered("syshaxctl", "status", "ch") == []
    assert offered("syshaxctl", "load", "--format", "") == []
    assert offered("syshaxd", "--config", "ch") == ["checkpoint"]
    assert offered("syshaxd", "operators", "") == sorted(["check", "--help"])
    assert offered("syshax-worker", "--dry") == ["--dry-run"]
    assert offered("syshax-api", "--wor") == ["--worker"]
