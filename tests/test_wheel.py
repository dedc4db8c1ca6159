"""Does what is packaged install and run where no repository is? Nothing is fetched for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import partita

pytestmark = pytest.mark.timeout(400)  # a compiler, and five processes that import torch
ROOT = Path(__file__).parent.parent
LEFT_OUT = ("__pycache__", "*.so", "*.egg-info", "build", "dist", "site")
PIP = [sys._base_executable, "-m", "pip", "--python", sys.executable]  # as the Makefile's
OFFLINE = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The sources as the sdist has them."""
    here = tmp_path_factory.mktemp("sdist")
    copied = here / "copy"  # building leaves files beside the sources
    copied.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copied)
    for folder in ("partita", "docs", "examples", "tests", "bench"):
        shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    run(sys.executable, "-c", build, cwd=copied)
    (made,) = here.glob("*.tar.gz")
    with tarfile.open(made) as sdist:
        sdist.extractall(here, filter="data")
    return here / made.name.removesuffix(".tar.gz")


def install(sources: Path, folder: Path, **environment: str) -> Path:
    """Build a wheel of the sources and install it into a folder."""
    sources = shutil.copytree(sources, folder / "sources")  # building leaves objects there
    wheel = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder / "wheels", sources]
    run(*wheel, cwd=folder, **environment)
    (made,) = (folder / "wheels").glob("*.whl")
    run(*PIP, "install", *OFFLINE, "--target", folder / "installed", made, cwd=folder)
    return folder / "installed"


@pytest.fixture(scope="module")
def installed(sources, tmp_path_factory) -> Path:
    return install(sources, tmp_path_factory.mktemp("wheel"))


def run_readme(installed: Path, cwd: Path) -> str:
    example = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    script = cwd / "readme.py"
    where = "print(pt.__file__)\nfrom partita.tensor.hot_path import IN_C\nprint(IN_C)\n"
    script.write_text(example + where)
    return run(sys.executable, "-W", "error", script, cwd=cwd, PYTHONPATH=str(installed))


@pytest.mark.slow
def test_the_readme_runs_on_the_wheel_outside_the_repository(installed, tmp_path):
    *said, file, in_c = run_readme(installed, tmp_path).splitlines()
    assert Path(file) == installed / "partita/__init__.py"
    assert said and str(installed) in in_c  # the part in C is the wheel's own


@pytest.mark.slow
def test_partita_trains_outside_the_repository(installed, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("one work made of parts\n" * 400)
    small = "--layers 1 --width 16 --heads 2 --context 16 --batch 4 --sample 0"
    said = run(
        installed / "bin/partita", "train", "--ranks", "2", "--steps", "3", "--data", "text",
        *small.split(), cwd=tmp_path, PYTHONPATH=str(installed),
    )  # fmt: skip
    assert "loss" in said


@pytest.mark.slow
def test_a_machine_without_a_compiler_gets_the_same_in_python(sources, tmp_path):
    installed = install(sources, tmp_path, CC="no-such-compiler")
    assert list(installed.rglob("*.so")) == []
    *said, _, in_c = run_readme(installed, tmp_path).splitlines()
    assert said and in_c == "None"


@pytest.mark.slow
def test_the_wheel_says_what_it_is_and_holds_the_library_alone(installed):
    (wheel,) = (installed.parent / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "partita",
        f"partita-{partita.__version__}.dist-info",
    }
    data = list((ROOT / "partita").rglob("*.toml"))
    assert data and {path.relative_to(ROOT).as_posix() for path in data} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h"))]
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert re.search(r"^Requires-Dist: torch", metadata.read_text(), re.M)


@pytest.mark.slow
def test_the_newest_version_of_the_changelog_is_this_one():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == partita.__version__
