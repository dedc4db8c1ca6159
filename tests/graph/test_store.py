"""Does the store of compiled programs give back what was put, whole, or nothing?"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import partita
from partita.cli import main
from partita.graph.backend import cpp_kernels
from partita.graph.backend.inductor import use_private_cache
from partita.graph.backend.store import Artifact, Store, default_store, read_limit

KEY, OTHER = "a" * 64, "b" * 64
WHAT = Artifact(b"code" * 100, {"what": "step", "seconds": 1.5, "memory": {"peak": [1, 2]}})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache" / "partita")


def test_what_was_put_is_got_with_its_metadata(store):
    assert store.get(KEY) is None
    assert store.put(KEY, WHAT)
    assert store.get(KEY) == WHAT
    assert Store(store.folder).get(KEY) == WHAT  # as another process sees it
    assert store.get(OTHER) is None
    store.path(KEY).unlink()
    assert store.get(KEY) is None


def test_the_folder_is_the_users_alone(store):
    store.put(KEY, WHAT)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.path(KEY).stat().st_mode & 0o077 == 0


def test_a_key_is_no_path(store):
    for key in ("../x", "A", "", "a/b", "a.b"):
        with pytest.raises(ValueError, match="a key consists of"):
            store.get(key)


# -- files that are not to be used -----------------------------------------------------------------


def cut(length):
    return lambda raw: raw[:length]


def flip(place):
    def damage(raw):
        raw = bytearray(raw)
        raw[place] ^= 1
        return bytes(raw)

    return damage


DAMAGE = {
    "empty": (cut(0), "cut short"),
    "cut in the first line": (cut(9), "cut short"),
    "cut in the header": (cut(60), "cut short"),
    "cut in the payload": (cut(-1), "cut short"),
    "longer": (lambda raw: raw + b"x", "too long"),
    "payload changed": (flip(-5), "checksum"),
    "metadata changed": (lambda raw: raw.replace(b'"step"', b'"gone"'), "checksum"),
    "key changed": (lambda raw: raw.replace(KEY.encode(), OTHER.encode()), "another key"),
    "length changed": (lambda raw: raw.replace(b" 400\n", b" 4x0\n"), "header"),
    "foreign": (lambda raw: b"PK\x03\x04 some archive", "no artifact"),
    "of a later partita": (
        lambda raw: raw.replace(b"artifact 1", b"artifact 2"),
        "another partita",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_as_it_was_written_is_ignored_with_one_warning_that_names_it(
    store, damage
):
    change, problem = DAMAGE[damage]
    store.put(KEY, WHAT)
    path = store.path(KEY)
    path.write_bytes(change(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=problem) as told:
        assert store.get(KEY) is None
        assert store.get(KEY) is None
    assert len(told) == 1 and str(path) in str(told[0].message)
    (entry,) = store.entries(check=True)
    assert problem in entry.problem and entry.key == KEY
    assert store.put(KEY, WHAT) and store.get(KEY) == WHAT  # its place is free


def test_every_cut_of_a_file_is_seen(store):
    store.put(KEY, Artifact(b"xyz", {"a": 1}))
    raw = store.path(KEY).read_bytes()
    for length in range(len(raw)):
        store.path(KEY).write_bytes(raw[:length])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert store.get(KEY) is None, length


def test_a_file_of_another_user_is_not_loaded(store, monkeypatch):
    store.put(KEY, WHAT)
    if os.geteuid() == 0:
        os.chown(store.path(KEY), 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.warns(RuntimeWarning, match="another user"):
        assert store.get(KEY) is None


def as_written_by_all(store):
    store.path(KEY).chmod(0o666)


def of_a_group(store):
    store.path(KEY).chmod(0o660)


def in_an_open_folder(store):
    store.folder.chmod(0o777)


def below_an_open_folder(store):
    store.folder.parent.chmod(0o777)


def as_a_link(store):
    real = store.folder.parent / "real"
    store.path(KEY).rename(real)
    store.path(KEY).symlink_to(real)


def as_a_pipe(store):
    store.path(KEY).unlink()
    os.mkfifo(store.path(KEY))


@pytest.mark.parametrize(
    ("expose", "problem"),
    [
        (as_written_by_all, "others may write to it: chmod go-w"),
        (of_a_group, "others may write to it: chmod go-w"),
        (in_an_open_folder, "others may write to it: chmod go-w"),
        (below_an_open_folder, "anybody may write to"),
        (as_a_link, "a symbolic link"),
        (as_a_pipe, "no file"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_loaded(expose, problem, store):
    store.put(KEY, WHAT)
    expose(store)
    with pytest.warns(RuntimeWarning, match=problem) as told:
        assert store.get(KEY) is None
        assert store.get(KEY) is None
    assert len(told) == 1 and str(store.path(KEY)) in str(told[0].message)
    (entry,) = store.entries()
    assert problem in entry.problem


def test_a_link_of_the_users_own_to_the_folder_is_followed(store, tmp_path):
    store.put(KEY, WHAT)
    (tmp_path / "link").symlink_to(store.folder)
    assert Store(tmp_path / "link").get(KEY) == WHAT


def test_nothing_is_put_where_others_can_write(store):
    store.folder.mkdir(parents=True)
    store.folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is not written to: others may write to it"):
        assert not store.put(KEY, WHAT)
    assert not list(store.folder.iterdir())


def test_a_folder_of_inductors_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    use_private_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(shared)
    shared.chmod(0o777)
    with pytest.warns(UserWarning, match="shared are not used: others may write to it"):
        use_private_cache()
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert own != shared and own.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_written_is_a_warning_and_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "partita")
    with pytest.warns(RuntimeWarning, match="cannot be written") as told:
        assert not store.put(KEY, WHAT)
        assert not store.put(OTHER, WHAT)
    assert len(told) == 1
    assert store.entries() == [] and store.clear() == (0, 0)
    assert store.get(KEY) is None


# -- bounded ---------------------------------------------------------------------------------------


def key_of(i):
    return f"{i:064x}"


def test_the_oldest_use_goes_first_and_the_bound_holds(store):
    store.put(key_of(0), WHAT)
    size = store.path(key_of(0)).stat().st_size
    store.limit = 3 * size
    for i in range(1, 3):
        store.put(key_of(i), WHAT)
    for i in range(3):
        os.utime(store.path(key_of(i)), (i, i))
    assert store.get(key_of(0)) == WHAT  # used: now the youngest
    store.put(key_of(3), WHAT)
    assert {e.key for e in store.entries()} == {key_of(0), key_of(2), key_of(3)}
    store.put(key_of(4), WHAT)
    assert {e.key for e in store.entries()} == {key_of(0), key_of(3), key_of(4)}
    assert sum(e.nbytes for e in store.entries()) <= store.limit


def test_what_is_larger_than_the_bound_is_not_kept_and_nothing_goes_for_it(store):
    store.put(KEY, WHAT)
    store.limit = 1000
    with pytest.warns(RuntimeWarning, match="PARTITA_CACHE_LIMIT"):
        assert not store.put(OTHER, Artifact(b"x" * 1000))
    assert store.get(KEY) == WHAT


def test_a_bound_of_nothing_is_no_store_and_no_warning(store):
    store.limit = 0
    assert not store.put(KEY, WHAT) and not store.folder.exists()


def test_other_files_of_the_folder_are_left_alone(store):
    store.put(KEY, WHAT)
    (store.folder / "notes.txt").write_text("mine")
    store.limit = 1000
    store.put(OTHER, WHAT)
    assert store.clear()[0] == 1
    assert [p.name for p in store.folder.iterdir()] == ["notes.txt"]


def test_parts_that_nobody_finished_go_after_an_hour(store):
    store.put(KEY, WHAT)
    old, new = store.folder / "x.part", store.folder / "y.part"
    for path, age in ((old, 7200), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    store.put(OTHER, WHAT)
    assert not old.exists() and new.exists()
    assert {e.key for e in store.entries()} == {KEY, OTHER}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("123", 123), ("2G", 2 << 30), ("1.5 MiB", 3 << 19), ("500kb", 500 << 10), ("7B", 7)],
)
def test_a_limit_may_have_a_unit(text, nbytes):
    assert read_limit(text) == nbytes


def test_a_limit_that_is_no_size_is_an_error():
    for text in ("", "lots", "-1", "2X", "1e9"):
        with pytest.raises(ValueError, match="PARTITA_CACHE_LIMIT"):
            read_limit(text)


def test_the_environment_says_where_the_store_is(monkeypatch, tmp_path):
    for name in ("PARTITA_CACHE", "XDG_CACHE_HOME", "PARTITA_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store().folder == tmp_path / ".cache" / "partita"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_store().folder == tmp_path / "xdg" / "partita"
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("PARTITA_CACHE_LIMIT", "10M")
    assert default_store().folder == tmp_path / "here"
    assert default_store().limit == 10 << 20


# -- many processes --------------------------------------------------------------------------------


def payload(key, writer):
    return (key[-8:].encode() + bytes([writer])) * 20_000


def put_and_get(folder, writer, rounds, wrong):
    """All writers put the same few keys over and over, and look what is there."""
    warnings.simplefilter("error")
    store = Store(folder, limit=800_000)  # four of six
    for i in range(rounds):
        key = key_of((i * 5 + writer) % 6)
        assert store.put(key, Artifact(payload(key, writer), {"writer": writer}))
        for key in map(key_of, range(6)):
            found = store.get(key)
            if found is not None and found.payload != payload(key, found.metadata["writer"]):
                wrong.value += 1


def test_concurrent_writers_leave_whole_files_within_the_bound(tmp_path):
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    wrong = context.Value("i", 0)
    writers = [context.Process(target=put_and_get, args=(tmp_path, w, 30, wrong)) for w in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork beside threads: these children only write files
        for process in writers:
            process.start()
    for process in writers:
        process.join(60)
    assert [process.exitcode for process in writers] == [0] * 4
    assert wrong.value == 0
    store = Store(tmp_path, limit=800_000)
    entries = store.entries(check=True)
    assert entries and not any(e.problem for e in entries)
    assert sum(e.nbytes for e in entries) <= store.limit
    assert not list(tmp_path.glob("*.part"))


SLOW = """
import sys
from pathlib import Path
from partita.graph.backend import store as store_py
def replace(*args):
    print("written", flush=True)
    import time
    time.sleep(60)
