"""README says what is: flags, commands and files, in both languages."""

import dataclasses
import re
import shlex

import pytest

from hpctrain.cli import COMMANDS, split_command
from hpctrain.config import Config, flag_name, parse
from tests.harness.launch import ROOT

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")}


def blocks(page: str) -> list[str]:
    """The fenced blocks, without comments behind commands."""
    found = re.findall(r"^```\w*\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [re.sub(r" +# .*", "", block) for block in found]


def rows(page: str) -> dict[str, str]:
    """First cell to second cell of every table line whose first cell begins with a flag."""
    return dict(re.findall(r"^\| (`--[^|]*) \| (.*) \|$", PAGES[page], re.MULTILINE))


def first_cell(each: dataclasses.Field) -> str:
    names = [flag_name(each)] + ([each.metadata["alias"]] if "alias" in each.metadata else [])
    return ", ".join(f"`{name}`" for name in names)


def test_both_pages_show_the_same_commands():
    assert blocks("README.md") == blocks("README.zh.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_flags_is_the_command_line(page):
    fields = dataclasses.fields(Config)
    assert list(rows(page)) == [first_cell(each) for each in fields]
    for each in fields:
        if each.default not in (None, False, dataclasses.MISSING):
            assert rows(page)[first_cell(each)].endswith(f"`{each.default}`"), each.name


def test_the_english_table_is_the_help_text():
    for each in dataclasses.fields(Config):
        assert rows("README.md")[first_cell(each)].startswith(each.metadata["help"]), each.name


def test_the_commands_shown_are_commands_there_are():
    lines = [line for block in blocks("README.md") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith(("python ", "mpirun ", "srun ", "sbatch "))]
    assert len(commands) > 8
    for words in commands:
        if "hpctrain" in words:
            command, rest = split_command(words[words.index("hpctrain") + 1 :])
            assert command in COMMANDS
            if command == "train":
                parse(rest)
        elif words[0] == "sbatch":
            assert (ROOT / words[1]).exists()
        else:
            assert f"Saved as `{words[-1]}`" in PAGES["README.md"]
    targets = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", PAGES["README.md"], re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in map("".join, targets))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_is_there(page):
    for name in re.findall(r"`((?:hpctrain|plan|comm|model|train|tasks|jobs)/[\w./]+)`", PAGES[page]):
        assert (ROOT / name).exists() or (ROOT / "hpctrain" / name).exists(), name
