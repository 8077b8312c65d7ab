from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests: nobody writes there."""
    folder = tmp_path_factory.mktemp("data")
    support.write_data(folder)
    return folder


@pytest.fixture(scope="session", params=sorted(support.HEADS))
def whole_run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of an uninterrupted run with each head; its output holds what that run left, never to be changed. It
    has two threads, unlike those that are compared with it: the bits are the same."""
    folder = tmp_path_factory.mktemp(f"whole-{request.param}")
    config = support.tiny_config(data, folder / "run", optimizer__head=support.HEADS[request.param])
    path = support.write_config(folder / "config.json", config)
    support.expect_ok(support.run("train", path, env={"OMP_NUM_THREADS": "2"}))
    return config


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_rank: a test of bad input that cannot be had under mpirun")