store_py.os.replace = replace
store_py.Store(Path(sys.argv[1])).put("a" * 64, store_py.Artifact(b"half" * 1000))
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_taken_for_an_artifact(store):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(store.folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(list(store.folder.glob("*.part"))) == 1
    assert store.get(KEY) is None and store.entries() == []
    assert store.put(KEY, WHAT) and store.get(KEY) == WHAT
    assert store.clear()[0] == 2 and not list(store.folder.iterdir())


# -- partita cache ---------------------------------------------------------------------------------


@pytest.fixture
def kept(store, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(store.folder))
    for key, what in ((KEY, "train.step"), (OTHER, "train.<locals>.block")):
        store.put(key, Artifact(b"code", {"what": what, "mesh": "dp=2 tp=2", "torch": "2.13.0"}))
    os.utime(store.path(KEY), (time.time() - 3 * 3600,) * 2)
    return store


def test_the_list_says_of_each_program_what_it_is(kept, capsys):
    assert main(["cache", "list"]) == 0
    head, first, second, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "SIZE", "USED", "WHAT", "MESH", "TORCH", "COMPILED", "IN"]
    assert OTHER[:12] in first and "train.block" in first and "now" in first
    for part in (KEY[:12], "B", "3 h ago", "train.step", "dp=2 tp=2", "2.13.0"):
        assert part in second
    assert total.startswith("2 programs, ") and str(kept.folder) in total


