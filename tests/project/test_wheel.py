"""Does what is packaged install and run where no repository is? Nothing is fetched for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import partita

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("__pycache__", "*.so", "*.egg-info", "build", "dist", "site")
PIP = [sys._base_executable, "-m", "pip", "--python"]  # as the Makefile's
OFFLINE = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**outer, **environment}, capture_output=True, text=True
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


def build_wheel(sources: Path, folder: Path, **environment: str) -> Path:
    sources = shutil.copytree(sources, folder / "sources")  # building leaves objects there
    wheel = [*PIP, sys.executable, "wheel", *OFFLINE, "--no-build-isolation"]
    run(*wheel, "-w", folder / "wheels", sources, cwd=folder, **environment)
    (made,) = (folder / "wheels").glob("*.whl")
    return made


def find_requirements(names: Iterable[str], extra: str = "") -> set[str]:
    """The packages that pip installs with these requirements: all that they require in turn."""
    found: set[str] = set()
    for text in names:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({"extra": extra}):
            found |= {asked.name, *find_requirements(metadata.requires(asked.name) or ())}
    return found


@dataclass(frozen=True)
class Environment:
    """An environment that has a wheel, what it requires, and nothing else.

    Attributes:
        home: its folder.
        package: where partita is in it.
    """

    home: Path
    package: Path

    @property
    def python(self) -> Path:
        return self.home / "bin/python"


def install(wheel: Path, home: Path, extra: str = "") -> Environment:
    """`pip install WHEEL[EXTRA]` into a new environment. What pip would fetch is linked there from
    the environment of the tests."""
    run(sys._base_executable, "-m", "venv", "--without-pip", home, cwd=wheel.parent)
    (packages,) = home.glob("lib/*/site-packages")
    run(*PIP, home / "bin/python", "install", *OFFLINE, wheel, cwd=wheel.parent)
    (installed,) = metadata.distributions(name="partita", path=[str(packages)])
    for name in find_requirements(installed.requires or (), extra):
        required = metadata.distribution(name)
        for part in {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(required.locate_file(part))
    return Environment(home, packages / "partita")


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    return build_wheel(sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    return install(wheel, tmp_path_factory.mktemp("fresh") / "environment")


# Torch itself says so where there is no numpy, which it does not require.
STRICT = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]


def run_readme(installed: Environment, cwd: Path) -> str:
    example = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    script = cwd / "readme.py"
    where = "print(pt.__file__)\nfrom partita.tensor.plan import IN_C\nprint(IN_C)\n"
    script.write_text(example + where)
    return run(installed.python, *STRICT, script, cwd=cwd)


@pytest.mark.slow
def test_an_environment_of_the_wheel_has_what_it_requires_and_nothing_else(installed, tmp_path):
    ask = "import importlib.util as u; print([n for n in NAMES if u.find_spec(n)])"
    names = ["torch", "partita", "sympy", "numpy", "rich", "plotly", "pytest", "mkdocs"]
    found = run(installed.python, "-c", ask.replace("NAMES", str(names)), cwd=tmp_path)
    assert found.strip() == "['torch', 'partita', 'sympy']"


@pytest.mark.slow
def test_the_readme_runs_on_the_wheel_outside_the_repository(installed, tmp_path):
    *said, file, in_c = run_readme(installed, tmp_path).splitlines()
    assert Path(file) == installed.package / "__init__.py"
    assert said and str(installed.package) in in_c  # the part in C is the wheel's own


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "train"])
def test_partita_trains_outside_the_repository(extra, wheel, tmp_path):
    installed = install(wheel, tmp_path / "environment", extra)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("one work made of parts\n" * 400)
    small = "--layers 1 --width 16 --heads 2 --context 16 --batch 4 --sample 0"
    said = run(
        installed.home / "bin/partita", "train", "--ranks", "2", "--steps", "3", "--data", "text",
        "--save", "kept", "--save-every", "2", *small.split(), cwd=tmp_path,
    )  # fmt: skip
    assert "loss" in said
    assert (tmp_path / "kept").is_dir()


PROGRAM = """
import torch
import partita as pt

mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = pt.zero(torch.nn.Linear(6, 3), mesh)
optimizer = torch.optim.AdamW(model.parameters())
scale = torch.tensor([1.0, 2.0, 3.0])

@pt.compile(backend="graph")
def step(x):
    optimizer.zero_grad()
    loss = (model(x) * scale).square().mean()
    loss.backward()
    optimizer.step()
    return loss

x = pt.distribute_tensor(torch.ones(4, 6), mesh, [pt.Shard(0)])
losses = [step(x).item() for _ in range(3)]
assert losses[2] < losses[0]
pt.save({"model": model}, "saved")
full = pt.full_state_dict(model)
with torch.no_grad():
    model.weight.zero_()
pt.load({"model": model}, "saved")
assert pt.full_state_dict(model)["weight"].equal(full["weight"])
assert x.max().item() == 1  # a value that ranks tell one another
"""


@pytest.mark.slow
def test_ranks_compile_read_and_save_where_torch_is_all_there_is(installed, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    start = "-m torch.distributed.run --standalone --nproc-per-node 2 program.py"
    run(installed.python, *start.split(), cwd=tmp_path)
    assert (tmp_path / "saved").is_dir()


@pytest.mark.slow
def test_a_machine_without_a_compiler_gets_the_same_in_python(sources, tmp_path):
    wheel = build_wheel(sources, tmp_path, CC="no-such-compiler")
    installed = install(wheel, tmp_path / "environment")
    assert list(installed.package.rglob("*.so")) == []
    *said, _, in_c = run_readme(installed, tmp_path).splitlines()
    assert said and in_c == "None"


@pytest.mark.slow
def test_the_wheel_says_what_it_is_and_holds_the_library_alone(wheel, installed):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "partita",
        f"partita-{partita.__version__}.dist-info",
    }
    data = list((ROOT / "partita").rglob("*.toml"))
    assert data and {path.relative_to(ROOT).as_posix() for path in data} <= set(names)
    assert "partita/py.typed" in names  # else type checkers see Any
    assert not [name for name in names if name.endswith((".c", ".h"))]
    (said,) = installed.package.parent.glob("partita-*.dist-info/METADATA")
    assert re.search(r"^Requires-Dist: torch", said.read_text(), re.M)


@pytest.mark.slow
def test_the_newest_version_of_the_changelog_is_this_one():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == partita.__version__
