"""Does `partita train` read text alone, no more than it may, and print what a terminal shows?"""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from partita.app import data
from partita.app.data import read
from partita.app.logs import Progress
from partita.app.options import Options

TEXT = b"a few words of text\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(TEXT)
    return tmp_path


def test_of_a_file_no_more_is_read_than_the_limit_allows(folder, monkeypatch):
    monkeypatch.setattr(data, "LARGEST", 1000)
    with (folder / "large").open("wb") as file:
        file.write(b"x" * 5000)
        file.truncate(1 << 40)  # a terabyte, of which the disk has nothing
    assert len(read(folder).bytes) == 1000


def test_what_is_no_file_is_left_out_and_nobody_waits_for_it(folder, monkeypatch):
    os.mkfifo(folder / "pipe")
    (folder / "null").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "up").symlink_to(folder)
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(folder)  # a socket's path may not be long
        listening.bind("socket")
        text = read(folder)
    assert text.files == 1 and bytes(text.bytes.tolist()) == TEXT


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_a_path_to_what_is_no_file_is_an_error(target, folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match=r"--data: .* holds 0 bytes of text"):
        read(folder / target)


def test_a_link_that_leads_back_to_itself_is_an_error(folder):
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(ValueError, match=r"there is no .*loop"):
        Options(data=folder / "loop").check()


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(folder, monkeypatch):
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(data.os, "open", refuse)  # root may read what others may not
    with pytest.raises(ValueError, match=r"--data: .*/text cannot be read: Permission denied"):
        read(folder)


def test_what_a_terminal_would_obey_is_shown_and_not_sent():
    out = io.StringIO()
    progress = Progress(steps=1, tokens=1, mesh="one rank", out=out)
    progress.show("sample", {"prompt": "def ", "text": "\x1b[2J\x07\x9b3m\r\u202eb\\xff\n\té"})
    shown = out.getvalue().split("The model writes:\n\n")[1]
    assert shown == "def \\x1b[2J\\x07\\x9b3m\\r\\u202eb\\xff\n\té\n"


def test_an_error_and_a_path_cannot_write_to_the_terminal_either(capsys):
    progress = Progress(steps=1, tokens=1, mesh="one rank")
    progress.show("job", {"message": "no \x1b]0;title\x07"})
    progress.say("text from \x1b[31m")
    shown = capsys.readouterr()
    assert shown.err == "no \\x1b]0;title\\x07\n" and shown.out == "text from \\x1b[31m\n"