def test_verify_names_what_is_damaged_and_fails(kept, capsys):
    assert main(["cache", "verify"]) == 0
    assert "all as they were written" in capsys.readouterr().out
    raw = kept.path(KEY).read_bytes()
    kept.path(KEY).write_bytes(raw[:-4] + b"CODE")
    assert main(["cache", "list"]) == 0  # which reads no payload
    assert main(["cache", "verify"]) == 1
    told = capsys.readouterr()
    assert str(kept.path(KEY)) in told.err and "its checksum is wrong" in told.err
    assert str(kept.path(OTHER)) not in told.err


def test_clear_removes_all(kept, capsys):
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 2 programs, ")
    assert kept.entries() == []
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.startswith("0 programs, 0 B of ")


def test_a_limit_that_is_no_size_is_said_by_the_command(kept, monkeypatch, capsys):
    monkeypatch.setenv("PARTITA_CACHE_LIMIT", "plenty")
    assert main(["cache", "list"]) == 2
    assert "'plenty'" in capsys.readouterr().err


def test_a_library_that_a_killed_compiler_left_half_written_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    whole = next(Path(partita.tensor.__file__).parent.glob("*.so")).read_bytes()
    files = {"whole": whole, "cut": whole[:-1], "zeros": bytes(len(whole)), "short": whole[:20]}
    with pytest.raises(KeyboardInterrupt), cpp_kernels.cleaning_up_libraries():
        for name, content in files.items():
            (tmp_path / "ab" / f"{name}.so").write_bytes(content)
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.glob("*/*.so")] == ["whole.so"]
