"""What holds for every test: the seed, the threads, and which tests need a GPU."""

from __future__ import annotations

import os

# Two workers share the cores, and each may start ranks: a kernel thread more is no help. Set before
# torch is imported, for the ranks' processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PARTITA_VERIFY", "1")  # graphs are checked after every pass

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # tests of GPUs run without it
    pass
else:
    # A shared machine is slow at times: an example that takes long is no failure. Derandomised, a
    # run that fails can be run again.
    settings.register_profile("partita", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("partita")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Knows the setting of pytest-timeout where that plugin is not loaded: `make test-gpu`."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds of a test; without pytest-timeout nothing ends it")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): see the setting `timeout`")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test of a module that starts Gloo ranks; the ranks of others are threads, or none."""
    if "run_ranks" in vars(getattr(item, "module", None) or item):
        item.add_marker("gloo")


@pytest.fixture(autouse=True, scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests compile is neither found in the user's store nor left there."""
    os.environ["PARTITA_CACHE"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
