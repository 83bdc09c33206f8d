# SPDX-License-Identifier: Apache-2.0
"""What survives on disk between starts, and what is ignored."""

import json
import logging
import os
from pathlib import Path

import pytest

from vllm.v1.worker.gpu.spec_decode.dspark import cost_cache as module
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import (
    CostCache,
    prepare_directory,
)

KEY = {"model": "m", "graph_sizes": [1, 2], "gpu": "H200"}


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def warnings():
    """What the module warned of."""
    listener = Listener()
    module.logger.addHandler(listener)
    yield listener.lines
    module.logger.removeHandler(listener)


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path, KEY, "org/My Model!")


def test_sections_come_back_exactly(cache, warnings):
    assert cache.load() is None
    sections = {"costs": {"draft_ms": [0.1, 1 / 3]}, "calibration": [1, None]}
    assert cache.save(sections)
    assert cache.load() == sections
    assert not warnings, "a missing entry is no news"


def test_saving_one_section_keeps_the_others(cache):
    cache.save({"costs": 1, "of the future": {"x": [2]}})
    cache.save({"costs": 3})
    cache.save({"calibration": 4})
    assert cache.load() == {"costs": 3, "of the future": {"x": [2]}, "calibration": 4}


@pytest.mark.parametrize("name", KEY)
def test_another_key_is_another_entry(cache, tmp_path, name):
    cache.save({"costs": 1})
    other = CostCache(tmp_path, KEY | {name: "changed"}, cache.name)
    assert other.path != cache.path
    assert other.load() is None
    other.save({"costs": 2})
    assert cache.load() == {"costs": 1}


def test_order_of_the_key_does_not_matter(cache, tmp_path):
    cache.save({"costs": 1})
    again = CostCache(tmp_path, dict(reversed(KEY.items())), cache.name)
    assert again.load() == {"costs": 1}


def entry(**changes):
    return {
        "schema": module.SCHEMA,
        "version": module.VERSION,
        "key": KEY,
        "sections": {"costs": 1},
    } | changes


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[]", "no sections"),
        (entry(sections=[1]), "no sections"),
        (entry(schema="other"), "schema, version"),
        (entry(version=99), "schema, version"),
        (entry(key=KEY | {"gpu": "H100"}), "another gpu"),
        (entry(key={**KEY, "extra": 1}), "another extra"),
        (entry(key=None), "another key"),
    ],
)
def test_entry_of_no_use_is_ignored_with_one_warning(cache, warnings, content, why):
    if isinstance(content, dict):
        content = json.dumps(content)
    data = content.encode() if isinstance(content, str) else content
    cache.path.write_bytes(data)
    assert cache.load() is None
    [line] = warnings
    assert why in line and str(cache.path) in line and "measuring again" in line
    assert cache.save({"costs": 2})
    assert cache.load() == {"costs": 2}
    assert len(warnings) == 1, "saving did not warn again"


def test_entry_that_is_too_large_is_not_read(cache, warnings, monkeypatch):
    cache.save({"costs": [0] * 100})
    monkeypatch.setattr(module, "MAX_ENTRY_BYTES", 50)
    assert cache.load() is None
    assert "larger than 50 bytes" in warnings[0]


def test_a_reader_never_sees_half_an_entry(cache, tmp_path, monkeypatch):
    cache.save({"costs": 1})
    seen = []
    replace = os.replace

    def look_and_replace(source, target):
        seen.append((cache.load(), json.loads(Path(source).read_text())["sections"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    cache.save({"costs": 2})
    assert seen == [({"costs": 1}, {"costs": 2})], "complete before it is renamed"
    assert os.listdir(tmp_path) == [cache.path.name]


def test_failure_to_write_is_a_warning_and_leaves_the_entry(
    cache, tmp_path, warnings, monkeypatch
):
    cache.save({"costs": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert not cache.save({"costs": 2})
    assert "No space left" in warnings[0] and "dspark_sps_cache" in warnings[0]
    assert cache.load() == {"costs": 1}
    assert os.listdir(tmp_path) == [cache.path.name], "no temporary file is left"


def test_cache_whose_directory_went_away_warns(tmp_path, warnings):
    assert not CostCache(tmp_path / "gone", KEY).save({"costs": 1})
    assert len(warnings) == 1


def test_prepare_makes_the_directory_and_leaves_it_empty(tmp_path):
    path = prepare_directory(str(tmp_path / "a" / "b"))
    assert path.is_dir() and not list(path.iterdir())


def test_prepare_refuses_what_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    for bad in ("/dev/null/x", str(tmp_path / "file"), str(tmp_path / "file" / "x")):
        with pytest.raises(OSError):
            prepare_directory(bad)
